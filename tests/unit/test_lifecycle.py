"""The decisions of the lifecycle: pure functions and the files that one event leaves for the next."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostd.clock import boot_s
from hostd.config import HookSettings, OnDirty
from hostd.lifecycle.event import TRIGGERS, Event, Phase, parse_context, stop_key
from hostd.lifecycle.gate import gate_of
from hostd.lifecycle.invocation import unit_invocation
from hostd.lifecycle.records import (
    Records,
    Snapshot,
    Started,
    Stopped,
    Watched,
    refused_starts,
    slow_stops,
)
from hostd.lifecycle.snapshot import take_snapshot
from hostd.model import (
    DriverNumbers,
    GpuInfo,
    GpuState,
    Holder,
    Observation,
    Process,
    ProcessRef,
    Report,
    Stuck,
    Verdict,
)
from hostd.nodes import missing_paths, node_number
from hostd.stopwatch import StopWatch, judge_stop, lock_is_held

BLOCK = HookSettings(on_dirty=OnDirty.BLOCK)
WARN = HookSettings()
GPU = GpuInfo(50, "GPU-a", "0000:18:00.0", "H200", 0)
STUCK = Stuck(ProcessRef(7, 1), 7, "D", "rwsem_down_write_slowpath", "", True)


def report(verdict: Verdict | None, reason: str = "ghost-memory") -> Report:
    return Report("id", 129, "hook-pre-start", verdict, reason, "5 MiB stay in use", "doctor")


def state(**values: Any) -> GpuState:
    return replace(GpuState(GPU, 1000, 600, 1, total_mib=10_000), **values)


# --- the gate ----------------------------------------------------------------------------------------------------------


def test_block_refuses_what_is_held() -> None:
    gate = gate_of(report(Verdict.HELD), [], BLOCK)
    assert not gate.allow and gate.reason == "ghost-memory" and "on_dirty: warn" in gate.next_step


def test_warn_lets_it_go_and_says_so() -> None:
    gate = gate_of(report(Verdict.HELD), [], WARN)
    assert gate.allow and gate.message


def test_unknown_is_never_refused() -> None:
    gate = gate_of(report(Verdict.UNKNOWN, "driver-silent"), [], BLOCK)
    assert gate.allow and gate.reason == "driver-silent"


def test_without_a_verdict_it_goes() -> None:
    assert gate_of(report(None, "busy"), [], BLOCK).allow


@pytest.mark.parametrize("reason", ["held-by-other", "taken-over"])
def test_what_others_keep_is_no_reason_to_refuse(reason: str) -> None:
    assert gate_of(report(Verdict.HELD, reason), [], BLOCK).allow


def test_a_free_gpu_is_silent() -> None:
    assert gate_of(report(Verdict.RELEASED, "not-running"), [state()], BLOCK) == gate_of(
        report(Verdict.RELEASED), [], WARN
    )


def test_too_little_free_memory_is_dirty() -> None:
    settings = replace(BLOCK, min_free_mib=8_500)
    assert not gate_of(report(Verdict.RELEASED), [state()], settings).allow
    assert gate_of(report(Verdict.RELEASED), [state(used_mib=900)], settings).allow


def test_what_living_clients_of_others_hold_counts_as_free() -> None:
    settings = replace(BLOCK, min_free_mib=9_000)
    shared = state(used_mib=5_000, client_mib={4711: 4_900}, foreign_clients=(4711,))
    assert gate_of(report(Verdict.RELEASED), [shared], settings).allow


def test_without_figures_memory_is_not_judged() -> None:
    assert gate_of(report(Verdict.RELEASED), [state(used_mib=None)], replace(BLOCK, min_free_mib=9_999)).allow


# --- events ------------------------------------------------------------------------------------------------------------


def event(phase: Phase, **context: str) -> Event:
    return Event(129, phase, "hookscript", context)


def test_every_phase_has_a_trigger() -> None:
    assert set(TRIGGERS) == set(Phase) and len(set(TRIGGERS.values())) == len(TRIGGERS)


def test_post_stop_and_exec_stop_post_of_one_stop_share_a_key() -> None:
    post_stop = stop_key(event(Phase.POST_STOP, INVOCATION_ID="a1", LXC_PID="7"), "a1")
    assert post_stop == stop_key(event(Phase.EXEC_STOP_POST, INVOCATION_ID="a1"), "") != ""


def test_a_login_sessions_invocation_names_no_stop() -> None:
    """Post-stop under an lxc-start by hand: INVOCATION_ID is the shell's, the same for every stop in it."""
    first = stop_key(event(Phase.POST_STOP, INVOCATION_ID="shell", LXC_PID="7"), "")
    assert first != stop_key(event(Phase.POST_STOP, INVOCATION_ID="shell", LXC_PID="8"), "") and first


