"""A driver that lies, is silent, hangs, crashes or is not there: holders are still found, "released" is never guessed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.embedded.node import MISMATCH, NO_V2_MEMORY, NOT_LOADED, Container, HolderHandle, Node
from tests.product_command import command

from .conftest import ALL_NODES, ONE_GPU
from .product import Answer, Product, dead, finish, held_mib, lives, parsed, wait_for_rung

Engine = Callable[..., HolderHandle]
OTHERS = {51: 2048}
IMPATIENT = """\
ladder: {grace: 5, kill_grace: 0.8, drain_grace: 0.6, timeout: 30, read_deadline: 0.3}
nvml: {deadline: 0.3}
"""
DEADLINE_S = 60.0
"""The time limit of these releases; "does not hang" means less than that and a generous bit."""


# --- lists that lie --------------------------------------------------------------------------------------------------


@pytest.mark.case("scrambled-list")
def test_pids_in_the_drivers_list_are_no_targets(
    node: Node, product: Product, container: Container, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    """Impossible, dead, of the host, of another container; and of the host's idle process 129 would never own."""
    stranger = node.spawn_holder(argv=("sshd",))
    elsewhere = node.container(140).spawn_holder(argv=("bash",))
    gone = node.spawn_holder(argv=("gone",))
    gone.kill()
    gone.wait_gone()
    holder = engine()
    words = f"0:1:compute 4294967295:5:compute,mps 1:7:compute {gone.pid}:9:compute {stranger.pid}:11:graphics"
    node.control(extra_clients={50: f"{words} {elsewhere.pid}:13:compute {container.init_pid}:0:graphics"})
    answer = product.release(129)
    assert answer.signalled() == {holder.pid}
    assert lives(stranger, elsewhere) and container.init_process.alive()
    assert answer.fates()[container.init_pid] == "spared", (
        "listed, ours, but nothing to be seen: named, never signalled"
    )
    answer.must_be("driver-only-holder")
    node.control(extra_clients={50: f"{words} {elsewhere.pid}:13:compute"})
    second = engine()
    answer = product.release(129).must_be(expected)
    assert answer.signalled() == {second.pid} and lives(stranger, elsewhere)
    assert any("4294967295" in spot["error"] for spot in answer.json["blind_spots"])


def test_a_list_that_hides_a_holder_does_not_hide_it_from_us(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(hide_clients={50: "*"})
    holder = engine()
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {holder.pid} and held_mib(node) == OTHERS


def test_mps_clients_count_once(node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]) -> None:
    engine(alloc=("50:1000:compute,mps",))
    server = engine(alloc=("50:66:compute",), argv=("nvidia-cuda-mps-server",))
    answer = product.release(129).must_be("released")
    assert answer.gpu(50)["used_mib_before"] == 1066 and answer.gpu(50)["ghost_mib"] == 0 and dead(server)


