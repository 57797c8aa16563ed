"""What a look at a running container leaves for its stop."""

from __future__ import annotations

from hostd.clock import boot_s
from hostd.lifecycle.records import SeenHolder, Snapshot, pairs
from hostd.model import Holder, Observation
from hostd.system.cgroupfs import owner_of


def take_snapshot(seen: Observation, invocation: str, earlier: Snapshot | None) -> Snapshot:
    """What a look at a running container leaves for its stop. Pure but for the clock.

    `earlier`: a pre-stop of the same incarnation (a shutdown that was given up): its holders and baselines stay, for a
    second look may come when half of them are gone.
    """
    init = list(seen.init) if seen.init is not None else []
    now = Snapshot(seen.vmid, boot_s(), invocation, init)
    if earlier is not None and same_incarnation(earlier, now):
        now.at_s = earlier.at_s
        now.init = earlier.init or init
    else:
        earlier = None
    known = {holder.ref: holder for holder in (earlier.holders if earlier else ())}
    known |= {holder.ref: SeenHolder.of(holder, _is_inside(holder, seen)) for holder in seen.holders}
    now.holders = list(known.values())
    minors = {m for holder in seen.holders for m in (*holder.gpus, *holder.open_gpus)}
    now.minors = sorted(minors | set(earlier.minors if earlier else ()))
    now.used_mib = [[g.info.minor, g.used_mib] for g in seen.gpus if g.used_mib is not None]
    baseline = {g.info.minor: g.baseline_mib for g in seen.gpus if g.baseline_mib is not None}
    baseline |= pairs(earlier.baseline_mib) if earlier else {}
    now.baseline_mib = [[minor, mib] for minor, mib in sorted(baseline.items())]
    return now


def _is_inside(holder: Holder, seen: Observation) -> bool:
    """It runs in the PID namespace of the container's init, or below it: the kernel ends it with that init, and no
    process ever leaves its PID namespace. One that is the container's by its cgroup alone may be anybody's later."""
    by_namespace = owner_of(holder.process.cgroup) is None
    return by_namespace or (seen.init_pidns != 0 and holder.process.pidns == seen.init_pidns)


def same_incarnation(a: Snapshot, b: Snapshot) -> bool:
    if a.invocation and b.invocation:
        return a.invocation == b.invocation
    return bool(a.init) and a.init == b.init