def test_a_stop_that_nothing_names_has_no_key() -> None:
    assert stop_key(event(Phase.EXEC_STOP_POST), "a1") == stop_key(event(Phase.POST_STOP, LXC_PID="x"), "") == ""


def test_only_plain_values_of_known_names_are_taken() -> None:
    given = {
        "INVOCATION_ID": "ab12",
        "EXIT_STATUS": "0\nX",
        "LXC_PID": "",
        "PATH": "/x",
        "EXIT_CODE": "x" * 65,
        "LXC_TARGET": 1,
    }
    assert parse_context(given) == {"INVOCATION_ID": "ab12"}


# --- what is remembered ------------------------------------------------------------------------------------------------


def holder(pid: int, *gpus: int, mib: int | None = 100) -> Holder:
    process = Process(pid, pid * 10, (1,), "python3", "S", 0, 1, 1, "/lxc/129/ns", 9)
    return Holder(process, 129, frozenset(), gpus, memory_mib=mib, cmdline="python3 \udcff")


def seen(*holders: Holder, ghost: int = 0, init: int = 5) -> Observation:
    gpu = state(used_mib=ghost)
    return Observation(129, 0.0, holders, gpus=(gpu,), init=ProcessRef(init, init * 10))


def test_a_snapshot_survives_the_file(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    snapshot = take_snapshot(seen(holder(7, 50), ghost=30), "inv", None)
    assert records.write(snapshot)
    read = records.read(Snapshot, 129)
    assert read == snapshot and read is not None
    assert read.minors == [50] and read.baseline_mib == [[50, 30]] and read.init_ref == ProcessRef(5, 50)
    back = read.holders[0].holder(129)
    assert (back.ref, back.gpus, back.memory_mib) == (ProcessRef(7, 70), (50,), 100)


def test_a_second_pre_stop_of_the_same_run_adds_to_the_first() -> None:
    first = take_snapshot(seen(holder(7, 50), ghost=30), "inv", None)
    second = take_snapshot(seen(holder(8, 51), ghost=900), "inv", first)
    assert {h.pid for h in second.holders} == {7, 8} and second.minors == [50, 51]
    assert second.baseline_mib == [[50, 30]] and second.at_s == first.at_s


def test_a_snapshot_of_an_earlier_run_is_forgotten() -> None:
    first = take_snapshot(seen(holder(7, 50)), "inv", None)
    assert {h.pid for h in take_snapshot(seen(holder(8, 50)), "next", first).holders} == {8}
    by_hand = take_snapshot(seen(holder(7, 50), init=5), "", None)
    assert {h.pid for h in take_snapshot(seen(holder(8, 50), init=6), "", by_hand).holders} == {8}
    assert {h.pid for h in take_snapshot(seen(holder(8, 50), init=5), "", by_hand).holders} == {7, 8}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"vmid": 129}', '{"vmid": 129, "at_s": 1, "holders": [{"no": 1}]}', "[" * 100_000]
)
def test_what_is_no_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/129.json").write_text(text)
    assert Records(str(tmp_path)).read(Snapshot, 129) is None


def test_unknown_fields_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "stops").mkdir()
    (tmp_path / "stops/129.json").write_text(json.dumps({"vmid": 129, "at_s": 1.0, "key": "unit-a", "later": 1}))
    assert Records(str(tmp_path)).read(Stopped, 129) == Stopped(129, 1.0, "unit-a")


def test_a_full_run_directory_costs_the_memory_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    records = Records(str(blocked))
    assert not records.write(Started(129, 1.0)) and records.problem
    records.drop(Started, 129)
    assert records.read(Started, 129) is None and records.vmids(Started) == []


