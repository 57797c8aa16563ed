"""`pve-gpu-release explain`: the story of a release from journal fields alone, complete or cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd import audit
from hostd.cli.explain import Source, find
from hostd.errors import UsageError
from hostd.model import Fate, HolderReport
from hostd.story import rebuild, tell
from hostd.system.journalread import Record
from tests.unit import trail
from tests.unit.journald import AVAILABLE, PrivateJournald
from tests.unit.test_log import MAIN

T0 = 1_796_069_701_000_000


def records(*entries: audit.Entry) -> list[Record]:
    made = []
    for number, entry in enumerate(entries):
        fields: dict[str, tuple[str, ...]] = {}
        for name, value in entry:
            fields[name] = (*fields.get(name, ()), value)
        made.append(Record({**fields, "_UID": ("0",)}, T0 + number * 1000, 0))
    return made


def told(*, stop_after: str = "") -> list[Record]:
    entries: list[audit.Entry] = []
    trail.tell(
        audit.Trail(entries.append, caller_uid=0, caller_pid=12),
        trail.report(),
        trail.holder(),
        stop_after=stop_after,
    )
    return records(*entries)


def test_the_story_has_everything_that_was_decided() -> None:
    story = rebuild(told())
    assert story is not None
    assert (story.release_id, story.vmid, story.trigger, story.caller_uid) == (trail.RELEASE_ID, 129, "cli", 0)
    (holder,) = story.holders
    assert (holder.pid, holder.ns_pids, holder.evidence, holder.gpus) == (4711, [35, 7], ["fd", "nvml"], [50])
    assert (holder.memory_mib, holder.unit, holder.inherited_from, holder.fate) == (
        42000,
        "vllm.service",
        4700,
        "exited",
    )
    assert [(r.step, r.targets, r.sent, r.gone, r.waited_ms, r.outcome) for r in story.rungs] == [
        ("term", [4711], 1, 0, 10_000, "none-gone"),
        ("kill", [4711], 1, 1, 120, "all-gone"),
    ]
    (gpu,) = story.gpus
    assert (gpu.minor, gpu.used_mib_before, gpu.used_mib_after, gpu.ghost_mib) == (50, 42100, 0, 0)
    assert (story.verdict, story.reason, story.exit_status, story.duration_ms) == ("released", "released", 0, 10_130)
    assert [other.comm for other in story.others] == ["Xorg"]
    assert story.blind_spots == ["procfs: /proc/5/maps: timed out"]
    assert story.gaps == []


def test_the_text_tells_it_in_order() -> None:
    story = rebuild(told())
    assert story is not None
    text = tell(story, "2026-11-30 21:15:01")
    where = [
        text.index(part)
        for part in (
            f"Release {trail.RELEASE_ID} of container 129",
            "asked for by cli, uid 0, pid 12; began 2026-11-30 21:15:01, took 10.130 s",
            "verdict: released (released, exit status 0)",
            "pid 4711 (VLLM::EngineCor), inside the container 35 > 7, user root",
            "held nvidia50 with 42000 MiB; seen by an open descriptor and the driver's list",
            "inherited from pid 4700, which is gone",
            "run by vllm.service",
            "in the end: exited",
            "pid 900 (Xorg) of the host is on nvidia50 too; left alone",
            "term for 1 process: 4711 (VLLM::EngineCor)",
            "term: 1 sent, 0 of 1 gone after 10000 ms",
            "kill: 1 sent, 1 of 1 gone after 120 ms; memory falling",
            "nvidia50 (NVIDIA H200, GPU-aaaa, 0000:3b:00.0): 42100 MiB used before, 0 MiB after",
            "/proc/5/maps: timed out",
        )
    ]
    assert where == sorted(where)


def test_a_release_that_was_cut_off_says_what_is_not_known() -> None:
    story = rebuild(told(stop_after="rung-begun"))
    assert story is not None
    assert len(story.rungs) == 1
    assert not story.rungs[0].done
    assert any("the outcome of term" in gap for gap in story.gaps)
    assert any("its end is not in the journal" in gap for gap in story.gaps)
    assert "verdict: none in the journal" in tell(story, "x")


def test_a_story_without_its_beginning_is_told_as_far_as_it_is_known() -> None:
    story = rebuild(told()[5:])
    assert story is not None
    assert any("beginning is not in the journal" in gap for gap in story.gaps)
    assert story.rungs[0].outcome == "none-gone"
    assert story.holders[0].fate == "exited"


def test_an_unkillable_holder_is_told_with_the_place_where_it_waits() -> None:
    ctx = audit.Context(129, trail.RELEASE_ID)
    stuck = HolderReport(trail.holder(), Fate.UNKILLABLE, trail.STUCK)
    story = rebuild(records(audit.fate(ctx, stuck)))
    assert story is not None
    assert "stuck: tid 78, state D, wchan percpu_rwsem_wait" in tell(story, "x")


def test_the_clock_of_the_release_counts_and_not_the_journal_s() -> None:
    ctx = audit.Context(129, trail.RELEASE_ID, began_s=0.0)
    first, second = records(audit.started(ctx, trail.report()), audit.record_missing(ctx, "full"))
    jumped = Record(second.fields, first.realtime_us - 3_600_000_000, 0)
    story = rebuild([first, jumped])
    assert story is not None
    assert 0 <= story.events[1].at_ms < 1000


def test_nothing_is_no_story() -> None:
    assert rebuild([]) is None


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(
                [
                    "MESSAGE_ID",
                    "MESSAGE",
                    "PVE_VMID",
                    "HOLDER_PID",
                    "RUNG",
                    "AT_MS",
                    "OUTCOME",
                    "VRAM_AFTER",
                    "GPU_MINOR",
                ]
            ),
            st.one_of(st.text(st.characters(), max_size=8), st.sampled_from([k.message_id for k in audit.KINDS])),
        ),
        max_size=8,
    )
)
def test_any_entries_make_a_story_that_is_safe_to_print(raw: list[dict[str, str]]) -> None:
    story = rebuild([Record({k: (v,) for k, v in fields.items()}, 0, 0) for fields in raw])
    if story is not None:
        assert all(line.isprintable() for line in tell(story, "x").split("\n"))


# --- with a real journal -------------------------------------------------------------------------------------------

FILL = """
from hostd import audit
from hostd.system.journal import Journal
from tests.unit import trail
j = Journal()
for release_id, vmid, stop in (
    ("aa111111-0000-4000-8000-000000000000", 129, ""),
    ("aa222222-0000-4000-8000-000000000000", 129, "rung-begun"),
    ("12345678-0000-4000-8000-000000000000", 130, ""),
):
    trail.tell(audit.Trail(j.send, caller_uid=0), trail.report(release_id, vmid), trail.holder(), stop_after=stop)
