"""Is what `doctor` advises a line for bash as printed?"""

from __future__ import annotations

import shlex
import subprocess

COMMANDS = frozenset(
    (
        *("apt", "cat", "cd", "chmod", "chown", "dpkg", "echo", "grep", "journalctl", "lspci", "lxc-unfreeze", "mkdir", "mount"),
        *("modprobe", "mv", "nvidia-cuda-mps-control", "nvidia-modprobe", "nvidia-smi", "pct", "printf", "proxmox-boot-tool"),
        *("pve-gpu-release", "pvesm", "python3", "qm", "rm", "scp", "sed", "sh", "ssh", "systemctl", "systemd-tmpfiles", "tar"),
        *("update-grub", "xargs"),
    )
)


def objection(mend: str) -> str:
    """Why an administrator cannot paste it; empty when he can. Every command in the line is one that we know."""
    parsed = subprocess.run(["bash", "-n", "-c", mend], capture_output=True, text=True)
    if parsed.returncode or parsed.stderr:
        return f"bash does not understand {mend!r}: {parsed.stderr}"
    if not mend.isprintable():
        return f"not one printable line: {mend!r}"
    words = shlex.shlex(mend, posix=True, punctuation_chars=";&|<>()")
    words.whitespace_split, words.commenters = True, "#"
    first = True
    for token in words:
        if set(token) <= set(";&|"):
            first = True
        elif first:
            if token not in COMMANDS:
                return f"{token!r} is no command: {mend!r}"
            first = False
    return f"no command: {mend!r}" if first else ""
