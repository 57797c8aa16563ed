"""Puts a checkout into a node where the package would put it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.node.node import VirtualNode

LIBRARY = "/usr/lib/pve-gpu-release"
PROGRAMS = {"pve-gpu-release": "hostd.cli.main", "pve-gpu-hostd": "hostd.daemon"}
WRAPPER = """#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "{library}")
sys.dont_write_bytecode = True

from {module} import entry

sys.exit(entry())
"""
TARGETS = {
    "etc/config.yaml": "/etc/pve-gpu-release/config.yaml",
    "etc/catalog": "/usr/lib/systemd/catalog",
    "etc/tmpfiles.d": "/usr/lib/tmpfiles.d",
    "etc/sysusers.d": "/usr/lib/sysusers.d",
    "etc/systemd": "/etc/systemd/system",
    "hookscripts": f"{LIBRARY}/hookscripts",
    "hostd": f"{LIBRARY}/hostd",
}


def install_checkout(node: VirtualNode, source: Path) -> None:
    if deb := os.environ.get("PGR_DEB"):  # the same tests against the package
        node.install_deb(Path(deb))
        install_snippet(node, source)
        return
    for name, target in TARGETS.items():
        if (source / name).exists():
            node.copy_in(source / name, target)
    for program, module in PROGRAMS.items():
        packaged = source / "packaging/bin" / program
        text = packaged.read_text() if packaged.is_file() else WRAPPER.format(library=LIBRARY, module=module)
        node.write(f"/usr/sbin/{program}", text, 0o755)
    cover_debug_unit(node)
    install_snippet(node, source)
    node.run(["/usr/bin/python3", "-m", "compileall", "-q", LIBRARY], check=False)
    node.run(["journalctl", "--update-catalog"], check=False)
    node.run(["systemd-tmpfiles", "--create"], check=False)
    start_units(node, source)


def cover_debug_unit(node: VirtualNode) -> None:
    """A drop-in written for one of the two container units holds for the other as well."""
    units = Path("/etc/systemd/system")
    first, second = units / "pve-container@.service.d", units / "pve-container-debug@.service.d"
    if node.exists(first) and not node.exists(second):
        shutil.copytree(node.host_path(first), node.host_path(second))


def install_snippet(node: VirtualNode, source: Path) -> None:
    script = source / "hookscripts/pve-gpu-release"
    if script.exists():
        node.copy_in(script, "/var/lib/vz/snippets/pve-gpu-release")
        node.host_path("/var/lib/vz/snippets/pve-gpu-release").chmod(0o755)
        node.host_path(f"{LIBRARY}/hookscripts/pve-gpu-release").chmod(0o755)


def start_units(node: VirtualNode, source: Path) -> None:
    """Sockets are started, services with an [Install] section enabled and started."""
    node.systemctl("daemon-reload")
    units = [path for path in sorted((source / "etc/systemd").glob("*")) if path.suffix in (".socket", ".service")]
    installable = [path.name for path in units if "@" not in path.name and "[Install]" in path.read_text()]
    services = [name for name in installable if name.endswith(".service") and name != "pve-gpu-hostd.service"]
    sockets = [name for name in installable if name.endswith(".socket")]
    if installable:
        node.systemctl("enable", *sockets, *services)
        node.systemctl("start", *sockets, *services)
