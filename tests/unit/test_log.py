"""`pve-gpu-release log`: times as journalctl takes them, only entries of root, one line each, a clean end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.cli import log
from hostd.cli.timespec import parse_time
from hostd.errors import UsageError
from hostd.system import journalread
from hostd.system.journalread import JournalUnreadableError, Record
from tests.unit.journald import AVAILABLE, PrivateJournald

# --- times ---------------------------------------------------------------------------------------------------------

NOW = 1_796_069_830.25
US = 1_000_000


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def local(*parts: int) -> int:
    return int(time.mktime((*(*parts, 0, 0, 0, 0, 0)[:6], 0, 0, -1))) * US  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", int(NOW * US)),
        ("@1700000000", 1_700_000_000 * US),
        ("@1700000000.5", 1_700_000_000 * US + 500_000),
        ("-1h", int((NOW - 3600) * US)),
        ("+90", int((NOW + 90) * US)),
        ("2 hours ago", int((NOW - 7200) * US)),
        ("1h30min ago", int((NOW - 5400) * US)),
        ("-1.5h", int((NOW - 5400) * US)),
        ("1 week 2 days ago", int((NOW - 9 * 86400) * US)),
        ("-5m", int((NOW - 300) * US)),
        ("-1M", int((NOW - 2_629_800) * US)),
        ("2026-11-30 20:15:01 UTC", 1_796_069_701 * US),
        ("2026-11-30T20:15:01Z", 1_796_069_701 * US),
        (" now ", int(NOW * US)),
    ],
)
def test_a_time_as_journalctl_takes_it(text: str, expected: int) -> None:
    assert parse_time(text, NOW) == expected


def test_local_times_and_days() -> None:
    today = time.localtime(NOW)[:3]
    assert parse_time("2026-07-01", NOW) == local(2026, 7, 1)
    assert parse_time("2026-07-01 06:05", NOW) == local(2026, 7, 1, 6, 5)
    assert parse_time("2026-07-01 06:05:04.25", NOW) == local(2026, 7, 1, 6, 5, 4) + 250_000
    assert parse_time("06:05", NOW) == local(*today, 6, 5)
    assert parse_time("today", NOW) == local(*today)
    assert parse_time("yesterday", NOW) == local(today[0], today[1], today[2] - 1)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-", "- h", "1 fortnight ago", "ago", "@", "@-1", "2026-13-01", "2026-02-31", "24:00", "10:60", "1h",
     "2026-1-1-1", "@" + "9" * 30, "-" + "9" * 12 + "y", "٣ hours ago", "12:3"],
)  # fmt: skip
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="cannot understand the time"):
        parse_time(text, NOW)


@given(st.text(st.characters(), max_size=30))
def test_any_text_is_a_time_or_a_usage_error(text: str) -> None:
    try:
        parse_time(text, NOW)
    except UsageError:
        pass


@pytest.mark.skipif(not os.path.exists("/usr/bin/systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("text", ["-1h30min", "2 days ago", "2026-07-01 06:05:04", "yesterday", "@1700000000", "-1w"])
def test_systemd_reads_the_same_time(text: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", "timestamp", "--", text], capture_output=True, text=True, env={"LC_ALL": "C"}, timeout=60
    )
    if done.returncode != 0:
        pytest.skip("this systemd-analyze takes no such time")
    (epoch,) = [line.split("@")[1] for line in done.stdout.splitlines() if "UNIX seconds" in line]
    os.environ["TZ"] = "UTC"
    time.tzset()
    assert 0 <= parse_time(text, float(epoch) if text.startswith("@") else None) / US - float(epoch) < 30


# --- lines ---------------------------------------------------------------------------------------------------------


def record(**fields: str) -> Record:
    base = {"PVE_GPU_RELEASE_EVENT": "x", "MESSAGE": "m", "PRIORITY": "6", "_UID": "0"}
    return Record({name: (value,) for name, value in {**base, **fields}.items()}, 1_700_000_000 * US, 0)


def test_a_line_has_local_time_message_and_release() -> None:
    made = record(MESSAGE="container 129: done", PVE_GPU_RELEASE_ID="1a2b3c4d-5555")
    assert log.short_line(made) == "2023-11-14 23:13:20 container 129: done [1a2b3c4d]"
    assert "\x1b[31m" in log.short_line(record(PRIORITY="3"), colour=True)


def test_a_line_is_safe_whatever_is_in_the_journal() -> None:
    made = record(MESSAGE="a\n\x1b[2J\u202e\udcff", PVE_GPU_RELEASE_ID="\n\x1b")
    assert log.short_line(made).isprintable()
    json.dumps(log.as_json(made)).encode("ascii")


# --- exported files ------------------------------------------------------------------------------------------------


def export(*entries: dict[str, bytes]) -> bytes:
    out = b""
    for fields in entries:
        for name, value in fields.items():
            if b"\n" in value:
                out += name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
            else:
                out += name.encode() + b"=" + value + b"\n"
        out += b"\n"
    return out


def test_an_export_with_binary_and_repeated_fields_is_read() -> None:
    data = export({"__REALTIME_TIMESTAMP": b"5", "MESSAGE": b"a\n\nMESSAGE=b", "_UID": b"0"}) + b"A=1\nA=2\n\n"
    first, second = journalread.parse_export(io.BytesIO(data))
    assert (first.realtime_us, first.get("MESSAGE"), first.all("_UID")) == (5, "a\n\nMESSAGE=b", ("0",))
    assert second.all("A") == ("1", "2")


@pytest.mark.parametrize(
    "data",
    [
        b"no export\n",
        b"=x\n",
        b"A\n\x05\x00\x00\x00\x00\x00\x00\x00ab\n",
        b"A\n\xff",
        b"A=cut off",
        b"A\n" + b"\xff" * 8,
    ],
)
def test_what_is_no_export_is_said(data: bytes) -> None:
    with pytest.raises(JournalUnreadableError):
        list(journalread.parse_export(io.BytesIO(data)))


@given(st.binary(max_size=300), st.booleans())
def test_any_file_is_entries_or_an_error(data: bytes, as_json: bool) -> None:
    parse = journalread.parse_json if as_json else journalread.parse_export
    try:
        list(parse(io.BytesIO(data)))
    except JournalUnreadableError:
        pass


def test_json_of_every_sort_is_read(tmp_path: Path) -> None:
    one = {"A": ["1", "2"], "B": [104, 105, 255], "C": None, "_UID": "0", "__REALTIME_TIMESTAMP": "7"}
    for text in (
        json.dumps(one) + "\n" + json.dumps(one),
        json.dumps(one, indent=2) + "\n" + json.dumps(one, indent=2),
        "\x1e" + json.dumps(one) + "\n\x1e" + json.dumps(one) + "\n",
    ):
        (tmp_path / "x").write_text(text)
        found = list(journalread.read_file(str(tmp_path / "x"), {}))
        assert [(r.realtime_us, r.all("A"), r.get("B"), r.all("C")) for r in found] == [
            (7, ("1", "2"), "hi\udcff", ())
        ] * 2


def test_only_entries_of_root_are_believed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(export({"A": b"1", "_UID": b"1000"}, {"A": b"2"}, {"A": b"3", "_UID": b"0"}))
    assert [r.get("A") for r in journalread.read_file(str(tmp_path / "x"), {})] == ["3"]


# --- a real journal ------------------------------------------------------------------------------------------------

FILL = """
import os
import hostd.syscalls, systemd.journal  # another user may not be able to read them below
from hostd import audit
from hostd.system.journal import Journal
from tests.unit import trail
def release(release_id, vmid):
    j = Journal()
    trail.tell(audit.Trail(j.send, caller_uid=0), trail.report(release_id, vmid), trail.holder())
    assert j.close(20)
