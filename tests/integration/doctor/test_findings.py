"""Every finding of `doctor`, produced for real in the embedded node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest

from hostd.doctor.kinds import KINDS
from hostd.doctor.runner import CHECKS
from hostd.lifecycle.records import Started, Watched
from hostd.snippet import with_chain
from hostd.system.pidns import first_namespace
from tests.embedded.node import MISMATCH, Container, wait_until

from .conftest import CONFIG, DAEMON_SOCKET, REPOSITORY, SNIPPETS, STORAGE, UNITS, VENDOR, FineNode

MS_NOEXEC = 8
DROPIN = "50-pve-gpu-release.conf"
ONE_GPU = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")


# --- the whole -------------------------------------------------------------------------------------------------------


def test_on_a_fine_node_only_the_nested_pid_namespace_is_found(fine: FineNode, ct: Container) -> None:
    fine.start_daemon()
    found = fine.all()
    assert found.wrong == ["pid-namespace"], found.json
    assert found.blind == []
    assert found.status == 3
    assert found.json["schema"] == 1
    assert found.json["checks"] == [check.name for check in CHECKS]
    assert set(found.json["findings"][0]) == {"code", "severity", "vmid", "what", "evidence", "mend"}


@pytest.mark.skipif(not first_namespace(), reason="this machine is in no first PID namespace itself")
def test_a_fine_node_in_the_first_pid_namespace_is_0(fine: FineNode, ct: Container) -> None:
    """The node's mounts and cgroups, this machine's processes: /proc is mounted anew, the driver's files over it.

    hidepid=4 leaves out what even root may not look at here (a sandbox's pid 1). Other tests on this machine may have a
    stuck process at that moment, which is rightly 4: then it is tried again.
    """
    fine.start_daemon()
    inner = (
        "mkdir -p /run/x && mount --rbind /proc/driver /run/x && touch /run/d && mount --bind /proc/devices /run/d"
        " && mount -t proc -o hidepid=4 proc /proc && mount --rbind /run/x /proc/driver"
        " && mount --bind /run/d /proc/devices"
        f" && exec {sys.executable} -I -m hostd.cli doctor --json"
    )
    outer = str(fine.node.init.outer_pid)
    command = ["nsenter", "--target", outer, "--mount", "--cgroup", "--uts", "--wd=/", "--"]
    command += ["unshare", "--mount", "sh", "-c", inner]
    end = time.monotonic() + 120
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        answer = json.loads(done.stdout)
        found = [f["code"] for f in answer["findings"] if f["severity"] != "note"]
        assert set(found) <= {"nvml-slow"}, answer["findings"]  # that one: this machine was busy; tried again, too
        if not (found or answer["could_not_look"]) or time.monotonic() > end:
            break
    assert (answer["could_not_look"], done.returncode) == ([], 0)


def test_text_is_grouped_worst_first_with_one_line_that_sums_up(fine: FineNode) -> None:
    fine.node.write("/etc/pve-gpu-release/config.yaml", "ladder: {grace: ten}\n")
    done = fine.doctor("-v")
    lines = done.stdout.splitlines()
    heads = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    order = ["error", "warning", "note", "ok", "-"]
    assert [h for h in heads if h in order] == sorted([h for h in heads if h in order], key=order.index)
    assert any(line.startswith("error    config-broken: ") for line in lines)
    mend = "         mend: pve-gpu-release check-config /etc/pve-gpu-release/config.yaml  # "
    assert any(line.startswith(mend) for line in lines)
    assert any(line.startswith("ok       cgroup-v2: ") for line in lines)
    assert lines[-1].startswith(f"{len(CHECKS)} checks: 1 error, ")
    plain = fine.doctor().stdout
    assert "\nok  " not in plain
    quiet = fine.doctor("-q").stdout.splitlines()
    assert not any(line.startswith((" ", "note", "ok")) for line in quiet)


def test_another_user_is_told_9(fine: FineNode) -> None:
    """With Debian's Python, which everybody can read."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from hostd.cli.main import main; "
    done = fine.node.run(["/usr/bin/python3", "-I", "-B", "-c", code + "sys.exit(main(['doctor']))"], uid=65534)
    if "No module named 'hostd'" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.returncode == 9, done.stderr
    assert "root is needed" in done.stderr


def test_hostile_names_reach_no_terminal(fine: FineNode) -> None:
    fine.node.container(129, config=CONFIG.replace("hookscript: local:", "hookscript: lo\x1b[31mcal:"))
    done = fine.doctor()
    assert "\x1b" not in done.stdout
    assert "lo\\x1b[31mcal" in done.stdout


def test_hostile_names_break_out_of_no_command(fine: FineNode) -> None:
    """Every finding is checked for that it can be pasted; here also that it does nothing else."""
    hostile = "a'b; >pwned #\x1b[0m`>pwned`$(>pwned)"
    fine.node.configure(129, f"dev0: /dev/nvidia-{hostile}\nhookscript: local:snippets/{hostile}\n")
    fine.node.configure(130, "lxc.mount.entry: /dev/nvidia-a\\012>pwned x none bind,optional,create=file\n")
    fine.node.configure(131, f"dev0: /dev/nvidia0\nhookscript: lo{hostile}cal:snippets/x\n")
    found = fine.look("device-nodes", "device-rules", "hookscripts")
    assert set(found.codes) >= {"device-missing", "optional-mount-hides-loss", "snippet-missing", "snippet-storage"}
    for finding in found.json["findings"]:
        fine.node.run(["bash", "-c", finding["mend"]], cwd="/run", env={"PATH": "/nonexistent"})
    assert not fine.node.path("/run/pwned").exists()


def test_nothing_found_but_not_everything_seen_is_4_and_the_others_go_on(fine: FineNode) -> None:
    """A configuration that is a directory: only what needs it cannot look."""
    fine.node.container(129, config=CONFIG)
    path = fine.node.path("/etc/pve/storage.cfg")
    path.unlink()
    path.mkdir()
    found = fine.look("hookscripts", "device-nodes")
    assert found.codes == []
    assert [b["check"] for b in found.blind] == ["hookscripts"]
    assert "storage.cfg" in found.blind[0]["error"]


def test_a_hanging_etc_pve_costs_its_deadline_once(fine: FineNode, ct: Container) -> None:
    """A FIFO for a configuration: opening it waits for ever, as FUSE does when pmxcfs hangs."""
    path = fine.node.path("/etc/pve/nodes/pve8/lxc/129.conf")
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(fine.node.path("/etc/pve/nodes/pve8/lxc/130.conf"))
    os.mkfifo(fine.node.path("/etc/pve/nodes/pve8/lxc/131.conf"))
    begun = time.monotonic()
    found = fine.look("device-nodes", "device-rules", "frozen", "hookscripts", "container-units", "run-dir")
    assert time.monotonic() - begun < 15
    assert {b["check"] for b in found.blind} == {"device-nodes", "device-rules", "frozen", "hookscripts"}
    assert all("no answer within" in b["error"] for b in found.blind)


def test_pmxcfs_that_does_not_run_is_not_a_node_without_containers(fine: FineNode, ct: Container) -> None:
    fine.node.path("/etc/pve").rename(fine.node.path("/etc/pve.off"))
    fine.node.path("/etc/pve").mkdir()
    found = fine.look("pve", "device-nodes", "hookscripts", "run-dir")
    assert found.one("pve-missing")["mend"] == "systemctl restart pve-cluster"
    assert {b["check"] for b in found.blind} == {"device-nodes", "hookscripts"}
    for name in ("pve-container@.service", "pve-container-debug@.service"):
        fine.node.path(f"{VENDOR}/{name}").unlink()
    found = fine.look("pve", "device-nodes")  # no Proxmox node: then nothing is missing
    assert (found.codes, found.blind) == ([], [])


def test_one_odd_configuration_hides_no_finding_of_another_container(fine: FineNode) -> None:
    """Neither a NUL byte, nor numbers without end, nor configurations that cannot be read at once."""
    node = fine.node
    for vmid in (150, 151, 152):
        node.path(f"/etc/pve/nodes/pve8/lxc/{vmid}.conf").mkdir()
    digits = "9" * 5000
    node.configure(153, f"dev0: /dev/nvidia0\0junk\nhookscript: local:snippets/x\0y\nlxc.cgroup2.devices.allow: c {digits}:* rwm\n")
    node.configure(154, f"dev{digits}: /dev/nvidia0\n")
    node.configure(155, "lxc.mount.entry: /dev/nvidia0\0x dev/nvidia0\0x none bind,create=file\n")
    node.configure(156, "dev0: /dev/nvidia9\ndev1: /dev/nvidia-uvm\n")
    checks = ("device-nodes", "nodes-inside", "device-rules", "passthrough", "hookscripts")
    found = fine.look(*checks)
    assert found.one("device-missing")["vmid"] == 156
    assert {f["vmid"] for f in found.json["findings"] if f["code"] == "no-hookscript"} == {155, 156}
    assert not [b for b in found.blind if b["what"] in checks], found.blind
    told = " ".join(b["what"] for b in found.blind)
    assert all(f"container {vmid}" in told for vmid in (150, 151, 152, 153, 154, 155))


# --- node ------------------------------------------------------------------------------------------------------------


def test_cgroup_v2_elsewhere_is_hybrid_and_nowhere_is_missing(fine: FineNode) -> None:
    init = fine.node.init
    fine.node.path("/run/unified").mkdir()
    init.mount("cgroup2", "/run/unified", "cgroup2")
    init.ask("umount", "/sys/fs/cgroup")
    assert fine.look("cgroup-v2").codes == ["cgroup-hybrid"]
    init.ask("umount", "/run/unified")
    found = fine.look("cgroup-v2", "leftovers", "run-dir")
    assert found.codes == ["cgroup-v2-missing"]
    assert [b["check"] for b in found.blind] == ["leftovers"]


def test_a_volatile_or_unreachable_journal(fine: FineNode) -> None:
    assert fine.look("journal").codes == []
    fine.node.write("/etc/systemd/journald.conf.d/x.conf", "[Journal]\nStorage=volatile\n")
    assert "Storage=volatile" in fine.look("journal").one("journal-not-persistent")["evidence"]
    fine.node.write("/etc/systemd/journald.conf.d/zz.conf", "[Journal]\nStorage=none\n")
    setting = fine.look("journal").one("journal-not-persistent")["mend"].partition(" && mkdir -p /var/log")[0]
    fine.node.run(["bash", "-c", setting], check=True)
    assert fine.look("journal").codes == []
    for name in ("zz.conf", "zz~.conf"):
        fine.node.path(f"/etc/systemd/journald.conf.d/{name}").unlink()
    fine.node.write("/etc/systemd/journald.conf.d/y.conf", "[Journal]\nStorage=auto\n")
    assert fine.look("journal").codes == []
    fine.node.path("/var/log/journal").rmdir()
    assert fine.look("journal").codes == ["journal-not-persistent"]
    fine.node.path("/run/systemd/journal/socket").unlink()
    assert fine.look("journal").codes == ["journal-unreachable", "journal-not-persistent"]


def test_missing_and_broken_python_modules(fine: FineNode) -> None:
    """Modules shadowed by ones that fail, on the path that Python itself uses."""
    names = ("pynvml", "yaml", "systemd", "psutil", "proxmoxer")
    for name in names:
        fine.node.write(f"/run/shadow/{name}.py", "raise ImportError('shadowed')")
    code = (
        f"import sys; sys.path[:0] = ['/run/shadow', {str(REPOSITORY)!r}]\n"
        "from hostd.cli.main import main; sys.exit(main(['doctor', '--json']))"
    )
    found = json.loads(fine.node.run([sys.executable, "-I", "-c", code]).stdout)
    codes = {f["code"] for f in found["findings"]}
    assert codes >= {"pynvml-missing", "yaml-missing", "systemd-python-missing", "psutil-missing", "proxmoxer-missing"}
    assert "nvml-missing" in codes
    assert "config-ignored" in codes


# --- driver ----------------------------------------------------------------------------------------------------------


def test_no_driver_matters_only_where_containers_want_gpus(make_fine: Callable[..., FineNode]) -> None:
    fine = make_fine(driver="none")
    assert fine.look("driver").codes == ["no-driver"]
    fine.node.configure(129, CONFIG)
    assert fine.look("driver", "nvml", "persistence").codes == ["driver-not-loaded"]


@pytest.mark.parametrize(
    ("control", "code"),
    [
        (MISMATCH, "driver-mismatch"),
        ({"crash": "nvmlInit"}, "nvml-silent"),
        ({"hang": "nvmlInit"}, "nvml-silent"),
        ({"init_delay_ms": 2300}, "nvml-slow"),
        ({"lost": {51: 1}}, "gpu-lost"),
        ({"recovery_action": {51: 2}}, "recovery-needed"),
        ({"ghost_mib": {50: 4096}}, "ghost-memory"),
        ({"persistence": {51: 0}}, "persistence-off"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_the_driver_misbehaves(fine: FineNode, control: dict[str, object], code: str) -> None:
    fine.node.control(**control)
    found = fine.look("nvml", "persistence", "gpu-health")
    finding = found.one(code)
    assert found.wrong == [code], found.json
    assert finding["vmid"] is None
    if code in ("driver-mismatch", "nvml-silent"):
        assert {b["check"] for b in found.blind} == {"persistence", "gpu-health"}
    else:
        assert found.blind == []


def test_persistenced_is_only_a_note(fine: FineNode) -> None:
    assert fine.look("persistence").one("persistenced-absent")["severity"] == "note"
    fine.node.spawn_holder(argv=("persistenced",), comm="nvidia-persistenced"[:15])
    assert fine.look("persistence").codes == []


def test_systemd_that_does_not_run_is_a_note(fine: FineNode) -> None:
    assert fine.look("systemd").one("no-systemd")["severity"] == "note"
    fine.systemctl("")
    assert fine.look("systemd").codes == []


def test_the_library_is_missing(make_fine: Callable[..., FineNode]) -> None:
    assert make_fine(nvml="none").look("nvml").codes == ["nvml-missing"]


def test_a_wedged_driver_is_named_and_not_asked_again(fine: FineNode) -> None:
    """A call that hangs in D state keeps the lock; doctor must not fork another child into the driver."""
    node = fine.node
    node.write("/etc/pve-gpu-release/config.yaml", "nvml: {deadline: 8}\n")
    fs = node.frozen_fs()
    node.control(hang_d="nvmlDeviceGetMemoryInfo", hang_d_path=fs.path("x"))
    fs.freeze()
    try:
        stuck = node.popen([sys.executable, "-I", "-m", "hostd.cli", "ps", "--no-daemon"])
        lock = node.path("/run/pve-gpu-release/nvml.lock")
        end = time.monotonic() + 20
        while not (lock.exists() and "pid" in lock.read_text()):
            assert time.monotonic() < end
            time.sleep(0.01)
        stuck.popen.communicate(timeout=60)
        time.sleep(max(0.0, 8.5 - (time.monotonic() - (end - 20))))  # wedged is what was silent for the deadline
        begun = time.monotonic()
        found = fine.look("nvml", "persistence", "gpu-health")
        assert time.monotonic() - begun < 7  # another question would take 8
        assert found.codes == ["nvml-wedged"]
        owner = json.loads(lock.read_text())["pid"]
        assert f"pid {owner}" in found.one("nvml-wedged")["what"]
        assert {b["check"] for b in found.blind} == {"persistence", "gpu-health"}
    finally:
        fs.thaw()


def test_ghost_memory_below_the_tolerance_or_beside_a_client_is_nothing(fine: FineNode, ct: Container) -> None:
    fine.node.control(ghost_mib={50: 10})
    assert fine.look("gpu-health").codes == []
    fine.node.control(ghost_mib={50: 4096})
    ct.spawn_holder(open=ONE_GPU, alloc=("50:100:compute",))
    assert fine.look("gpu-health").codes == []


XID = "NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, name=python3, Timeout after 6s of waiting for RPC"


def test_xids_since_boot(fine: FineNode) -> None:
    fine.node.path("/dev/kmsg").unlink()
    fine.node.write("/dev/kmsg", f"4,100,1000,-;NVRM: Xid (PCI:0000:18:00): 31, pid=1\n12,101,1001,-;{XID}\n")
    fine.node.control(recovery_action=1)
    assert fine.look("kernel-log").codes == []  # an application's error, and a line that user space wrote
    fine.node.write("/dev/kmsg", f"4,100,1000,-;{XID}\n")
    assert "Xid 119 on 0000:3b:00.0" in fine.look("kernel-log").one("xid-needs-reset")["what"]
    fine.node.control(recovery_action=0)
    assert fine.look("kernel-log").codes == ["xid-past"]
    fine.node.path("/dev/kmsg").unlink()
    assert [b["check"] for b in fine.look("kernel-log").blind] == ["kernel-log"]


# --- device nodes ----------------------------------------------------------------------------------------------------


def test_host_nodes_missing_of_the_wrong_type_and_stale(fine: FineNode) -> None:
    node = fine.node
    node.configure(129, CONFIG)
    assert fine.look("device-nodes").codes == []
    node.path("/dev/nvidia-uvm").unlink()
    missing = fine.look("device-nodes").one("device-missing")
    assert (missing["vmid"], missing["severity"]) == (129, "error")
    assert "dev3" in missing["what"]
    assert missing["mend"] == "systemctl start pve-gpu-release-nodes.service"
    node.write("/dev/nvidia-uvm", "")
    assert "regular file" in fine.look("device-nodes").one("device-wrong-type")["what"]
    node.path("/dev/nvidia-uvm").unlink()
    node.path("/dev/nvidia-uvm").mkdir()
    fine.systemctl("")
    fine.mend(fine.look("device-nodes").one("device-wrong-type"))
    assert fine.look("device-nodes").codes == ["device-missing"]  # this systemctl makes nothing
    node.mknod("/dev/nvidia-uvm", 511, 0)
    assert "major 511, which belongs to no driver" in fine.look("device-nodes").one("device-stale")["what"]
    node.mknod("/dev/nvidia-uvm", 1, 3)
    assert "belongs to the driver 'mem'" in fine.look("device-nodes").one("device-stale")["what"]


def test_nodes_that_the_unit_does_not_make_have_commands_of_their_own(fine: FineNode) -> None:
    paths = ("/dev/nvidia9", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-modeset", "/dev/nvidia-nvswitchctl", "/dev/nvidia-x")
    fine.node.configure(129, "".join(f"dev{number}: {path}\n" for number, path in enumerate(paths)))
    mends = {f["what"].split()[0]: f["mend"] for f in fine.look("device-nodes").json["findings"]}
    assert mends["/dev/nvidia9"].startswith("pct set 129 -delete dev0  # the driver has /dev/nvidia")
    assert "'DeviceFileMinor: 1'" in mends["/dev/nvidia-caps/nvidia-cap1"]
    assert mends["/dev/nvidia-modeset"] == "nvidia-modprobe -m"
    assert mends["/dev/nvidia-nvswitchctl"] == "nvidia-modprobe -s -c 255"
    assert mends["/dev/nvidia-x"].startswith("pct set 129 -delete dev4")
    fine.node.configure(129, "lxc.mount.entry: /dev/nvidia9 dev/nvidia9 none bind,create=file\nlxc.mount.entry = /dev/nvidia9x x\n")
    (first, _second) = fine.look("device-nodes").json["findings"]
    fine.mend(first)
    assert fine.node.read("/etc/pve/lxc/129.conf") == "lxc.mount.entry = /dev/nvidia9x x\n"


MOUNTS = """\
hostname: x
lxc.cgroup2.devices.allow: c 4:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
"""


def test_optional_mounts_hide_a_loss(fine: FineNode) -> None:
    fine.node.configure(129, MOUNTS)
    assert fine.look("device-nodes").codes == ["optional-mount"]
    fine.node.path("/dev/nvidia-uvm").rename(fine.node.path("/dev/moved"))
    found = fine.look("device-nodes")
    assert found.codes == ["optional-mount-hides-loss", "optional-mount"]
    assert "/dev/nvidia-uvm" in found.one("optional-mount-hides-loss")["what"]
    fine.node.path("/dev/moved").rename(fine.node.path("/dev/nvidia-uvm"))
    before = "dev0: /dev/dri/renderD128\n" + MOUNTS.replace("bind,optional,", "optional,bind,", 1)
    snapshot = f"\n[before]\n{MOUNTS}"
    fine.node.configure(129, before + snapshot)
    fine.mend(fine.look("device-nodes").one("optional-mount"))
    assert fine.look("device-nodes").codes == []
    assert fine.node.read("/etc/pve/lxc/129.conf") == before.replace("optional,", "") + snapshot


def test_nodes_inside_a_running_container(fine: FineNode, ct: Container) -> None:
    assert fine.look("nodes-inside").codes == []
    ct.path("/dev/nvidia-uvm").unlink()
    ct.write("/dev/nvidia-uvm", "")
    assert fine.look("nodes-inside").one("container-node-wrong-type")["vmid"] == 129
    ct.mknod("/dev/nvidia-uvm", 511, 0)
    assert fine.look("nodes-inside").codes == ["container-node-stale"]
    ct.path("/dev/nvidia-uvm").unlink()
    ct.path("/dev/nvidia-uvm").symlink_to("/dev/nvidia0")  # not followed
    assert "is a symbolic link" in fine.look("nodes-inside").one("container-node-wrong-type")["what"]


def test_rules_that_miss_or_name_a_stale_major(fine: FineNode) -> None:
    fine.node.configure(129, MOUNTS)
    found = fine.look("device-rules")
    assert found.codes == ["allow-missing-major"]
    assert "c 7:50" in found.one("allow-missing-major")["what"]
    fine.node.configure(129, MOUNTS + "lxc.cgroup2.devices.allow: c 7:* rwm\n")
    assert fine.look("device-rules").codes == []
    fine.node.configure(129, MOUNTS + "lxc.cgroup2.devices.allow: c 511:* rwm\n")
    found = fine.look("device-rules")
    assert found.codes == ["allow-missing-major", "allow-stale-major"]
    for finding in found.json["findings"]:
        fine.mend(finding)
    assert fine.look("device-rules").codes == []
    assert fine.node.read("/etc/pve/lxc/129.conf") == "lxc.cgroup2.devices.allow: c 7:* rwm\n" + MOUNTS
    fine.node.configure(129, "dev0: /dev/nvidia0\ndev2: /dev/dri/renderD128\ndev255: /dev/kvm\ndev99999999999999999999: /dev/x\n")
    assert "pct set 129 -dev1 /dev/nvidia-uvm  # " in fine.look("device-rules").one("uvm-not-given")["mend"]
    fine.node.configure(129, "dev0: /dev/nvidia0\n" + "".join(f"dev{number}: /dev/kvm\n" for number in range(1, 256)))
    assert fine.look("device-rules").one("uvm-not-given")["mend"].startswith("pct config 129  # every devN is in use")
    fine.node.configure(129, CONFIG)
    fine.node.control(mig=1)
    found = fine.look("device-rules", "gpu-health", "persistence")
    assert sorted(found.codes) == ["caps-not-given", "figures-unavailable", "figures-unavailable", "persistenced-absent"]


# --- containers ------------------------------------------------------------------------------------------------------


def test_a_frozen_container(fine: FineNode, ct: Container) -> None:
    assert fine.look("frozen").codes == []
    ct.freeze()
    assert fine.look("frozen").one("frozen")["vmid"] == 129
    ct.thaw()
    (ct.payload / "cgroup.freeze").write_text("1")
    wait_until(lambda: "frozen 1" in (ct.payload / "cgroup.events").read_text(), "the container frozen")
    assert fine.look("frozen").codes == ["frozen"]
    (ct.payload / "cgroup.freeze").write_text("0")


def test_leftovers_of_containers_that_do_not_run(fine: FineNode, ct: Container) -> None:
    assert fine.look("leftovers").codes == []
    ct.kill_monitor()
    if ct.init_process.alive():
        assert fine.look("leftovers").codes == ["monitor-gone"]
    left = fine.node.popen(["sleep", "60"], cgroup="/lxc/130/ns")
    beside = fine.node.popen(["sleep", "60"], cgroup="/lxc.monitor/131")
    found = fine.look("leftovers")
    assert (found.one("leftovers")["vmid"], found.one("monitor-leftovers")["vmid"]) == (130, 131)
    for running in (left, beside):
        running.kill()
        running.popen.communicate()


def test_a_container_outside_its_unit(fine: FineNode, ct: Container) -> None:
    fine.systemctl("Id=pve-container@129.service\nActiveState=inactive\n\nId=pve-container-debug@129.service\n")
    assert "is inactive" in fine.look("outside-unit").one("outside-unit")["what"]
    fine.systemctl("Id=pve-container@129.service\nActiveState=active\n")
    assert fine.look("outside-unit").codes == []


def test_systemctl_that_fails_or_hangs_is_not_fine(fine: FineNode, ct: Container) -> None:
    fine.systemctl("")
    fine.node.write("/run/fake-systemctl", "#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n", 0o755)
    found = fine.look("outside-unit", "units-loaded", "container-units")
    assert {b["check"] for b in found.blind} == {"outside-unit", "units-loaded"}
    assert "Failed to connect to bus" in found.blind[0]["error"]
    fine.node.write("/run/fake-systemctl", "#!/bin/sh\nexec sleep 600\n", 0o755)
    begun = time.monotonic()
    assert "no answer within" in fine.look("outside-unit", "units-loaded").blind[0]["error"]
    assert time.monotonic() - begun < 9


def test_the_hosts_own_holders_and_mps(fine: FineNode) -> None:
    fine.node.spawn_holder(argv=("nvtop",), comm="nvtop", open=("/dev/nvidia0",))
    fine.node.spawn_holder(argv=("mps",), comm="nvidia-cuda-mps-control"[:15], open=("/dev/nvidiactl",))
    found = fine.look("host-holders", "mps")
    assert sorted(found.codes) == ["host-holder", "host-holder", "mps-on-host"]
    assert any("(nvtop) of the host holds GPU 0" in f["what"] for f in found.json["findings"])


def test_a_container_that_calls_itself_mps_is_not_the_hosts(fine: FineNode, ct: Container) -> None:
    ct.spawn_holder(argv=("mps",), comm="nvidia-cuda-mps-control"[:15], open=("/dev/nvidiactl",))
    assert fine.look("host-holders", "mps").codes == []


def test_a_vm_that_wants_the_same_gpu(fine: FineNode, ct: Container) -> None:
    fine.pve("nodes/pve8/qemu-server/200.conf", "name: win\nhostpci0: 0000:18:00,pcie=1\n")
    fine.node.path("/etc/pve/qemu-server").symlink_to("nodes/pve8/qemu-server")
    finding = fine.look("passthrough").one("vm-uses-gpu")
    assert finding["vmid"] == 129
    assert finding["mend"].startswith("qm set 200 -delete hostpci0  # ")
    assert "VM 200" in finding["what"]
    fine.pve("nodes/pve8/qemu-server/200.conf", "name: win\nhostpci0: mapping=h200\n")
    fine.pve("mapping/pci.cfg", "h200\n\tmap node=other,path=0000:18:00\n\tmap id=1:2,node=pve8,path=0000:3b:00.0\n")
    assert "mapping h200 = 0000:3b:00.0" in fine.look("passthrough").one("vm-uses-gpu")["evidence"]
    fine.pve("nodes/pve8/qemu-server/200.conf", "hostpci0: 0000:99:00\n")
    assert fine.look("passthrough").codes == []


def test_a_gpu_on_vfio(fine: FineNode) -> None:
    fine.node.init.mount("pci", "/sys/bus/pci/devices", "tmpfs")
    for name, vendor, kind in (("0000:5e:00.0", "0x10de", "0x030200"), ("0000:5f:00.0", "0x8086", "0x030000")):
        fine.node.write(f"/sys/bus/pci/devices/{name}/vendor", f"{vendor}\n")
        fine.node.write(f"/sys/bus/pci/devices/{name}/class", f"{kind}\n")
        fine.node.path(f"/sys/bus/pci/devices/{name}/driver").symlink_to("../../drivers/vfio-pci")
    assert "0000:5e:00.0" in fine.look("passthrough").one("gpu-on-vfio")["what"]


def test_fuser_is_blind_for_nodes_made_in_the_container(fine: FineNode, ct: Container) -> None:
    if not fine.node.path("/usr/bin/fuser").exists():
        pytest.skip("fuser is not installed")
    holder = ct.spawn_holder(open=ONE_GPU, alloc=("50:100:compute",))
    assert str(holder.pid) in fine.look("fuser").one("fuser-blind")["evidence"]
    holder.kill()
    holder.wait_gone()
    bound = fine.node.container(130, nodes="bind")
    bound.spawn_holder(open=ONE_GPU)
    assert fine.look("fuser").codes == []


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_hookscripts(fine: FineNode) -> None:
    node = fine.node
    node.configure(129, CONFIG)
    assert fine.look("hookscripts").codes == []
    script = node.path(f"{SNIPPETS}/pve-gpu-release")
    script.chmod(0o644)
    assert fine.look("hookscripts").one("snippet-not-executable")["mend"] == f"chmod 755 {SNIPPETS}/pve-gpu-release"
    fine.mend(fine.look("hookscripts").one("snippet-not-executable"))
    assert fine.look("hookscripts").codes == []
    shipped = script.read_bytes()
    node.write(f"{SNIPPETS}/pve-gpu-release", shipped.replace(b"chained=", b"chained=/usr/bin/true # local:snippets/x"), 0o755)
    assert fine.look("hookscripts").codes == []
    node.write(f"{SNIPPETS}/pve-gpu-release", shipped + b"# another version\n", 0o755)
    assert fine.look("hookscripts").one("snippet-outdated")["mend"] == "pve-gpu-release hook enable 129"
    script.unlink()
    assert fine.look("hookscripts").one("snippet-missing")["mend"].startswith("pve-gpu-release hook enable 129  # ")
    script.mkdir()
    assert fine.look("hookscripts").one("snippet-not-executable")["mend"].startswith("mv ")
    script.rmdir()
    node.write(f"{SNIPPETS}/pve-gpu-release", "#!/bin/sh\necho mine\n", 0o755)
    assert fine.look("hookscripts").codes == ["foreign-hookscript"]
    node.configure(129, "dev0: /dev/nvidia0\n")
    assert fine.look("hookscripts").codes == ["no-hookscript"]
    node.configure(129, "hostname: no-gpu\n")
    assert fine.look("hookscripts").codes == []


def test_a_snippet_that_another_node_cannot_have(fine: FineNode) -> None:
    fine.node.configure(129, CONFIG)
    fine.node.configure(140, CONFIG, "pve9")
    assert fine.look("hookscripts").codes == ["snippet-other-nodes"]
    fine.pve("storage.cfg", STORAGE + "\tnodes pve8\n")
    found = fine.look("hookscripts")
    assert found.codes == ["snippet-storage-closed", "snippet-other-nodes"]
    assert "on node pve9" in found.one("snippet-storage-closed")["what"]
    assert found.one("snippet-storage-closed")["mend"] == "pvesm set local --nodes pve8,pve9"
    copy = f"scp -p {SNIPPETS}/pve-gpu-release pve9:{SNIPPETS}/pve-gpu-release"
    assert found.one("snippet-other-nodes")["mend"].startswith(f"{copy}  # ")
    fine.pve("storage.cfg", STORAGE + "\tnodes pve9\n")
    assert "on node pve8" in fine.look("hookscripts").one("snippet-storage-closed")["what"]
    fine.pve("storage.cfg", STORAGE + "\tshared 1\n")
    assert fine.look("hookscripts").codes == []


def test_a_storage_that_is_closed_hides_nothing_of_the_file_that_is_on_it(fine: FineNode) -> None:
    """Proxmox runs a hookscript whatever the storage says of its content; one of no storage it cannot find."""
    fine.node.configure(129, CONFIG)
    fine.pve("storage.cfg", "dir: local\n\tpath /run/vz\n\tcontent iso\n")
    finding = fine.look("hookscripts").one("snippet-storage-closed")
    assert (finding["severity"], finding["mend"]) == ("warning", "pvesm set local --content iso,snippets")
    fine.pve("storage.cfg", "dir: local\n\tpath /run/vz\n\tcontent none\n\tdisable\n")
    assert fine.look("hookscripts").one("snippet-storage-closed")["mend"] == "pvesm set local --disable 0"
    fine.node.path(f"{SNIPPETS}/pve-gpu-release").unlink()
    assert fine.look("hookscripts").codes == ["snippet-storage-closed", "snippet-missing"]
    fine.node.configure(129, "dev0: /dev/nvidia0\nhookscript: gone:snippets/a'b.sh\n")
    mend = fine.look("hookscripts").one("snippet-storage")["mend"]
    assert mend == "pct set 129 -delete hookscript && pve-gpu-release hook enable 129"


def test_a_hookscript_that_cannot_be_run_where_it_is(fine: FineNode) -> None:
    """A file system mounted noexec; another hookscript that ours calls."""
    node = fine.node
    node.configure(129, CONFIG)
    script = node.read(f"{SNIPPETS}/pve-gpu-release")
    node.init.mount("noexec", SNIPPETS, "tmpfs", MS_NOEXEC)
    node.write(f"{SNIPPETS}/pve-gpu-release", script, 0o755)
    finding = fine.look("hookscripts").one("snippet-not-executable")
    assert "mounted noexec" in finding["what"]
    fine.mend(finding)
    assert fine.look("hookscripts").codes == []
    node.write(f"{SNIPPETS}/pve-gpu-release", with_chain(script, f"{SNIPPETS}/it's own.sh", "local:snippets/it's own.sh", 5), 0o755)
    finding = fine.look("hookscripts").one("chained-missing")
    assert finding["mend"] == "pct set 129 -delete hookscript && pve-gpu-release hook enable 129"
    node.write(f"{SNIPPETS}/it's own.sh", "#!/bin/sh\n", 0o644)
    fine.mend(fine.look("hookscripts").one("chained-missing"))
    assert fine.look("hookscripts").codes == []
    node.write(f"{SNIPPETS}/pve-gpu-release", "#!/bin/sh\n# do not use pve-gpu-release here\n", 0o755)
    assert fine.look("hookscripts").codes == ["foreign-hookscript"]
    node.write(f"{SNIPPETS}/pve-gpu-release", '#!/bin/sh\n/usr/lib/pve-gpu-release/hookscripts/pve-gpu-release "$@"\n', 0o755)
    assert fine.look("hookscripts").codes == []


def test_drop_ins_missing_masked_and_overridden(fine: FineNode) -> None:
    node = fine.node
    folder = f"{UNITS}/pve-container@.service.d"
    ours = node.read(f"{folder}/{DROPIN}")
    assert fine.look("container-units").codes == []
    node.write(f"{folder}/90-other.conf", "[Service]\nExecStopPost=\nKillMode=process\n")
    found = fine.look("container-units")
    assert sorted(found.codes) == ["container-unit-overridden", "dropin-overridden"]
    assert "90-other.conf takes back ExecStopPost=" in found.one("dropin-overridden")["what"]
    fine.systemctl("")
    fine.mend(found.one("dropin-overridden"))
    found = fine.look("container-units")
    assert "10-90-other.conf sets KillMode=" in found.one("container-unit-overridden")["what"]
    fine.mend(found.one("container-unit-overridden"))
    assert fine.look("container-units").codes == []
    node.write(f"{folder}/{DROPIN}", "[Service]\n")
    found = fine.look("container-units")
    assert found.codes == ["dropin-overridden", "dropin-overridden"]
    assert {f["mend"] for f in found.json["findings"]} == {f"rm {folder}/{DROPIN} && systemctl daemon-reload"}
    node.write(f"{VENDOR}/pve-container@.service.d/{DROPIN}", "[Service]\n")
    node.path(f"{folder}/{DROPIN}").unlink()
    assert fine.look("container-units").json["findings"][0]["mend"].startswith("apt install --reinstall ./pve-gpu-release_")
    node.path(f"{VENDOR}/pve-container@.service.d/{DROPIN}").unlink()
    node.write(f"{folder}/{DROPIN}", ours)
    node.path(f"{folder}/{DROPIN}").unlink()
    assert fine.look("container-units").codes == ["dropin-missing"]
    node.write(f"{VENDOR}/pve-container@.service.d/{DROPIN}", ours)
    assert fine.look("container-units").codes == []
    node.path(f"{folder}/{DROPIN}").symlink_to("/dev/null")
    assert fine.look("container-units").one("dropin-masked")["mend"].startswith(f"rm {folder}/{DROPIN}")
    node.path(f"{folder}/{DROPIN}").unlink()
    node.write(f"{UNITS}/pve-container@.service", "[Service]\nExecStart=/bin/true\n")
    fine.mend(fine.look("container-units").one("container-unit-overridden"))
    assert fine.look("container-units").codes == []
    node.write(f"{UNITS}/pve-container@.service", "[Service]\nExecStart=/bin/true\n")
    for path in (f"{UNITS}/pve-container@.service", f"{VENDOR}/pve-container@.service"):
        node.path(path).unlink()
    assert fine.look("container-units").codes == ["no-proxmox"]


def test_drop_ins_that_systemd_has_not_read(fine: FineNode, ct: Container) -> None:
    path = f"{UNITS}/pve-container@.service.d/{DROPIN}"
    fine.systemctl(f"Id=pve-container@129.service\nDropInPaths={path}\nNeedDaemonReload=no\n")
    assert fine.look("units-loaded").codes == []
    fine.systemctl("Id=pve-container@129.service\nDropInPaths=\nNeedDaemonReload=no\n")
    assert fine.look("units-loaded").one("dropin-not-loaded")["mend"] == "systemctl daemon-reload"
    fine.systemctl(f"Id=pve-container@129.service\nDropInPaths={path}\nNeedDaemonReload=yes\n")
    assert fine.look("units-loaded").codes == ["dropin-not-loaded"]


def test_the_boot_unit(fine: FineNode) -> None:
    assert fine.look("boot-unit").codes == []
    fine.node.path(f"{UNITS}/multi-user.target.wants/pve-gpu-release-boot.service").unlink()
    assert "is not enabled" in fine.look("boot-unit").one("boot-unit-disabled")["what"]
    fine.node.path(f"{UNITS}/pve-gpu-release-boot.service").unlink()
    assert fine.look("boot-unit").codes == ["boot-unit-missing"]
    fine.node.path(f"{UNITS}/pve-gpu-release-boot.service").symlink_to("/dev/null")
    assert "is masked" in fine.look("boot-unit").one("boot-unit-disabled")["what"]


# --- our own state ---------------------------------------------------------------------------------------------------


def test_the_daemon_is_absent_silent_or_not_enabled(fine: FineNode) -> None:
    assert fine.look("daemon").codes == ["socket-not-active"]
    running = fine.start_daemon()
    assert fine.look("daemon").codes == []
    running.process.kill()
    running.popen.communicate()
    assert fine.node.path(DAEMON_SOCKET).exists()
    assert fine.look("daemon").codes == ["daemon-silent"]
    fine.node.path(f"{UNITS}/sockets.target.wants/pve-gpu-hostd.socket").unlink()
    assert "socket-not-enabled" in fine.look("daemon").codes
    fine.node.path(f"{UNITS}/pve-gpu-hostd.socket").unlink()
    mend = fine.look("daemon").one("socket-not-enabled")["mend"]
    assert mend.startswith("apt install --reinstall ./pve-gpu-release_")
    assert " && systemctl unmask pve-gpu-hostd.socket; systemctl enable --now pve-gpu-hostd.socket  # " in mend


def test_a_daemon_that_is_masked(fine: FineNode) -> None:
    fine.node.path(f"{UNITS}/pve-gpu-hostd.service").unlink()
    fine.node.path(f"{UNITS}/pve-gpu-hostd.service").symlink_to("/dev/null")
    found = fine.look("daemon")
    assert found.codes == ["daemon-masked"]
    assert found.one("daemon-masked")["mend"].startswith("systemctl unmask pve-gpu-hostd.service; ")


def test_a_broken_configuration(fine: FineNode) -> None:
    fine.node.write("/etc/pve-gpu-release/config.yaml", "ladder: {grace: ten}\nhook: {x: 1}\n")
    found = fine.look("configuration")
    assert found.codes == ["config-broken", "config-broken"]
    assert "ladder.grace" in found.json["findings"][0]["what"]


def test_a_release_that_was_killed_in_the_middle(fine: FineNode, ct: Container) -> None:
    assert fine.look("records").codes == []
    ct.spawn_holder(open=ONE_GPU, alloc=("50:100:compute",), ignore_term=True)
    command = [sys.executable, "-I", "-m", "hostd.cli", "129", "--no-daemon", "--grace", "60"]
    release = fine.node.popen(command)
    folder = fine.node.path("/run/pve-gpu-release/releases")
    wait_until(lambda: any('"step": "term"' in path.read_text() for path in folder.glob("*.json")), "SIGTERM sent")
    assert fine.look("records").codes == []  # at work is not cut off
    release.kill()
    release.popen.communicate()
    finding = fine.look("records").one("release-cut-off")
    assert finding["vmid"] == 129
    assert "at term" in finding["what"]
    assert finding["mend"] == "pve-gpu-release 129"
    again = [*command[:4], "129", "--no-daemon", "--now"]
    dry = fine.node.run([*again, "--dry-run"])
    assert dry.returncode == 3, dry.stderr
    assert fine.look("records").codes == ["release-cut-off"]
    assert fine.node.run(again).returncode == 0
    assert fine.look("records").codes == []


def test_starts_refused_and_stops_that_hang(fine: FineNode) -> None:
    run = "/run/pve-gpu-release"
    refused = Started(130, 1.0, allow=False, phase="pre-start", messages=["start REFUSED: dirty \x1b[2J"])
    fine.node.write(f"{run}/starts/130.json", json.dumps(asdict(refused)))
    fine.node.write(f"{run}/starts/131.json", json.dumps(asdict(Started(131, 1.0))))
    fine.node.write(f"{run}/watch/132.json", json.dumps(asdict(Watched(132, 1.0, 2, "pid 7 is in D state"))))
    fine.node.write(f"{run}/watch/133.json", json.dumps(asdict(Watched(133, 1.0))))
    found = fine.look("records")
    assert {f["code"]: f["vmid"] for f in found.json["findings"]} == {"start-refused": 130, "stop-hangs": 132}
    assert "\x1b" not in fine.doctor().stdout


def test_the_run_directory(fine: FineNode) -> None:
    path = fine.node.path("/run/pve-gpu-release")
    assert fine.look("run-dir").codes == []
    path.chmod(0o755)
    assert fine.look("run-dir").one("run-dir")["mend"].endswith("chmod 700 /run/pve-gpu-release")
    path.chmod(0o700)
    os.chown(path, 1000, 0)
    assert fine.look("run-dir").codes == ["run-dir"]
    os.chown(path, 0, 0)
    fine.node.init.mount("small", "/run/pve-gpu-release", "tmpfs", 0, "mode=700,size=4k")
    path.joinpath("all").write_bytes(b"x" * 4096)
    fine.mend(fine.look("run-dir").one("run-dir-full"))
    assert fine.look("run-dir").codes == []
    fine.node.run(["mount", "-o", "remount,ro", "/run/pve-gpu-release"], check=True)
    fine.mend(fine.look("run-dir").one("run-dir-full"))
    assert fine.look("run-dir").codes == []
    fine.node.init.ask("umount", "/run/pve-gpu-release")
    path.rename(fine.node.path("/run/moved"))
    assert fine.look("run-dir").codes == ["run-dir-missing"]
    fine.node.write("/run/pve-gpu-release", "")
    found = fine.look("run-dir", "daemon")  # the daemon's socket is missing for that reason
    assert found.codes == ["run-dir"]
    assert "no directory" in found.one("run-dir")["what"]
    assert "restart pve-gpu-hostd.socket" in found.one("run-dir")["mend"]


def test_every_kind_is_produced_by_a_test() -> None:
    """Reads this file and the unit tests: a kind that no test names could not be seen to work."""
    here = os.path.dirname(__file__)
    with open(__file__) as one, open(os.path.join(here, "../../unit/test_doctor.py")) as other:
        text = one.read() + other.read()
    assert [code for code in KINDS if f'"{code}"' not in text] == []


