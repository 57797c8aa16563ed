"""The last rung, and what there is to say when memory stays: a reset of the GPUs that nothing less frees."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace

from hostd.account import case_of
from hostd.case import Judgement
from hostd.climb import Climb
from hostd.errors import RefusedError
from hostd.figures import excess_mib
from hostd.judge import judge
from hostd.lock import RUN_DIR
from hostd.model import Observation, ProcessRef, RungRecord, Step, Stuck, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostd.reset import Resetter

RESETTABLE = ("ghost-memory", "ghost-memory-before", "unkillable", "gpu-lost")
"""Reasons after which a reset may help: nothing is left that a signal could end."""
REBOOT_STEP = "reboot the node: the driver says that nothing less helps (journalctl -k -g NVRM)"


def reset_targets(observation: Observation, minors: Iterable[int], stuck: Iterable[Stuck]) -> tuple[str, ...]:
    """PCI addresses of the GPUs that only a reset can free: ghost memory, lost, or a task stuck in the driver."""
    wanted = set(minors)
    in_driver = {s.ref for s in stuck if "[nvidia" in s.stack or s.wchan.startswith(("nv", "_nv", "os_", "rm_"))}
    held = {m for h in observation.holders if h.ref in in_driver for m in h.gpus}
    return tuple(
        g.info.pci_bus_id
        for g in observation.gpus
        if g.info.minor in wanted
        and g.info.pci_bus_id
        and (excess_mib(g, None) or g.error_code == "gpu-lost" or g.info.minor in held)
    )


class ResetRung:
    """`resetter` None: no reset from here."""

    def __init__(self, climb: Climb, resetter: Resetter | None) -> None:
        self._climb = climb
        self._resetter = resetter

    def may_run(self, judgement: Judgement) -> bool:
        """It was asked for or is configured, and may help."""
        options = self._climb.options
        asked = options.reset or options.auto_reset
        return asked and judgement.reason in RESETTABLE and not options.dry_run and self._resetter is not None

    def run(self, last: Observation, judgement: Judgement) -> tuple[Judgement, Observation]:
        """Resets and looks again. Raises RefusedError if it was asked for (`--reset`); else a refusal leaves the verdict
        as it was."""
        assert self._resetter is not None
        climb = self._climb
        wanted = reset_targets(last, climb.minors | climb.own_minors(), climb.stuck)
        if not wanted:
            return judgement, last
        record = RungRecord(Step.RESET, climb.now_ms())
        climb.report.rungs.append(record)
        climb.listener.rung_begun(climb.report, record, ())
        begun_s = time.monotonic()

        def tell(what: str) -> None:
            climb.listener.waiting(climb.report, f"reset: {what}", climb.elapsed_s())

        try:
            outcome = self._resetter.reset(
                climb.sources, climb.report.release_id, climb.subject.vmid, wanted, self._dealt(last), tell
            )
            record.note, record.sent, record.gone = outcome.text, 1, int(outcome.done)
        except RefusedError as exc:
            record.note = exc.message
            if climb.options.reset:
                raise
            return judgement, last
        finally:
            record.waited_ms = round((time.monotonic() - begun_s) * 1000)
            climb.listener.rung_done(climb.report, record)
        last = climb.look(nvml=True)
        judgement = judge(case_of(climb, last))
        step = REBOOT_STEP if outcome.reboot else judgement.next_step
        return replace(judgement, message=f"{judgement.message}; {outcome.text}", next_step=step), last

    def _dealt(self, last: Observation) -> set[ProcessRef]:
        return {h.ref for h in self._climb.selected(last)} | {s.ref for s in self._climb.stuck}

    def explain(self, judgement: Judgement, last: Observation) -> Judgement:
        """Adds to the report what an administrator needs to know of memory that does not come back."""
        climb = self._climb
        run_dir = self._resetter.run_dir if self._resetter is not None else RUN_DIR
        if climb.xids is not None and (spot := climb.xids.blind_spot()):
            climb.report.details.append(f"the kernel log was not read: {spot.error}")
        quiet = judgement.verdict is Verdict.RELEASED and not (climb.xids is not None and climb.xids.look())
        if quiet and not os.path.exists(os.path.join(run_dir, "ghosts.json")):
            return judgement
        from hostd.ghosts import FirstSeen, describe, haunted  # not for a release that is fine
        from hostd.resetplan import REBOOT

        states = haunted(last, climb.minors | climb.subject.own_minors)
        since = FirstSeen(run_dir).update(last.gpus)
        xids = climb.xids.look() if climb.xids is not None else []
        if judgement.reason in RESETTABLE or xids:
            climb.report.details += describe(climb.sources, states, since, xids)
        if judgement.reason in RESETTABLE and any(g.recovery_action == REBOOT for g in states):
            return replace(judgement, next_step=REBOOT_STEP)
        return judgement