def test_a_list_that_grows_while_it_is_read_is_read_again(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(grow=300, grow_times=1)
    holder = engine()
    answer = product.release(129)
    assert answer.json["verdict"] in ("released", "held") and dead(holder)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_memory_in_flight_of_a_dead_opener_is_no_baseline(
    node: Node, product: Product, container: Container, engine: Engine, shared: bool
) -> None:
    """A child keeps it in a socket, where nobody sees it: what is left when the others are gone may be the container's."""
    if shared:
        node.container(130).spawn_holder(argv=("train",), open=ONE_GPU, alloc=("50:2048:compute",))
    plain = engine(alloc=("50:1000:compute",), open=ONE_GPU)
    hidden = engine(alloc=("50:4000:compute",), open=ONE_GPU, inflight=True, children=1, die=True)
    answer = product.release(129).must_be("ghost-memory")
    assert dead(plain) and hidden.by_role("child")[0].alive() and "4,000 MiB on GPU 0" in answer.message


@pytest.mark.case("in-flight")
def test_a_descriptor_in_flight_is_named_and_never_signalled(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    hidden, open_one = engine(inflight=True, alloc=("50:500:compute",)), engine()
    answer = product.release(129).must_be(expected)
    assert answer.fates() == {hidden.pid: "spared", open_one.pid: "exited"}
    assert answer.holder(hidden.pid)["evidence"] == ["nvml"] and lives(hidden) and dead(open_one)


# --- a driver that is not there --------------------------------------------------------------------------------------


@pytest.mark.case("no-driver")
def test_no_driver_at_all_is_released(make_node: Callable[..., Node], expected: str) -> None:
    with make_node(driver="none") as node:
        node.container(129)
        Product(node).release(129).must_be(expected)


@pytest.mark.case("nvml-absent")
def test_without_the_library_holders_are_ended_and_the_verdict_is_unknown(
    make_node: Callable[..., Node], expected: str
) -> None:
    with make_node(nvml="none") as node:
        product, container = Product(node), node.container(129)
        other = node.container(130).spawn_holder(open=ALL_NODES)
        holder = container.spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",))
        answer = product.release(129).must_be(expected)
        assert answer.signalled() == {holder.pid} and dead(holder) and lives(other) and held_mib(node) == {}
        product.release(129).must_be(expected)  # nothing is held now, and still nobody can say so
        product.release(129, "--no-verify-memory").must_be("memory-not-verified")


@pytest.mark.case("mismatch")
def test_library_and_module_of_different_versions(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    node.control(**MISMATCH)
    holder = engine()
    answer = product.release(129).must_be(expected)
    assert dead(holder) and held_mib(node) == OTHERS and answer.fates() == {holder.pid: "exited"}


def test_the_module_is_not_loaded_but_named_by_proc_devices(product: Product, node: Node, engine: Engine) -> None:
    node.control(**NOT_LOADED)
    holder = engine()
    product.release(129).must_be("driver-silent")
    assert dead(holder)


@pytest.mark.case("accepted")
@pytest.mark.parametrize(
    "trouble", [MISMATCH, {"crash": "nvmlInit"}, {"hang": "nvmlInit"}], ids=["error", "crash", "hang"]
)
def test_no_verify_memory_accepts_what_the_driver_cannot_confirm_and_says_so(
    node: Node, engine: Engine, neighbours: list[HolderHandle], expected: str, trouble: dict[str, str]
) -> None:
    product = Product(node, IMPATIENT)
    node.control(**trouble)
    holder = engine()
    answer = product.release(129, "--no-verify-memory").must_be(expected)
    assert "NOT verified" in answer.message and dead(holder) and held_mib(node) == OTHERS


def test_no_verify_memory_does_not_ignore_ghost_memory_that_the_driver_reports(
    node: Node, product: Product, engine: Engine
) -> None:
    node.control(leak_mib={50: 500})
    engine()
    product.release(129, "--no-verify-memory").must_be("ghost-memory")


def test_without_any_of_the_python_packages(node: Node, engine: Engine, neighbours: list[HolderHandle]) -> None:
    """No pynvml, no yaml, no psutil: holders are ended, the built-in defaults count, the verdict is unknown."""
    Product(node)
    holder = engine()
    python, *words = command()
    done = node.run([python, "-S", *words, "129", "--json"])  # without site-packages
    answer = parsed(done.returncode, done.stdout, done.stderr).must_be("nvml-missing")
    assert dead(holder) and held_mib(node) == OTHERS and "pynvml" in answer.message


def test_an_old_driver_without_v2_memory_and_v3_lists(make_node: Callable[..., Node]) -> None:
    with make_node(nvml="old") as node:
        product = Product(node)
        holder = node.container(129).spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",))
        answer = product.release(129).must_be("released")  # the reserve is in "used" there: no ghost memory
        assert dead(holder) and answer.gpu(50)["used_mib_after"] == 615


def test_the_v1_memory_call_counts_the_reserve_before_and_after(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(**NO_V2_MEMORY)
    other = node.container(140).spawn_holder(open=ONE_GPU, alloc=("50:100:compute",))
    holder = engine()
    product.release(129).must_be("released")
    assert dead(holder) and lives(other)


# --- a GPU that is not there -----------------------------------------------------------------------------------------


@pytest.mark.case("lost-gpu")
@pytest.mark.parametrize("when", ["before", "later"])
def test_a_gpu_off_the_bus_is_unknown(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str, when: str
) -> None:
    if when == "before":
        node.control(lost={50: 1})
    else:
        node.control(error={50: "nvmlDeviceGetMemoryInfo=15 nvmlDeviceGetComputeRunningProcesses=15"})
    holder = engine()
    answer = product.release(129).must_be(expected)
    assert "GPU 0" in answer.message or "0000:18:00.0" in answer.message
    assert dead(holder) and held_mib(node) == OTHERS


def test_a_lost_gpu_that_the_container_has_nothing_to_do_with(node: Node, product: Product) -> None:
    node.control(lost={51: 1})
    container = node.container(129, devices=("nvidia0", "nvidiactl", "nvidia-uvm"))
    holder = container.spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",))
    product.release(129).must_be("released")
    assert dead(holder)


def test_a_gpu_that_neither_driver_nor_proc_knows_any_more_is_still_a_gpu(node: Node, product: Product) -> None:
    """Minor 52 has a node on the host and a holder; nobody answers for it."""
    node.mknod("/dev/nvidia7", 4, 52)
    container = node.container(129, devices=("nvidia7", "nvidiactl"))
    holder = container.spawn_holder(open=("/dev/nvidia7", "/dev/nvidiactl"))
    answer = product.release(129).must_be("gpu-lost")
    assert answer.holder(holder.pid)["gpus"] == [52] and dead(holder)


def test_a_holder_of_control_nodes_alone_is_a_holder_of_no_gpu(node: Node, product: Product) -> None:
    holder = node.container(129).spawn_holder(open=("/dev/nvidiactl", "/dev/nvidia-uvm"))
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {holder.pid} and answer.holder(holder.pid)["gpus"] == [] and dead(holder)


@pytest.mark.case("mig")
@pytest.mark.parametrize("how", ["mig", "figure of a client"])
def test_no_memory_figures(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str, how: str
) -> None:
    other = node.container(140).spawn_holder(open=ONE_GPU, alloc=("50:100:compute",))
    node.control(**({"mig": {50: 1}} if how == "mig" else {"memory_na": str(other.pid)}))
    holder = engine()
    answer = product.release(129).must_be(expected)
    assert dead(holder) and lives(other) and answer.gpu(50)["ghost_mib"] is None


@pytest.mark.case("not-placed")
@pytest.mark.parametrize(
    "trouble",
    [{"lost": {51: 1}}, {"error": {51: "nvmlDeviceGetComputeRunningProcesses=4"}}, {"error": "nvmlInit=18"}],
    ids=["lost", "list refused", "mismatch"],
)
def test_with_gpu_nobody_is_ended_who_may_be_on_another_one(
    node: Node, product: Product, container: Container, expected: str, trouble: dict[str, object]
) -> None:
    """Both jobs have every node open, as CUDA does; the lists that tell them apart are not all to be had."""
    there = container.spawn_holder(open=ALL_NODES, alloc=("50:100:compute",))
    elsewhere = container.spawn_holder(open=ALL_NODES, alloc=("51:100:compute",))
    alone = container.spawn_holder(open=ONE_GPU)
    node.control(**trouble)
    answer = product.ask(129, "--now", "--gpu", "0000:18:00.0").must_be(expected)
    assert lives(elsewhere) and dead(alone), "one that has this GPU only can be on no other"
    assert f"pid {elsewhere.pid}" in answer.message
    assert dead(there) == (trouble != {"error": "nvmlInit=18"}), "the list of its own GPU names it"


@pytest.mark.case("configuration-unreadable")
def test_a_running_container_whose_configuration_cannot_be_read(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    """Memory that nobody holds may be on its own GPU, so it is not called free; else a release is as any other."""
    config = node.path("/etc/pve/nodes/pve8/lxc/129.conf")
    config.unlink()
    config.mkdir()
    node.control(ghost_mib={50: 40_000})
    assert "configuration of 129" in product.ask("verify", 129).must_be(expected).json["blind_spots"][0]["what"]
    node.control(ghost_mib={50: 0})
    holder = engine()
    assert product.ask(129, "--now").must_be("released").json["blind_spots"]
    assert dead(holder)


# --- a driver that hangs ---------------------------------------------------------------------------------------------

EVERY_CALL = (
    *("nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"),
    *("nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo", "nvmlDeviceGetUUID", "nvmlDeviceGetName"),
    *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"),
    *("nvmlDeviceGetMPSComputeRunningProcesses", "nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetMigMode"),
    *("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetFieldValues"),
)


@pytest.mark.case("nvml-hang")
def test_a_call_that_hangs_costs_its_deadline_and_the_verdict(make_node: Callable[..., Node], expected: str) -> None:
    """Every call, each in a node of its own, side by side: mostly they wait."""
    begun = time.monotonic()
    tried = []
    for call in EVERY_CALL:
        node = make_node()
        product = Product(node, IMPATIENT)
        node.control(hang=call)
        holder = node.container(129).spawn_holder(open=ONE_GPU, alloc=("50:42759:compute",), ignore_term=True)
        other = node.container(130).spawn_holder(open=ALL_NODES, alloc=("51:2048:compute",))
        tried.append((call, node, holder, other, product.start(129, "--grace", "0.2", "--json")))
    for call, node, holder, other, running in tried:
        done = finish(running)
        answer = parsed(done.status, done.out, done.err).must_be(expected)
        assert answer.signalled() == {holder.pid} and dead(holder) and lives(other) and held_mib(node) == OTHERS, call
        assert any(spot["source"] == "nvml" for spot in answer.json["blind_spots"]), call
    assert time.monotonic() - begun < DEADLINE_S + 20, "it hangs"


def test_a_hanging_shutdown_changes_nothing(node: Node, engine: Engine, neighbours: list[HolderHandle]) -> None:
    product = Product(node, IMPATIENT)
    node.control(hang="nvmlShutdown")
    holder = engine()
    timed(product, 129).must_be("released")
    assert dead(holder)


@pytest.mark.case("nvml-hang-idle")
def test_nothing_held_and_a_driver_that_hangs_is_unknown(
    node: Node, container: Container, neighbours: list[HolderHandle], expected: str
) -> None:
    product = Product(node, IMPATIENT)
    node.control(hang="nvmlDeviceGetMemoryInfo")
    answer = timed(product, 129).must_be(expected)
    assert not answer.json["was_held"]


def test_a_driver_that_hangs_does_not_eat_up_a_short_time_limit(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    """The driver's deadline is longer than the release may take: the holder gets its signals all the same."""
    product.configure("nvml: {deadline: 60}\n")
    node.control(hang="nvmlInit")
    holder = engine(ignore_term=True)
    answer = timed(product, 129, "--timeout", "2").must_be("driver-silent")
    assert dead(holder) and answer.steps() == ["term", "kill"] and answer.json["duration_ms"] < 10_000


@pytest.mark.parametrize("call", ["*", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_begins_to_hang_in_the_middle_does_not_break_the_time_limit(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], call: str
) -> None:
    product.configure("nvml: {deadline: 60}\n")
    holder = engine(ignore_term=True)
    begun = time.monotonic()
    running = product.start(129, "--timeout", "4", "--grace", "60", "--json")
    wait_for_rung(node)
    node.control(hang=call)
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be("driver-silent")
    assert dead(holder) and answer.steps() == ["term", "kill"] and time.monotonic() - begun < 15


def test_a_driver_that_hangs_in_d_state_is_left_behind(
    node: Node, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    product = Product(node, IMPATIENT)
    with node.frozen_fs() as frozen:
        node.control(hang_d="nvmlDeviceGetMemoryInfo", hang_d_path=frozen.path("nvml"))
        frozen.freeze()
        holder = engine(ignore_term=True)
        answer = timed(product, 129, "--grace", "0.2").must_be("driver-silent")
        assert dead(holder) and held_mib(node) == OTHERS
        assert any("does not die" in s["error"] or "stuck" in s["error"] for s in answer.json["blind_spots"])
        again = timed(product, 129).must_be("driver-silent")  # nobody adds to it: the wedged call is known
        assert again.json["duration_ms"] < 5000
    node.clear_control()
    product.release(129).must_be("nothing-held")


@pytest.mark.case("nvml-crash")
def test_a_library_that_crashes_again_and_again(
    node: Node, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    product = Product(node, IMPATIENT)
    node.control(crash="nvmlDeviceGetMemoryInfo")
    holder = engine(ignore_term=True)
    timed(product, 129, "--grace", "0.2").must_be(expected)
    assert dead(holder) and held_mib(node) == OTHERS


def test_a_slow_first_call_is_waited_for(node: Node, product: Product, engine: Engine) -> None:
    """Without persistence mode the first call takes seconds per GPU."""
    node.control(init_delay_ms=1500)
    engine()
    product.release(129).must_be("released")


def timed(product: Product, *words: object) -> Answer:
    begun = time.monotonic()
    answer = product.release(*words)
    assert time.monotonic() - begun < DEADLINE_S + 20, "it hangs"
    return answer
