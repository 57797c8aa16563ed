"""Which invocation of the container's unit runs."""

from __future__ import annotations

import os

UNITS = ("pve-container@{}.service", "pve-container-debug@{}.service")
INVOCATIONS = "/run/systemd/units"


def unit_invocation(vmid: int, folder: str = INVOCATIONS) -> str:
    """The invocation id that systemd has for the container's unit now; empty when it does not run.

    systemd keeps it as a symbolic link (unit_export_invocation_id in core/unit.c): no bus call needed.
    """
    for unit in UNITS:
        try:
            return os.readlink(os.path.join(folder, "invocation:" + unit.format(vmid)))
        except OSError:
            continue
    return ""
