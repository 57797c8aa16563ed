"""The climb on real processes, with looks that are scripted: what is hard to bring about on a node."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hostd.cancel import Cancel
from hostd.climb import Subject
from hostd.clock import boot_ticks_now
from hostd.errors import UnreadableError
from hostd.events import Silent
from hostd.ladder import Limits, Options, Resume, rungs_for
from hostd.model import Evidence, Holder, Observation, Process, ProcessRef, Report, RungRecord, Step
from hostd.release import Release
from hostd.rungs import Effects, spare_descriptors
from hostd.sources import Sources
from hostd.system.nvml import Nvml
from hostd.system.pidfd import Pinned
from hostd.system.procfs import Procfs
from hostd.system.scan import Scanner
from hostd.waiting import MemoryGauge, Patience, wait_for_exits, wait_readable

from .makers import gpu, look, replace, silent, unit

QUICK = Limits(grace_s=5, kill_grace_s=5, drain_grace_s=0.3, settle_s=0.0, timeout_s=20, respawn_rounds=1)
LISTENS = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
)


class Job:
    """A child of ours that stands for a holder; deaf ones ignore SIGTERM."""

    def __init__(self, *, deaf: bool = False) -> None:
        command = [
            sys.executable,
            "-S",
            "-c",
            LISTENS if deaf else "print(1, flush=True); import time; time.sleep(1000)",
        ]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None and self.popen.stdout.readline() == "1\n"
        found = Procfs().read_process(self.popen.pid)
        assert found is not None
        self.process: Process = found

    @property
    def ref(self) -> ProcessRef:
        return self.process.ref

    def alive(self) -> bool:
        found = Procfs().read_process(self.popen.pid)
        return found is not None and not found.is_zombie

    def holder(self, **more: Any) -> Holder:
        return Holder(self.process, 129, frozenset({Evidence.FD}), (50,), open_gpus=(50,), **more)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def jobs() -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(**options: bool) -> Job:
        started.append(Job(**options))
        return started[-1]

    yield start
    for job in started:
        job.end()


INIT = ProcessRef(3, 5)


class View:
    vmid = 129

    def owns(self, process: Process) -> bool:
        return True

    def is_inside(self, process: Process) -> bool:
        return True


class Looks:
    """An observer that tells what a function says; `calls` counts."""

    def __init__(self, script: Callable[[int], Observation]) -> None:
        self._script = script
        self.calls = 0
        self.asked: list[bool] = []
        self.view = View()

    def look(
        self, *, nvml: bool = True, nvml_deadline_s: float | None = None, budget_s: float | None = None
    ) -> Observation:
        self.calls += 1
        self.asked.append(nvml)
        return replace(self._script(self.calls), nvml_asked=nvml)

    def recheck(self, pid: int) -> ProcessRef | None:
        return Procfs().read_ref(pid)

    def close(self) -> None:
        return


class NoCgroups:
    def open(self, vmid: int, kind: str = "lxc") -> None:
        return None

    def is_frozen(self, path: str) -> bool:
        return False


@dataclass
class NoReset:
    """Only says where records go: not to this machine's /run."""

    run_dir: str


class Here(Sources):
    """The sources, and where records of the test go."""

    run_dir = ""


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    made = Here(Procfs(), NoCgroups(), Scanner(), Nvml(1.0, str(tmp_path / "nvml.lock")), 1)  # type: ignore[arg-type]
    made.run_dir = str(tmp_path / "run")
    yield made
    made.close()


def holding(*jobs: Job, used: int = 0, **more: Any) -> Observation:
    """A look that sees those of them that live."""
    return look(*(job.holder() for job in jobs if job.alive()), gpus=[gpu(50, used)], **more)