def test_what_status_shows_of_them(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    records.write(Watched(129, boot_s() - 40, 2, "hangs", "thaw it"))
    records.write(Started(130, boot_s(), "id", allow=False, messages=["start REFUSED: x"]))
    records.write(Started(131, boot_s(), "id"))
    assert [(s["vmid"], s["message"]) for s in slow_stops(str(tmp_path))] == [(129, "hangs")]
    assert [s["vmid"] for s in refused_starts(str(tmp_path))] == [130]


def test_the_units_invocation_is_a_link_of_systemds(tmp_path: Path) -> None:
    assert unit_invocation(129, str(tmp_path)) == ""
    (tmp_path / "invocation:pve-container-debug@129.service").symlink_to("abc")
    assert unit_invocation(129, str(tmp_path)) == "abc"


# --- the stop watchdog -------------------------------------------------------------------------------------------------


def judged(**values: Any) -> Any:
    given = {"init_alive": True, "init_ending": False, "others": 3, "stopping": True, "stuck": [], "since_s": 40.0}
    return judge_stop(**{**given, **values})


def test_nothing_is_signalled_while_the_init_lives_without_sigkill() -> None:
    finding = judged()
    assert not finding.may_signal and not finding.over and "nothing is signalled" in finding.message


def test_a_stop_that_nobody_works_at_any_more_is_over() -> None:
    assert judged(stopping=False).over


def test_an_init_with_sigkill_pending_opens_the_way() -> None:
    assert judged(init_ending=True, stopping=False).may_signal and judged(init_alive=False).may_signal


def test_what_cannot_die_is_named_with_the_way_out() -> None:
    finding = judged(init_alive=False, stuck=[STUCK])
    assert "pid 7 (state D, waiting in rwsem_down_write_slowpath)" in finding.message and "thawed" in finding.next_step


def test_an_empty_container_has_stopped() -> None:
    assert judged(init_alive=False, others=0).over


class Timer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


class Clock:
    """Timers as the server has them."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, when: float, run: Callable[[], None]) -> Any:
        entry = (when, run)
        self.calls.append(entry)

        return Timer(lambda: self.calls.remove(entry))

    def fire(self) -> None:
        _, run = self.calls.pop(0)
        run()


def test_the_watch_looks_again_until_the_snapshot_is_gone(tmp_path: Path) -> None:
    records, clock, looks = Records(str(tmp_path)), Clock(), []
    watch = StopWatch(clock.call_at, looks.append, lambda vmid: (30.0, 60.0), records)
    records.write(Snapshot(129, boot_s()))
    watch.arm(129)
    watch.arm(129)
    assert len(clock.calls) == 1 and watch.armed == (129,)
    clock.fire()
    clock.fire()
    assert looks == [129, 129]
    records.drop(Snapshot, 129)
    clock.fire()
    assert looks == [129, 129] and clock.calls == [] and watch.armed == ()


def test_a_new_daemon_goes_on_watching(tmp_path: Path) -> None:
    records, clock = Records(str(tmp_path)), Clock()
    records.write(Snapshot(129, boot_s() - 1000))
    watch = StopWatch(clock.call_at, lambda vmid: None, lambda vmid: (30.0, 60.0), records)
    watch.resume()
    assert watch.armed == (129,)


def test_a_lock_is_seen_without_being_tried(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "lock"
    assert not lock_is_held(str(path))
    with open(path, "w") as file:
        assert not lock_is_held(str(path))
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_is_held(str(path))
    assert not lock_is_held(str(path))
    assert lock_is_held(str(path), str(tmp_path / "nothing"))


# --- device nodes ------------------------------------------------------------------------------------------------------


DRIVER = DriverNumbers({195: frozenset({"nvidia", "nvidiactl"}), 510: frozenset({"nvidia-uvm"})})


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("nvidia0", (195, 0)),
        ("nvidia3", None),
        ("nvidiactl", (195, 255)),
        ("nvidia-modeset", (195, 254)),
        ("nvidia-uvm", (510, 0)),
        ("nvidia-uvm-tools", (510, 1)),
        ("nvidia-caps", None),
    ],
)
def test_numbers_of_nodes_come_from_the_driver(name: str, number: tuple[int, int] | None) -> None:
    assert node_number(name, DRIVER, [0, 1]) == number


def test_without_a_driver_no_node_has_a_number() -> None:
    assert node_number("nvidia0", DriverNumbers({}), [0]) is node_number("nvidia-uvm", DriverNumbers({}), []) is None


def test_only_nodes_of_the_driver_can_be_missing() -> None:
    assert missing_paths(["/dev/nvidia-surely-not", "/dev/null", "/nonexistent"]) == ["/dev/nvidia-surely-not"]


assert os.name == "posix"
