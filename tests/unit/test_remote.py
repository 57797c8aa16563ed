"""What a caller makes of a daemon that stops answering, or that is of another version."""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest

from hostd.cli import common, interrupt, map, ps, remote, status, verify
from hostd.cli.render import Renderer
from hostd.errors import InterruptedRelease
from hostd.shapes import ANSWERS, REPORT, fits


class Gone:
    """A daemon that tells of one rung and is lost; `asked`: somebody pressed Ctrl-C meanwhile."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked

    def __enter__(self) -> Gone:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def call_more(self, *_: Any, **__: Any) -> Iterator[dict[str, object]]:
        yield {"progress": {"event": "rung_begun", "rung": {"step": "term"}}}
        interrupt.came = self.asked
        raise remote.DaemonLost("timed out")


@pytest.mark.parametrize("asked", [True, False])
def test_a_release_that_was_to_stop_is_not_gone_on_with_when_the_daemon_is_lost(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(interrupt, "came", False)
    monkeypatch.setattr(remote, "connect", lambda: Gone(asked))
    with pytest.raises(InterruptedRelease if asked else remote.DaemonLost) as caught:
        remote.release(129, {}, "f00d", lambda event: None)
    assert not asked or "begun with term" in str(caught.value)


# --- another version ---

SEEN: dict[str, Any] = {
    **{"vmid": 129, "pid": 7, "ns_pids": [2], "start_time": 5, "comm": "python3", "cmdline": "python3 x", "user": "root"},
    **{"cgroup": "/lxc/129", "unit": "", "state": "S", "evidence": ["fd"], "gpus": [0], "memory_mib": 5},
    "inherited_from": None,
}
GPU: dict[str, Any] = {"index": 0, "minor": 0, "uuid": "GPU-1", "pci_bus_id": "0000:3b:00.0", "name": "H200"}
SEEN_GPU = {**GPU, "total_mib": 9, "used_mib": 5, "reserved_mib": 1, "ghost_mib": 0, "bar1_used_mib": 1, "error": ""}
SPOT = {"source": "nvml", "what": "driver", "error": "silent"}
RUNG = {"step": "term", "at_ms": 1, "targets": [7], "sent": 1, "gone": 1, "waited_ms": 3, "note": ""}
STUCK = {"tid": 7, "state": "D", "wchan": "x", "stack": "", "kill_pending": True, "since": ""}
GOOD: dict[str, Any] = {
    **{"schema": 1, "release_id": "f00d", "vmid": 129, "trigger": "cli", "verdict": "held", "reason": "unkillable"},
    **{"message": "m", "was_held": True, "dry_run": False, "started": "2026-12-01T00:00:00Z", "duration_ms": 3},
    "holders": [{**{k: v for k, v in SEEN.items() if k != "vmid"}, "fate": "unkillable", "stuck": STUCK}],
    "gpus": [
        GPU
        | {"used_mib_before": 5, "used_mib_after": 5, "reserved_mib": 1, "ghost_mib": 2, "bar1_used_mib_after": 0}
        | {"recovery_action": None, "other_holders": [SEEN]}
    ],
    **{"rungs": [RUNG], "blind_spots": [SPOT], "details": ["d"], "next_step": "n"},
}
OBSERVED = {"schema": 1, "holders": [SEEN], "gpus": [SEEN_GPU], "blind_spots": [SPOT]}
STATUS = {
    **OBSERVED,
    "first_pid_namespace": True,
    "daemon": {
        **{"version": "1", "pid": 2, "since": "now", "first_pid_namespace": True, "config": "", "config_error": ""},
        **dict.fromkeys(("connections", "workers", "queued", "refused", "driver_hangs"), 0),
    },
    "driver": {"present": True, "version": "570", "nvml": "ok", "detail": "", "wedged": None},
    "releases": [{key: GOOD[key] for key in ("release_id", "vmid", "trigger", "verdict", "reason", "started", "duration_ms")}],
    "stops": [{"vmid": 129, "since_s": 2.5, "message": "m", "next_step": "n", "signalled": False}],
    "refused": [{"vmid": 129, "since_s": 2.5, "release_id": "f00d", "message": "m"}],
}
MAPPED = {"vmid": 129, "ns_pid": 2, "matches": [{"pid": 7, "ns_pids": [2], "start_time": 5, "comm": "c", "cgroup": "/"}]}
NOWHERE = object()


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """(what was changed, a copy with that): each place gone, null, and of another type."""
    places = [*_places(value)]
    for place in places:
        for other in (NOWHERE, None, 5, "text", [], {}, [None], [{}], 1.5):
            whole = copy.deepcopy(value)
            inner = whole
            for step in place[:-1]:
                inner = inner[step]
            if other is NOWHERE:
                del inner[place[-1]]
            else:
                inner[place[-1]] = other
            yield f"{place} {'gone' if other is NOWHERE else other!r}", whole


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, key)
        yield from _places(value[key], (*before, key))


class Answering(Gone):
    """A daemon that gives these replies, whatever is asked."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies = replies

    def call_more(self, *_: Any, **__: Any) -> Iterator[dict[str, object]]:
        yield from self.replies

    def call(self, *_: Any, **__: Any) -> dict[str, object]:
        return self.replies[0]


