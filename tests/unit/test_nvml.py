"""The NVML child against the stand-in library: the real pynvml, real forks, real hangs, in the embedded node.

The code under test runs in the node, in a process of its own; what it assigns to `out` comes back as JSON.
`PVE_GPU_RELEASE_TEST_PYTHON` names another interpreter for it (another Python or pynvml version).
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.system.nvml import Wedged, parse_lock_record, read_wedged
from tests.embedded.fixtures import make_node, node, nothing_left_behind, require_node  # noqa: F401
from tests.embedded.node import Node

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PVE_GPU_RELEASE_TEST_PYTHON", sys.executable)
GPU0, GPU1 = "GPU-6a1f0e52-93c4-4d0b-8f2e-0d5c7b1a2e50", "GPU-c07d94b1-2e8a-47f6-b3d9-51f0a6e83c51"

embedded = [pytest.mark.embedded, pytest.mark.root]

PREAMBLE = f"""
import json, os, select, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from hostd.system.nvml import Nvml, read_wedged
LOCK = "/run/nvml.lock"
GPU0, GPU1 = {GPU0!r}, {GPU1!r}
out = {{}}

def control(text):
    with open("/run/nvidia-standin/control.new", "w") as file:
        file.write(text + "\\n")
    os.rename("/run/nvidia-standin/control.new", "/run/nvidia-standin/control")

def spots(blind_spots):
    return [[spot.code, spot.what, spot.error] for spot in blind_spots]

def codes(answer):
    return [spot.code for spot in answer.blind_spots]

def children():
    return open(f"/proc/self/task/{{os.getpid()}}/children").read().split()

def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "not within 20 s"
        time.sleep(0.001)
"""


@pytest.fixture
def inside(node: Node) -> Callable[..., dict[str, Any]]:  # noqa: F811
    """Runs code in the node and returns its `out`."""
    return lambda code, **options: run_inside(node, code, **options)


def run_inside(node: Node, code: str, **options: Any) -> dict[str, Any]:  # noqa: F811
    end = "\nassert not children(), children()\nprint(json.dumps(out, default=sorted))"
    done = node.run([PYTHON, "-c", PREAMBLE + code + end], **options)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# --- what a GPU says -------------------------------------------------------------------------------------------------


class TestSnapshot:
    pytestmark = embedded

    def test_figures_identity_and_clients_of_every_gpu(self, node, inside):  # noqa: F811
        ct = node.container(129)
        holder = ct.spawn_holder(open=("/dev/nvidia0", "/dev/nvidiactl"), alloc=("50:42759:compute",))
        both = ct.spawn_holder(open=("/dev/nvidia1", "/dev/nvidiactl"), alloc=("51:100:compute,mps",))
        node.control(recovery_action=1, bar1_used_mib=7, ghost_mib={51: 3})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    seen = nvml.snapshot()
out["complete"], out["driver"] = seen.complete, seen.driver_version
out["infos"] = [[g.info.index, g.info.minor, g.info.uuid, g.info.pci_bus_id] for g in seen.gpus]
out["figures"] = [[g.used_mib, g.reserved_mib, g.total_mib, g.bar1_used_mib, g.recovery_action] for g in seen.gpus]
out["clients"] = [[[c.pid, c.used_mib, sorted(c.kinds)] for c in g.clients] for g in seen.gpus]
""")
        assert out["complete"] and out["driver"] == "580.159"
        assert out["infos"] == [[0, 50, GPU0, "0000:18:00.0"], [1, 51, GPU1, "0000:3b:00.0"]]
        assert out["figures"] == [[42759, 615, 143771, 7, 1], [103, 615, 143771, 7, 1]]
        assert out["clients"] == [[[holder.pid, 42759, ["compute"]]], [[both.pid, 100, ["compute", "mps"]]]]

    def test_each_pid_counts_once_with_its_largest_figure(self, node, inside):  # noqa: F811
        node.control(extra_clients={50: "4711:100:compute 4711:300:mps 4711:200:graphics"})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    out["clients"] = [[c.pid, c.used_mib, sorted(c.kinds)] for c in nvml.snapshot().gpus[0].clients]