def release(
    sources: Sources,
    script: Callable[[int], Observation],
    *,
    limits: Limits = QUICK,
    effects: Effects | None = None,
    cancel: Cancel | None = None,
    listener: Silent | None = None,
    resume: Resume | None = None,
    kmsg: str = "/nonexistent",
    asked: list[bool] | None = None,
    **options: Any,
) -> tuple[Report, Looks]:
    own = cancel or Cancel()
    made = Release(
        sources,
        Subject(129),
        Options(limits=limits, **options),
        listener,
        effects=effects,
        cancel=own,
        resume=resume,
        resetter=NoReset(sources.run_dir),  # type: ignore[arg-type,attr-defined]
        kmsg=kmsg,
    )
    looks = Looks(script)
    looks.asked = asked if asked is not None else []
    made.climb.observer = looks  # type: ignore[assignment]
    try:
        return made.run(), looks
    finally:
        if cancel is None:
            own.close()


# --- the ladder --------------------------------------------------------------------------------------------------------


def test_the_ladder_is_data() -> None:
    assert [r.step for r in rungs_for(Options())] == [Step.TERM, Step.KILL]
    assert [r.step for r in rungs_for(Options(now=True))] == [Step.KILL]
    assert [r.step for r in rungs_for(Options(stop_units=True))] == [Step.STOP_UNIT, Step.TERM, Step.KILL]
    assert rungs_for(Options())[0].grace_s == Limits().grace_s


def test_term_then_kill_then_released(sources: Sources, jobs: Callable[..., Job]) -> None:
    deaf, obedient = jobs(deaf=True), jobs()
    report, _ = release(sources, lambda _: holding(deaf, obedient), limits=replace(QUICK, grace_s=0.3))
    assert report.reason == "released" and [r.step for r in report.rungs] == [Step.TERM, Step.KILL]
    assert [(r.sent, r.gone) for r in report.rungs] == [(2, 1), (1, 1)]
    assert deaf.popen.wait() == -signal.SIGKILL and obedient.popen.wait() == -signal.SIGTERM


def test_a_kernel_that_refuses_a_signal_is_noted_and_the_holder_survives(
    sources: Sources, jobs: Callable[..., Job]
) -> None:
    """EPERM for root: a security module, a seccomp filter. No traceback, no success."""

    class Refused(Effects):
        def send(self, pin: Pinned, number: int) -> bool:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    job = jobs()
    report, _ = release(
        sources, lambda _: holding(job), limits=replace(QUICK, grace_s=0, kill_grace_s=0), effects=Refused()
    )
    assert report.reason == "holders-survive" and job.alive()
    assert "cannot signal" in report.rungs[0].note and report.rungs[0].sent == 0


def test_an_xid_stops_the_climb(sources: Sources, jobs: Callable[..., Job], tmp_path: Path) -> None:
    """The log is a file here: only the kernel can write one into /dev/kmsg."""
    log = tmp_path / "kmsg"
    log.write_text("")

    class Breaks(Effects):
        def send(self, pin: Pinned, number: int) -> bool:
            with log.open("a") as file:
                file.write("3,1,1,-;NVRM: Xid (PCI:0000:18:00): 119, pid=7, name=x, timeout\n")
            return super().send(pin, number)

    deaf = jobs(deaf=True)
    report, _ = release(
        sources, lambda _: holding(deaf), limits=replace(QUICK, grace_s=0.2), effects=Breaks(), kmsg=str(log)
    )
    assert report.reason == "new-xid" and deaf.alive() and [r.step for r in report.rungs] == [Step.TERM]
    assert "Xid 119" in report.message


def test_what_belongs_to_a_new_run_is_left_alone(sources: Sources, jobs: Callable[..., Job]) -> None:
    """By its init, by one of several candidates for it, or by a cgroup that was made anew without an init met."""
    for new_run in ("init", "candidates", "cgroup"):
        old, later = jobs(), None

        def script(call: int, old: Job = old, new_run: str = new_run) -> Observation:
            nonlocal later
            first = replace(holding(old), init=INIT, inits=frozenset({INIT}), incarnation=1)
            if call == 1:
                return first
            later = later or jobs()
            young = ProcessRef(7, later.process.start_time)
            changed = {
                "init": {"init": young, "inits": frozenset({young})},
                "candidates": {"init": None, "inits": frozenset({INIT, young})},
                "cgroup": {"init": None, "inits": frozenset(), "incarnation": 2},
            }[new_run]
            return replace(holding(old, later), **{"incarnation": 1, **changed})

        report, _ = release(sources, script)
        assert report.reason == "container-restarted", new_run
        assert not old.alive() and later is not None and later.alive(), new_run
        assert {h.holder.ref: h.fate.value for h in report.holders}[later.ref] == "spared"