def renderer() -> Renderer:
    return Renderer(io.StringIO(), io.StringIO(), verbose=True)


def test_a_report_is_either_understood_to_the_last_word_or_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fits(GOOD, REPORT) and fits(GOOD | {"new": 1}, REPORT)
    taken = 0
    for what, report in changed(GOOD):
        monkeypatch.setattr(remote, "connect", lambda report=report: Answering({"report": report}))
        for ask in (remote.verify, lambda given, emit: remote.release(129, {}, "f00d", emit)):
            try:
                answer = ask({"vmid": 129}, lambda event: None)
            except remote.DaemonLost:
                continue
            taken += 1
            renderer().report(answer)
            assert common.status_of(answer) != 0, what
            common.print_json(answer)
    assert taken  # what nobody needs may be missing


@pytest.mark.parametrize("event", [
    {"event": "observed", "vmid": 129, **OBSERVED},
    {"event": "rung_begun", "vmid": 129, "rung": RUNG},
    {"event": "rung_done", "vmid": 129, "rung": RUNG},
    {"event": "waiting", "vmid": 129, "what": "w", "since_s": 20.0},
], ids=lambda event: str(event["event"]))
def test_progress_that_cannot_be_shown_ends_no_release(monkeypatch: pytest.MonkeyPatch, event: dict[str, Any]) -> None:
    for what, progress in changed(event):
        answer = Answering({"progress": progress}, {"report": GOOD})
        monkeypatch.setattr(remote, "connect", lambda answer=answer: answer)
        assert remote.release(129, {}, "f00d", renderer().event) == GOOD, what


def test_a_report_of_another_container_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "connect", lambda: Answering({"report": GOOD}))
    with pytest.raises(remote.DaemonLost):
        verify.remote.verify({"vmid": 130}, lambda event: None)


@pytest.mark.parametrize(("method", "good"), [("Observe", OBSERVED), ("Status", STATUS), ("Map", MAPPED)])
def test_an_answer_is_either_understood_to_the_last_word_or_not_taken(
    monkeypatch: pytest.MonkeyPatch, method: str, good: dict[str, Any]
) -> None:
    assert fits(good, ANSWERS[method])
    args = argparse.Namespace(no_daemon=False, config=None, vmid=129, pid=2, vmids=[129], json=False, quiet=False)
    args.verbose = args.watch = False
    for what, answer in changed(good):
        monkeypatch.setattr(remote, "connect", lambda answer=answer: Answering(answer))
        try:
            remote.ask(method, {})
        except remote.DaemonLost:
            continue
        verb = {"Observe": ps, "Status": status, "Map": map}[method]
        try:
            verb.run(args)
        except common.PgrError as exc:
            assert "no such process" in exc.message, what


@pytest.mark.parametrize(("verdict", "reason", "expected"), [
    ("released", "released", 0), ("released", "nothing-held", 0), ("released", "memory-not-verified", 0),
    ("released", "freed-by-quantum", 0), ("released", "holders-present", 4), ("released", "refused", 4),
    ("held", "released", 3), ("held", "held-by-quantum", 3), ("held", "unkillable", 5), ("held", "draining", 6),
    ("unknown", "no-idea", 4), ("unknown", "released", 4), ("unknown", "driver-silent", 4),
    (None, "released", 4), (None, "holders-survive", 4), (None, "busy", 75), (None, "quantum", 1), ("freed", "quantum", 1),
])
def test_the_exit_status_is_0_only_where_verdict_and_reason_agree(verdict: str | None, reason: str, expected: int) -> None:
    result = {"vmid": 129, "verdict": verdict, "reason": reason}
    assert common.status_of(result) == expected
    assert common.status_of({"verdict": "released", "releases": [result]}) == expected
