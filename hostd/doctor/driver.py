"""Checks of the NVIDIA driver: is it there, does it answer, how fast, what does it say about its GPUs."""

from __future__ import annotations

import os

from hostd.doctor import origin
from hostd.doctor.facts import Facts, Look
from hostd.doctor.finding import Blind, CannotLookError, Results, Skipped
from hostd.doctor.kinds import found
from hostd.doctor.shell import Shell, word
from hostd.model import GpuInfo, GpuState, NvmlGpu
from hostd.system import devices, kmsg
from hostd.system.kmsg import Severity as XidSeverity
from hostd.system.kmsg import Xid

SLOW_S = 2.0
"""Importing the library takes 0.05 s and opening the GPUs 0.01 s with persistence mode (FACTS)."""
PERSISTENCED = "nvidia-persistenced"[:15]
"""As the kernel cuts names."""
RESET = "nvidia-smi --gpu-reset -i {gpu}  # when nobody is on it any more: pve-gpu-release ps"
REBOOT = "systemctl reboot  # of the node"
ACTIONS = {
    1: ("a reset", RESET),
    2: ("a reboot", REBOOT),
    3: ("draining P2P traffic", "pve-gpu-release ps  # end what uses it by NVLink"),
    4: ("draining and a reset", RESET),
}
"""Values of field 230 (FACTS) but 0, none."""
KERNEL_LOG_BYTES = 32 << 20
NO_FIGURES = "figures-unavailable"
NO_MODULE = "cannot import pynvml"
"""As the NVML child says it."""
NO_DRIVER = Skipped("no driver is loaded")


def gpu_name(info: GpuInfo) -> str:
    """As administrators know it: `GPU 0 (0000:3b:00.0)`."""
    place = info.pci_bus_id or f"minor {info.minor}"
    return f"GPU {info.index} ({place})" if info.index is not None else f"GPU {place}"


def smi_name(info: GpuInfo) -> str:
    """As nvidia-smi -i takes it."""
    return info.uuid or info.pci_bus_id


def loaded(facts: Facts) -> Results:
    if facts.driver.present:
        return
    wanting = facts.get("gpu_containers")
    if wanting:
        names = ", ".join(f"container {vmid}" for vmid in wanting)
        yield found("driver-not-loaded", "/proc/devices names no nvidia driver", containers=names)
    else:
        yield found("no-driver", "/proc/devices names no nvidia driver")


def nvml(facts: Facts) -> Results:
    look: Look = facts.get("look")
    if look.wedged is not None:
        stuck = look.wedged
        age = f"{stuck.age_s:.0f} s"
        evidence = f"nvml.lock is held by pid {stuck.pid}, in {stuck.call} for {age}; the driver was not asked"
        yield found("nvml-wedged", evidence, pid=stuck.pid, call=stuck.call, age=age)
        return
    if not facts.driver.present:
        yield NO_DRIVER
        return
    codes = {"nvml-missing": "nvml-missing", "driver-mismatch": "driver-mismatch"}
    for spot in look.snapshot.blind_spots:
        evidence = f"{spot.what}: {spot.error}"
        if spot.code == "driver-mismatch":
            evidence += f"; kernel module {devices.read_driver_version() or 'of unknown version'}"
        command = _library_command(spot.error) if spot.code == "nvml-missing" else ""
        yield found(codes.get(spot.code, "nvml-silent"), evidence, command=Shell(command))
    if not look.snapshot.blind_spots and look.took_s is not None and look.took_s >= SLOW_S:
        yield found("nvml-slow", f"first answer after {look.took_s:.1f} s", took=f"{look.took_s:.1f} s")


def _library_command(error: str) -> str:
    came_from = origin.read_origin()
    return origin.pynvml_advice(came_from) if NO_MODULE in error else origin.library_advice(came_from)


