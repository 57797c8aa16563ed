"""The proof that memory came back: waiting as long as it falls, and looking again for a job that comes back."""

from __future__ import annotations

import time

from hostd.case import driver_silence
from hostd.climb import Climb
from hostd.figures import baseline_of, excess_mib, old_ghost_mib
from hostd.model import Holder, Observation
from hostd.triage import stuck_tasks
from hostd.waiting import MemoryGauge, Patience, wait_readable
from hostd.words import gpu_text

OLD_GHOST_GRACE_S = 1.0
"""Ghost memory from before that has not fallen for this long is not on its way out."""
PAUSE_MAX_S = 0.1
"""Between two memory samples while nothing but the driver's figures can tell us anything."""


class Drain:
    """Waits that end when nothing is left, when nothing moves any more, or when the time is up."""

    def __init__(self, climb: Climb) -> None:
        self._climb = climb

    def until_given_back(self, observation: Observation) -> Observation:
        """Looks until every GPU is back at its baseline, or memory has stopped falling, or the time is up."""
        climb = self._climb
        if not observation.nvml_asked:
            observation = climb.look(nvml=True)
        patience = Patience(climb.options.limits.drain_grace_s, climb.deadline_s)
        gauge = self._gauge()
        ticks: dict[int, int] = {}
        told_s = pause_s = 0.0
        while not climb.targets(observation):
            dying = climb.dying(observation)
            climb.dealt |= {h.ref: h for h in dying if h.ref not in climb.dealt}
            over = self._over(observation)
            if not over and not dying:
                break
            climb.cancel.check()
            if any(self._burns(h.process.pid, ticks) for h in dying):
                patience.progressed()
            if patience.stalled:
                climb.falling = patience.moving
                if not patience.moving:
                    climb.stuck += stuck_tasks(climb.sources.procfs, [h.ref for h in dying], climb.report.started)
                break
            if time.monotonic() - told_s >= 1.0:
                told_s = time.monotonic()
                text = ", ".join(_to_go(observation, over, dying))
                climb.listener.waiting(climb.report, f"memory is falling: {text} to go", told_s - climb.begun_s)
            pause_s = min(PAUSE_MAX_S, max(0.005, pause_s * 1.5))
            if self._sample(gauge, pause_s):
                patience.progressed()
            observation = climb.look(nvml=True)
        return observation

    def until_old_ghosts_rest(self, observation: Observation) -> Observation:
        """Waits for ghost memory from before on a GPU that nobody else is on, as long as it falls: whoever held it may
        have been ended a moment before us."""
        climb = self._climb
        patience = Patience(min(OLD_GHOST_GRACE_S, climb.options.limits.drain_grace_s), climb.deadline_s)
        gauge = self._gauge()
        lowest: int | None = None
        while (total := self._old_ghost_mib(observation)) and not climb.targets(observation):
            climb.cancel.check()
            if lowest is not None and total < lowest:
                patience.progressed()
            lowest = total if lowest is None else min(lowest, total)
            if patience.stalled:
                climb.falling = climb.falling or patience.moving
                break
            if self._sample(gauge, PAUSE_MAX_S):
                patience.progressed()
            observation = climb.look(nvml=True)
        return observation

    def settle(self, observation: Observation) -> Observation:
        """Looks again for a moment when something alive would start a killed job again (CASES, "It comes back").

        The same observation when there is nothing to wait for."""
        climb = self._climb
        settle_s = climb.options.limits.settle_s
        if climb.targets(observation) or not self._may_come_back() or settle_s <= 0:
            return observation
        end_s = min(time.monotonic() + settle_s, climb.deadline_s)
        while time.monotonic() < end_s and not climb.cancel.requested:
            wait_readable(climb.cancel.fileno(), 0.05)
            looked = climb.look(nvml=False)
            if climb.targets(looked):
                return looked
        return climb.look(nvml=True)

    def _may_come_back(self) -> bool:
        """True when a killed holder had a supervisor, or a living parent in the container that is not its init."""
        climb = self._climb
        for holder in climb.dealt.values():
            if holder.supervisor is not None and holder.supervisor.kind != "session":
                return True
            if holder.process.ppid > 1:
                parent = climb.sources.procfs.read_process(holder.process.ppid)
                init = climb.first.init
                if (
                    parent is not None
                    and not parent.is_zombie
                    and parent.start_time <= holder.process.start_time
                    and (init is None or parent.ref != init)
                    and climb.observer.view.owns(parent)
                ):
                    return True
        return False

    # --- figures ---

    def _gauge(self) -> MemoryGauge:
        return MemoryGauge(self._climb.sources, self._climb.uuids(), self._climb.driver_limit_s)

    def _sample(self, gauge: MemoryGauge, pause_s: float) -> bool:
        """Waits a moment and samples memory; True when it has fallen."""
        wait_readable(self._climb.cancel.fileno(), pause_s)
        gauge.ask()
        fd = gauge.fileno()
        if fd is None:
            return False
        return gauge.take()

    def _burns(self, pid: int, ticks: dict[int, int]) -> bool:
        now = self._climb.sources.procfs.cpu_ticks(pid) or 0
        before, ticks[pid] = ticks.get(pid, now), now
        return now > before

    def _over(self, observation: Observation) -> dict[int, int]:
        """GPU minor -> MiB above the baseline, of the GPUs that this release verifies."""
        climb = self._climb
        if driver_silence(observation):
            return {}
        over = {
            m: excess_mib(s, baseline_of(m, climb.first, climb.baseline_mib))
            for m in climb.minors
            if (s := observation.gpu(m))
        }
        return {minor: mib for minor, mib in over.items() if mib}

    def _old_ghost_mib(self, observation: Observation) -> int:
        """MiB of ghost memory that is no more than it was before, on the GPUs that nobody else is attached to."""
        climb = self._climb
        verified = climb.minors | climb.own_minors()
        gpus = [gpu for gpu in observation.gpus if gpu.info.minor in verified]
        return sum(old_ghost_mib(gpu, climb.first, climb.baseline_mib) for gpu in gpus)


def _to_go(observation: Observation, over: dict[int, int], dying: list[Holder]) -> list[str]:
    """What is still to be given back, by GPU as people count them, for the line that is shown meanwhile."""
    left = dict(over)
    for holder in dying:
        for gpu in observation.gpus:
            if gpu.info.minor in holder.gpus:
                charge = gpu.client_mib.get(holder.process.pid) or 0
                left[gpu.info.minor] = left.get(gpu.info.minor, 0) + charge
    return [f"{left[g.info.minor]:,} MiB on {gpu_text(g)}" for g in observation.gpus if g.info.minor in left]