""")
        assert out["clients"] == [[4711, 300, ["compute", "graphics", "mps"]]]

    def test_pids_that_cannot_be_are_put_aside(self, node, inside):  # noqa: F811
        node.control(extra_clients={50: "0:5:compute 1:5:compute 4194303:5:compute 4194304:5:mps 4294967295:5:compute"})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    gpu = nvml.snapshot().gpus[0]
out["clients"], out["odd"] = [c.pid for c in gpu.clients], gpu.implausible_pids
""")
        assert out == {"clients": [4194303], "odd": [0, 1, 4194304, 4294967295]}

    def test_a_list_that_grows_between_two_calls_is_read_whole(self, node, inside):  # noqa: F811
        node.control(extra_clients={50: "4711:1:compute"}, grow=900, grow_times=3)
        out = inside("""
with Nvml(5, LOCK) as nvml:
    seen = nvml.snapshot()
out["pids"], out["spots"] = len(seen.gpus[0].clients), spots(seen.blind_spots)
""")
        assert out["spots"] == [] and out["pids"] >= 901

    def test_a_list_that_never_fits_is_a_blind_spot_and_not_a_loop(self, node, inside):  # noqa: F811
        node.control(error="nvmlDeviceGetComputeRunningProcesses=7", extra_clients={50: "4711:1:mps"})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    seen = nvml.snapshot()
out["spots"], out["complete"] = spots(seen.blind_spots), seen.complete
out["clients"] = [c.pid for c in seen.gpus[0].clients]
""")
        assert len(out["spots"]) == 2 and "grew faster" in out["spots"][0][2]
        assert not out["complete"] and out["clients"] == [4711]

    def test_a_reply_larger_than_a_pipe(self, node, inside):  # noqa: F811
        node.control(grow=4000)
        out = inside("""
with Nvml(5, LOCK) as nvml:
    out["pids"] = len(nvml.snapshot().gpus[0].clients)
""")
        assert out["pids"] == 4000

    def test_without_figure_of_one_client(self, node, inside):  # noqa: F811
        node.control(extra_clients={50: "4711:100:compute 4712:100:compute"}, memory_na={50: "4711"})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    gpu = nvml.snapshot().gpus[0]
out["clients"], out["code"] = {c.pid: c.used_mib for c in gpu.clients}, gpu.error_code
""")
        assert out == {"clients": {"4711": None, "4712": 100}, "code": "figures-unavailable"}

    def test_a_figure_larger_than_the_gpu_is_none(self, node, inside):  # noqa: F811
        """Believed, it would account for any amount of ghost memory."""
        node.control(extra_clients={50: "4711:200000:compute 4712:100:compute"})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    gpu = nvml.snapshot().gpus[0]
