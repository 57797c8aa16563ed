"""One release of one container from start to report: lock, subject, climb. CLI, daemon worker and hook call this."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hostd import audit
from hostd.cancel import Cancel
from hostd.climb import Subject
from hostd.errors import NoSuchContainerError, NotPermittedError, UnreadableError, UsageError
from hostd.events import Fanout, Listener, Silent
from hostd.ladder import Options, Resume
from hostd.lock import RUN_DIR, ReleaseLock, acquire, ensure_run_dir, is_held
from hostd.model import BlindSpot
from hostd.release import Release
from hostd.sources import Sources
from hostd.store import Recorder, Store, parse_resume
from hostd.system.journal import Journal
from hostd.system.pve import Pve
from hostd.verdicts import say
from hostd.wire import options_dict, report_dict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostd.reset import Resetter

Json = dict[str, Any]

HIGHEST_VMID = 999_999_999
"""pve-guest ids run from 100 to 999999999 (pve-common, `pve-vmid` format); smaller ones are accepted here."""


def raise_descriptor_limit() -> None:
    """A container may have more holders than the usual 1,024 descriptors: each is held by one while it ends."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # then they are held in several rounds


def require_root() -> None:
    """Raises NotPermittedError unless we are root: /proc/PID/fd of others needs ptrace rights (FACTS)."""
    if os.geteuid() != 0:
        message, step = say("not-root", uid=os.geteuid())
        raise NotPermittedError(message, next_step=step)


def find_subject(sources: Sources, vmid: int, pve: Pve) -> Subject:
    """What is known of container `vmid` beside its processes. A running one whose configuration cannot be read has a
    blind spot: which GPUs are its own, and may have memory in use that nobody holds, is not known.

    Raises NoSuchContainerError when neither configuration nor cgroup exists here (another node that has it is named), and
    UnreadableError when the configuration decides and cannot be read.
    """
    try:
        cgroup = sources.cgroups.open(vmid)
    except OSError as exc:
        message, step = say("cannot-look", detail=f"cannot open cgroup /lxc/{vmid}: {exc.strerror or exc}")
        raise UnreadableError(message, next_step=step, vmid=vmid) from exc
    if cgroup is not None:
        cgroup.close()
    try:
        config = pve.read_container(vmid)
    except UnreadableError as exc:
        if cgroup is None:
            message, step = say("pve-unreadable", vmid=vmid, detail=exc.message)
            raise UnreadableError(message, next_step=step, reason="pve-unreadable", vmid=vmid) from exc
        spot = BlindSpot("pve", f"configuration of {vmid}", exc.message, "detail-unreadable")
        return Subject(vmid, blind_spots=(spot,))
    if config is None and cgroup is None:
        raise _no_such_container(vmid, pve)
    return Subject(vmid, configured_minors(config.gpu_paths if config else ()))


def _no_such_container(vmid: int, pve: Pve) -> NoSuchContainerError:
    node = pve.find_node(vmid)
    if node:
        message, step = say("container-elsewhere", vmid=vmid, node=node)
        return NoSuchContainerError(message, next_step=step, reason="container-elsewhere", vmid=vmid)
    message, step = say("no-such-container", vmid=vmid)
    return NoSuchContainerError(message, next_step=step, vmid=vmid)


