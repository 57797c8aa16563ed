"""`pve-gpu-release hook` on a node with Proxmox's API, proxmoxer and real calls of what it installs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.lifecycle import CONFIG, CONFIG_PATH
from tests.node.node import Container, VirtualNode

pytestmark = pytest.mark.node
FOREIGN = """#!/bin/sh
echo "foreign $1 $2"
case $2 in pre-start) exit "$(cat /shared/status 2>/dev/null || echo 0)";; esac
"""


@pytest.fixture(scope="module")
def node(require_virtual_node: None) -> Iterator[VirtualNode]:
    with VirtualNode() as booted:
        booted.install_product()
        booted.write(CONFIG_PATH, CONFIG)
        booted.remove("/var/lib/vz/snippets/pve-gpu-release")
        booted.write("/var/lib/vz/snippets/foreign", FOREIGN, 0o755)
        booted.add_container(129, gpus=(0, 1), init="tiny")
        booted.add_container(131, init="tiny")
        yield booted


@pytest.fixture
def ct(node: VirtualNode) -> Iterator[Container]:
    container = node.containers[129]
    yield container
    if container.running:
        container.stop()
    if "hookscript" in container.config:
        container.hookscript(None)


def hook(node: VirtualNode, *words: object, check: bool = True) -> Any:
    return node.run(["pve-gpu-release", "hook", *map(str, words)], check=check)


def status(node: VirtualNode, *words: object) -> dict[int, dict[str, Any]]:
    done = hook(node, "status", "--json", *words, check=False)
    return {row["vmid"]: row for row in json.loads(done.stdout)["containers"]}


def test_enable_status_disable(node: VirtualNode, ct: Container) -> None:
    assert status(node)[129]["state"] == "none" and hook(node, "status", check=False).returncode == 3
    assert "hookscript is local:snippets/pve-gpu-release" in hook(node, "enable", 129).stdout
    assert "hookscript: local:snippets/pve-gpu-release" in ct.config
    row = status(node)[129]
    assert (row["state"], row["drop_in"], row["drop_in_debug"], row["on_dirty"]) == ("ours", "installed", "installed", "warn")
    assert hook(node, "status").returncode == 0
    assert "has it already" in hook(node, "enable", 129).stdout
    ct.start()
    assert status(node)[129]["last_release"]["trigger"] == "hook-pre-start"
    assert "removed" in hook(node, "disable", 129).stdout
    assert "hookscript" not in ct.config


def test_all_means_every_container_with_a_gpu(node: VirtualNode, ct: Container) -> None:
    hook(node, "enable", "--all")
    assert "hookscript: " in ct.config and "hookscript" not in node.containers[131].config
    assert set(status(node)) == {129}


def test_a_foreign_hookscript_is_not_overwritten(node: VirtualNode, ct: Container) -> None:
    ct.hookscript("local:snippets/foreign")
    done = hook(node, "enable", 129, check=False)
    assert done.returncode == 7 and "--chain" in done.stderr
    assert "hookscript: local:snippets/foreign" in ct.config
    assert "no hookscript of ours" in hook(node, "disable", 129).stdout


@pytest.mark.smoke
def test_a_foreign_hookscript_is_chained(node: VirtualNode, ct: Container) -> None:
    ct.hookscript("local:snippets/foreign")
    assert "it calls local:snippets/foreign after itself" in hook(node, "enable", "--chain", 129).stdout
    assert status(node)[129]["chained"] == "local:snippets/foreign"
    said = ct.start().stdout
    assert said.index("holds no GPU") < said.index("foreign 129 pre-start") and "foreign 129 post-start" in said
    assert "foreign 129 pre-stop" in ct.stop().stdout
    node.write("/shared/status", "5")
    done = node.pct("start", 129, check=False)
    assert done.returncode == 255 and "exit code 5" in done.stderr
    node.remove("/shared/status")
    assert "foreign is set again" in hook(node, "disable", 129).stdout
    assert "hookscript: local:snippets/foreign" in ct.config
    assert not node.exists("/var/lib/vz/snippets/pve-gpu-release-129")


def test_a_chained_hookscript_has_a_limit(node: VirtualNode, ct: Container) -> None:
    node.write("/var/lib/vz/snippets/slow", "#!/bin/sh\nsleep 1000\n", 0o755)  # its child holds Proxmox's pipe
    ct.hookscript("local:snippets/slow")
    hook(node, "enable", "--chain", "--chain-limit", 1, 129)
    done = node.pct("start", 129, check=False)
    assert done.returncode == 255 and "exit code 124" in done.stderr
    assert "/var/lib/vz/snippets/slow ended with 124; its limit is 1 s" in done.stdout + done.stderr


def test_a_storage_that_starts_no_programs_is_refused(node: VirtualNode, ct: Container) -> None:
    """Proxmox looks at the mode of the file alone, and the container does not start."""
    node.run(["mkdir", "-p", "/srv/nx"])
    node.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", "/srv/nx"])
    node.run(["mkdir", "/srv/nx/snippets"])
    before = node.read("/etc/pve/storage.cfg")
    node.write("/etc/pve/storage.cfg", before + "\ndir: nx\n\tpath /srv/nx\n\tcontent snippets\n\tshared 1\n")
    try:
        done = hook(node, "enable", "--storage", "nx", 129, check=False)
        assert done.returncode == 7 and "mounted noexec" in done.stderr and "hookscript" not in ct.config
        assert "local:snippets/pve-gpu-release" in hook(node, "enable", 129).stdout
    finally:
        node.write("/etc/pve/storage.cfg", before)
        node.run(["umount", "/srv/nx"])


def test_no_storage_for_snippets_is_said_and_none_is_made(node: VirtualNode, ct: Container) -> None:
    before = node.read("/etc/pve/storage.cfg")
    node.run(["pvesh", "set", "/storage/local", "-content", "images,rootdir"])
    done = hook(node, "enable", 129, check=False)
    assert done.returncode == 7 and "pvesm set" in done.stderr
    assert "no storage that this node can use now allows snippets" in done.stderr
    node.write("/etc/pve/storage.cfg", before)
    done = hook(node, "enable", "--storage", "plain", 129, check=False)
    assert done.returncode == 7 and "choose from: local" in done.stderr


def test_what_cannot_be_done_has_its_status(node: VirtualNode) -> None:
    assert hook(node, "enable", 999, check=False).returncode == 8
    assert hook(node, "enable", check=False).returncode == 2
    assert hook(node, "enable", "--all", 129, check=False).returncode == 2


def test_another_node_without_the_package_is_not_bothered(node: VirtualNode, ct: Container) -> None:
    hook(node, "enable", 129)
    node.run(["mv", "/usr/lib/pve-gpu-release", "/usr/lib/away"])
    try:
        done = ct.start()
        assert (done.stdout, done.stderr) == ("", "")
    finally:
        node.run(["mv", "/usr/lib/away", "/usr/lib/pve-gpu-release"])