out["clients"], out["code"] = {c.pid: c.used_mib for c in gpu.clients}, gpu.error_code
""")
        assert out == {"clients": {"4711": None, "4712": 100}, "code": "figures-unavailable"}

    def test_mig_gives_no_figures_and_the_other_gpu_does(self, node, inside):  # noqa: F811
        node.control(mig={51: 1})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    seen = nvml.snapshot()
    out["memory"] = nvml.memory([GPU0, GPU1])
out["gpus"] = [[g.mig, g.used_mib, g.error_code, bool(g.error)] for g in seen.gpus]
""")
        assert out["gpus"] == [[False, 0, "", False], [True, None, "figures-unavailable", True]]
        assert out["memory"] == {GPU0: 0, GPU1: None}

    def test_an_old_driver_has_other_lists_and_only_v1_memory(self, make_node):  # noqa: F811
        old = make_node(nvml="old")
        old.control(extra_clients={50: "4711:100:compute,mps"})
        out = run_inside(
            old,
            """
with Nvml(5, LOCK) as nvml:
    seen = nvml.snapshot()
    out["memory"] = nvml.memory([GPU0])
gpu = seen.gpus[0]
out["figures"] = [gpu.used_mib, gpu.reserved_mib, gpu.error_code, gpu.error]
out["clients"] = [[c.pid, c.used_mib, sorted(c.kinds)] for c in gpu.clients]
out["spots"] = spots(seen.blind_spots)
""",
        )
        assert out["figures"] == [615, None, "memory-v1", ""]
        assert out["memory"] == {GPU0: 615}
        assert out["clients"] == [[4711, 100, ["compute", "mps"]]]
        assert out["spots"] == []

    @pytest.mark.parametrize("when", ["before nvmlInit", "after it"])
    def test_a_lost_gpu_and_the_others_still_answer(self, inside, when):
        out = inside(f"""
nvml = Nvml(5, LOCK)
if {when == "after it"}:
    nvml.snapshot()
control("lost.51 1")
seen = nvml.snapshot()
out["gpus"] = [[g.info.index, g.used_mib, g.error_code, bool(g.error)] for g in seen.gpus]
out["complete"], out["spots"] = seen.complete, spots(seen.blind_spots)
out["memory"], out["memory_spots"] = nvml.memory([GPU0, GPU1]), len(nvml.blind_spots)
nvml.close()
""")
        assert out["gpus"] == [[0, 0, "", False], [1, None, "gpu-lost", True]]
        assert not out["complete"] and out["spots"] == []
        assert out["memory"] == {GPU0: 0, GPU1: None}

    def test_links_between_gpus_only_when_asked(self, node, inside):  # noqa: F811
        node.control(nvlink="50:51")
        out = inside("""
with Nvml(5, LOCK) as nvml:
    out["peers"] = [[g.nvlink_peers for g in nvml.snapshot(nvlink=asked).gpus] for asked in (False, True)]
""")
        assert out["peers"] == [[[], []], [["0000:3b:00.0"], ["0000:18:00.0"]]]

    def test_persistence_and_recovery_action(self, node, inside):  # noqa: F811
        node.control(recovery_action={50: 2, 51: -1})
        out = inside("""
with Nvml(5, LOCK) as nvml:
    before = nvml.snapshot(uuids=[GPU0]).gpus[0].persistence_mode
    failure = nvml.set_persistence(GPU0, True)
    out["mode"] = [before, failure, nvml.snapshot(uuids=[GPU0]).gpus[0].persistence_mode]
    out["unknown"] = nvml.set_persistence("GPU-none", True).code
    out["actions"] = nvml.recovery_actions()
""")
        assert out["mode"] == [False, None, True]
        assert out["unknown"] == "gpu-lost"
        assert out["actions"] == {GPU0: 2, GPU1: None}


# --- when there is no answer -----------------------------------------------------------------------------------------


