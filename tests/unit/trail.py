"""A release as the loop would tell it, for the tests of audit, log and explain: made of the product's own types."""

from __future__ import annotations

from hostd import audit
from hostd.model import (
    BlindSpot,
    Evidence,
    Fate,
    GpuInfo,
    GpuReport,
    GpuState,
    Holder,
    HolderReport,
    Observation,
    Process,
    Report,
    RungRecord,
    Step,
    Stuck,
    Supervisor,
    Verdict,
)

RELEASE_ID = "1a2b3c4d-0000-4000-8000-00000000beef"
GPU0 = GpuInfo(50, "GPU-aaaa", "0000:3b:00.0", "NVIDIA H200", 1)


def process(pid: int, comm: str = "VLLM::EngineCor", ns_pids: tuple[int, ...] = (35, 7)) -> Process:
    return Process(pid, pid * 10, ns_pids, comm, "S", 0, 1, 4, "/lxc/129/ns/system.slice/vllm.service", 4026532000)


def holder(pid: int = 4711, comm: str = "VLLM::EngineCor", cmdline: str = "python3 -m vllm") -> Holder:
    return Holder(
        process(pid, comm),
        129,
        frozenset({Evidence.FD, Evidence.NVML}),
        (50,),
        memory_mib=42000,
        inherited_from=4700,
        cmdline=cmdline,
        user="root",
        supervisor=Supervisor("systemd", "vllm.service", "/lxc/129/ns/system.slice/vllm.service"),
    )


FOREIGN = Holder(process(900, "Xorg", ()), None, frozenset({Evidence.NVML}), (50,), memory_mib=12)


def report(release_id: str = RELEASE_ID, vmid: int = 129) -> Report:
    return Report(release_id, vmid, "cli", started="2026-11-30T20:15:01Z")


def tell(trail: audit.Trail, made: Report, held: Holder, *, stop_after: str = "") -> None:
    """A release of one holder by TERM and KILL; `stop_after` = the event after which the teller dies."""
    state = GpuState(GPU0, 42100, 615, 1)
    look = Observation(
        made.vmid, 1.0, (held,), (FOREIGN,), (state,), (BlindSpot("procfs", "/proc/5/maps", "timed out"),)
    )
    trail.started(made)
    trail.observed(made, look, (held,))
    term = RungRecord(Step.TERM, 3, [held.process.pid])
    trail.rung_begun(made, term, (held,))
    if stop_after == "rung-begun":
        return
    term.sent, term.gone, term.waited_ms = 1, 0, 10_000
    trail.rung_done(made, term)
    kill = RungRecord(Step.KILL, 10_004, [held.process.pid], 1, 1, 120, "memory falling")
    trail.rung_begun(made, kill, (held,))
    trail.rung_done(made, kill)
    ended = HolderReport(held, Fate.EXITED)
    trail.fate(made, ended)
    made.holders = [ended]
    made.gpus = [GpuReport(GPU0, 42100, 0, 615, 0, 1)]
    made.verdict, made.reason, made.was_held = Verdict.RELEASED, "released", True
    made.message = f"container {made.vmid}: 1 process released, memory verified on nvidia50"
    made.duration_ms = 10_130
    trail.finished(made)


STUCK = Stuck(
    process(77).ref, 78, "D", "percpu_rwsem_wait", "percpu_rwsem_wait+0x1\nsb_start_write+0x2\n", True, "12 s"
)
