"""May the container start? Pure (DESIGN 7: *dirty* = a holder of this container, exclusive ghost memory, or less than
`min_free_mib`; living clients of others never make a GPU dirty).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hostd.config import HookSettings, OnDirty
from hostd.model import GpuState, Report, Verdict
from hostd.words import gpu_text

OTHERS = frozenset({"held-by-other", "taken-over"})
"""Held by somebody else's process: reported, never a reason to refuse this container's start."""


@dataclass(frozen=True, slots=True)
class Gate:
    """`allow` false refuses the start; `reason` empty: nothing to say."""

    allow: bool = True
    reason: str = ""
    message: str = ""
    next_step: str = ""


def gate_of(report: Report, gpus: Iterable[GpuState], settings: HookSettings) -> Gate:
    """`gpus`: the container's GPUs at the last look."""
    if report.verdict is Verdict.HELD and report.reason not in OTHERS:
        return _dirty(settings, report.reason, report.message, report.next_step)
    short = _short_of_memory(gpus, settings.min_free_mib)
    if short:
        return _dirty(
            settings,
            "short-of-memory",
            f"container {report.vmid}: {short}, and hook.min_free_mib asks for {settings.min_free_mib:,}",
            f"pve-gpu-release ps shows who uses it; pve-gpu-release {report.vmid} frees what this container left",
        )
    if report.verdict is Verdict.RELEASED:
        return Gate()
    return Gate(True, report.reason, report.message, report.next_step)


def _dirty(settings: HookSettings, reason: str, message: str, next_step: str) -> Gate:
    if settings.on_dirty is OnDirty.BLOCK:
        step = f"{next_step}; or let it start anyway: hook.on_dirty: warn in /etc/pve-gpu-release/config.yaml"
        return Gate(False, reason, message, step)
    return Gate(True, reason, message, next_step)


def _short_of_memory(gpus: Iterable[GpuState], min_free_mib: int) -> str:
    if min_free_mib <= 0:
        return ""
    short = [
        f"{gpu_text(gpu)} has {gpu.available_mib:,} MiB free"
        for gpu in gpus
        if gpu.available_mib is not None and gpu.available_mib < min_free_mib
    ]
    return ", ".join(short)