class TestNoAnswer:
    pytestmark = embedded

    @pytest.mark.parametrize(
        ("settings", "code"),
        [("error nvmlInit=18", "driver-mismatch"), ("error nvmlInit=9", "driver-not-loaded"),
         ("error nvmlInit=999", "driver-silent"), ("error *=18", "driver-mismatch")],
    )  # fmt: skip
    def test_an_error_about_everything_has_its_code_and_passes_when_the_driver_is_mended(self, inside, settings, code):
        out = inside(f"""
control({settings!r})
nvml = Nvml(5, LOCK)
nvml.start()
seen = nvml.snapshot()
out["codes"], out["gpus"], out["pid"] = codes(seen), seen.gpus, nvml.pid
out["memory"] = nvml.memory([GPU0])
control("")
out["later"], out["same child"] = len(nvml.snapshot().gpus), nvml.pid == out.pop("pid")
nvml.close()
""")
        assert out == {"codes": [code], "gpus": [], "memory": {GPU0: None}, "later": 2, "same child": True}

    def test_no_library(self, make_node):  # noqa: F811
        out = run_inside(
            make_node(nvml="none"),
            """
with Nvml(5, LOCK) as nvml:
    out["codes"] = codes(nvml.snapshot())
""",
        )
        assert out["codes"] == ["nvml-missing"]

    def test_no_pynvml(self, inside):
        out = inside("""
sys.modules["pynvml"] = None
with Nvml(5, LOCK) as nvml:
    out["codes"] = codes(nvml.snapshot())
""")
        assert out["codes"] == ["nvml-missing"]

    def test_a_broken_pynvml(self, inside, node):  # noqa: F811
        node.write("/run/broken/pynvml.py", "raise RuntimeError('half an upgrade')")
        out = inside("""
sys.path.insert(0, "/run/broken")
with Nvml(5, LOCK) as nvml:
    out["spots"] = spots(nvml.snapshot().blind_spots)
""")
        ((code, _, error),) = out["spots"]
        assert code == "nvml-missing" and "half an upgrade" in error

    def test_a_hang_ends_at_the_deadline_and_the_next_request_starts_afresh(self, inside):
        out = inside("""
nvml = Nvml(0.3, LOCK)
nvml.snapshot()
first = nvml.pid
control("hang nvmlDeviceGetMemoryInfo")
begin = time.monotonic()
out["memory"], out["codes"] = nvml.memory([GPU0]), codes(nvml)
out["took"] = time.monotonic() - begin
out["gone"] = not os.path.exists(f"/proc/{first}") and not nvml.alive
control("")
out["later"] = len(nvml.snapshot().gpus)
nvml.close()
""")
        assert out["memory"] == {GPU0: None} and out["codes"] == ["driver-silent"]
        assert 0.3 <= out["took"] < 20 and out["gone"]
        assert out["later"] == 2

    def test_a_crash_says_how_and_is_tried_once_more_but_no_storm(self, inside):
        out = inside("""
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
control("crash nvmlDeviceGetMemoryInfo")
nvml = Nvml(5, LOCK)
pids = []
for _ in range(4):
    nvml.start()
    pids.append(nvml.pid)
    out.setdefault("spots", []).append(spots(nvml.snapshot().blind_spots)[0])
out["children"] = len(set(pids) - {None})
nvml.close()
""")
        assert out["children"] == 2
        assert [code for code, _, _ in out["spots"]] == ["driver-silent"] * 4
        assert "Segmentation fault" in out["spots"][0][2]
        assert "not tried again yet" in out["spots"][2][2]

    def test_a_child_killed_between_two_requests_is_replaced(self, inside):
        out = inside("""
nvml = Nvml(5, LOCK)
nvml.snapshot()
os.kill(nvml.pid, signal.SIGKILL)
wait_for(lambda: not nvml.alive)
out["gpus"] = len(nvml.snapshot().gpus)
nvml.close()
""")
        assert out["gpus"] == 2

    def test_a_child_in_d_state_is_abandoned_shown_and_not_added_to(self, node, inside):  # noqa: F811
        frozen = node.frozen_fs()
        node.control(hang_d="nvmlDeviceGetMemoryInfo", hang_d_path=frozen.path("x"))
        out = inside(f"""
import fcntl
disk = os.open({frozen.inside!r}, os.O_RDONLY)
fcntl.ioctl(disk, 0xC0045877, 0)  # FIFREEZE
nvml = Nvml(0.3, LOCK)
nvml.start()
stuck = nvml.pid
out["codes"] = codes(nvml.snapshot())
begin = time.monotonic()
out["again"], out["new child"] = spots(nvml.snapshot().blind_spots)[0], nvml.alive
out["at once"] = time.monotonic() - begin < 0.1
out["children"] = children() == [str(stuck)]
wedged = read_wedged(LOCK, older_than_s=0.2)
out["wedged"] = [wedged.pid == stuck, wedged.call, wedged.age_s > 0.2, abs(time.time() - wedged.since) < 60]
out["too young"] = read_wedged(LOCK, older_than_s=60)
other = os.fork()  # another process of the node: it does not join the queue either
if not other:
    from hostd.system import nvml as module
    module._abandoned.clear()
    with Nvml(0.2, LOCK) as mine:
        text = mine.snapshot().blind_spots[0].error
        os._exit(0 if f"pid {{stuck}} has been in snapshot" in text and mine.pid is None else 1)
out["other"] = os.waitpid(other, 0)[1]
nvml.close()
fcntl.ioctl(disk, 0xC0045878, 0)  # FITHAW
os.close(disk)
wait_for(lambda: open(f"/proc/{{stuck}}/stat").read().rpartition(")")[2].split()[0] == "Z")
control("")
out["recovered"], out["lock"] = len(nvml.snapshot().gpus), read_wedged(LOCK, 0)
nvml.close()
""")
        assert out["codes"] == ["driver-silent"]
        assert out["again"][0] == "driver-silent" and "stuck in the driver" in out["again"][2]
        assert not out["new child"] and out["at once"] and out["children"]
        assert out["wedged"] == [True, "snapshot", True, True] and out["too young"] is None
        assert out["other"] == 0
        assert out["recovered"] == 2 and out["lock"] is None

    def test_waiting_for_the_lock_is_part_of_the_deadline_and_such_a_child_dies_at_once(self, inside):
        out = inside("""
import fcntl
held = os.open(LOCK, os.O_RDWR | os.O_CREAT)
fcntl.flock(held, fcntl.LOCK_EX)
nvml = Nvml(0.2, LOCK)
begin = time.monotonic()
out["codes"] = codes(nvml.snapshot())
out["took"] = time.monotonic() - begin
out["children"] = children()
os.close(held)
out["later"] = len(nvml.snapshot().gpus)
nvml.close()
""")
        assert out["codes"] == ["driver-silent"] and 0.2 <= out["took"] < 20
        assert out["children"] == [] and out["later"] == 2

    @pytest.mark.parametrize("lock", ["/run/not-there/nvml.lock", "/proc/nvml.lock", "/run"])
    def test_work_goes_on_without_a_lock_file(self, inside, lock):
        out = inside(f"""
with Nvml(5, {lock!r}) as nvml:
    out["gpus"] = len(nvml.snapshot().gpus)
out["wedged"] = read_wedged({lock!r}, 0)
""")
        assert out == {"gpus": 2, "wedged": None}


