"""What `--gpu` and `--pid` mean on this node at this moment. Pure, on an observation."""

from __future__ import annotations

from collections.abc import Callable

from hostd.errors import UsageError
from hostd.model import GpuInfo, Observation, Process, ProcessRef
from hostd.system.devices import canonical_pci
from hostd.terminal import escape, shorten

HIGHEST_PID = 1 << 22
"""PID_MAX_LIMIT of the kernel."""
LONGEST_PIDS = 4096
"""Characters of a list of process numbers."""


def resolve_gpu(selector: str, gpus: tuple[GpuInfo, ...], *, driver_silent: bool) -> GpuInfo:
    """The one GPU that `selector` names: NVML index, minor, UUID (or a unique beginning of one) or PCI address.

    Raises UsageError when it names none or more than one: an index cannot be told from a minor while the driver is silent.
    """
    text = selector.strip()
    shown = shorten(escape(selector), 60)
    matches = _by_number(text, gpus, driver_silent) if text.isascii() and text.isdigit() else _by_name(text, gpus)
    unique = list({g.minor: g for g in matches}.values())
    choices = ", ".join(g.uuid or g.pci_bus_id or f"minor {g.minor}" for g in gpus) or "none"
    if not unique:
        raise UsageError(
            f"cannot select GPU '{shown}': no such GPU on this node", next_step=f"GPUs of this node: {choices}"
        )
    if len(unique) > 1:
        raise UsageError(f"cannot select GPU '{shown}': it names more than one", next_step=f"choose from: {choices}")
    return unique[0]


def is_gpu_selector(text: str) -> bool:
    """True for what could be an NVML index, a minor, (the beginning of) a UUID or a PCI address; looks at nothing."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return len(text) <= 6
    if text[:4].lower() in ("gpu-", "mig-"):
        return 5 <= len(text) <= 96 and text.isascii() and text.isprintable()
    try:
        return bool(canonical_pci(text))
    except ValueError:
        return False


def is_pid_selector(text: str) -> bool:
    """True for a process number, or `host:` and one; or several of either, with commas between."""
    return len(text) <= LONGEST_PIDS and all(_is_one_pid(word) for word in text.split(","))


def _is_one_pid(text: str) -> bool:
    digits = text.removeprefix("host:")
    return digits.isascii() and digits.isdigit() and len(digits) <= 10 and 1 <= int(digits) <= HIGHEST_PID


def _by_number(text: str, gpus: tuple[GpuInfo, ...], driver_silent: bool) -> list[GpuInfo]:
    number = int(text)
    matches = [g for g in gpus if g.index == number]
    if not matches and driver_silent:
        choices = ", ".join(g.uuid or g.pci_bus_id for g in gpus)
        raise UsageError(
            f"cannot select GPU {text}: the driver does not answer, so an index cannot be told from a minor",
            next_step=f"choose from: {choices or 'none known'}",
        )
    return matches + [g for g in gpus if g.minor == number]


def _by_name(text: str, gpus: tuple[GpuInfo, ...]) -> list[GpuInfo]:
    folded = text.lower()
    by_uuid = [g for g in gpus if g.uuid and g.uuid.lower().startswith(folded) and len(folded) >= 8]
    if by_uuid:
        return by_uuid
    try:
        pci = canonical_pci(text)
    except ValueError:
        return []
    return [g for g in gpus if g.pci_bus_id == pci]


def resolve_pid(
    selector: str, observation: Observation, find: Callable[[int, bool], list[Process]]
) -> frozenset[ProcessRef]:
    """The processes that `--pid` names: `17` in the container's own PID namespace, `host:4711` on the host, `17,host:4711`
    for both.

    `find(number, host)` returns the container's processes of that number. Raises UsageError for one that is no number, or
    that is not the number of exactly one process.
    """
    if not is_pid_selector(selector):
        shown = shorten(escape(selector), 60)
        raise UsageError(f"cannot select pid '{shown}': expected a number, or host:NUMBER, or several with commas between")
    return frozenset(_one_pid(word, observation.vmid, find) for word in selector.split(","))


def _one_pid(word: str, vmid: int, find: Callable[[int, bool], list[Process]]) -> ProcessRef:
    host = word.startswith("host:")
    digits = word.removeprefix("host:")
    found = find(int(digits), host)
    if len(found) > 1:
        raise UsageError(
            f"cannot select pid {digits}: {len(found)} processes of container {vmid} have that number",
            next_step="choose from: " + ", ".join(f"--pid host:{p.pid}" for p in found),
        )
    if not found:
        where = "on the host that belongs to it" if host else "in its PID namespace"
        raise UsageError(
            f"cannot select pid {digits}: container {vmid} has no such process {where}",
            next_step=f"pve-gpu-release ps {vmid} lists the holders with both numbers",
        )
    return found[0].ref