release("11111111-0000-4000-8000-000000000000", 129)
release("22222222-0000-4000-8000-000000000000", 130)
if os.fork() == 0:
    os.setuid(12345)
    release("66666666-0000-4000-8000-000000000000", 129)
    os._exit(0)
assert os.wait()[1] == 0
"""
MAIN = "import sys; sys.argv[0] = 'pve-gpu-release'; from hostd.cli.main import entry; entry()"
WITHOUT_LIBRARY = "import sys; sys.modules['systemd'] = None\n"


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateJournald]:
    with PrivateJournald() as made:
        made.python(FILL)
        made.run("journalctl", "--sync")
        yield made


def cli(node: PrivateJournald, *words: str, setup: str = "") -> subprocess.CompletedProcess[str]:
    return node.run(sys.executable, "-c", setup + MAIN, *words)


@pytest.mark.root
@pytest.mark.skipif(not AVAILABLE, reason="needs root, systemd-journald and unshare")
class TestRealJournal:
    @pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "journalctl"])
    def test_the_log_has_every_entry_that_root_wrote(self, node: PrivateJournald, setup: str) -> None:
        done = cli(node, "log", setup=setup)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert len(lines) == 22
        assert "container 129: release 11111111 begins, asked for by cli (uid 0) [11111111]" in lines[0]
        assert "66666666" not in done.stdout
        assert len(node.entries("PVE_GPU_RELEASE_ID=66666666-0000-4000-8000-000000000000")) == 11

    @pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "journalctl"])
    @pytest.mark.parametrize(
        ("words", "count"),
        [
            (["130"], 11),
            (["999"], 0),
            (["-n", "3"], 3),
            (["-n", "0"], 0),
            (["-n", "100"], 22),
            (["--release", "1111"], 11),
            (["--release", "11111111-0000-4000-8000-000000000000"], 11),
            (["--since", "-1h"], 22),
            (["--since", "tomorrow"], 0),
            (["--until", "yesterday"], 0),
            (["--since", "-1h", "--until", "now", "-n", "2"], 2),
        ],
    )
    def test_what_is_asked_for_is_shown(self, node: PrivateJournald, setup: str, words: list[str], count: int) -> None:
        done = cli(node, "log", *words, setup=setup)
        assert (done.returncode, len(done.stdout.splitlines())) == (0, count)
        assert done.stderr == ("" if count else "-- no entries --\n")

    def test_the_last_entries_stand_in_their_order(self, node: PrivateJournald) -> None:
        every = cli(node, "log").stdout.splitlines()
        assert cli(node, "log", "-n", "5").stdout.splitlines() == every[-5:]

    @pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "journalctl"])
    def test_json_has_the_fields_as_journalctl_has_them(self, node: PrivateJournald, setup: str) -> None:
        shown = [json.loads(line) for line in cli(node, "log", "129", "-o", "json", setup=setup).stdout.splitlines()]
        real = node.entries("PVE_VMID=129", "_UID=0")
        assert [entry["HOLDER_NSPID"] for entry in shown if "HOLDER_NSPID" in entry] == [["35", "7"]]
        for ours, theirs in zip(shown, real, strict=True):
            assert {k: v for k, v in theirs.items() if k in ours} == {k: v for k, v in ours.items() if k in theirs}
            assert set(theirs) - set(ours) <= {"__SEQNUM", "__SEQNUM_ID"}

    @pytest.mark.parametrize("form", ["export", "json", "json-pretty"])
    def test_an_exported_file_gives_the_same_log(self, node: PrivateJournald, tmp_path: Path, form: str) -> None:
        path = tmp_path / "exported"
        path.write_bytes(node.run("journalctl", "-q", "-o", form, text=False).stdout)  # type: ignore[arg-type]
        assert cli(node, "log", "--file", str(path)).stdout == cli(node, "log").stdout
        assert (
            cli(node, "log", "--file", str(path), "130", "-n", "2").stdout == cli(node, "log", "130", "-n", "2").stdout
        )

    @pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "journalctl"])
    def test_a_journal_file_gives_the_same_log(self, node: PrivateJournald, tmp_path: Path, setup: str) -> None:
        (name,) = node.run("find", "/run/log/journal", "-name", "system.journal").stdout.split()
        node.run("cp", name, str(tmp_path / "copy.journal"))
        assert cli(node, "log", "--file", str(tmp_path / "copy.journal"), setup=setup).stdout == cli(node, "log").stdout

    @pytest.mark.parametrize(
        ("words", "status", "says"),
        [
            (["--since", "soon"], 2, "cannot understand the time"),
            (["x"], 2, "not a container id"),
            (["-n", "x"], 2, "cannot take 'x' for a number of lines"),
            (["-f", "--file", "x"], 2, "cannot follow a file"),
            (["--file", "/does/not/exist"], 4, "cannot read /does/not/exist: No such file"),
            (["--file", "/etc/passwd"], 4, "not a journal export"),
        ],
    )
    def test_what_makes_no_sense_is_said(self, node: PrivateJournald, words: list[str], status: int, says: str) -> None:
        done = cli(node, "log", *words)
        assert done.returncode == status
        assert says in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "journalctl"])
    @pytest.mark.parametrize("end", ["interrupt", "closed pipe"])
    def test_following_shows_new_entries_and_ends_cleanly(self, node: PrivateJournald, setup: str, end: str) -> None:
        program = "import os; print(os.getpid(), flush=True)\n" + setup + MAIN
        words = node.command(sys.executable, "-u", "-c", program, "log", "131", "-f", "-n", "1")
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None and follower.stderr is not None
            inside = follower.stdout.readline().strip()
            node.python(FILL.replace("22222222", f"{os.getpid():08d}").replace("130", "131"))
            first = follower.stdout.readline()
            assert "container 131:" in first
            if end == "interrupt":
                node.run("kill", "-INT", inside)
                follower.communicate(timeout=60)
                assert follower.returncode == 130
            else:
                follower.stdout.close()
                assert follower.stderr.read() == ""
                assert follower.wait(30) == 0
        node.wait_for_nobody()
