"""The written-ahead records: what is kept, what is refused, what a successor learns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostd.ladder import Options
from hostd.model import Report, RungRecord, Step, Verdict
from hostd.store import Recorder, Store, is_record, parse_resume
from hostd.wire import options_dict, report_dict

ID = "0b9f1a52-93c4-4d0b-8f2e-0d5c7b1a2e50"


def record(release_id: str = ID, **changes: Any) -> dict[str, Any]:
    return {
        "release_id": release_id, "vmid": 129, "trigger": "cli", "dry_run": False, "started": "2026-01-01T00:00:00.000Z",
        "owner": "daemon", "pid": 1, "at_ticks": 100, "options": {}, "event": None, "was_held": True, "minors": [50],
        "baseline_mib": [[50, 3]], "sent": [["term", 11, 99], ["kill", 12, 98]],
        "rungs": [{"step": "term", "at_ms": 1, "targets": [11], "sent": 1, "gone": 0, "waited_ms": 5, "note": "",
                   "done": False}],
        "report": None,
    } | changes  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(str(tmp_path / "run"))
    found.write(record())
    return found


def number(n: int) -> str:
    return f"{n:08x}-0000-4000-8000-000000000000"


def report_of(release_id: str = ID) -> dict[str, Any]:
    return report_dict(Report(release_id, 129, "cli", Verdict.RELEASED, "released", "1 holder released"))


def test_what_was_written_is_read(store: Store) -> None:
    assert store.read(ID) == record()
    assert store.all() == store.open_ones() == [record()]
    assert oct(os.stat(store.path).st_mode & 0o777) == "0o700"


def test_a_successor_learns_what_was_signalled(store: Store) -> None:
    resume = parse_resume(record())
    assert resume is not None
    assert (resume.termed, resume.killed) == (frozenset({(11, 99)}), frozenset({(12, 98)}))
    assert resume.baseline_mib == ((50, 3),) and resume.was_held and resume.was_at == "term, begun"
    assert resume.rungs[0].note == "cut off"


WRONG: dict[str, dict[str, Any]] = {
    "a vmid that is a path": {"vmid": "../../etc"}, "vmid 0": {"vmid": 0}, "a negative vmid": {"vmid": -1},
    "a huge vmid": {"vmid": 10**30}, "a vmid that is true": {"vmid": True}, "no vmid": {"vmid": None},
    "signals that are no list": {"sent": 5}, "an infinite pid": {"sent": [["term", float("inf"), 1]]},
    "a pid in words": {"sent": [["term", "eleven", 1]]}, "half a signal": {"sent": [["term", 1]]},
    "rungs that are text": {"rungs": "term"}, "an unknown step": {"rungs": [{"step": "dance"}]},
    "rungs that are numbers": {"rungs": [1]}, "an owner that is a list": {"owner": ["cli"]},
    "options that are a list": {"options": []}, "an event that is text": {"event": "post-stop"},
    "a report that is text": {"report": "released"}, "a report without a reason": {"report": {"verdict": "released"}},
    "no start": {"started": None}, "minors that are text": {"minors": ["a"]}, "baseline of one": {"baseline_mib": [[1]]},
    "a pid that is text": {"pid": "1"}, "ticks that are text": {"at_ticks": "1"},
}  # fmt: skip


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_hostile_record_is_no_record_and_is_removed(store: Store, changes: dict[str, Any]) -> None:
    assert not is_record(record(**changes), ID)
    Path(store.path, f"{ID}.json").write_text(json.dumps(record(**changes)))
    assert store.read(ID) is None and store.all() == []
    assert store.sweep() == 1
    assert os.listdir(store.path) == []


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(5 << 20)


RUBBISH: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_text(json.dumps(record())[:40]),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a number": lambda path: path.write_text("9" * 10_000),
    "too long": huge,
    "a pipe that nobody writes to": os.mkfifo,
    "a directory": os.mkdir,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a dangling link": lambda path: path.symlink_to("/nowhere"),
}


@pytest.mark.parametrize("make", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_is_ignored_and_removed(store: Store, make: Callable[[Path], object]) -> None:
    make(Path(store.path, f"{number(1)}.json"))
    assert store.read(number(1)) is None
    assert store.all() == [record()]
    assert store.sweep() == 1
    assert os.listdir(store.path) == [f"{ID}.json"]


def test_files_of_others_and_of_dead_writers_are_removed_those_of_live_ones_stay(store: Store) -> None:
    for name in ("notes.txt", ".hidden", f"{number(2)}.json.4194304.new", f"{number(3)}.json.x.new", "A.json"):
        Path(store.path, name).write_text("{}")
    live = f"{number(4)}.json.{os.getpid()}.new"
    Path(store.path, live).write_text("{")
    assert store.sweep() == 5
    assert sorted(os.listdir(store.path)) == sorted([f"{ID}.json", live])


@pytest.mark.parametrize("release_id", ["", "../x", "a/b", "X", "0" * 65, "a\0b"])
def test_an_id_is_never_a_path(store: Store, release_id: str) -> None:
    assert store.read(release_id) is None
    with pytest.raises(ValueError, match="not a release id"):
        store.write(record(release_id))


def fill(store: Store, count: int, **changes: Any) -> None:
    for n in range(count):
        store.write(record(number(n), **changes))
        os.utime(Path(store.path, f"{number(n)}.json"), ns=(n, n))


def test_the_oldest_finished_ones_go_open_ones_stay(store: Store) -> None:
    fill(store, 100, report=report_of())
    store.prune(keep=10)
    assert [r["report"] is None for r in store.all()].count(True) == 1
    assert set(os.listdir(store.path)) == {f"{ID}.json", *(f"{number(n)}.json" for n in range(91, 100))}


def test_even_open_ones_are_bounded(store: Store) -> None:
    fill(store, 100)
    store.prune(keep=10, most=50)
    assert len(os.listdir(store.path)) == 50
    assert store.read(number(99)) is not None and store.read(number(0)) is None


def test_pruning_opens_none_of_those_that_stay(store: Store) -> None:
    fill(store, 30, report=report_of())
    for path in Path(store.path).iterdir():
        path.chmod(0)
        os.utime(path, ns=(5, 5))
        path.write_text("not read")
    store.prune(keep=31)
    assert len(os.listdir(store.path)) == 31


# --- the recorder ---


def climb(recorder: Recorder, release_id: str = ID) -> Report:
    report = Report(release_id, 129, "cli")
    report.started = "2026-01-01T00:00:00.000Z"
    recorder.started(report)
    return report



def test_a_second_death_forgets_nothing(store: Store) -> None:
    """Daemon killed after SIGTERM, the command line that went on killed before its own first rung."""
    recorder = Recorder(store, "cli", options_dict(Options()))
    climb(recorder)
    kept = store.read(ID)
    assert kept is not None and kept["owner"] == "cli"
    for key in ("sent", "rungs", "baseline_mib", "minors", "was_held", "at_ticks"):
        assert kept[key] == record()[key], key


def test_a_handed_over_release_stays_open_an_interrupted_one_does_not(tmp_path: Path) -> None:
    for handed_over in (True, False):
        store = Store(str(tmp_path / str(handed_over)))
        recorder = Recorder(store, "daemon", {}, handed_over=lambda handed_over=handed_over: handed_over)  # type: ignore[misc]
        report = climb(recorder)
        report.reason = "interrupted"
        recorder.finished(report)
        kept = store.read(ID)
        assert kept is not None and (kept["report"] is None) is handed_over is kept["handed_over"]


def test_a_record_that_cannot_be_written_says_so_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    recorder = Recorder(Store(str(tmp_path / "run")), "cli", {})
    report = climb(recorder)
    rung = RungRecord(Step.TERM, 0, [1])
    recorder.rung_begun(report, rung, ())
    recorder.rung_done(report, rung)
    report.reason = "released"
    recorder.finished(report)
    assert recorder.missing


