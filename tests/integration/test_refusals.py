"""Everything that ends without a release, each with its exit status, and what exists or not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hostd.verdicts import REASONS
from tests.embedded.node import Container, Gpu, HolderHandle, Node
from tests.embedded.scope import MS_BIND

from .conftest import ALL_NODES, ONE_GPU
from .hungfuse import HungFuse
from .product import Product, dead, finish, held_mib, lives, parsed, wait_for_rung

Engine = Callable[..., HolderHandle]


@pytest.mark.case("nothing")
def test_a_running_container_that_holds_nothing(
    product: Product, container: Container, neighbours: list[HolderHandle], expected: str
) -> None:
    answer = product.release(129).must_be(expected)
    assert not answer.json["was_held"] and answer.json["holders"] == [] and answer.json["rungs"] == []


@pytest.mark.case("stopped-container")
def test_a_configured_container_that_does_not_run(node: Node, product: Product, expected: str) -> None:
    node.configure(129, "arch: amd64\n")
    product.release(129).must_be(expected)


def test_a_container_with_an_empty_cgroup_and_no_configuration(node: Node, product: Product) -> None:
    node.cgroup("lxc/129/ns")
    product.release(129).must_be("not-running")


@pytest.mark.case("unknown-vmid")
def test_neither_configuration_nor_cgroup(node: Node, product: Product, container: Container, expected: str) -> None:
    answer = product.ask(12).must_be(expected)
    assert answer.json["vmid"] == 12 and answer.json["next_step"]
    assert not node.path("/run/pve-gpu-release/locks/12.lock").exists(), "a typo leaves nothing behind"


@pytest.mark.case("elsewhere")
def test_a_container_of_another_node_is_named_with_its_node(node: Node, product: Product, expected: str) -> None:
    node.configure(129, "arch: amd64\n", pve_node="pve9")
    answer = product.ask(129).must_be(expected)
    assert "pve9" in answer.message


@pytest.mark.case("init-holds")
def test_an_init_that_holds_is_refused_and_nobody_is_touched(
    product: Product, container: Container, engine: Engine, expected: str
) -> None:
    other = engine()
    init = container.become_holder(argv=("vllm", "serve"), open=ONE_GPU, alloc=("50:1000:compute",))
    answer = product.ask(129).must_be(expected)
    assert lives(other, init) and str(init.pid) in answer.message and "--stop" in answer.json["next_step"]


def test_an_init_that_only_the_driver_names_is_refused_all_the_same(product: Product, container: Container) -> None:
    """The walk of the container's cgroups ended before it came to the init."""
    init = container.become_holder(argv=("vllm", "serve"), open=ONE_GPU, alloc=("50:1000:compute",))
    with container.unwalkable():
        answer = product.release(129, "--now").must_be("would-stop-container")
        assert lives(init) and any("cgroups" in spot["error"] for spot in answer.json["blind_spots"])


def test_stop_may_end_the_init(node: Node, product: Product, container: Container, engine: Engine) -> None:
    other = engine()
    init = container.become_holder(argv=("vllm", "serve"), open=ONE_GPU, alloc=("50:1000:compute",))
    answer = product.release(129, "--stop", "--grace", "0.3").must_be("released")
    assert answer.signalled() >= {init.pid} and dead(other, init) and held_mib(node) == {}