def persistence(facts: Facts) -> Results:
    if not facts.driver.present:
        yield NO_DRIVER
        return
    for gpu in _answered(facts):
        if gpu.persistence_mode is False:
            name = gpu_name(gpu.info)
            yield found("persistence-off", f"{name}: persistence mode disabled", gpu=name, uuid=smi_name(gpu.info))
    if PERSISTENCED not in facts.get("commands").values():
        command = origin.persistenced_advice(origin.read_origin())
        yield found("persistenced-absent", "no process of that name", command=Shell(command))


def health(facts: Facts) -> Results:
    if not facts.driver.present:
        yield NO_DRIVER
        return
    look: Look = facts.get("look")
    for spot in look.snapshot.blind_spots:
        yield Blind(spot.what, spot.error)
    for gpu in look.snapshot.gpus:
        if gpu.error_code == NO_FIGURES:
            yield found(NO_FIGURES, f"{gpu.error_code}: {gpu.error}", gpu=gpu_name(gpu.info), error=gpu.error)
        elif gpu.error:
            yield found("gpu-lost", f"{gpu.error_code}: {gpu.error}", gpu=gpu_name(gpu.info), error=gpu.error)
        action = gpu.recovery_action or 0
        if action:
            words, advice = ACTIONS.get(action, (f"action {action}", "nvidia-smi -q -i {gpu}  # and the driver's documentation"))
            yield found(
                "recovery-needed",
                f"field 230 is {action}",
                gpu=gpu_name(gpu.info),
                action=words,
                advice=Shell(advice.format(gpu=word(smi_name(gpu.info)))),
            )
    on_gpu = {minor for holder in look.view.holders for minor in holder.gpus}
    for state in look.view.gpus:
        if state.ghost_mib is not None and _is_idle(state) and state.ghost_mib > state.tolerance_mib:
            held = "; processes have it open" if state.info.minor in on_gpu else ""
            evidence = f"{state.used_mib} MiB in use, {state.ghost_mib} MiB of them nobody's{held}"
            yield found(
                "ghost-memory", evidence, ghost=state.ghost_mib, gpu=gpu_name(state.info), uuid=smi_name(state.info)
            )


def _is_idle(state: GpuState) -> bool:
    return not state.own_clients and not state.foreign_clients


def kernel_log(facts: Facts) -> Results:
    """The last message per GPU that asked for a reset or a reboot."""
    last: dict[str, Xid] = {}
    for xid in read_kernel_log():
        if xid.fatal:
            last[xid.pci] = xid
    if not last:
        return
    try:
        actions = {gpu.info.pci_bus_id: gpu.recovery_action for gpu in _answered(facts)}
    except CannotLookError as exc:
        yield Blind("recovery action of the GPUs", exc.message)
        actions = {}
    for pci, xid in last.items():
        evidence = f"kernel log: {xid}" + (f" ({xid.text})" if xid.text else "")
        if actions.get(pci) == 0:
            yield found("xid-past", evidence, xid=xid)
            continue
        reboot = xid.meaning.severity is XidSeverity.REBOOT
        mend = REBOOT if reboot else RESET.format(gpu=word(pci))
        yield found("xid-needs-reset", evidence, xid=xid, advice=xid.advice, mend=Shell(mend))


def read_kernel_log(path: str = kmsg.PATH) -> list[Xid]:
    """Xids in what the kernel still has of its log, oldest first. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    parts: list[bytes] = []
    try:
        size = 0
        while size < KERNEL_LOG_BYTES:
            try:
                part = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten before we read it; the next read has the oldest left
                continue
            if not part:
                break
            parts.append(part)
            size += len(part)
    finally:
        os.close(fd)
    return kmsg.parse_records(b"".join(parts).decode("utf-8", "replace"))


def _answered(facts: Facts) -> list[NvmlGpu]:
    """GPUs that the driver has answered for. Raises CannotLookError when it said nothing."""
    look: Look = facts.get("look")
    gpus = [gpu for gpu in look.snapshot.gpus if not gpu.error or gpu.error_code == NO_FIGURES]
    if facts.driver.present and not gpus and look.snapshot.blind_spots:
        spot = look.snapshot.blind_spots[0]
        raise CannotLookError(f"the driver does not answer ({spot.error})")
    return gpus
