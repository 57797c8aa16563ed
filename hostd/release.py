"""One climb of the ladder for one container: observe, judge, act, wait, observe again, and prove it.

The same loop serves CLI, daemon and hook; a dry run has no effect on anything. `climb` is what it knows, `rungs` what it
does, `drain` how it waits for memory, `account` what it reports, `resetrung` the last resort.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from hostd.account import case_of, fill
from hostd.cancel import Cancel
from hostd.case import Judgement, Selection, driver_silence, of_new_run
from hostd.climb import Climb, Subject
from hostd.clock import utc_now
from hostd.drain import Drain
from hostd.errors import InterruptedRelease, NoSuchContainerError, PgrError, RefusedError
from hostd.events import Listener, Silent
from hostd.judge import judge
from hostd.ladder import Options, Resume, Rung, rungs_for
from hostd.model import DeviceId, Observation, Report, Step
from hostd.resetrung import ResetRung
from hostd.rungs import Effects, Rungs
from hostd.selection import resolve_gpu, resolve_pid
from hostd.sources import Sources, read_driver
from hostd.verdicts import REASONS, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostd.reset import Resetter


class Release:
    """One release of one container. `run()` once; the report is complete whatever happens."""

    def __init__(
        self,
        sources: Sources,
        subject: Subject,
        options: Options,
        listener: Listener | None = None,
        *,
        effects: Effects | None = None,
        cancel: Cancel | None = None,
        release_id: str = "",
        resume: Resume | None = None,
        resetter: Resetter | None = None,
        kmsg: str = "/dev/kmsg",
    ) -> None:
        report = Report(release_id or str(uuid.uuid4()), subject.vmid, options.trigger, dry_run=options.dry_run)
        report.started = utc_now()
        if resume is not None:
            report.release_id = resume.release_id
            report.started = resume.started or report.started
            report.rungs += resume.rungs
        self.report = report
        self.climb = Climb(sources, subject, options, listener or Silent(), cancel or Cancel(), report, resume)
        self.rungs = Rungs(self.climb, effects or Effects())
        self.drain = Drain(self.climb)
        self.reset = ResetRung(self.climb, resetter)
        self._kmsg = kmsg

    def run(self) -> Report:
        """Climbs and returns the report. Errors of policy, usage and interruption end in the report, too; only a bug raises."""
        climb = self.climb
        climb.listener.started(self.report)
        try:
            self._run()
        except KeyboardInterrupt:
            self._end_by_error(InterruptedRelease("interrupted"))
        except PgrError as exc:
            self._end_by_error(exc)
        finally:
            climb.close()
            self.rungs.close()
        self.report.duration_ms = climb.now_ms()
        climb.listener.finished(self.report)
        return self.report

    def _run(self) -> None:
        climb, resume = self.climb, self.climb.resume
        first = climb.look_first()
        climb.begin(first)
        self._check_exists(first)
        self._select(first)
        holders = climb.selected(first)
        climb.minors |= climb.minors_of(holders)
        climb.minors |= (climb.selection.minors or frozenset()) & climb.subject.own_minors
        if resume is not None:
            climb.minors |= resume.minors
        self.report.was_held = bool(holders) or (resume is not None and resume.was_held)
        climb.listener.observed(self.report, first, holders)
        work = climb.targets(first) or climb.dying(first) or (resume and resume.was_held)
        if climb.options.dry_run:
            self._conclude(first)
            return
        self._refuse_init(first)
        if not work:
            self._conclude(self.drain.until_old_ghosts_rest(first))
            return
        from hostd.xid import XidWatch  # not for a look that finds nothing

        climb.xids = XidWatch(self._kmsg)
        climb.lineage.note(holders)
        last = self._climb_all(first)
        self._refuse_init(last)  # it may have opened a GPU meanwhile; everybody else has been dealt with
        self._conclude(last)

    # --- the climb ---

    def _climb_all(self, observation: Observation) -> Observation:
        """All rungs, then rounds of KILL for what came after, until nothing is left or nothing helps."""
        climb = self.climb
        for round_number in range(climb.options.limits.respawn_rounds + 1):
            observation = self._climb_round(round_number, observation)
            if climb.targets(observation):
                fresh = any(h.ref not in climb.killed for h in climb.targets(observation))
                if fresh and not climb.time_is_up() and climb.xid is None:
                    continue
                break
            observation = self._prove(observation)
            if not climb.targets(observation) or climb.time_is_up():
                return self.drain.until_old_ghosts_rest(observation)
        else:
            climb.restless = True
        return climb.look(nvml=True)

    def _climb_round(self, round_number: int, observation: Observation) -> Observation:
        """Each rung that has targets, a look after each."""
        climb = self.climb
        for rung in self._rungs_of(round_number, observation):
            targets = self.rungs.targets_of(rung, observation)
            if not targets:
                continue
            last = rung.step is Step.KILL and round_number == 0 and climb.first_signal_ticks is not None
            if (climb.time_is_up() and not last) or climb.is_told_to_stop(observation):
                break
            self.rungs.run(rung, targets, observation)
            observation = climb.look(nvml=not climb.silent)
        return observation

    def _rungs_of(self, round_number: int, observation: Observation) -> Sequence[Rung]:
        """The ladder at first; later SIGKILL, and before it what brings the holders back, where that is allowed."""
        options = self.climb.options
        if round_number == 0:
            return rungs_for(options)
        kill = Rung(Step.KILL, options.limits.kill_grace_s)
        if not options.stop_units:
            return (kill,)
        self.rungs.end_restarters(observation)
        return (Rung(Step.CGROUP_KILL, kill.grace_s), kill)

    def _prove(self, observation: Observation) -> Observation:
        """No target is left: waits for the memory, and for whoever may come back."""
        observation = self.drain.until_given_back(observation)
        settled = self.drain.settle(observation)
        if settled is observation:
            return observation
        # Once more: others may have allocated between the driver's lists and its figures.
        return self.drain.until_given_back(settled)

    # --- whom ---

    def _select(self, first: Observation) -> None:
        options = self.climb.options
        infos = tuple(g.info for g in first.gpus)
        minors = pids = None
        if options.gpu is not None:
            silent = driver_silence(first) is not None
            minors = frozenset({resolve_gpu(options.gpu, infos, driver_silent=silent).minor})
        if options.pid is not None:
            pids = resolve_pid(options.pid, first, self.climb.observer.find)
        nodes: frozenset[DeviceId] = frozenset()
        if minors and options.open_nodes:
            nodes = frozenset(DeviceId(major, m) for major in read_driver([]).gpu_majors for m in minors)
        self.climb.selection = Selection(minors, pids, nodes)

    def _check_exists(self, first: Observation) -> None:
        subject = self.climb.subject
        if first.running or first.processes or subject.exists():
            return
        message, step = say("no-such-container", vmid=subject.vmid)
        raise NoSuchContainerError(message, next_step=step, vmid=subject.vmid)

    def _refuse_init(self, seen: Observation) -> None:
        climb = self.climb
        inits = [
            h for h in climb.selected(seen) if h.is_init and h.targetable and not of_new_run(h, climb.new_run_ticks)
        ]
        if not inits or climb.options.stop:
            return
        vmid, process = climb.subject.vmid, inits[0].process
        message, step = say("would-stop-container", vmid=vmid, pid=process.pid, comm=process.comm)
        raise RefusedError(message, next_step=step, reason="would-stop-container", vmid=vmid)

    # --- the end ---

    def _conclude(self, last: Observation) -> None:
        judgement = judge(case_of(self.climb, last))
        if self.reset.may_run(judgement):
            try:
                judgement, last = self.reset.run(last, judgement)
            except RefusedError:
                self._fill(last)
                raise
        self._fill(last)
        self._set_verdict(self.reset.explain(judgement, last))

    def _fill(self, last: Observation) -> None:
        fill(self.climb, last)

    def _set_verdict(self, judgement: Judgement) -> None:
        self.report.verdict = judgement.verdict
        self.report.reason = judgement.reason
        self.report.message = judgement.message
        self.report.next_step = judgement.next_step

    def _end_by_error(self, exc: PgrError) -> None:
        self.report.verdict = REASONS[exc.reason].verdict if exc.reason in REASONS else None
        self.report.reason = exc.reason
        self.report.message = exc.message
        self.report.next_step = exc.next_step
        if self.climb.latest is not None and not self.report.holders:
            self._fill(self.climb.latest)
        if isinstance(exc, InterruptedRelease):
            signalled = [f"{r.step} to pid {', '.join(map(str, r.targets))}" for r in self.report.rungs if r.sent]
            detail = f"already sent: {'; '.join(signalled)}" if signalled else "nothing had been signalled"
            if self.climb.cancel.handed_over:
                detail += "; the daemon is being stopped, whoever asked goes on, or the next daemon"
            self.report.message, self.report.next_step = say("interrupted", vmid=self.climb.subject.vmid, detail=detail)