def test_a_run_that_begins_during_the_first_look_is_left_alone(sources: Sources, jobs: Callable[..., Job]) -> None:
    """The look waits for the driver; its lists of processes are read again after that."""
    new: list[Job] = []

    def script(call: int) -> Observation:
        if not new:
            time.sleep(0.03)  # a tick is 10 ms
            new.append(jobs())
        init = ProcessRef(7, new[0].process.start_time)
        return replace(holding(*new), init=init, inits=frozenset({init}), incarnation=2)

    report, _ = release(sources, script)
    assert report.reason == "container-restarted" and new[0].alive() and report.rungs == []


def test_neither_the_gpus_nor_the_init_of_a_new_run_are_ours(sources: Sources, jobs: Callable[..., Job]) -> None:
    """Its init holds a GPU that the old run never had: no refusal, no proof about that GPU."""
    old, new = jobs(), list[Job]()

    def script(call: int) -> Observation:
        first = replace(holding(old), init=INIT, inits=frozenset({INIT}))
        if call == 1:
            return first
        if not new:
            time.sleep(0.02)
            new.append(jobs())
        init = replace(new[0].holder(is_init=True), gpus=(51,), open_gpus=(51,))
        gpus = (gpu(50, 0), gpu(51, 9000))
        return replace(first, holders=(init,), gpus=gpus, init=init.ref, inits=frozenset({init.ref}))

    report, _ = release(sources, script)
    assert report.reason == "container-restarted" and new[0].alive()
    assert [one.info.minor for one in report.gpus] == [50]


