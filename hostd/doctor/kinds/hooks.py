"""What `hostd/doctor/hooks.py` can find: hookscripts and units."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
REINSTALL = "apt install --reinstall pve-gpu-release && systemctl daemon-reload"

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
        "pve-gpu-release hook enable {vmid}, or pct set {vmid} -delete hookscript",
        "Proxmox refuses a start when the snippet is not there.",
        "storage.cfg, stat of the file",
    ),
    Kind(
        "snippet-not-executable", E, "hookscripts",
        "the hookscript {volume} of container {vmid} is not executable ({path}): the container does not start",
        "chmod 755 {path}",
        "Proxmox refuses a start with \"script is not executable\".",
        "storage.cfg, stat of the file",
    ),
    Kind(
        "snippet-storage", E, "hookscripts",
        "the hookscript {volume} of container {vmid} cannot be on node {node}: {why}",
        "pvesm status --content snippets; pvesm set STORAGE --content ...,snippets; or pve-gpu-release hook "
        "enable {vmid}",
        "The container does not start there.",
        "storage.cfg",
    ),
    Kind(
        "snippet-other-nodes", N, "hookscripts",
        "the hookscript {volume} is on a storage that is not shared: it has to be on {nodes} too, which cannot be seen "
        "from here",
        "pve-gpu-release doctor on each node; apt install pve-gpu-release there",
        "After a migration or by HA the container starts there, and does not if the snippet is missing.",
        "storage.cfg, nodes of the cluster",
    ),
    Kind(
        "dropin-missing", E, "container-units",
        "{unit} lacks our drop-in: a reboot inside, a killed monitor and a busy rootfs are not covered",
        REINSTALL,
        "On these paths Proxmox runs no hookscript.",
        "*.service.d directories of systemd",
    ),
    Kind(
        "dropin-masked", E, "container-units",
        "our drop-in of {unit} is masked",
        "rm {path} && systemctl daemon-reload",
        "An empty file or a link to /dev/null of the same name hides it.",
        "*.service.d directories of systemd",
    ),
    Kind(
        "dropin-overridden", E, "container-units",
        "our drop-in of {unit} has no effect: {why}",
        "mend or remove {path}, then systemctl daemon-reload",
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
        "systemctl revert {unit} (or check that {path} is meant to be so)",
        "Start, stop and the order of our steps rest on Proxmox's unit.",
        "unit files and drop-ins of systemd",
    ),
    Kind(
        "boot-unit-missing", W, "boot-unit",
        "the unit that makes the device nodes before the guests start is missing",
        REINSTALL,
        "After a boot /dev/nvidia-uvm may be missing when containers start.",
        "unit files of systemd: pve-gpu-*.service, Before=pve-guests.service",
    ),
    Kind(
        "boot-unit-disabled", W, "boot-unit",
        "{unit}, which makes the device nodes before the guests start, is {state}",
        "systemctl unmask {unit}; systemctl enable {unit}",
        "After a boot /dev/nvidia-uvm may be missing when containers start.",
        "links in *.wants of systemd",
    ),
)  # fmt: skip
