"""The package in a bare tree: no systemd, no Proxmox, no driver, none of the recommended packages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.package.chroot import REPOSITORY, Chroot
from tests.package.conftest import OLD_VERSION

pytestmark = pytest.mark.node
PACKAGED = """
cat >>/var/lib/dpkg/status <<END

Package: libnvidia-ml1
Status: install ok installed
Maintainer: nobody <nobody@localhost>
Architecture: amd64
Version: 535
Provides: libnvidia-ml.so.1 (= 535)
Description: stands in
END
"""
AUTOPKGTESTS = REPOSITORY / "packaging/debian/tests"


def contents(package: Path) -> list[str]:
    done = subprocess.run(["dpkg-deb", "--contents", str(package)], capture_output=True, text=True, check=True)
    return [line.split()[5].removeprefix(".") for line in done.stdout.splitlines()]


def test_the_package_has_what_the_product_has(package: Path) -> None:
    names = contents(package)
    for source in (REPOSITORY / "hostd").rglob("*.py"):
        assert f"/usr/lib/pve-gpu-release/{source.relative_to(REPOSITORY)}" in names
    units = [str(p.relative_to(REPOSITORY / "etc/systemd")) for p in (REPOSITORY / "etc/systemd").rglob("*") if p.is_file()]
    assert units and all(any(name.endswith(f"/lib/systemd/system/{unit}") for name in names) for unit in units)
    for name in (
        "/etc/pve-gpu-release/config.yaml", "/usr/lib/pve-gpu-release/hookscripts/pve-gpu-release", "/usr/sbin/pve-gpu-hostd",
        "/usr/lib/systemd/catalog/pve-gpu-release.catalog", "/usr/lib/tmpfiles.d/pve-gpu-release.conf",
        "/usr/share/bash-completion/completions/pve-gpu-release", "/usr/share/zsh/vendor-completions/_pve-gpu-release",
    ):
        assert name in names
    assert [name for name in names if "dist-packages" in name or "__pycache__" in name or "/tests/" in name] == []


LINKS = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def test_pages_of_the_installed_documentation_link_to_each_other(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--extract", str(package), str(tmp_path)], check=True)
    folder = tmp_path / "usr/share/doc/pve-gpu-release"
    pages = sorted(folder.rglob("*.md"))
    assert {"README.md", "docs/operations.md", "docs/verdicts.md"} <= {str(p.relative_to(folder)) for p in pages}
    missing = [(p.name, to) for p in pages for to in LINKS.findall(p.read_text()) if not (p.parent / to).exists()]
    assert missing == []


@pytest.mark.smoke
def test_it_installs_answers_and_says_what_is_missing(chroot: Chroot, package: Path) -> None:
    chroot.install(package)
    chroot.run("mkdir -p /etc/pve/lxc && touch /etc/pve/lxc/129.conf /etc/pve/lxc/1290.conf")
    tests = chroot.copy_in(AUTOPKGTESTS, "tests")
    for name in ("command", "man-pages", "completion"):
        done = chroot.run(f"cd /tmp && {tests}/{name}", check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    log = chroot.run("pve-gpu-release log", check=False)
    assert log.returncode == 4 and "journalctl" in log.stderr and "Traceback" not in log.stderr


@pytest.mark.parametrize(
    "driver, expected, forbidden",
    [
        ("", "no NVIDIA driver is loaded", "pip"),
        ("touch /usr/bin/nvidia-installer", "pip install --break-system-packages nvidia-ml-py", "install python3-pynvml"),
        (PACKAGED, "apt install python3-pynvml", "pip"),
    ],
    ids=["no driver", "driver of NVIDIA's installer", "driver from packages"],
)
def test_installing_says_what_brings_pynvml_beside_this_driver(
    chroot: Chroot, package: Path, driver: str, expected: str, forbidden: str
) -> None:
    path = chroot.copy_in(package)
    if driver:
        driver += "\nprintf 'Character devices:\\n195 nvidia\\n' >/tmp/devices; mount --bind /tmp/devices /proc/devices"
    said = chroot.run(f"{driver}\napt-get install -y --no-install-recommends {path} 2>&1").stdout
    ours = "\n".join(line for line in said.splitlines() if line.startswith(("pve-gpu-release: ", "  mend it: ")))
    assert expected in ours and forbidden not in ours, said
    assert "python3-yaml" in ours and "Traceback" not in said


def test_the_daemon_runs_without_systemd(chroot: Chroot, package: Path) -> None:
    chroot.install(package)
    script = """
      pve-gpu-hostd 2>/tmp/log & daemon=$!
      for i in $(seq 100); do [ -S /run/pve-gpu-release/io.pve.GpuRelease ] && break; sleep 0.05; done
      pve-gpu-release status >/tmp/status 2>&1; kill $daemon; wait $daemon; echo "ended with $?"; cat /tmp/status /tmp/log
    """
    said = chroot.run(script).stdout
    assert "ended with 0" in said and "is ready" in said
    assert "cannot find a cgroup v2 mount" in said and "Traceback" not in said


@pytest.mark.smoke
def test_upgrade_remove_purge_and_install_again_leave_nothing(chroot: Chroot, old_package: Path, package: Path) -> None:
    chroot.copy_in(old_package)
    chroot.copy_in(package)
    before = chroot.files()
    chroot.install(old_package)
    assert chroot.run("pve-gpu-release --version").stdout == f"pve-gpu-release {OLD_VERSION}\n"
    chroot.run("sed -i 's/^#containers: .*/containers: {129: {ladder: {grace: 7}}}/' /etc/pve-gpu-release/config.yaml")

    chroot.install(package)
    assert chroot.run("pve-gpu-release --version").stdout != f"pve-gpu-release {OLD_VERSION}\n"
    assert "grace: 7" in chroot.run("cat /etc/pve-gpu-release/config.yaml").stdout
    compiled = chroot.run("find /usr/lib/pve-gpu-release -name '*.pyc' ! -newer /usr/sbin/pve-gpu-release").stdout
    assert compiled == "", "left from the older version"

    chroot.run("apt-get remove -y pve-gpu-release")
    # What dpkg keeps to purge later, and that the units were enabled (deb-systemd-helper): as after any removal.
    left = [line.split()[0] for line in chroot.files() if "pve-gpu" in line]
    kept = ("/var/lib/dpkg/info/", "/var/lib/systemd/deb-", ".wants/")
    assert [name for name in left if not any(part in name for part in kept)] == [
        "/etc/pve-gpu-release", "/etc/pve-gpu-release/config.yaml",
    ]

    chroot.install(package)
    assert "grace: 7" in chroot.run("cat /etc/pve-gpu-release/config.yaml").stdout
    chroot.run("pve-gpu-release 129; mkdir -p -m 700 /run/pve-gpu-release/releases; touch /etc/pve-gpu-release/note", check=False)
    chroot.run("apt-get purge -y pve-gpu-release")
    # dpkg and deb-systemd-helper keep the directories that they made for themselves.
    assert set(chroot.files()) - set(before) <= {line for line in chroot.files() if "/var/lib/systemd" in line}
    assert "pve-gpu" not in "\n".join(chroot.files())
    chroot.install(package)
    assert chroot.run("pve-gpu-release --version").returncode == 0


def test_removal_names_the_containers_that_still_have_the_hookscript(chroot: Chroot, package: Path) -> None:
    chroot.install(package)
    chroot.run("mkdir -p /etc/pve/lxc && cd /etc/pve/lxc && echo 'hookscript: local:snippets/pve-gpu-release' >129.conf && "
               "echo 'hookscript: local:snippets/other' >130.conf")
    said = chroot.run("apt-get remove -y pve-gpu-release").stdout
    assert "hookscript of container(s) 129 -" in said and "pct set VMID --delete hookscript" in said


def test_the_snippet_is_harmless_without_the_package(chroot: Chroot, package: Path) -> None:
    chroot.install(package)
    chroot.run("cp /usr/lib/pve-gpu-release/hookscripts/pve-gpu-release /root/snippet; apt-get purge -y pve-gpu-release")
    for phase in ("pre-start", "post-start", "pre-stop", "post-stop"):
        done = chroot.run(f"/root/snippet 129 {phase}")
        assert (done.stdout, done.stderr) == ("", "")


def test_a_half_unpacked_package_keeps_no_container_from_starting(chroot: Chroot, package: Path) -> None:
    """Between two versions any file may be missing or of the other one."""
    chroot.install(package)
    for broken in ("rm", "truncate -s 100"):
        for module in ("hook.py", "lifecycle/__init__.py", "lifecycle/stopping.py", "model.py", "errors.py", "__init__.py"):
            path = f"/usr/lib/pve-gpu-release/hostd/{module}"
            chroot.run(f"""
              [ -s {path} ] || exit 8
              cp -r /usr/lib/pve-gpu-release /tmp/kept; find /usr/lib/pve-gpu-release -name __pycache__ -exec rm -r {{}} +
              {broken} {path} || exit 8
              for phase in pre-start exec-start-pre post-stop; do
                /usr/lib/pve-gpu-release/hookscripts/pve-gpu-release 129 $phase >/dev/null 2>&1 || exit 9
              done
              rm -r /usr/lib/pve-gpu-release; cp -r /tmp/kept /usr/lib/pve-gpu-release
            """)
