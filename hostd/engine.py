"""One release of one container from start to report: lock, subject, climb. CLI, daemon worker and hook call this."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable

from hostd.cancel import Cancel
from hostd.errors import NoSuchContainerError, NotPermittedError, PgrError, UnreadableError
from hostd.events import Listener
from hostd.ladder import Options
from hostd.lock import RUN_DIR, acquire
from hostd.model import BlindSpot, Report
from hostd.observe import Sources
from hostd.release import Release, Subject
from hostd.system.pve import Pve
from hostd.verdicts import say

HIGHEST_VMID = 999_999_999
"""pve-guest ids run from 100 to 999999999 (pve-common, `pve-vmid` format); smaller ones are accepted here."""


def require_root() -> None:
    """Raises NotPermittedError unless we are root: /proc/PID/fd of others needs ptrace rights (FACTS)."""
    if os.geteuid() != 0:
        message, step = say("not-root", uid=os.geteuid())
        raise NotPermittedError(message, next_step=step)


def find_subject(sources: Sources, vmid: int, pve: Pve) -> tuple[Subject, list[BlindSpot]]:
    """What is known of container `vmid` beside its processes.

    Raises NoSuchContainerError when neither configuration nor cgroup exists here (another node that has it is named), and
    UnreadableError when the configuration decides and cannot be read.
    """
    cgroup = sources.cgroups.open(vmid)
    if cgroup is not None:
        cgroup.close()
    try:
        config = pve.read_container(vmid)
    except UnreadableError as exc:
        if cgroup is None:
            message, step = say("pve-unreadable", vmid=vmid, detail=exc.message)
            raise UnreadableError(message, next_step=step, reason="pve-unreadable", vmid=vmid) from exc
        return Subject(vmid), [BlindSpot("pve", f"configuration of {vmid}", exc.message, "detail-unreadable")]
    if config is None and cgroup is None:
        raise _no_such_container(vmid, pve)
    return Subject(vmid, configured_minors(config.gpu_paths if config else ())), []


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


def perform(
    sources: Sources,
    vmid: int,
    options: Options,
    listener: Listener,
    cancel: Cancel,
    *,
    pve: Pve | None = None,
    run_dir: str = RUN_DIR,
    release_id: str = "",
    on_wait: Callable[[int, float], None] | None = None,
) -> Report:
    """One release under the container's lock. Raises PgrError where there is no report to give."""
    sources.nvml.start()
    subject, spots = find_subject(sources, vmid, pve or Pve())
    if options.dry_run:
        return _climb(sources, subject, options, listener, cancel, release_id, spots)
    lock = _lock(vmid, options, run_dir, cancel, on_wait)
    try:
        return _climb(sources, subject, options, listener, cancel, release_id, spots)
    finally:
        lock()


def _climb(
    sources: Sources,
    subject: Subject,
    options: Options,
    listener: Listener,
    cancel: Cancel,
    release_id: str,
    spots: list[BlindSpot],
) -> Report:
    report = Release(sources, subject, options, listener, cancel=cancel, release_id=release_id).run()
    report.blind_spots += spots
    return report


def _lock(
    vmid: int, options: Options, run_dir: str, cancel: Cancel, on_wait: Callable[[int, float], None] | None
) -> Callable[[], None]:
    try:
        lock = acquire(
            vmid,
            wait=options.wait,
            timeout_s=options.limits.timeout_s,
            run_dir=run_dir,
            on_wait=on_wait,
            check=cancel.check,
        )
    except OSError as exc:
        message, step = say("cannot-look", detail=f"cannot take the lock of container {vmid}: {exc}")
        raise UnreadableError(message, next_step=step, vmid=vmid) from exc
    return lock.close


__all__ = ["PgrError", "configured_minors", "find_subject", "perform", "require_root"]
