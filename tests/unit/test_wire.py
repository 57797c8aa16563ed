"""JSON, schema 1: the names of the contract, valid Unicode whatever a container says, options there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd import shapes
from hostd.errors import BusyError, PgrError, UnreadableError, UsageError
from hostd.ladder import Limits, Options
from hostd.model import Fate, GpuReport, HolderReport, Observation, Report, RungRecord, Step, Verdict
from hostd.service.varlink import MAX_REPLY, encode_reply
from hostd.shapes import fits
from hostd.wire import (
    clean,
    error_dict,
    holder_dict,
    observed_event,
    options_dict,
    parse_options,
    ps_dict,
    releases_dict,
    report_dict,
    short,
    status_of,
)

from .makers import INFOS, blocked, gpu, holder, process, stuck, unit

REPORT = (
    "schema release_id vmid trigger verdict reason message was_held dry_run started duration_ms holders gpus rungs"
    " blind_spots next_step"
)
HOLDER = "pid ns_pids start_time comm cmdline user cgroup unit state evidence gpus memory_mib fate"
GPU = "index minor uuid pci_bus_id name used_mib_before used_mib_after reserved_mib ghost_mib bar1_used_mib_after other_holders"
RUNG = "step at_ms targets sent gone waited_ms"
SPOT = "source what error"


def report(**more: Any) -> Report:
    full = Report("f00d", 129, "cli", Verdict.HELD, "unkillable", "message", "next", True)
    full.holders = [HolderReport(holder(11, 50, supervisor=unit()), Fate.UNKILLABLE, stuck(11))]
    full.gpus = [GpuReport(INFOS[50], 1, 2, 3, 4, 5, [holder(7, 50, vmid=130)])]
    full.rungs = [RungRecord(Step.TERM, 1, [11], 1, 0, 10, "stopped")]
    full.blind_spots = [blocked()]
    return replace(full, **more)


def test_a_report_has_the_names_of_the_contract() -> None:
    found = report_dict(report())
    assert set(REPORT.split()) <= set(found) and found["schema"] == 1 and fits(found, shapes.REPORT)
    assert set(HOLDER.split()) <= set(found["holders"][0])
    assert set(GPU.split()) <= set(found["gpus"][0]) and found["gpus"][0]["other_holders"][0]["vmid"] == 130
    assert set(RUNG.split()) <= set(found["rungs"][0]) and set(SPOT.split()) == set(found["blind_spots"][0])
    assert found["verdict"] == "held" and found["holders"][0]["fate"] == "unkillable"
    assert found["holders"][0]["stuck"]["wchan"] == "os_acquire_mutex"
    json.dumps(found)


def test_ps_has_the_names_of_the_contract() -> None:
    found = ps_dict([holder(11, 50), holder(7, vmid=None)], [gpu(50, 5)], [blocked()])
    assert set(found) == {"schema", "holders", "gpus", "blind_spots"}
    assert [h["vmid"] for h in found["holders"]] == [129, None]


@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_any_text_of_a_container_becomes_valid_json(text: str) -> None:
    hostile = replace(
        holder(11, 50), process=process(11, comm=text, cgroup=f"/lxc/129/{text}"), cmdline=text, user=text
    )
    encoded = json.dumps(holder_dict(hostile)).encode("ascii")
    assert json.loads(encoded)["cmdline"] == clean(text)
    clean(text).encode()


def test_30000_holders_with_names_as_long_as_can_be_fit_into_one_answer() -> None:
    hostile = replace(
        holder(11, 50, supervisor=replace(unit(), name="\x01" * 4000)),
        process=process(11, comm="\x01" * 15, cgroup="/lxc/129/ns/" + "\x01" * 4000),
        cmdline="\x01" * 16_384,
    )
    crowd = [hostile] * 30_000
    full = report(verdict=Verdict.RELEASED, reason="released", holders=[HolderReport(h, Fate.EXITED) for h in crowd])
    for said in (report_dict(full), ps_dict(crowd, [], []), observed_event(Observation(129, 0.0, ()), crowd)):
        sizes = [sum(len(json.dumps(h[key])) for h in said["holders"]) for key in ("cmdline", "cgroup", "unit")]
        assert len(said["holders"]) == 30_000 and max(sizes) < 3 << 20
    encoded = encode_reply({"report": report_dict(full)})
    reply = json.loads(encoded[:-1])["parameters"]["report"]
    assert (reply["verdict"], status_of(reply)) == ("released", 0) and len(encoded) <= MAX_REPLY


@given(st.text(st.characters(exclude_categories=()), max_size=200), st.integers(12, 300))
def test_a_text_is_cut_at_the_bytes_that_json_needs(text: str, room: int) -> None:
    said = short(text, room)
    assert len(json.dumps(said)) - 2 <= room + 3
    assert said == clean(text) or said.endswith("...")


def test_few_holders_keep_their_command_lines() -> None:
    words = "python3 " + "x" * 4000
    assert {h["cmdline"] for h in ps_dict([replace(holder(11, 50), cmdline=words)] * 400, [], [])["holders"]} == {words}


def test_text_that_is_valid_is_not_touched() -> None:
    assert (
        clean("\x1b[2J ü \u202e") == "\x1b[2J ü \u202e" and clean("\udcff") == "\\xff" and clean("\ud800") == "\\ud800"
    )


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (BusyError("busy", vmid=129), None),
        (UnreadableError("cannot read", reason="pve-unreadable"), "unknown"),
        (PgrError("x", reason="no-such-reason"), None),
    ],
)
def test_an_error_has_no_verdict_unless_not_looking_is_one(error: PgrError, verdict: str | None) -> None:
    found = error_dict(error, 129)
    assert found["verdict"] == verdict and found["vmid"] == 129 and found["reason"] == error.reason


def test_several_reports_have_the_worst_verdict_and_status() -> None:
    good = report_dict(report(verdict=Verdict.RELEASED, reason="released"))
    bad, none = report_dict(report()), error_dict(BusyError("busy"), 130)
    both = releases_dict([good, bad, none])
    assert (both["verdict"], status_of(both), len(both["releases"])) == ("held", 5, 3)
    assert status_of(good) == 0 and status_of(none) == 75 and status_of({"reason": "what"}) == 1
    assert releases_dict([])["verdict"] is None


options = st.builds(
    Options,
    limits=st.builds(
        lambda grace, timeout: replace(Limits(), grace_s=grace, timeout_s=timeout),
        st.floats(0, 86_400),
        st.floats(0, 86_400, exclude_min=True),
    ),
    now=st.booleans(),
    dry_run=st.booleans(),
    stop=st.booleans(),
    verify_memory=st.booleans(),
    wait=st.booleans(),
    gpu=st.none() | st.text(max_size=9),
    pid=st.none() | st.text(max_size=9),
    trigger=st.text(max_size=9),
)


@given(options)
def test_options_come_back_as_they_were(given_options: Options) -> None:
    sent = json.loads(json.dumps(options_dict(given_options)))
    assert parse_options(sent, Limits()) == given_options


@pytest.mark.parametrize(
    "values",
    [
        {"now": "yes"},
        {"now": 1},
        {"grace_s": "5"},
        {"grace_s": True},
        {"grace_s": -1},
        {"grace_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": 1e9},
        {"timeout_s": 0},
        {"gpu": 0},
        {"pid": ["1"]},
        {"kill": True},
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        parse_options(values, Limits())


def test_absent_and_null_options_are_as_configured() -> None:
    limits = replace(Limits(), grace_s=42.0)
    assert parse_options({"now": None, "grace_s": None}, limits) == Options(limits=limits)