def configured_minors(paths: Iterable[str]) -> frozenset[int]:
    """Minors of the `/dev/nvidiaN` nodes that a configuration names, as the host has them now."""
    minors = set()
    for path in paths:
        name = os.path.basename(path)
        if not (name.startswith("nvidia") and name[6:].isdigit()):
            continue
        try:
            info = os.stat(path)
        except OSError:
            continue  # a missing node is doctor's finding; it holds no memory
        if stat.S_ISCHR(info.st_mode):
            minors.add(os.minor(info.st_rdev))
    return frozenset(minors)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a release runs: by whom it was asked for, where it is written down, who listens."""

    owner: str = "cli"
    """`cli`, `daemon` or `hook`: who finishes the release if this process is killed."""
    listener: Listener = field(default_factory=Silent)
    pve: Pve = field(default_factory=Pve)
    run_dir: str = RUN_DIR
    journal: Journal | None = None
    caller_uid: int | None = None
    caller_pid: int | None = None
    phase: str = ""
    on_wait: Callable[[int, float], None] | None = None


def perform(
    sources: Sources,
    vmid: int,
    options: Options,
    around: Surroundings,
    cancel: Cancel,
    *,
    release_id: str = "",
) -> Json:
    """One release under the container's lock, written ahead and in the journal; the result as `wire.report_dict`.

    With the `release_id` of a release that was cut off it goes on with that one; if somebody has finished it meanwhile,
    that report is the result. Raises PgrError where there is no report to give.
    """
    raise_descriptor_limit()
    try:
        ensure_run_dir(around.run_dir)  # the driver's lock is there
    except OSError:
        pass  # a full /run: the record will say that it is missing
    if not options.dry_run and is_held(vmid, around.run_dir):
        sources.nvml.close()  # while we wait for another release we are no client of the GPU
    else:
        sources.nvml.start()
    subject = find_subject(sources, vmid, around.pve)
    if options.dry_run:
        release = Release(sources, subject, options, around.listener, cancel=cancel, release_id=release_id)
        return report_dict(release.run())
    store = Store(around.run_dir)
    lock = _lock(vmid, options, around, cancel)
    sources.nvml.start()
    try:
        record = store.read(release_id) if release_id else None
        if record is not None and record["vmid"] != vmid:
            raise UsageError(f"cannot go on with release {release_id}: it is one of container {record['vmid']}", vmid=vmid)
        if record is not None and record["report"] is not None:
            return dict(record["report"])
        resume = parse_resume(record) if record is not None else None
        return _written_ahead(sources, subject, options, around, cancel, release_id, resume)
    finally:
        lock.close()


def _written_ahead(
    sources: Sources,
    subject: Subject,
    options: Options,
    around: Surroundings,
    cancel: Cancel,
    release_id: str,
    resume: Resume | None,
) -> Json:
    recorder = Recorder(
        Store(around.run_dir), around.owner, options_dict(options), handed_over=lambda: cancel.handed_over
    )
    listeners: list[Listener] = [recorder]
    trail = None
    if around.journal is not None:
        trail = audit.Trail(
            around.journal.send,
            phase=around.phase,
            caller_uid=around.caller_uid,
            caller_pid=around.caller_pid,
        )
        listeners.append(trail)
    fanout = Fanout(*listeners, around.listener)
    release = Release(
        sources,
        subject,
        options,
        fanout,
        cancel=cancel,
        release_id=release_id,
        resume=resume,
        resetter=_resetter(options, around),
    )
    if trail is not None and resume is not None and around.journal is not None:
        context = audit.Context(vmid=subject.vmid, release_id=resume.release_id, trigger=options.trigger)
        around.journal.send(audit.resumed(context, resume.was_at))
    result = report_dict(release.run())
    if trail is not None and around.journal is not None:
        if recorder.missing:
            around.journal.send(audit.record_missing(trail.context, recorder.missing))
        if around.owner != "daemon" and (wedged := sources.nvml.wedged()):  # the daemon's own watch says it there
            around.journal.send(audit.nvml_wedged(wedged.pid, wedged.call, wedged.age_s, trail.context))
    return result


def _resetter(options: Options, around: Surroundings) -> Resetter | None:
    """How a GPU may be reset from here. Also puts back what a reset that was killed has left behind."""
    if not (options.reset or options.auto_reset or reset_records(around.run_dir)):
        return None
    from hostd.reset import Resetter, recover

    for text in recover(around.run_dir):
        if around.journal is not None:
            around.journal.send(audit.reset_recovered(text))
    return Resetter(options.reset_services, around.run_dir, around.owner == "daemon")


def reset_records(run_dir: str) -> bool:
    """True when a reset is under way or was cut off."""
    try:
        return any(name.endswith(".json") for name in os.listdir(os.path.join(run_dir, "resets")))
    except OSError:
        return False


def _lock(vmid: int, options: Options, around: Surroundings, cancel: Cancel) -> ReleaseLock:
    try:
        return acquire(
            vmid,
            wait=options.wait,
            timeout_s=options.limits.timeout_s,
            run_dir=around.run_dir,
            on_wait=around.on_wait,
            check=cancel.check,
        )
    except OSError as exc:
        message, step = say("cannot-look", detail=f"cannot take the lock of container {vmid}: {exc}")
        raise UnreadableError(message, next_step=step, vmid=vmid) from exc