assert j.close(20)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateJournald]:
    with PrivateJournald() as made:
        made.python(FILL)
        made.run("journalctl", "--sync")
        yield made


def explain(node: PrivateJournald, *words: str, setup: str = "") -> subprocess.CompletedProcess[str]:
    return node.run(sys.executable, "-c", setup + MAIN, "explain", *words)


@pytest.mark.root
@pytest.mark.skipif(not AVAILABLE, reason="needs root, systemd-journald and unshare")
class TestRealJournal:
    @pytest.mark.parametrize(
        "setup", ["", "import sys; sys.modules['systemd'] = None\n"], ids=["library", "journalctl"]
    )
    @pytest.mark.parametrize(
        ("wanted", "release"),
        [
            ("aa111111-0000-4000-8000-000000000000", "aa111111"),
            ("aa1", "aa111111"),
            ("129", "aa222222"),
            ("130", "12345678"),
            ("last", "12345678"),
            ("12345678", "12345678"),
        ],
    )
    def test_a_release_is_found(self, node: PrivateJournald, setup: str, wanted: str, release: str) -> None:
        done = explain(node, wanted, setup=setup)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Release {release}-0000-4000-8000-000000000000 of container ")

    @pytest.mark.parametrize(
        ("wanted", "says"),
        [
            ("aa", "2 begin so"),
            ("bb", "cannot find release bb in the journal"),
            ("bb111111-0000-4000-8000-000000000000", "cannot find release bb111111"),
            ("999", "cannot find a release of container 999 in the journal: none is there yet"),
            ("x\x1b", "cannot take 'x\\x1b' for a release id"),
            ("", "cannot take ''"),
        ],
    )
    def test_what_is_not_there_is_said(self, node: PrivateJournald, wanted: str, says: str) -> None:
        done = explain(node, wanted)
        assert done.returncode == 2
        assert says in done.stderr

    @pytest.mark.parametrize("form", ["export", "json", "journal"])
    def test_an_exported_file_tells_the_same_story(self, node: PrivateJournald, tmp_path: Path, form: str) -> None:
        path = tmp_path / "exported"
        if form == "journal":
            (name,) = node.run("find", "/run/log/journal", "-name", "system.journal").stdout.split()
            node.run("cp", name, str(path))
        else:
            path.write_bytes(node.run("journalctl", "-q", "-o", form, text=False).stdout)  # type: ignore[arg-type]
        for wanted in ("aa1", "129", "last"):
            assert explain(node, wanted, "--file", str(path)).stdout == explain(node, wanted).stdout

    def test_json_is_the_rebuilt_data(self, node: PrivateJournald) -> None:
        data = json.loads(explain(node, "aa1", "--json").stdout)
        assert (data["schema"], data["vmid"], data["verdict"]) == (1, 129, "released")
        assert data["holders"][0]["ns_pids"] == [35, 7]
        assert [rung["step"] for rung in data["rungs"]] == ["term", "kill"]


@pytest.mark.parametrize("wanted", ["\udcff" * 36, "g" * 36, "x", ""])
def test_what_is_no_id_is_refused_before_anything_is_read(wanted: str) -> None:
    """36 bytes that are no text are as long as an id; the journal cannot be asked for them."""
    with pytest.raises(UsageError, match="cannot take"):
        find(Source(None), wanted)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(UsageError, match="cannot find a release"):
        find(Source(str(tmp_path / "empty")), "last")
