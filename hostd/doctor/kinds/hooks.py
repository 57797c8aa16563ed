"""What `hostd/doctor/hooks.py` can find: hookscripts and units."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity
from hostd.snippet import REINSTALL

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
FROM_FILE = "  # the file that it was installed from"
RELOADED = f"{REINSTALL} && systemctl daemon-reload"

ROWS = (
    Kind(
        "no-hookscript", W, "hookscripts",
        "container {vmid} is given GPUs but has no hookscript",
        "pve-gpu-release hook enable {vmid}",
        "No snapshot before a stop, no gate before a start; the drop-in alone checks after a stop.",
        "hookscript: of the configuration",
    ),
    Kind(
        "foreign-hookscript", W, "hookscripts",
        "container {vmid} has another hookscript ({volume})",
        "pve-gpu-release hook enable --chain {vmid}",
        "One hookscript per guest: ours can call the other one.",
        "hookscript: of the configuration, content of the snippet",
    ),
    Kind(
        "snippet-missing", E, "hookscripts",
        "the hookscript {volume} of container {vmid} does not exist ({path}): the container does not start",
        "{enable}  # or none at all: pct set {vmid} -delete hookscript",
        "Proxmox refuses a start when the snippet is not there.",
        "storage.cfg, stat of the file",
    ),
    Kind(
        "snippet-not-executable", E, "hookscripts",
        "the hookscript {volume} of container {vmid} cannot be executed ({why}): the container does not start",
        "{mend}",
        "Proxmox refuses a start with \"script is not executable\", or cannot run it (a file system mounted noexec).",
        "storage.cfg, stat of the file",
    ),
    Kind(
        "snippet-storage", E, "hookscripts",
        "the hookscript {volume} of container {vmid} cannot be on node {node}: {why}",
        "{mend}",
        "The container does not start there. Either the storage is opened (pvesm set), or the hookscript set anew.",
        "storage.cfg",
    ),
    Kind(
        "snippet-storage-closed", W, "hookscripts",
        "the hookscript {volume} of container {vmid} is on a storage that is closed to it on node {node}: {why}",
        "{mend}",
        "The container starts as long as the file is there, but the hookscript can be neither chosen nor refreshed.",
        "storage.cfg",
    ),
    Kind(
        "chained-missing", E, "hookscripts",
        "the hookscript {chained} that ours calls for container {vmid} {why} ({path}): the container does not start",
        "{mend}",
        "A chained hookscript that cannot be run fails a start, as it would without us.",
        "content of the snippet, stat of the file that it calls",
    ),
    Kind(
        "snippet-other-nodes", N, "hookscripts",
        "the hookscript {volume} is on a storage that is not shared: it has to be on {nodes} too, which cannot be seen "
        "from here",
        "{copy}  # the same file does on every node; the package has to be installed there, too",
        "After a migration or by HA the container starts there, and does not if the snippet is missing.",
        "storage.cfg, nodes of the cluster",
    ),
    Kind(
        "snippet-outdated", W, "hookscripts",
        "the hookscript {volume} of container {vmid} is not the one of this version of the package ({path})",
        "pve-gpu-release hook enable {vmid}",
        "A snippet is a copy: an upgrade of the package does not reach it, and what was mended since is not in force.",
        "storage.cfg, content of the snippet but for the chained hookscript",
    ),
    Kind(
        "dropin-missing", E, "container-units",
        "{unit} lacks our drop-in: a reboot inside, a killed monitor and a busy rootfs are not covered",
        RELOADED + FROM_FILE,
        "On these paths Proxmox runs no hookscript.",
        "*.service.d directories of systemd",
    ),
    Kind(
        "dropin-target", E, "container-units",
        "what our drop-ins call is missing or cannot be run ({path}): they do nothing",
        RELOADED + FROM_FILE,
        "The drop-ins do not fail a start when the package is gone; so they say nothing when only this file is.",
        "access of the file",
    ),
    Kind(
        "dropin-masked", E, "container-units",
        "our drop-in of {unit} is masked",
        "{mend}",
        "An empty file or a link to /dev/null of the same name hides it.",
        "*.service.d directories of systemd",
    ),
    Kind(
        "dropin-overridden", E, "container-units",
        "our drop-in of {unit} has no effect: {why}",
        "{mend}",
        "An empty ExecStartPre= or ExecStopPost= that is read after ours takes our lines away.",
        "content of the drop-ins, in systemd's order",
    ),
    Kind(
        "dropin-not-loaded", E, "units-loaded",
        "systemd has not read our drop-in of {unit}",
        "systemctl daemon-reload",
        "A file that systemd has not loaded does nothing.",
        "systemctl show -p DropInPaths,NeedDaemonReload",
    ),
    Kind(
        "container-unit-overridden", W, "container-units",
        "{unit} is not as Proxmox ships it: {why}",
        "{mend}",
        "Start, stop and the order of our steps rest on Proxmox's unit.",
        "unit files and drop-ins of systemd",
    ),
    Kind(
        "boot-unit-missing", W, "boot-unit",
        "the unit that makes the device nodes before the guests start is missing",
        RELOADED + FROM_FILE,
        "After a boot /dev/nvidia-uvm may be missing when containers start.",
        "unit files of systemd: pve-gpu-*.service, Before=pve-guests.service",
    ),
    Kind(
        "boot-unit-disabled", W, "boot-unit",
        "{unit}, which makes the device nodes before the guests start, is {state}",
        "{mend}",
        "After a boot /dev/nvidia-uvm may be missing when containers start.",
        "links in *.wants of systemd",
    ),
)  # fmt: skip
