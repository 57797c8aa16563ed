"""What is left in /run for another process, when something else is in its place: never believed, never waited for."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostd import statefile
from hostd.ghosts import FirstSeen
from hostd.lifecycle.records import Records, SeenHolder, Snapshot, Started, Stopped, Watched, refused_starts, slow_stops
from hostd.lock import is_held, read_owner, try_lock
from hostd.reset import Journal, recover
from hostd.store import Store
from hostd.system.nvml import read_wedged

from .makers import gpu

HUGE = 8 << 20


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A reader that waits is ended, and the test fails."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(path.parent, os.O_PATH)  # the path may be too long for an address
        sock.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def a_link(path: Path) -> None:
    """To what would be believed."""
    other = path.parent / "elsewhere"
    other.write_text(GOOD[0])
    path.symlink_to(other)


def nothing(path: Path) -> None:
    path.touch()


def cut_off(path: Path) -> None:
    path.write_text(GOOD[0][: len(GOOD[0]) // 2])


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" * 100)


def too_deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def huge(path: Path) -> None:
    path.write_text(GOOD[0])
    os.truncate(path, HUGE)


def foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path.write_text(GOOD[0])
    os.chown(path, 65534, 65534)


def unreadable(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.write_text(GOOD[0])
    path.chmod(0)


def of_wrong_types(path: Path) -> None:
    values: Any = json.loads(GOOD[0])
    path.write_text(
        json.dumps({key: {"odd": [None]} if key not in ("release_id", "vmid") else values[key] for key in values})
    )


GOOD = ["{}"]
"""What the reader of the test would believe."""
DAMAGED = (
    *(a_directory, a_full_directory, a_fifo, a_socket, a_link, nothing, cut_off, no_text, too_deep, huge, foreign),
    *(unreadable, of_wrong_types),
)
Damage = Callable[[Path], None]
damaged = pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)

HOLDER = SeenHolder(11, 5, "python3", evidence=["fd"], gpus=[50], ns_pids=[7])
RECORDS = (
    ("snapshots", Snapshot(129, 1.0, "ab" * 16, [3, 4], [HOLDER], [50], [[50, 0]], [[50, 10]])),
    ("starts", Started(129, 1.0, "id", "event", "pre-start", False, False, [50], [[50, 0]], ["refused"])),
    ("stops", Stopped(129, 1.0, "unit-1", "id", "released")),
    ("watch", Watched(129, 1.0, 2, "it hangs", "wait", True)),
)


def put(path: Path, damage: Damage, good: object) -> None:
    GOOD[0] = json.dumps(good)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    damage(path)


@damaged
@pytest.mark.parametrize(("folder", "record"), RECORDS, ids=[folder for folder, _ in RECORDS])
def test_a_record_of_an_event(tmp_path: Path, damage: Damage, folder: str, record: Any) -> None:
    records = Records(str(tmp_path))
    assert records.write(record) and records.read(type(record), 129) == record
    path = tmp_path / folder / "129.json"
    put(path, damage, json.loads(path.read_text()))
    assert records.read(type(record), 129) is None
    assert (slow_stops(str(tmp_path)), refused_starts(str(tmp_path))) == ([], [])
    if damage is a_full_directory:  # not ours to remove; said, and nothing more
        assert not records.write(record) and records.problem
    else:
        assert records.write(record) and records.read(type(record), 129) == record
    assert not [name for name in os.listdir(tmp_path / folder) if name.endswith(".new")]


def test_the_record_of_another_container_is_not_this_one_s(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    records.write(Stopped(130, 1.0, "unit-1"))
    os.rename(tmp_path / "stops/130.json", tmp_path / "stops/129.json")
    assert records.read(Stopped, 129) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("at_s", "yesterday"),
        ("at_s", float("nan")),
        ("at_s", 1 << 80),
        ("minors", [1, "2"]),
        ("minors", {"1": 2}),
        ("baseline_mib", [[1]]),
        ("baseline_mib", [[1, None]]),
        ("holders", [3]),
        ("holders", [{"pid": 1}]),
        ("holders", [{"pid": 1, "start_time": 2, "comm": "x", "evidence": ["hearsay"]}]),
        ("init", None),
        ("invocation", 7),
        ("vmid", True),
    ],
)
def test_one_wrong_type_is_no_record(tmp_path: Path, key: str, value: object) -> None:
    records = Records(str(tmp_path))
    assert records.write(RECORDS[0][1])
    path = tmp_path / "snapshots/129.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert records.read(Snapshot, 129) is None


def test_a_record_of_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    records.write(Stopped(129, 1.0, "unit-1"))
    path = tmp_path / "stops/129.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": ["odd"]}))
    assert records.read(Stopped, 129) == Stopped(129, 1.0, "unit-1")


RELEASE = {
    **{"release_id": "ab-12", "vmid": 129, "trigger": "cli", "dry_run": False, "started": "2026-01-01T00:00:00Z"},
    **{"owner": "cli", "pid": 1, "at_ticks": 1, "options": {}, "event": None, "was_held": True, "minors": [50]},
    **{"baseline_mib": [], "sent": [], "rungs": [], "handed_over": False, "report": None},
}


@damaged
def test_a_release_that_was_written_ahead(tmp_path: Path, damage: Damage) -> None:
    store = Store(str(tmp_path))
    store.write(RELEASE)
    assert store.read("ab-12") == RELEASE
    put(tmp_path / "releases/ab-12.json", damage, RELEASE)
    assert store.read("ab-12") is None and store.all() == [] and store.open_ones() == []
    store.prune(keep=0)
    store.sweep()


@damaged
def test_the_record_of_a_reset(tmp_path: Path, damage: Damage) -> None:
    reset = {
        "release_id": "ab-12",
        "vmid": 129,
        "wanted": [],
        "services": [],
        "at": 1.0,
        "persistence": {},
        "stopped": [],
    }
    journal = Journal(str(tmp_path))
    journal.make()
    journal.write(reset)
    assert journal.read("ab-12") == reset
    put(tmp_path / "resets/ab-12.json", damage, reset)
    assert journal.read("ab-12") is None
    assert recover(str(tmp_path)) == []
    assert journal.names() == (["ab-12"] if damage is a_full_directory else [])


def test_a_name_that_no_reset_has_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "resets").mkdir()
    (tmp_path / "resets/XYZ.json").write_text("{}")
    assert recover(str(tmp_path)) == [] and Journal(str(tmp_path)).names() == []


@damaged
def test_since_when_there_is_ghost_memory(tmp_path: Path, damage: Damage) -> None:
    good = {"GPU-50": "2020-01-01T00:00:00Z"}
    put(tmp_path / "ghosts.json", damage, good)
    state = gpu(50, 900)
    if damage is of_wrong_types:
        return  # whatever it says is text
    found = FirstSeen(str(tmp_path)).update([state])
    assert list(found) == [state.info.uuid] and not found[state.info.uuid].startswith("2020")


@damaged
def test_the_lock_of_a_container(tmp_path: Path, damage: Damage) -> None:
    """Where there is no such file the directory is locked."""
    put(tmp_path / "locks/129.lock", damage, {"pid": 12})
    assert not is_held(129, str(tmp_path))
    read_owner(129, str(tmp_path))
    lock = try_lock(129, str(tmp_path))
    assert lock is not None
    with lock:
        assert try_lock(129, str(tmp_path)) is None


@damaged
def test_the_lock_of_the_driver(tmp_path: Path, damage: Damage) -> None:
    put(tmp_path / "nvml.lock", damage, {"pid": os.getpid(), "since": 1, "boot": 1, "call": "x"})
    assert read_wedged(str(tmp_path / "nvml.lock"), 0.0) is None


@pytest.mark.parametrize("damage", [a_fifo, a_link, a_full_directory, nothing], ids=lambda damage: damage.__name__)
def test_what_is_in_the_place_of_the_temporary_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, damage: Damage
) -> None:
    path, temporary = tmp_path / "x.json", tmp_path / f"x.json.{os.getpid()}.new"
    damage(temporary)
    if damage is a_full_directory:
        with pytest.raises(OSError):
            statefile.write_json(str(path), {"a": 1})
        return
    statefile.write_json(str(path), {"a": 1})
    assert statefile.read_json(str(path)) == {"a": 1} and not temporary.exists()
    assert path.stat().st_mode & 0o777 == 0o600
