"""pve-gpu-hostd as systemd runs it: socket activation, sandbox, restart, watchdog, a real journal, a real varlinkctl.

PGR_SUITE=trixie runs the same on Debian 13.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.node import Container, VirtualNode, wait_exit
from tests.node.standin import GpuHolder

pytestmark = [pytest.mark.node, pytest.mark.smoke]
SERVICE = "pve-gpu-hostd.service"
SOCKET = "/run/pve-gpu-release/io.pve.GpuRelease"
IFACE = "io.pve.GpuRelease"
CONFIG = "/etc/pve-gpu-release/config.yaml"
ONE_GPU = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")


class World:
    def __init__(self, node: VirtualNode) -> None:
        self.node = node
        node.install_product()
        self.ct: Container = node.add_container(129, gpus=(0, 1), init="tiny")
        self.ct.start()
        self.default = node.read(CONFIG)
        self.cursor = node.cursor()

    def hold(self, **fields: Any) -> GpuHolder:
        return self.ct.hold(**{"open": ONE_GPU, "alloc": ("50:4096:compute",), **fields})

    @property
    def main_pid(self) -> int:
        return int(self.node.unit(SERVICE, "MainPID")["MainPID"])

    def active(self) -> bool:
        return self.node.unit(SERVICE, "ActiveState")["ActiveState"] == "active"

    def entries(self, event: str, **matches: str) -> list[dict[str, Any]]:
        return self.node.journal(since=self.cursor, PVE_GPU_RELEASE_EVENT=event, **matches)

    def release(self, *words: str, status: int = 0) -> dict[str, Any]:
        done = self.node.run(["pve-gpu-release", "129", "--json", *words], check=False)
        assert done.returncode == status, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report


@pytest.fixture(scope="module")
def module_world(require_virtual_node: None) -> Iterator[World]:
    with VirtualNode() as node:
        yield World(node)


@pytest.fixture
def world(module_world: World) -> Iterator[World]:
    """The daemon is stopped, the socket listens; afterwards everything is as before."""
    node = module_world.node
    node.systemctl("stop", SERVICE)
    node.systemctl("reset-failed")
    node.systemctl("start", "pve-gpu-hostd.socket")
    module_world.cursor = node.cursor()
    yield module_world
    node.standin.close()
    node.clear_control()
    if node.read(CONFIG) != module_world.default:
        node.write(CONFIG, module_world.default)
    dropin = f"/run/systemd/system/{SERVICE}.d"
    if node.exists(dropin):
        node.run(["rm", "-r", dropin])
        node.systemctl("daemon-reload")


def varlink(world: World, *words: str) -> str:
    if not world.node.exists("/usr/bin/varlinkctl"):
        pytest.skip("varlinkctl comes with systemd 257 (Debian 13)")
    return world.node.run(["varlinkctl", *words]).stdout


# --- activation ---


def test_the_first_question_starts_it(world: World) -> None:
    assert not world.active()
    done = world.node.run(["pve-gpu-release", "status", "--json"])
    status = json.loads(done.stdout)
    assert status["daemon"]["pid"] == world.main_pid and world.active()
    assert world.node.unit(SERVICE, "StatusText")["StatusText"] == "idle"
    mode = world.node.run(["stat", "-c", "%a %U %F", SOCKET, "/run/pve-gpu-release"]).stdout
    assert mode == "600 root socket\n700 root directory\n"


def test_the_sandbox_lets_it_see_everything(world: World) -> None:
    holder = world.hold()
    report = world.release("--now")
    assert report["holders"][0]["pid"] == holder.pid and sorted(report["holders"][0]["evidence"]) == ["fd", "nvml"]


def test_varlinkctl_introspects_and_calls(world: World) -> None:
    assert "method Release(" in varlink(world, "introspect", SOCKET, IFACE)
    assert json.loads(varlink(world, "call", "-j", SOCKET, f"{IFACE}.Status", "{}"))["driver"]["nvml"] == "ok"
    holder = world.hold()
    said = varlink(world, "call", "-j", "--more", SOCKET, f"{IFACE}.Release", '{"vmid": 129, "options": {"now": true}}')
    replies = [json.loads(line) for line in said.replace("\x1e", "").splitlines() if line.strip()]
    assert [r["progress"]["event"] for r in replies[:-1]].count("rung_begun") == 1
    assert replies[-1]["report"]["reason"] == "released" and not holder.alive()
    assert IFACE in varlink(world, "info", SOCKET)


# --- the trail ---


def test_a_release_is_in_the_journal_and_its_story_can_be_told(world: World) -> None:
    holder = world.hold(argv=("VLLM::EngineCore",), comm="VLLM::EngineCor")
    report = world.release()
    mine = {"PVE_GPU_RELEASE_ID": report["release_id"]}
    assert world.entries("release-finished", PVE_VMID="129", VERDICT="released", **mine)
    assert world.entries("holder-found", HOLDER_PID=str(holder.pid), **mine)
    plain = world.node.run(["journalctl", "PVE_VMID=129", "--no-pager", "-q"]).stdout
    assert "1 holder released, memory verified on GPU 0" in plain
    explained = world.node.run(["journalctl", "-x", "PVE_VMID=129", "--no-pager", "-q"]).stdout
    assert "Defined-By: pve-gpu-release" in explained and "Release of container 129 has ended: released" in explained
    story = world.node.run(["pve-gpu-release", "explain", report["release_id"]]).stdout
    assert "VLLM::EngineCor" in story and "verdict: released" in story
    assert report["release_id"][:8] in world.node.run(["pve-gpu-release", "log", "129"]).stdout


HOSTILE = "x\nPVE_VMID=1\n"
FIELDS = "\nPVE_VMID=666\nVERDICT=released\nMESSAGE=forged\nPRIORITY=0\n\x1b[2Jbye\x07"


def test_a_process_named_like_a_field_forges_nothing(world: World) -> None:
    world.hold(argv=("python3", FIELDS, "MESSAGE_ID=0"), comm=HOSTILE)
    report = world.release()
    assert report["holders"][0]["comm"] == HOSTILE
    entries = world.node.journal(since=world.cursor, PVE_GPU_RELEASE_ID=report["release_id"])
    assert len(entries) >= 6
    for entry in entries:
        assert entry["PVE_VMID"] == "129", entry
        assert isinstance(entry["MESSAGE"], str) and entry["MESSAGE"].isprintable(), entry
        assert entry["MESSAGE"] != "forged" and entry["PRIORITY"] != "0"
    assert not world.node.journal(since=world.cursor, PVE_VMID="666")
    assert not world.node.journal(since=world.cursor, PVE_VMID="1")
    assert {e.get("VERDICT") for e in entries} == {None, "released"}
    for verb in (["log", "129"], ["explain", report["release_id"]]):
        said = world.node.run(["pve-gpu-release", *verb]).stdout
        assert all(line.isprintable() for line in said.splitlines()), said


def test_an_entry_of_somebody_else_is_not_believed(world: World) -> None:
    """Anybody may write `PVE_VMID=129` into the journal; `log` goes by the sender that journald saw."""
    forge = (
        "from systemd.journal import send; send('container 129: nothing to see', PVE_VMID='129', VERDICT='released',"
        " PVE_GPU_RELEASE_EVENT='release-finished', PVE_GPU_RELEASE_ID='%s', SYSLOG_IDENTIFIER='pve-gpu-release')"
    )
    report = world.release()
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    world.node.run([*as_nobody, "/usr/bin/python3", "-c", forge % report["release_id"]])
    assert world.node.journal(since=world.cursor, MESSAGE="container 129: nothing to see")
    assert "nothing to see" not in world.node.run(["pve-gpu-release", "log", "129"]).stdout
    assert "nothing to see" not in world.node.run(["pve-gpu-release", "explain", report["release_id"]]).stdout


def test_a_journald_that_restarts_in_the_middle_loses_nothing(world: World) -> None:
    holder = world.hold(ignore_term=True)
    running = world.node.popen(["pve-gpu-release", "129", "--grace", "1", "--json"])
    world.node.wait_until(lambda: world.entries("rung-begun", RUNG="term"), "the TERM rung")
    world.node.systemctl("restart", "systemd-journald.service")
    out, err = running.communicate()
    assert json.loads(out)["reason"] == "released", err
    holder.wait_gone()
    release_id = json.loads(out)["release_id"]
    world.node.wait_until(lambda: world.entries("release-finished", PVE_GPU_RELEASE_ID=release_id), "the last entry")
    assert len(world.entries("rung-done", PVE_GPU_RELEASE_ID=release_id)) == 2


def test_a_journald_that_is_stopped_stops_nothing(world: World) -> None:
    world.node.run(["pve-gpu-release", "status"])
    units = ["systemd-journald.socket", "systemd-journald-dev-log.socket", "systemd-journald.service"]
    world.node.systemctl("stop", *units, check=False)
    try:
        holder = world.hold()
        begun = time.monotonic()
        world.release("--now")
        assert time.monotonic() - begun < 20
        holder.wait_gone()
    finally:
        world.node.systemctl("start", *units)
    world.node.run(["pve-gpu-release", "status"])
    world.hold()
    report = world.release("--now")
    world.node.wait_until(
        lambda: world.entries("release-finished", PVE_GPU_RELEASE_ID=report["release_id"]), "it writes again"
    )


# --- its end ---


def kill_after_term(world: World, *words: str) -> tuple[Any, GpuHolder, int]:
    """A release in the middle of its TERM rung; (command, holder, pid of the daemon)."""
    holder = world.hold(ignore_term=True)
    running = world.node.popen(["pve-gpu-release", "129", "--grace", "1.5", "--json", *words])
    world.node.wait_until(lambda: world.entries("rung-begun", RUNG="term"), "the TERM rung")
    return running, holder, world.main_pid


def test_killed_in_the_middle_systemd_restarts_it_and_the_caller_goes_on(world: World) -> None:
    running, holder, before = kill_after_term(world)
    world.node.run(["kill", "-9", str(before)])
    out, err = running.communicate()
    report = json.loads(out)
    assert report["reason"] == "released", err
    holder.wait_gone()
    world.node.wait_until(lambda: world.active() and world.main_pid not in (0, before), "the new daemon")
    assert len(world.entries("release-resumed", PVE_GPU_RELEASE_ID=report["release_id"])) == 1
    assert len(world.entries("release-finished", PVE_GPU_RELEASE_ID=report["release_id"])) == 1
    terms = [e for e in world.entries("rung-done", PVE_GPU_RELEASE_ID=report["release_id"]) if e["RUNG"] == "term"]
    assert sum(int(e["SENT"]) for e in terms) == 0, "the first attempt sent it, and was killed before it could say so"
    story = world.node.run(["pve-gpu-release", "explain", report["release_id"]]).stdout
    assert "cut off at term, begun" in story and "verdict: released" in story


def test_killed_with_its_caller_the_restarted_one_finishes(world: World) -> None:
    running, holder, before = kill_after_term(world)
    world.node.run(["kill", "-9", str(before), str(running.pid)])
    running.communicate()
    holder.wait_gone()
    world.node.wait_until(lambda: world.entries("release-finished", VERDICT="released"), "the verdict", 60)
    (resumed,) = world.entries("release-resumed")
    assert resumed["_SYSTEMD_UNIT"] == SERVICE


def test_stopped_in_the_middle_it_hands_over(world: World) -> None:
    running, holder, _ = kill_after_term(world)
    begun = time.monotonic()
    world.node.systemctl("stop", SERVICE)
    assert time.monotonic() - begun < 20
    out, err = running.communicate()
    assert json.loads(out)["reason"] == "released", err
    holder.wait_gone()
    assert world.node.unit(SERVICE, "Result")["Result"] == "success"
    assert world.entries("release-finished", REASON="interrupted"), "the trail says who stopped it"
    assert world.entries("daemon-stopped")


def test_a_daemon_that_stands_still_is_ended_by_the_watchdog(world: World) -> None:
    world.node.write(f"/run/systemd/system/{SERVICE}.d/w.conf", "[Service]\nWatchdogSec=2s\n")
    world.node.systemctl("daemon-reload")
    running, holder, before = kill_after_term(world)
    host_pid = world.node.host_pid(before)
    os.kill(host_pid, signal.SIGSTOP)
    assert wait_exit(host_pid, 20)
    out, err = running.communicate()
    assert json.loads(out)["reason"] == "released", err
    holder.wait_gone()
    world.node.wait_until(lambda: world.active() and world.main_pid not in (0, before), "the new daemon")


# --- configuration ---


def test_reload_with_a_typo_keeps_the_last_good_one(world: World) -> None:
    world.node.run(["pve-gpu-release", "status"])
    world.node.write(CONFIG, "ladder: {grace: ten}\n")
    world.node.systemctl("reload", SERVICE)
    text = world.node.unit(SERVICE, "StatusText")["StatusText"]
    assert "configuration broken, the last good one is in force" in text and "ladder.grace" in text
    assert "last good one is in force" in world.node.run(["pve-gpu-release", "status"]).stdout
    world.hold()
    world.release("--now")
    world.node.write(CONFIG, world.default)
    world.node.systemctl("reload", SERVICE)
    assert world.node.unit(SERVICE, "StatusText")["StatusText"] == "idle"
    assert world.entries("config-failed") and world.entries("config-loaded")


def test_a_fresh_start_refuses_a_typo_and_comes_back_when_it_is_gone(world: World) -> None:
    world.node.write(CONFIG, "ladder: {grace: ten}\n")
    for _ in range(6):
        done = world.node.run(["pve-gpu-release", "129"], check=False)
        assert done.returncode == 2 and "ladder.grace" in done.stdout + done.stderr
    assert not world.active()
    world.node.write(CONFIG, world.default)
    world.node.wait_until(
        lambda: json.loads(world.node.run(["pve-gpu-release", "status", "--json"]).stdout)["daemon"], "the daemon", 30
    )
    assert world.active()


# --- idleness ---


def test_idle_it_is_one_small_process_that_sleeps(world: World) -> None:
    world.hold()
    world.release("--now")
    unit = f"system.slice/{SERVICE}"
    world.node.wait_until(lambda: len(world.node.host_processes(unit)) == 1, "it is alone", 60)
    (pid,) = world.node.host_processes(unit)
    world.node.wait_until(lambda: not _sockets_of_clients(pid), "its clients are gone", 60)
    assert not [fd for fd in os.listdir(f"/proc/{pid}/fd") if "nvidia" in os.readlink(f"/proc/{pid}/fd/{fd}")]
    pss = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    assert int(pss.split()[1]) <= 25 << 10, pss
    before = Path(f"/proc/{pid}/schedstat").read_text()
    time.sleep(5)  # that nothing happens is the point
    assert Path(f"/proc/{pid}/schedstat").read_text() == before


def _sockets_of_clients(pid: int) -> bool:
    """More sockets than the listener, stdout and stderr."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return len({link for link in links if link.startswith("socket:")}) > 3
