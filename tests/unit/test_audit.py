"""Every decision is one entry with a fixed id; no name from inside a container can forge a field or an entry."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd import audit
from hostd.model import BlindSpot, Fate, GpuReport, HolderReport, Observation, Report, Verdict
from tests.unit import trail
from tests.unit.journald import AVAILABLE, PrivateJournald

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "etc/catalog/pve-gpu-release.catalog"


def told(**options: object) -> list[dict[str, list[str]]]:
    entries: list[audit.Entry] = []
    held = options.pop("held", trail.holder())
    trail.tell(audit.Trail(entries.append, caller_uid=0, caller_pid=12), trail.report(), held, **options)  # type: ignore[arg-type]
    return [as_fields(entry) for entry in entries]


def as_fields(entry: audit.Entry) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in entry:
        found.setdefault(name, []).append(value)
    return found


def one(entry: audit.Entry) -> dict[str, str]:
    return {name: " ".join(values) for name, values in as_fields(entry).items()}


def test_ids_are_unique_and_128_bit() -> None:
    ids = [kind.message_id for kind in audit.KINDS]
    assert len(set(ids)) == len(ids) == len({kind.name for kind in audit.KINDS})
    assert all(re.fullmatch("[0-9a-f]{32}", message_id) for message_id in ids)


def test_a_release_is_told_from_beginning_to_end() -> None:
    assert [entry["PVE_GPU_RELEASE_EVENT"][0] for entry in told()] == [
        "release-started",
        "holder-found",
        "foreign-seen",
        "blind-spot",
        "rung-begun",
        "rung-done",
        "rung-begun",
        "rung-done",
        "holder-fate",
        "gpu-verified",
        "release-finished",
    ]


def test_every_entry_of_a_release_has_the_fields_to_find_it_by() -> None:
    for entry in told():
        assert entry["PVE_GPU_RELEASE_ID"] == [trail.RELEASE_ID]
        assert entry["PVE_VMID"] == ["129"]
        assert entry["TRIGGER"] == ["cli"]
        assert entry["CALLER_UID"] == ["0"]
        assert entry["SYSLOG_IDENTIFIER"] == ["pve-gpu-release"]
        assert entry["MESSAGE_ID"][0] in audit.BY_MESSAGE_ID
        assert int(entry["AT_MS"][0]) >= 0
        assert all(re.fullmatch("[A-Z][A-Z0-9_]{0,63}", name) for name in entry)


def test_the_fields_of_the_contract_are_there() -> None:
    seen = {name for entry in told() for name in entry} | {"PVE_PHASE"}
    contract = (
        "PVE_GPU_RELEASE_ID PVE_VMID PVE_PHASE GPU_UUID GPU_MINOR HOLDER_PID HOLDER_NSPID HOLDER_COMM HOLDER_UNIT "
        "EVIDENCE RUNG OUTCOME VERDICT REASON VRAM_BEFORE VRAM_AFTER DURATION_USEC TRIGGER CALLER_UID"
    )
    assert seen >= set(contract.split())


def test_a_holder_is_written_with_all_its_pids_and_evidence() -> None:
    entry = as_fields(audit.holder_found(audit.Context(129), trail.holder(), [trail.GPU0]))
    assert entry["HOLDER_PID"] == ["4711"]
    assert entry["HOLDER_NSPID"] == ["35", "7"]
    assert entry["EVIDENCE"] == ["fd", "nvml"]
    assert (entry["GPU_MINOR"], entry["GPU_UUID"]) == (["50"], ["GPU-aaaa"])
    assert entry["MESSAGE"] == [
        "container 129: pid 4711 (VLLM::EngineCor) holds nvidia50 with 42000 MiB; seen by fd, nvml, inherited from "
        "pid 4700, which is gone; run by vllm.service"
    ]


def test_holders_and_blind_spots_are_written_once_in_a_release() -> None:
    entries: list[audit.Entry] = []
    listener = audit.Trail(entries.append)
    made, held = trail.report(), trail.holder()
    look = Observation(129, 1.0, (held,), (), (), (BlindSpot("a", "b", "c"),))
    listener.started(made)
    for _ in range(3):
        listener.observed(made, look, (held,))
    assert len(entries) == 3


def test_what_a_rung_brought_is_three_facts() -> None:
    done = [entry for entry in told() if entry["PVE_GPU_RELEASE_EVENT"] == ["rung-done"]]
    assert [(e["RUNG"], e["OUTCOME"], e["SENT"], e["GONE"], e["WAITED_MS"]) for e in done] == [
        (["term"], ["none-gone"], ["1"], ["0"], ["10000"]),
        (["kill"], ["all-gone"], ["1"], ["1"], ["120"]),
    ]


def test_an_unkillable_holder_says_where_it_waits() -> None:
    entry = one(audit.fate(audit.Context(129), HolderReport(trail.holder(), Fate.UNKILLABLE, trail.STUCK)))
    assert entry["PRIORITY"] == "3"
    assert entry["STUCK_WCHAN"] == "percpu_rwsem_wait"
    assert entry["STUCK_STACK"] == "percpu_rwsem_wait+0x1 < sb_start_write+0x2"


@pytest.mark.parametrize(
    ("verdict", "reason", "event", "priority", "status"),
    [
        (Verdict.RELEASED, "released", "release-finished", "5", "0"),
        (Verdict.HELD, "holders-survive", "release-finished", "4", "3"),
        (Verdict.HELD, "unkillable", "release-finished", "3", "5"),
        (Verdict.UNKNOWN, "driver-silent", "release-finished", "4", "4"),
        (None, "busy", "release-refused", "4", "75"),
        (None, "would-stop-container", "release-refused", "4", "7"),
        (None, "interrupted", "release-finished", "4", "130"),
        (None, "internal-error", "release-finished", "3", "1"),
    ],
)
def test_the_end_of_a_release(verdict: Verdict | None, reason: str, event: str, priority: str, status: str) -> None:
    made = Report(trail.RELEASE_ID, 129, "cli", verdict, reason)
    entry = one(audit.finished(audit.Context.of(made), made))
    found = (entry["PVE_GPU_RELEASE_EVENT"], entry["PRIORITY"], entry["EXIT_STATUS"], entry["REASON"])
    assert found == (event, priority, status, reason)


def test_figures_that_the_driver_did_not_give_are_left_out_and_never_0() -> None:
    entry = one(audit.gpu_verified(audit.Context(129), GpuReport(trail.GPU0)))
    assert "VRAM_AFTER" not in entry
    assert entry["OUTCOME"] == "no-figures"
    measured = one(audit.gpu_verified(audit.Context(129), GpuReport(trail.GPU0, 10, 0)))
    assert (measured["VRAM_BEFORE"], measured["VRAM_AFTER"]) == ("10", "0")


def every_other_event() -> Iterator[audit.Entry]:
    ctx = audit.Context(129, phase="pre-start")
    look = Observation(129, 1.0, (trail.holder(),), gpus=())
    yield audit.resumed(ctx, "rung-begun kill")
    yield audit.abandoned(ctx, "rung-begun kill", "the container is gone")
    yield audit.record_missing(ctx, "No space left on device")
    yield audit.snapshot(ctx, look)
    yield audit.cleared(ctx, "/lxc/129/ns", [(5, "agent")], empty=False)
    yield audit.gate(ctx, blocked=True, reason="ghost-memory", message="2 GiB with no live client", next_step="x")
    yield audit.gate(ctx, blocked=False, reason="ghost-memory", message="2 GiB with no live client")
    yield audit.nodes_made(ctx, ["/dev/nvidia-uvm"])
    yield audit.phase_done(ctx, "verified", 0.25, detail="nothing held")
    yield audit.watchdog_armed(ctx, 30)
    yield audit.watchdog_report(ctx, "stop hangs", [HolderReport(trail.holder(), Fate.UNKILLABLE, trail.STUCK)])
    yield audit.watchdog_unarmed(ctx, "no daemon")
    yield audit.daemon_started("0.1.0", ["not in the first PID namespace"])
    yield audit.daemon_stopped("SIGTERM")
    yield audit.config_loaded("/etc/x.yaml")
    yield audit.config_failed("/etc/x.yaml", ["one", "two"], instead="the last good configuration")
    yield audit.nvml_wedged(7, "nvmlInit", 12.4)
    yield audit.nvml_recovered(7)
    yield audit.reset_recovered("the reset of release 0a was cut off: services are as they were")
    yield audit.internal_error("worker", "Traceback\n  x\nValueError: bad\n")
    yield audit.entries_dropped(3)
    yield audit.finished(ctx, Report("x", 129, "cli", None, "busy"))


def test_every_kind_of_event_can_be_written() -> None:
    written = {entry["PVE_GPU_RELEASE_EVENT"][0] for entry in told()}
    for entry in every_other_event():
        fields = as_fields(entry)
        written.add(fields["PVE_GPU_RELEASE_EVENT"][0])
        assert fields["MESSAGE"][0].isprintable()
    assert written == {kind.name for kind in audit.KINDS}


EVIL = "x\nPVE_VMID=666\n\nMESSAGE=forged\n_UID=0\x1b]0;pwned\x07\u202e\udcff\x00"


def test_no_value_has_a_character_that_is_not_visible() -> None:
    for entry in told(held=trail.holder(comm=EVIL, cmdline=EVIL * 400)):
        for values in entry.values():
            assert all(value.isprintable() and len(value) <= audit.MAX_TEXT for value in values)


def test_a_list_without_end_is_cut() -> None:
    ctx = audit.Context(129)
    entry = as_fields(audit.cleared(ctx, "/lxc/129", [(pid, "x") for pid in range(2, 5000)], empty=True))
    assert len(entry["HOLDER_PID"]) == audit.MAX_REPEATS


# --- with a real journal -------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.skipif(not AVAILABLE, reason="needs root, systemd-journald and unshare")
def test_a_hostile_name_forges_nothing_in_a_real_journal() -> None:
    code = (
        "from hostd import audit\nfrom hostd.system.journal import Journal\nfrom tests.unit import trail\n"
        f"evil = {EVIL!r}\n"
        "j = Journal(on_drop=audit.entries_dropped)\n"
        "trail.tell(audit.Trail(j.send, caller_uid=0), trail.report(), trail.holder(comm=evil, cmdline=evil))\n"
        "assert j.close(20)\n"
    )
    with PrivateJournald() as node:
        node.python(code)
        entries = node.entries("PVE_VMID=129")
        assert len(entries) == 11
        assert node.entries("PVE_VMID=666") == []
        assert [e for e in node.entries() if e.get("MESSAGE") == "forged"] == []
        (found,) = node.entries(f"MESSAGE_ID={audit.HOLDER_FOUND.message_id}")
        assert found["HOLDER_COMM"].startswith("x\\nPVE_VMID=666\\n\\nMESSAGE=forged\\n_UID=0\\x1b]0;pwned")  # type: ignore[attr-defined]
        assert len(node.entries("HOLDER_PID=4711")) == 7


# --- the catalog ---------------------------------------------------------------------------------------------------


def catalog() -> dict[str, tuple[dict[str, str], str]]:
    found = {}
    for part in re.split(r"(?m)^-- ", CATALOG.read_text())[1:]:
        head, _, text = part.partition("\n\n")
        message_id, *lines = head.splitlines()
        found[message_id] = (dict(line.split(": ", 1) for line in lines), text.strip())
    return found


def test_the_catalog_explains_exactly_the_ids_there_are() -> None:
    entries = catalog()
    assert list(entries) == [kind.message_id for kind in audit.KINDS]
    for head, text in entries.values():
        assert head["Subject"]
        assert head["Defined-By"] == "pve-gpu-release"
        assert len(text) > 30


def test_the_catalog_names_only_fields_that_the_entries_of_that_id_have() -> None:
    fields: dict[str, set[str]] = {}
    for entry in [*told(), *map(as_fields, every_other_event())]:
        fields.setdefault(entry["MESSAGE_ID"][0], set()).update(entry)
    release = {"PVE_GPU_RELEASE_ID"}
    for message_id, (head, text) in catalog().items():
        assert set(re.findall("@([A-Z_]+)@", head["Subject"] + text)) <= fields[message_id] | release


@pytest.mark.skipif(not shutil.which("journalctl"), reason="needs journalctl")
def test_systemd_takes_the_catalog(tmp_path: Path) -> None:
    place = tmp_path / "usr/lib/systemd/catalog"
    place.mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    shutil.copy(CATALOG, place)
    done = subprocess.run(
        ["journalctl", "--update-catalog", f"--root={tmp_path}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert (tmp_path / "var/lib/systemd/catalog/database").stat().st_size > 1000


def test_a_long_text_is_cut_before_it_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with thousands of command lines of control characters would use up a release's time."""
    lengths: list[int] = []
    real = audit.entry.escape
    monkeypatch.setattr(audit.entry, "escape", lambda text: lengths.append(len(text)) or real(text))
    text = audit.entry._text("\x01" * 16_000)
    assert len(text) == audit.entry.MAX_TEXT and text.endswith("…") and max(lengths) <= audit.entry.MAX_TEXT + 1
    assert audit.entry._text("x" * audit.entry.MAX_TEXT) == "x" * audit.entry.MAX_TEXT