# --- the child as a process ------------------------------------------------------------------------------------------


class TestChild:
    pytestmark = embedded

    def test_it_holds_nothing_of_ours_and_only_the_driver_once_it_was_asked(self, inside):
        out = inside(
            """
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
read, write = os.pipe()
os.set_inheritable(write, True)
nvml = Nvml(5, LOCK)
nvml.start(init=False)
def targets():
    links = [f"/proc/{nvml.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{nvml.pid}/fd")]
    try:
        return sorted(os.readlink(link).split(":")[0] for link in links)
    except FileNotFoundError:
        return []
wait_for(lambda: targets() == ["/dev/null"] * 3 + ["pipe"] * 2)
nvml.snapshot()
out["asked"] = targets()
status = dict(line.split(":", 1) for line in open(f"/proc/{nvml.pid}/status").read().splitlines())
out["caught"], out["blocked"] = int(status["SigCgt"], 16) & (1 << 14), int(status["SigBlk"], 16)
out["session"] = os.getsid(nvml.pid) == nvml.pid
out["cwd"] = os.readlink(f"/proc/{nvml.pid}/cwd")
nvml.close()
links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
out["ours"] = [os.readlink(link) for link in links if os.path.lexists(link) and "nvidia" in os.readlink(link)]
""",
            cwd="/run",
        )
        assert out["asked"] == ["/dev/null"] * 3 + ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"] + ["pipe"] * 2
        assert out["caught"] == 0 and out["blocked"] == 0 and out["session"] and out["cwd"] == "/"
        assert out["ours"] == []

    def test_it_dies_with_its_parent(self, inside):
        out = inside(
            """
control("hang nvmlInit")
read, write = os.pipe()
parent = os.fork()
if not parent:
    nvml = Nvml(5, LOCK)
    nvml.start()
    os.write(write, b"%d" % nvml.pid)
    signal.pause()
child = int(os.read(read, 20))
os.kill(parent, signal.SIGKILL)
os.waitpid(parent, 0)
wait_for(lambda: not os.path.exists(f"/proc/{child}"))
""",
            timeout=30,
        )
        assert out == {}

    def test_closing_gives_back_every_descriptor_and_ends_a_busy_child_at_once(self, inside):
        out = inside("""
def descriptors():
    return len(os.listdir("/proc/self/fd"))
with Nvml(5, LOCK) as nvml:
    nvml.snapshot()
before = descriptors()
for hang in ("", "hang nvmlShutdown", "hang nvmlDeviceGetCount"):
    control(hang)
    nvml = Nvml(5, LOCK)
    begin = time.monotonic()
    if "Count" in hang:
        nvml.send_snapshot_request()
    elif hang:
        nvml.snapshot()
    nvml.close(0.1)
    nvml.close()
    out.setdefault("quick", []).append(time.monotonic() - begin < 1)
    out.setdefault("children", []).append(children())
out["leaked"] = descriptors() - before
""")
        assert out == {"quick": [True] * 3, "children": [[]] * 3, "leaked": 0}

    def test_an_answer_can_be_waited_for_beside_other_events(self, inside):
        out = inside("""
control("delay nvmlDeviceGetMemoryInfo\\ndelay_ms 50")
nvml = Nvml(5, LOCK)
nvml.send_memory_request([GPU0])
out["pending"], poll = [nvml.pending], select.poll()
poll.register(nvml.fileno(), select.POLLIN)
out["early"] = poll.poll(0)
out["left"] = 4 < nvml.left_s <= 5
out["event"] = len(poll.poll(10000))
out["memory"] = nvml.receive_memory()
out["pending"].append(nvml.pending)
# an answer that nobody fetched is never taken for the next one
nvml.send_memory_request([GPU0])
control("ghost_mib.50 77")
nvml.send_memory_request([GPU0])
out["fresh"] = nvml.receive_memory()
nvml.send_snapshot_request()
out["crossed"] = [nvml.receive_memory(), len(nvml.receive_snapshot().gpus)]
nvml.close()
""")
        assert out["pending"] == [True, False] and out["early"] == [] and out["left"] and out["event"] == 1
        assert out["memory"] == {GPU0: 0} and out["fresh"] == {GPU0: 77}
        assert out["crossed"] == [{GPU0: 77}, 2]

    def test_a_dead_child_wakes_the_poll(self, inside):
        out = inside("""
control("hang nvmlInit")
nvml = Nvml(5, LOCK)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
nvml.send_memory_request([GPU0])
os.kill(nvml.pid, signal.SIGKILL)
poll = select.poll()
poll.register(nvml.fileno(), select.POLLIN)
out["event"] = len(poll.poll(10000))
out["memory"], out["spots"] = nvml.receive_memory(), spots(nvml.blind_spots)
nvml.close()
""")
        assert out["event"] == 1 and out["memory"] == {GPU0: None}
        assert out["spots"][0][0] == "driver-silent" and "Killed" in out["spots"][0][2]

    def test_closed_standard_streams_do_no_harm(self, inside):
        out = inside("""
saved = os.dup(1)
for fd in (0, 1, 2):
    os.close(fd)
with Nvml(5, LOCK) as nvml:
    out["gpus"] = len(nvml.snapshot().gpus)
os.dup2(saved, 1)
os.dup2(saved, 2)
""")
        assert out["gpus"] == 2

    def test_five_hundred_looks_leak_nothing(self, inside):
        out = inside("""
nvml = Nvml(5, LOCK)
nvml.snapshot()
def size():
    return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{nvml.pid}/fd"))
before = size()
for _ in range(500):
    nvml.snapshot()
    nvml.memory([GPU0, GPU1])
out["grown"] = [now - then for now, then in zip(size(), before)]
nvml.close()
""")
        assert out["grown"] == [0, 0]