class Made:
    """Cgroups of container 129, as they are when they are opened."""

    def __init__(self, inode: int | None) -> None:
        self.inode = inode

    def open(self, vmid: int, kind: str = "lxc") -> Made | None:
        return None if self.inode is None else self

    def is_frozen(self, path: str) -> bool:
        return False

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("sentence", "inode", "init_lives", "inside", "ended"),
    [
        ("its cgroup is the one of the look, its init lives", 1, True, False, True),
        ("the cgroup was made anew between look and signal", 2, True, True, False),
        ("the init has died since, and it is not in its namespace", 1, False, False, False),
        ("the init has died since, and it is in its namespace", 1, False, True, True),
        ("there is no cgroup any more", None, True, False, True),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_who_started_after_us_is_signalled_only_in_the_run_of_the_look(
    sources: Sources,
    jobs: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    sentence: str,
    inode: int | None,
    init_lives: bool,
    inside: bool,
    ended: bool,
) -> None:
    """A container that is stopped and started between a look and its signals: the new job was met by the driver's list."""
    init, young, old = jobs(), [], jobs()
    while boot_ticks_now() <= old.ref.start_time:  # in the tick in which the release begins it could be of either run
        time.sleep(0.001)
    monkeypatch.setattr(View, "is_inside", lambda *_: inside)
    sources.cgroups = Made(inode)  # type: ignore[assignment]

    def script(call: int) -> Observation:
        if not young:
            time.sleep(0.03)
            young.append(jobs())
            if not init_lives:
                init.end()
        seen = replace(holding(old, *young), init=init.ref, inits=frozenset({init.ref}), incarnation=1)
        return seen if call == 1 else replace(seen, holders=())

    report, _ = release(sources, script)
    assert not old.alive(), sentence
    assert young[0].alive() is not ended, sentence
    assert report.rungs[0].sent == 1 + ended


# --- memory after the settle time ----------------------------------------------------------------------------------------


def test_what_is_in_use_after_the_settle_time_is_waited_for_again(sources: Sources, jobs: Callable[..., Job]) -> None:
    """Somebody may have allocated between the driver's lists and its figures of that look: it is not ghost memory yet."""
    job, asked = jobs(), list[bool]()
    after = 0
    looks = iter([900, 900, 0])

    def script(call: int) -> Observation:
        nonlocal after
        if call == 1:
            return look(job.holder(supervisor=unit()), gpus=[gpu(50, 0)])
        settled = True in (not nvml for nvml in asked)  # looks without the driver: the settle time has begun
        if asked[-1] and settled:
            after = next(looks, 0)
        return holding(job, used=after)

    report, _ = release(sources, script, limits=replace(QUICK, settle_s=0.1, drain_grace_s=5), asked=asked)
    assert report.reason == "released", report.message
    assert asked[-2:] == [True, True] and False in asked


# --- time --------------------------------------------------------------------------------------------------------------


def test_no_time_left_after_the_first_look_is_said(sources: Sources, jobs: Callable[..., Job]) -> None:
    job = jobs()

    def script(call: int) -> Observation:
        if call == 1:
            time.sleep(0.3)  # a node that is slow to be looked at, not luck
        return holding(job)

    report, _ = release(sources, script, limits=replace(QUICK, timeout_s=0.2))
    assert report.reason == "holders-survive" and job.alive() and report.rungs == []
    assert "longer --timeout" in report.next_step


def test_term_gets_at_most_half_of_the_time(sources: Sources, jobs: Callable[..., Job]) -> None:
    deaf = jobs(deaf=True)
    report, _ = release(sources, lambda _: holding(deaf), limits=replace(QUICK, grace_s=60, timeout_s=2))
    assert report.reason == "released" and 900 <= report.rungs[0].waited_ms < 1900


def test_memory_that_falls_rarely_is_draining_at_the_limit(sources: Sources, jobs: Callable[..., Job]) -> None:
    job = jobs()
    begun = time.monotonic()

    def script(call: int) -> Observation:
        step = int((time.monotonic() - begun) / 0.4)
        return holding(job, used=0 if call == 1 else 5000 - 100 * step)

    limits = replace(QUICK, drain_grace_s=3, timeout_s=1.5)
    report, _ = release(sources, script, limits=limits)
    assert report.reason in ("draining", "ghost-memory") and not job.alive()


def test_a_silent_driver_is_not_asked_after_each_rung(sources: Sources, jobs: Callable[..., Job]) -> None:
    deaf = jobs(deaf=True)
    report, looks = release(sources, lambda _: holding(deaf, blind=[silent()]), limits=replace(QUICK, grace_s=0.1))
    assert report.reason == "driver-silent" and not deaf.alive()
    assert looks.asked[0] and looks.asked[-1] and not all(looks.asked)


# --- the end -----------------------------------------------------------------------------------------------------------


def test_cancelled_before_the_first_signal(sources: Sources, jobs: Callable[..., Job]) -> None:
    job, cancel = jobs(), Cancel()
    cancel.request()
    report, _ = release(sources, lambda _: holding(job), cancel=cancel)
    assert report.reason == "interrupted" and job.alive() and "nothing had been signalled" in report.message
    cancel.close()


def test_cancelled_in_the_grace_ends_at_once_and_says_what_was_sent(sources: Sources, jobs: Callable[..., Job]) -> None:
    deaf, cancel = jobs(deaf=True), Cancel()

    class Impatient(Silent):
        def rung_begun(self, report: Report, rung: RungRecord, targets: Any) -> None:
            cancel.request()

    begun = time.monotonic()
    report, _ = release(
        sources,
        lambda _: holding(deaf),
        limits=replace(QUICK, grace_s=60, timeout_s=200),
        cancel=cancel,
        listener=Impatient(),
    )
    assert report.reason == "interrupted" and deaf.alive() and time.monotonic() - begun < 10
    assert f"term to pid {deaf.popen.pid}" in report.message
    assert [(h.holder.process.pid, h.fate.value) for h in report.holders] == [(deaf.popen.pid, "survived")]
    cancel.close()


def test_an_error_in_the_middle_keeps_what_is_known(sources: Sources, jobs: Callable[..., Job]) -> None:
    job = jobs()

    def script(call: int) -> Observation:
        if call > 1:
            raise UnreadableError("cannot look")
        return holding(job)

    report, _ = release(sources, script)
    assert report.reason == "cannot-look" and report.verdict is not None and report.verdict.value == "unknown"
    assert not job.alive() and [h.fate.value for h in report.holders] == ["exited"]


def test_a_release_that_was_cut_off_sends_no_second_term(sources: Sources, jobs: Callable[..., Job]) -> None:
    deaf = jobs(deaf=True)
    sent: list[int] = []

    class Recorder(Effects):
        def send(self, pin: Pinned, number: int) -> bool:
            sent.append(number)
            return super().send(pin, number)

    resume = Resume("f00d", 129, termed=frozenset({deaf.ref}), was_held=True)
    report, _ = release(
        sources, lambda _: holding(deaf), limits=replace(QUICK, grace_s=0.1), effects=Recorder(), resume=resume
    )
    assert report.reason == "released" and sent == [signal.SIGKILL] and report.release_id == "f00d"


def test_a_release_that_was_cut_off_does_not_reach_into_the_next_run(
    sources: Sources, jobs: Callable[..., Job]
) -> None:
    """The daemon was killed, the container started again, then the daemon: what it left undone is not the new run's."""
    job = jobs()
    init = ProcessRef(7, job.process.start_time)
    seen = replace(holding(job), init=init, inits=frozenset({init}))
    resume = Resume("f00d", 129, was_held=True, begun_ticks=init.start_time - 5)
    report, _ = release(sources, lambda _: seen, resume=resume)
    assert report.reason == "container-restarted" and job.alive() and report.rungs == []
    report, _ = release(sources, lambda _: replace(holding(job), init=init, inits=frozenset({init})))
    assert report.reason == "released" and not job.alive(), "a new release begins with the run that there is"


def test_who_left_by_himself_counts_as_released(sources: Sources, jobs: Callable[..., Job]) -> None:
    job = jobs()
    seen = job.holder()

    def script(call: int) -> Observation:
        if call == 1:
            job.end()
            return look(seen, gpus=[gpu(50, 0)])
        return look(gpus=[gpu(50, 0)])

    report, _ = release(sources, script)
    assert report.reason == "released" and "1 holder released" in report.message and report.was_held


# --- waiting -----------------------------------------------------------------------------------------------------------


def test_patience_is_seconds_without_progress_and_an_end() -> None:
    now = time.monotonic()
    patience = Patience(0.05, now + 100)
    assert not patience.stalled and not patience.moving
    assert wait_until_stalled(patience) and not patience.moving
    patience.progressed()
    assert patience.moving and not patience.stalled
    assert Patience(100, now - 1).stalled


def wait_until_stalled(patience: Patience) -> bool:
    cancel = Cancel()
    wait_readable(cancel.fileno(), patience.left_s + 0.01)
    cancel.close()
    return patience.stalled


def test_waiting_ends_when_the_last_one_is_dead(sources: Sources, jobs: Callable[..., Job]) -> None:
    one, cancel = jobs(), Cancel()
    pin = Pinned.pin(one.ref, Procfs().read_ref)
    assert pin is not None
    with pin:
        pin.send(signal.SIGKILL)
        gauge = MemoryGauge(sources, [])
        assert wait_for_exits([pin], Patience(30, time.monotonic() + 30), gauge, cancel) == []
    cancel.close()


def test_processes_that_can_be_held_at_a_time_leave_room() -> None:
    import resource

    assert 1 <= spare_descriptors() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_clock_of_start_times(jobs: Callable[..., Job]) -> None:
    before = boot_ticks_now()
    job = jobs()
    assert before <= job.process.start_time <= boot_ticks_now()
