"""Every way to a verdict, in one table of sentences; then the arithmetic of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.case import Case, Handover, Selection
from hostd.figures import excess_mib, handovers
from hostd.judge import incomplete, judge
from hostd.model import BlindSpot, DeadClient, GpuState, Heir, ProcessRef, Verdict
from hostd.verdicts import EXIT_PRECEDENCE, REASONS
from hostd.words import holders_text, others_text

from .makers import blocked, gpu, holder, look, process, ref, silent, stuck, unit

HELD = look(holder(11, 50), gpus=[gpu(50, 1000, {11: 1000})])
FREE = look(gpus=[gpu(50, 0)])
KILLED: dict[str, Any] = {
    "minors": frozenset({50}),
    "acted": True,
    "known": frozenset({ref(11)}),
    "openers": frozenset({11}),
}
IDLE: dict[str, Any] = {"minors": frozenset()}
OWN_GPU: dict[str, Any] = {"minors": frozenset(), "own_minors": frozenset({50})}


def case(before: Any, after: Any, **more: Any) -> Case:
    return Case(before=before, after=after, **more)


class Row(NamedTuple):
    sentence: str
    case: Case
    reason: str


NOBODY = DeadClient(11, 500, Heir.NOBODY)
OLD = DeadClient(12, 500, Heir.NOBODY)
ROWS = [
    Row("killed, memory back", case(HELD, FREE, **KILLED), "released"),
    Row("nothing was held", case(FREE, FREE, **IDLE), "nothing-held"),
    Row("not running", case(FREE, look(gpus=[gpu(50, 0)], running=False, processes=0), **IDLE), "not-running"),
    Row("no driver on the node", case(FREE, look(driver_present=False), **IDLE), "no-driver"),
    Row("no driver any more after a kill", case(HELD, look(driver_present=False), **KILLED), "released"),
    Row("a holder, dry run", case(HELD, HELD, minors=frozenset({50}), dry_run=True), "holders-present"),
    Row("a holder, never signalled", case(HELD, HELD, minors=frozenset({50})), "holders-present"),
    Row(
        "a holder, no time was left to signal it",
        case(HELD, HELD, minors=frozenset({50}), time_is_up=True),
        "holders-survive",
    ),
    Row("a holder survives", case(HELD, HELD, **KILLED), "holders-survive"),
    Row("a holder that no rung has met", case(HELD, look(holder(12, 50)), **KILLED), "holder-appeared"),
    Row(
        "a holder that started after the first signal",
        case(HELD, look(holder(12, 50)), **KILLED, respawned={ref(12)}),
        "respawned",
    ),
    Row(
        "came back after the last round, not met by the last look",
        case(HELD, FREE, **KILLED, restless=True, returned=(holder(12, 50, supervisor=unit()),)),
        "respawned",
    ),
    Row("cannot die", case(HELD, HELD, **KILLED, stuck=(stuck(11),)), "unkillable"),
    Row(
        "cannot die and hangs in exit",
        case(HELD, FREE, **KILLED, stuck=(stuck(11),), undead=(holder(11, 50),)),
        "unkillable",
    ),
    Row(
        "cannot die, beside one that survives",
        case(HELD, look(holder(11, 50), holder(12, 50)), **KILLED, stuck=(stuck(11),)),
        "unkillable",
    ),
    Row("an Xid stopped the climb", case(HELD, HELD, **KILLED, xid="Xid 119"), "new-xid"),
    Row(
        "the container runs anew and holds it",
        case(HELD, look(holder(12, 50)), **KILLED, new_run_ticks=1012),
        "container-restarted",
    ),
    Row(
        "the container runs anew, the old one's holder lives too",
        case(HELD, look(holder(11, 50), holder(12, 50)), **KILLED, new_run_ticks=1012),
        "holders-survive",
    ),
    # --- blindness ---
    Row(
        "mappings of somebody unreadable", case(FREE, look(gpus=[gpu(50, 0)], blind=[blocked()]), **IDLE), "blind-spots"
    ),
    Row(
        "a command line unreadable",
        case(FREE, look(gpus=[gpu(50, 0)], blind=[BlindSpot("procfs", "x", "y", "detail-unreadable")]), **IDLE),
        "nothing-held",
    ),
    Row("the driver silent, holders killed", case(HELD, look(blind=[silent()]), **KILLED), "driver-silent"),
    Row("the driver silent, nothing held", case(FREE, look(blind=[silent()]), **IDLE), "driver-silent"),
    Row(
        "the driver silent, accepted",
        case(HELD, look(blind=[silent()]), **KILLED, verify_memory=False),
        "memory-not-verified",
    ),
    Row(
        "the driver silent and idle, accepted",
        case(FREE, look(blind=[silent()]), **IDLE, verify_memory=False),
        "memory-not-verified",
    ),
    Row("no NVML", case(HELD, look(blind=[silent("nvml-missing")]), **KILLED), "nvml-missing"),
    Row("versions differ", case(HELD, look(blind=[silent("driver-mismatch")]), **KILLED), "driver-mismatch"),
    Row("the module is not loaded", case(HELD, look(blind=[silent("driver-not-loaded")]), **KILLED), "driver-silent"),
    Row(
        "the driver silent with a holder alive",
        case(HELD, look(holder(11, 50), blind=[silent()]), **KILLED),
        "holders-survive",
    ),
    Row(
        "pids that cannot be, in a list",
        case(FREE, look(gpus=[gpu(50, 0)], blind=[silent("detail-unreadable")]), **IDLE),
        "nothing-held",
    ),
    Row(
        "listed by the driver alone",
        case(HELD, look(holder(11, 50, seen="nvml"), gpus=[gpu(50, 9, {11: 9})]), **KILLED),
        "driver-only-holder",
    ),
    Row(
        "on which of two GPUs nobody says, and one of them was asked for",
        case(FREE, look(replace(holder(11, 50, 51), placed=False)), **IDLE, selection=Selection(frozenset({50}))),
        "placement-unknown",
    ),
    Row(
        "the same without --gpu",
        case(FREE, look(replace(holder(11, 50, 51), placed=False)), **IDLE),
        "holders-present",
    ),
    Row(
        "ghost memory while the configuration cannot be read",
        case(FREE, look(gpus=[gpu(50, 500)], blind=[BlindSpot("pve", "x", "y", "detail-unreadable")]), **IDLE),
        "blind-spots",
    ),
    Row(
        "past exit, still listed",
        case(HELD, look(holder(11, 50, seen="nvml", dying=True), gpus=[gpu(50, 9, {11: 9})]), **KILLED),
        "draining",
    ),
    # --- memory ---
    Row("memory stays", case(HELD, look(gpus=[gpu(50, 500)]), **KILLED), "ghost-memory"),
    Row(
        "memory stays charged to the dead",
        case(HELD, look(gpus=[gpu(50, 500, dead_clients=(NOBODY,))]), **KILLED),
        "ghost-memory",
    ),
    Row(
        "memory of a dead one whose heir nobody finds, from before, beside others",
        case(
            look(holder(11, 50), gpus=[gpu(50, 1507, {11: 1000}, foreign={7: 7}, dead_clients=(OLD,))]),
            look(gpus=[gpu(50, 507, foreign={7: 7}, dead_clients=(OLD,))]),
            **KILLED,
        ),
        "ghost-memory",
    ),
    Row(
        "memory of a dead one whose heir nobody finds, from before, exclusive",
        case(look(gpus=[gpu(50, 500, dead_clients=(OLD,))]), look(gpus=[gpu(50, 500, dead_clients=(OLD,))]), **OWN_GPU),
        "ghost-memory-before",
    ),
    Row("memory still falls at the limit", case(HELD, look(gpus=[gpu(50, 500)]), **KILLED, falling=True), "draining"),
    Row("a context's worth stays", case(HELD, look(gpus=[gpu(50, 16)]), **KILLED), "released"),
    Row(
        "memory from before, exclusive",
        case(look(gpus=[gpu(50, 700)]), look(gpus=[gpu(50, 700)]), **OWN_GPU),
        "ghost-memory-before",
    ),
    Row(
        "memory from before, still falling at the limit",
        case(look(gpus=[gpu(50, 700)]), look(gpus=[gpu(50, 600)]), **OWN_GPU, falling=True),
        "draining",
    ),
    Row(
        "memory from before, an old driver's reserve",
        case(look(gpus=[gpu(50, 615)]), look(gpus=[gpu(50, 615, error_code="memory-v1")]), **OWN_GPU),
        "nothing-held",
    ),
    Row(
        "memory from before, others on the GPU",
        case(look(gpus=[gpu(50, 900, foreign={7: 200})]), look(gpus=[gpu(50, 900, foreign={7: 200})]), **OWN_GPU),
        "nothing-held",
    ),
    Row(
        "memory from before and a holder killed, others on the GPU",
        case(
            look(holder(11, 50), gpus=[gpu(50, 1900, {11: 1000}, foreign={7: 200})]),
            look(gpus=[gpu(50, 900, foreign={7: 200})]),
            **KILLED,
        ),
        "released",
    ),
    Row(
        "on a GPU that is not its own",
        case(look(gpus=[gpu(51, 700)]), look(gpus=[gpu(50, 0), gpu(51, 700)]), **OWN_GPU),
        "nothing-held",
    ),
    Row(
        "no baseline, ghost memory",
        case(look(gpus=[gpu(50, None)]), look(gpus=[gpu(50, 700)]), **KILLED),
        "ghost-memory",
    ),
    Row(
        "a GPU lost",
        case(HELD, look(gpus=[gpu(50, None, error="GPU is lost", error_code="gpu-lost")]), **KILLED),
        "gpu-lost",
    ),
    Row("a GPU gone from the answer", case(HELD, look(gpus=[gpu(51, 0)]), **KILLED), "gpu-lost"),
    Row(
        "MIG",
        case(HELD, look(gpus=[gpu(50, None, error="MIG", error_code="figures-unavailable")]), **KILLED),
        "figures-unavailable",
    ),
    Row(
        "a client without figure",
        case(HELD, look(gpus=[gpu(50, 900, foreign={7: None})]), **KILLED),
        "figures-unavailable",
    ),
    Row(
        "a GPU lost, accepted",
        case(HELD, look(gpus=[gpu(50, None, error="lost", error_code="gpu-lost")]), **KILLED, verify_memory=False),
        "released",
    ),
    Row(
        "passed on",
        case(
            HELD,
            look(
                gpus=[gpu(50, 500, dead_clients=(DeadClient(11, 500, Heir.PASSED),))],
                foreign=(holder(7, 50, seen="fd", vmid=130, passed_on=True),),
            ),
            **KILLED,
        ),
        "held-by-other",
    ),
    Row(
        "a dead opener elsewhere",
        case(HELD, look(gpus=[gpu(50, 500, dead_clients=(DeadClient(77, 500, Heir.FOREIGN),))]), **KILLED),
        "released",
    ),
    Row(
        "taken over",
        case(HELD, look(gpus=[gpu(50, 1000, foreign={7: 1000})]), **KILLED, handovers=(Handover(50, 7, 1000),)),
        "taken-over",
    ),
    Row("taken over by one that has left", case(HELD, FREE, **KILLED, handovers=(Handover(50, 7, 1000),)), "released"),
    Row(
        "taken over on another GPU",
        case(HELD, look(gpus=[gpu(50, 0), gpu(51, 9, foreign={7: 9})]), **KILLED, handovers=(Handover(51, 7, 9),)),
        "released",
    ),
    Row(
        "kept by one that was not selected",
        case(
            HELD,
            look(holder(12, 50, seen="fd"), gpus=[gpu(50, 500, dead_clients=(DeadClient(11, 500, Heir.OWN),))]),
            **KILLED,
            selection=Selection(pids=frozenset({ref(11)})),
        ),
        "held-by-rest",
    ),
    Row(
        "another's share of the container, not selected",
        case(
            HELD,
            look(holder(12, 50, seen="fd"), gpus=[gpu(50, 500, dead_clients=(DeadClient(99, 500, Heir.OWN),))]),
            **KILLED,
            selection=Selection(pids=frozenset({ref(11)})),
        ),
        "released",
    ),
    # --- the worst wins ---
    Row(
        "unkillable before everything",
        case(
            HELD, look(holder(11, 50), gpus=[gpu(50, 900)], blind=[silent(), blocked()]), **KILLED, stuck=(stuck(11),)
        ),
        "unkillable",
    ),
    Row(
        "ghost memory before blindness",
        case(HELD, look(gpus=[gpu(50, 900)], blind=[blocked()]), **KILLED),
        "ghost-memory",
    ),
    Row("blindness before release", case(HELD, look(gpus=[gpu(50, 0)], blind=[blocked()]), **KILLED), "blind-spots"),
    Row("after a resumed release", case(FREE, FREE, minors=frozenset({50}), resumed=frozenset({ref(3)})), "released"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.sentence)
def test_verdict(row: Row) -> None:
    judgement = judge(row.case)
    assert judgement.reason == row.reason, judgement
    assert judgement.verdict is REASONS[row.reason].verdict and "<" not in judgement.message + judgement.next_step


def test_every_reason_that_a_judge_can_give_has_a_row() -> None:
    from pathlib import Path

    import hostd

    root = Path(hostd.__file__).parent
    text = "".join((root / name).read_text() for name in ("judge.py", "memorycheck.py", "case.py"))
    given_here = {code for code in REASONS if f'"{code}"' in text}
    assert given_here == {row.reason for row in ROWS}


def test_a_release_names_how_many_and_where() -> None:
    both = look(gpus=[gpu(50, 0), gpu(51, 0)])
    judgement = judge(case(both, both, minors=frozenset({50, 51}), acted=True, known=frozenset({ref(1), ref(2)})))
    assert judgement.message == "container 129: 2 holders released, memory verified on GPU 0, GPU 1"


def test_names_are_at_most_four_and_owners_are_said() -> None:
    many = [holder(n, 50) for n in range(10, 17)]
    assert holders_text(many) == "pid 10 (p10), pid 11 (p11), pid 12 (p12), pid 13 (p13) and 3 more"
    assert (
        others_text([holder(7, vmid=None), holder(8, vmid=130)])
        == "pid 7 (p7) of the host, pid 8 (p8) of container 130"
    )


def test_a_respawn_without_unit_names_whoever_starts_it() -> None:
    loop = process(40, comm="run.sh", ns_pids=(4,))
    after = look(holder(12, 50), gpus=[gpu(50, 0)])
    judgement = judge(case(HELD, after, **KILLED, respawned=frozenset({ref(12)}), restarters=(loop,)))
    assert "pid 40 (run.sh)" in judgement.message and "kill 4" in judgement.next_step


# --- arithmetic ------------------------------------------------------------------------------------------------------

mib = st.integers(0, 200_000)
clients = st.dictionaries(st.integers(2, 40), mib, max_size=6)


@given(clients, clients, mib, mib)
def test_ghost_memory_is_what_is_left_and_never_negative(
    own: dict[int, int], foreign: dict[int, int], ghost: int, less: int
) -> None:
    foreign = {pid + 100: amount for pid, amount in foreign.items()}
    total = sum(own.values()) + sum(foreign.values())
    assert gpu(50, total + ghost, own, foreign=foreign).ghost_mib == ghost
    assert gpu(50, max(0, total - less), own, foreign=foreign).ghost_mib == 0


@given(st.integers(0, 6), mib)
def test_a_context_per_client_is_tolerated(live: int, extra: int) -> None:
    state = gpu(50, 16 + 16 * live, foreign=dict.fromkeys(range(100, 100 + live), 0))
    assert excess_mib(state, 0) == 0
    more = gpu(50, 17 + 16 * live + extra, foreign=dict.fromkeys(range(100, 100 + live), 0))
    assert excess_mib(more, 0) == 17 + 16 * live + extra


@pytest.mark.parametrize("missing", ["used", "client", "dead"])
def test_a_figure_that_is_missing_is_never_0(missing: str) -> None:
    state: GpuState = {
        "used": gpu(50, None, {11: 5}),
        "client": gpu(50, 100, foreign={7: None}),
        "dead": gpu(50, 100, dead_clients=(DeadClient(9, None, Heir.FOREIGN),)),
    }[missing]
    assert state.ghost_mib is None and state.baseline_mib is None


def test_what_a_living_heir_keeps_is_no_ghost_and_no_baseline() -> None:
    state = gpu(50, 1300, dead_clients=(DeadClient(9, 1000, Heir.OWN), DeadClient(8, 200, Heir.FOREIGN)))
    assert state.ghost_mib == state.baseline_mib == 100


def test_what_a_dead_one_has_left_without_an_heir_is_ghost_memory_and_no_baseline() -> None:
    state = gpu(50, 700, dead_clients=(NOBODY,))
    assert (state.ghost_mib, state.baseline_mib) == (700, 200)


BEFORE = gpu(50, 1507, {11: 1000, 12: 500}, foreign={7: 7})


@pytest.mark.parametrize(
    ("after", "gone", "found"),
    [
        (gpu(50, 1007, foreign={7: 1007}), [11], [Handover(50, 7, 1000)]),
        (gpu(50, 1507, foreign={7: 1507}), [11, 12], [Handover(50, 7, 1500)]),
        (gpu(50, 507, foreign={7: 507}), [11, 12], [Handover(50, 7, 500)]),
        (gpu(50, 7, foreign={7: 7}), [11, 12], []),
        (gpu(50, 1007, foreign={7: 7, 8: 1000}), [11], []),
        (gpu(50, 1507, {11: 1000}, foreign={7: 507}), [11], []),
        (gpu(50, 20007, foreign={7: 20007}), [11], []),
        (gpu(50, 1007, foreign={7: 1007}), [], []),
    ],
    ids=[
        "the whole of one",
        "the sum of two",
        "one of two",
        "nobody grew",
        "a client that was not there before",
        "ours still listed",
        "grown by far more",
        "none of ours has gone",
    ],
)
def test_handover(after: GpuState, gone: list[int], found: list[Handover]) -> None:
    assert handovers(BEFORE, after, gone) == found


def test_a_selection_is_of_identities() -> None:
    chosen = Selection(pids=frozenset({ref(11)}))
    assert chosen.takes(holder(11, 50))
    assert not Selection(pids=frozenset({ProcessRef(11, 5)})).takes(holder(11, 50)), "the number alone is not enough"
    assert Selection(frozenset({51})).takes(holder(11, 50, 51)) and not Selection(frozenset({51})).takes(holder(11, 50))


def test_only_what_can_hide_a_holder_makes_a_look_incomplete() -> None:
    spots = [silent(), blocked(), BlindSpot("pve", "x", "y", "detail-unreadable")]
    assert incomplete(spots) == [blocked()]


def test_the_worst_of_all_objections_is_told() -> None:
    for row in ROWS:
        judgement = judge(row.case)
        assert judgement.exit_status in EXIT_PRECEDENCE
        assert (judgement.verdict is Verdict.RELEASED) == (judgement.exit_status == 0)