@pytest.mark.embedded
@pytest.mark.root
def test_nothing_is_left_behind(nothing_left_behind, make_node):  # noqa: F811
    with Node() as fresh:
        run_inside(fresh, "with Nvml(5, LOCK) as nvml: nvml.snapshot()")


# --- the lock's record -----------------------------------------------------------------------------------------------


class TestLockRecord:
    def test_is_read(self):
        record = b'{"pid": 4711, "since": 1764533000.5, "boot": 90.0, "call": "nvmlInit"}\n'
        assert parse_lock_record(record, 100.0) == Wedged(4711, 1764533000.5, "nvmlInit", 10.0)

    @given(st.binary())
    def test_takes_any_bytes(self, record):
        parse_lock_record(record, 1.0)

    @given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
    def test_takes_any_json(self, value):
        for key in ("pid", "since", "boot", "call"):
            fields = {"pid": 1, "since": 1.0, "boot": 1.0, "call": "x", key: value}
            parse_lock_record(json.dumps(fields).encode(), 1.0)

    @pytest.mark.parametrize(
        ("record", "expected"),
        [(b"", None), (b"{", None), (b'{"pid": 0, "since": 1, "boot": 0, "call": "x"}', None),
         (b'{"pid": %d, "since": 1, "boot": 0, "call": "x"}', "x")],
    )  # fmt: skip
    def test_an_owner_that_cannot_be_is_none(self, tmp_path, record, expected):
        path = tmp_path / "nvml.lock"
        path.write_bytes(record.replace(b"%d", b"%d" % os.getpid()))
        assert read_wedged(str(path), 0) is None  # nobody holds it
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            wedged = read_wedged(str(path), 0)
            assert (wedged.call if wedged else None) == expected
            assert read_wedged(str(path), time.clock_gettime(time.CLOCK_BOOTTIME) + 60) is None