def test_an_init_that_opens_a_gpu_in_the_middle_of_a_release_is_left_alone(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    """Holders of the first look are ended; the init, a holder only since then, is not."""
    first = engine(ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    init = container.become_holder(argv=("vllm", "serve"), open=ONE_GPU, alloc=("50:1000:compute",))
    first.kill()
    done = finish(running)
    answer = parsed(done.status, done.out, done.err)
    assert lives(init), answer.out
    assert dead(first) and answer.status in (3, 7) and init.pid not in answer.signalled()


@pytest.mark.case("two-inits")
def test_two_candidates_for_the_init(
    node: Node, product: Product, container: Container, engine: Engine, expected: str
) -> None:
    """Another namespace's pid 1 in the same cgroup: who is the init cannot be said, so none of them is ended."""
    second = second_init(node, container)
    answer = product.release(129).must_be(expected)
    assert "several candidates" in answer.message
    holder = engine()
    answer = product.release(129).must_be(expected)
    assert dead(holder) and second.poll() is None
    second.kill()
    second.wait()


def test_one_of_two_candidates_that_holds_is_refused(node: Node, product: Product, container: Container) -> None:
    second = second_init(node, container, "/dev/nvidia0")
    product.ask(129).must_be("would-stop-container")
    assert second.poll() is None
    second.kill()
    second.wait()


def second_init(node: Node, container: Container, device: str = "/dev/null") -> subprocess.Popen[str]:
    """pid 1 of a PID namespace of its own, one level below the node's, moved into 129's cgroup."""
    script = f"import os,sys; fd=os.open({device!r}, os.O_RDWR|os.O_NOCTTY); print(1, flush=True); sys.stdin.read()"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-I", "-c", script]
    running = node.popen(command, cgroup="lxc/129/ns/second.scope", stdin=subprocess.PIPE)
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "1\n"
    procs = (node.cgroup("lxc/129/ns/second.scope") / "cgroup.procs").read_text().split()
    outer = next(p for p in procs if int(p) == running.process.outer_pid)
    (node.cgroup("system.slice/node.service") / "cgroup.procs").write_text(outer)  # the unshare that waits for it
    return running.popen


FEW = """
import os, resource, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize("words", [("129", "--now"), ("verify", "129")], ids=["release", "verify"])
def test_with_too_few_descriptors_it_could_not_look(
    node: Node, product: Product, engine: Engine, words: tuple[str, ...]
) -> None:
    holder = engine()
    for most in range(5, 20):
        done = node.run([sys.executable, "-I", "-c", FEW, str(most), *product.command, *words, "--json"])
        answer = json.loads(done.stdout)
        if answer["verdict"] != "unknown":  # enough for this much
            assert answer["reason"] in ("holders-present", "holders-survive", "released"), (most, answer, done.stderr)
        assert not (lives(holder) and answer["verdict"] == "released")
        holder = holder if lives(holder) else engine()


def test_where_proc_is_of_another_pid_namespace_nothing_is_concluded(node: Node, product: Product, engine: Engine) -> None:
    """`unshare --pid` without a /proc of its own: every number there means another process to pidfd_open and to kill."""
    holder = engine()
    for words in (["129"], ["verify", "129"], ["wait", "129", "--timeout", "1"]):
        done = node.run(["unshare", "--pid", "--fork", *product.command, *words, "--json", "--no-daemon"])
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["reason"]) == (4, "cannot-look") and "PID namespace" in answer["message"]
    assert lives(holder)
    inside = ["unshare", "--pid", "--fork", "--mount-proc", *product.command, "verify", "129", "--json", "--no-daemon"]
    assert json.loads(node.run(inside).stdout)["reason"] != "cannot-look"


def others_python() -> str:
    """An interpreter that a user without rights can execute: Debian's, where this one lies below /root (pyenv)."""
    base = os.path.realpath(sys.executable)
    return "/usr/bin/python3" if base.startswith("/root/") else base


@pytest.mark.case("not-root")
@pytest.mark.parametrize(
    "words", [["129"], ["ps"], ["verify", "129"], ["map", "129", "1"], ["129", "-n"]], ids=" ".join
)
def test_not_root(node: Node, product: Product, container: Container, expected: str, words: list[str]) -> None:
    """Neither checkout nor interpreter need be readable for others: they get copies where they can reach them."""
    import hostd

    shutil.copytree(Path(hostd.__file__).parent, node.path("/run/copy/hostd"))
    node.path("/run/python").mkdir()
    node.init.mount(sys.base_prefix, "/run/python", "", MS_BIND)
    code = "import sys; sys.path.insert(0, '/run/copy'); from hostd.cli.main import entry; entry()"
    python = "/run/python/bin/" + Path(sys.executable).resolve().name
    done = node.run([python, "-I", "-c", code, *words], uid=1000)
    assert done.returncode == REASONS[expected].exit_status == 9, done
    assert "root is needed" in done.stderr + done.stdout and "Traceback" not in done.stderr


NONSENSE: list[list[str]] = [
    ["129x"],
    ["-5"],
    ["0"],
    ["0x81"],
    ["１２９"],
    ["99999999999999999999"],
    ["129", "--gpu", "7"],
    ["129", "--gpu", "GPU-nonsense"],
    ["129", "--gpu", ""],
    ["129", "--pid", "4711"],
    ["129", "--pid", "0"],
    ["129", "--pid", "-1"],
    ["129", "--pid", "host:1"],
    ["129", "--pid", "²"],
    ["129", "--pid", "99999999999999999999"],
    ["129", "--grace", "-1"],
    ["129", "--grace", "nan"],
    ["129", "--timeout", "inf"],
    ["129", "--timeout", "0"],
    ["129", "--no-such-option"],
    ["129", "--tim", "3"],
    ["relase"],
    [],
]


@pytest.mark.case("nonsense")
def test_nonsense_is_one_clear_line_and_status_2(product: Product, engine: Engine, expected: str) -> None:
    holder = engine()
    for words in NONSENSE:
        answer = product.run(*words)
        assert answer.status == 2 and expected == "usage", (words, answer)
        lines = (answer.out + answer.err).splitlines()
        assert 1 <= len(lines) <= 2 or not words, (words, answer)
        assert "Traceback" not in answer.err and (not words or "cannot" in lines[0] or "pve-gpu-release: " in lines[0])
    assert lives(holder)


def test_a_number_that_means_two_gpus_is_asked_back(make_node: Callable[..., Node]) -> None:
    """With GPUs whose minors and indices cross, `1` names one by index and another by minor."""
    gpus = (
        Gpu(51, "GPU-aaaaaaaa-0000-4000-8000-000000000051", "00000000:18:00.0", "/dev/nvidia0"),
        Gpu(0, "GPU-bbbbbbbb-0000-4000-8000-000000000000", "00000000:3B:00.0", "/dev/nvidia1"),
    )
    with make_node(gpus) as node:
        crossed = Product(node)
        holder = node.container(129).spawn_holder(open=("/dev/nvidia0",), alloc=("51:100:compute",))
        answer = crossed.run("129", "--gpu", "0")
        assert answer.status == 2 and "more than one" in answer.out and "GPU-aaaaaaaa" in answer.out
        assert lives(holder)


@pytest.mark.case("broken-config")
@pytest.mark.parametrize(
    "text", ["ladder: {grace: ten}\n", "lader: {}\n", "ladder: [\n", "\0\xff", "ladder: {timeout: 0}\n"]
)
def test_a_broken_configuration_refuses_a_fresh_start(
    product: Product, engine: Engine, expected: str, text: str
) -> None:
    product.configure(text)
    holder = engine()
    answer = product.ask(129).must_be(expected)
    assert lives(holder) and "config.yaml" in answer.message


@pytest.mark.case("hung-pve")
def test_an_etc_pve_that_hangs_and_no_cgroup(node: Node, product: Product, expected: str) -> None:
    with hung_etc_pve(node):
        product.ask(129).must_be(expected)


def test_an_etc_pve_that_hangs_does_not_stop_a_release_of_a_running_container(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    holder = engine()
    with hung_etc_pve(node):
        answer = product.release(129).must_be("released")
        assert dead(holder) and answer.json["duration_ms"] < 15_000


def hung_etc_pve(node: Node) -> HungFuse:
    """pmxcfs does not answer any more."""
    return HungFuse(node, f"/etc/pve/nodes/{node.hostname}", answers=False)


def test_several_containers_are_all_attempted_and_the_worst_status_wins(
    node: Node, product: Product, engine: Engine
) -> None:
    ours = engine()
    other = node.container(130).spawn_holder(open=ALL_NODES, alloc=("51:100:compute",))
    answer = product.ask(129, 777, 130)
    assert [r["reason"] for r in answer.json["releases"]] == ["released", "no-such-container", "released"]
    assert answer.status == 8 and dead(ours, other)


def test_the_same_container_twice_is_one_release(product: Product, engine: Engine) -> None:
    engine()
    answer = product.run(129, 129)
    assert answer.status == 0 and answer.out.count("released:") == 1


@pytest.mark.case("busy")
def test_no_wait_is_busy_while_another_release_is_in_flight(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    holder = engine(ignore_term=True)
    first = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    answer = product.ask(129, "--no-wait").must_be(expected)
    assert str(first.pid) in answer.message
    holder.kill()
    done = finish(first)
    parsed(done.status, done.out, done.err).must_be("released")
    assert dead(holder)


def test_a_second_release_waits_for_the_first_ones_verdict(node: Node, product: Product, engine: Engine) -> None:
    holder = engine(ignore_term=True)
    first = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    second = product.start(129)
    assert second.popen.stdout is not None and "waiting for another" in second.popen.stdout.readline()
    holder.kill()
    done = finish(first)
    parsed(done.status, done.out, done.err).must_be("released")
    answer = finish(second)
    assert answer.status == 0 and dead(holder) and "holds no GPU" in answer.out


def test_while_it_waits_for_another_release_it_is_no_client_of_the_gpu(
    node: Node, product: Product, engine: Engine
) -> None:
    holder = engine(ignore_term=True)
    first = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    second = product.start(129)
    assert second.popen.stdout is not None and "waiting for another" in second.popen.stdout.readline()
    task = second.process.proc / "task" / str(second.process.outer_pid) / "children"
    for child in task.read_text().split():
        nodes = [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
        assert not [n for n in nodes if "nvidia" in n]
    holder.kill()
    assert finish(first).status == 0 and finish(second).status == 0


def test_helpers_hold_no_lock_and_the_directory_is_roots(node: Node, product: Product, engine: Engine) -> None:
    """flock survives in a forked child, so none may have it (DESIGN 12)."""
    holder = engine(ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    everybody = children_of(running.process.outer_pid)
    assert everybody, "the driver's child at least"
    for pid in everybody:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [link for link in links if "/locks/" in link or "/releases/" in link], links
    assert node.path("/run/pve-gpu-release").stat().st_mode & 0o777 == 0o700
    holder.kill()
    assert finish(running).status == 0


def children_of(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [grandchild for child in found for grandchild in children_of(child)]


def test_two_containers_are_released_side_by_side(node: Node, product: Product, engine: Engine) -> None:
    ours = engine(term_ms=500)
    theirs = node.container(130).spawn_holder(open=ALL_NODES, alloc=("51:100:compute",), term_ms=500)
    running = [product.start(129, "--json"), product.start(130, "--json")]
    for one in running:
        done = finish(one)
        parsed(done.status, done.out, done.err).must_be("released")
    assert dead(ours, theirs)


def test_waiting_for_another_release_can_be_interrupted(node: Node, product: Product, engine: Engine) -> None:
    holder = engine(ignore_term=True)
    first = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    second = product.start(129)
    assert second.popen.stdout is not None and "waiting for another" in second.popen.stdout.readline()
    second.process.kill(signal.SIGINT)
    answer = finish(second)
    assert answer.status == 130
    holder.kill()
    assert finish(first).status == 0 and dead(holder)
