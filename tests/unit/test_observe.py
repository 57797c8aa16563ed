"""The join: whose memory is whose, where a holder is, whom a dead opener left its descriptors to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hostd.facts import Facts, can_hold_memory, gpu_minors_of
from hostd.join import join, printable_cmdline, user_name
from hostd.membership import ContainerView, Members
from hostd.model import DeviceId, Evidence, Heir, Observation, OpenNodes, Process
from hostd.system.mounts import parse_mount_id, parse_mount_ids

from .makers import CTL, DRIVER, INFOS, UVM, nodes, nvml, process, snapshot


def facts(
    members: Iterable[Process] = (),
    opened: dict[int, OpenNodes] | None = None,
    gpus: Any = (),
    foreign: Iterable[Process] = (),
    **more: Any,
) -> Facts:
    found = Members({p.pid: p for p in members}, running=True)
    return Facts(
        DRIVER,
        snapshot(*gpus),
        tuple(INFOS.values()),
        dict(opened or {}),
        {},
        found,
        {p.pid: p for p in foreign},
        **more,
    )


def joined(given: Facts, own_seen: Iterable[int] = ()) -> Observation:
    return join(129, 0.0, given, set(own_seen))


def dead_of(seen: Observation, minor: int = 50) -> dict[int, Heir]:
    state = seen.gpu(minor)
    assert state is not None
    return {client.pid: client.heir for client in state.dead_clients}


BOTH = nodes(50, 51)


# --- which GPU? ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "given", "gpus", "memory"),
    [
        (
            "where the driver lists it, not where it has a node open",
            facts([process(11)], {11: BOTH}, [nvml(50, 0), nvml(51, 900, {11: 900})]),
            (51,),
            900,
        ),
        (
            "on both, when it is listed on both",
            facts([process(11)], {11: BOTH}, [nvml(50, 5, {11: 5}), nvml(51, 7, {11: 7})]),
            (50, 51),
            12,
        ),
        (
            "every node it has open, when no list places it",
            facts([process(11)], {11: BOTH}, [nvml(50, 0), nvml(51, 0)]),
            (50, 51),
            None,
        ),
        (
            "where a dead opener left memory that it can have inherited",
            facts([process(11)], {11: BOTH}, [nvml(50, 0), nvml(51, 900, {7: 900})]),
            (51,),
            900,
        ),
        (
            "not there when it has no uvm open, as CUDA memory needs",
            facts([process(11)], {11: nodes(50, 51, uvm=False)}, [nvml(50, 0), nvml(51, 900, {7: 900})]),
            (50, 51),
            None,
        ),
        (
            "where its living parent is listed, whose descriptors it inherited",
            facts(
                [process(11, ppid=5), process(5, ppid=3), process(3)],
                {11: BOTH},
                [nvml(50, 900, {7: 900}), nvml(51, 5, {3: 5})],
            ),
            (51,),
            None,
        ),
        ("nowhere, with control nodes alone", facts([process(11)], {11: nodes()}, [nvml(50, 0)]), (), None),
        (
            "where it was placed before, when the driver is silent",
            facts([process(11)], {11: BOTH}, placed={process(11).ref: (51,)}),
            (51,),
            None,
        ),
        ("every node, when the driver was always silent", facts([process(11)], {11: BOTH}), (50, 51), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_holder_is(sentence: str, given: Facts, gpus: tuple[int, ...], memory: int | None) -> None:
    holder = next(h for h in joined(given).holders if h.process.pid == 11)
    assert holder.gpus == gpus and holder.memory_mib == memory


def test_two_heirs_share_what_cannot_be_split() -> None:
    seen = joined(facts([process(11), process(12)], {11: BOTH, 12: BOTH}, [nvml(50, 900, {7: 900})]))
    assert [h.memory_mib for h in seen.holders] == [None, None]
    assert {h.inherited_from for h in seen.holders} == {7}


def test_what_is_open_is_kept_beside_what_is_used() -> None:
    (holder,) = joined(facts([process(11)], {11: BOTH}, [nvml(50, 5, {11: 5}), nvml(51, 0)])).holders
    assert holder.gpus == (50,) and holder.open_gpus == (50, 51)


# --- evidence --------------------------------------------------------------------------------------------------------


def test_evidence_is_told_apart() -> None:
    mapped = OpenNodes(by_map=frozenset({DeviceId(195, 50)}))
    seen = joined(facts([process(n) for n in (11, 12, 13, 14)], {11: BOTH, 12: mapped}, [nvml(50, 9, {11: 4, 13: 5})]))
    evidence = {h.process.pid: h.evidence for h in seen.holders}
    assert evidence == {
        11: {Evidence.FD, Evidence.NVML},
        12: {Evidence.MAP},
        13: {Evidence.NVML},
    }, "14 holds nothing and is not listed"
    assert {h.process.pid for h in seen.holders if h.targetable} == {11, 12}


def test_the_init_and_every_candidate_for_it_are_marked() -> None:
    given = facts([process(11), process(12), process(13)], {11: BOTH, 12: BOTH, 13: BOTH})
    given.members.inits = frozenset({process(11).ref, process(12).ref})
    assert {h.process.pid for h in joined(given).holders if h.is_init} == {11, 12}


# --- listed pids that nobody has -------------------------------------------------------------------------------------


def test_a_listed_process_of_others_is_a_client_when_it_can_be_seen_to_be_one() -> None:
    stranger, reader, exiting = process(7, "/a"), process(8, "/b"), process(9, "/c")
    given = facts(
        [], {8: BOTH}, [nvml(50, 30, {7: 10, 8: 10, 9: 10})], [stranger, reader, exiting], dying=frozenset({9})
    )
    state = joined(given).gpu(50)
    assert state is not None and state.foreign_clients == (8, 9) and dead_of(joined(given)) == {7: Heir.NOBODY}
    given.unseen = frozenset({7})
    state = joined(given).gpu(50)
    assert state is not None and state.foreign_clients == (7, 8, 9), "what cannot be read counts as what the list says"


@pytest.mark.parametrize(
    ("sentence", "given", "own_seen", "heir"),
    [
        ("ours, when one of ours can have inherited", facts([process(11)], {11: BOTH}, [nvml(50, 9, {7: 9})]), (), Heir.OWN),
        (
            "ours, by a graphics client without uvm when there is nobody better",
            facts([process(11)], {11: nodes(50, uvm=False)}, [nvml(50, 9, {7: 9})]),
            (),
            Heir.OWN,
        ),
        ("nobody's", facts([], {}, [nvml(50, 9, {7: 9})]), (), Heir.NOBODY),
        (
            "another's, when only another can have inherited",
            facts([], {21: BOTH}, [nvml(50, 9, {7: 9})], [process(21, "/lxc/130/ns")], heirs={50: frozenset({21})}),
            (),
            Heir.FOREIGN,
        ),
        (
            "nobody's, when it was ours and another has a node open that was opened elsewhere",
            facts([], {21: BOTH}, [nvml(50, 9, {7: 9})], [process(21, "/lxc/130/ns")], heirs={50: frozenset({21})}),
            (7,),
            Heir.NOBODY,
        ),
        (
            "passed on, when another's descriptor was opened here",
            facts(
                [], {21: BOTH}, [nvml(50, 9, {7: 9})], [process(21, "/lxc/130/ns")],
                heirs={50: frozenset({21})}, passed=frozenset({21}),
            ),
            (7,),
            Heir.PASSED,
        ),
        (
            "another's, when it was not ours and both kinds are there",
            facts(
                [], {21: BOTH, 22: BOTH}, [nvml(50, 9, {7: 9})], [process(21, "/a"), process(22, "/b")],
                heirs={50: frozenset({21, 22})}, passed=frozenset({21}),
            ),
            (),
            Heir.FOREIGN,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_dead_openers_memory_is(sentence: str, given: Facts, own_seen: tuple[int, ...], heir: Heir) -> None:
    assert dead_of(joined(given, own_seen)) == {7: heir}


# --- device nodes ----------------------------------------------------------------------------------------------------


def test_control_nodes_are_no_gpus_and_uvm_is_what_memory_needs() -> None:
    given = facts()
    assert gpu_minors_of(nodes(50), given) == {50} and gpu_minors_of(nodes(), given) == set()
    assert can_hold_memory(nodes(50), DRIVER) and not can_hold_memory(nodes(50, uvm=False), DRIVER)
    assert {CTL, UVM} <= nodes(50).all


def test_a_minor_that_nobody_knows_is_a_gpu_as_long_as_the_host_has_its_node() -> None:
    given = facts(host_minors=frozenset({7}))
    assert gpu_minors_of(nodes(7, 8), given) == {7}


# --- members, on a tree ----------------------------------------------------------------------------------------------


class Tree:
    """A /proc and a cgroup tree in a directory, and what stands for the sources on it."""

    def __init__(self, root: Path) -> None:
        from hostd.system.cgroupfs import Cgroupfs
        from hostd.system.procfs import Procfs

        self.root = root
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.proc.mkdir()
        self.cgroup.mkdir()
        self.procfs, self.cgroups, self.own_pidns = Procfs(str(self.proc)), Cgroupfs(str(self.cgroup)), 1
        self.ours: set[int] = set()

    def helpers(self) -> set[int]:
        return self.ours

    def add(self, pid: int, listed: str, now: str | None = None, state: str = "S") -> None:
        """A process that is listed in one cgroup and by the time we read about it is in another."""
        directory = self.cgroup
        for part in listed.strip("/").split("/"):
            directory /= part
            directory.mkdir(exist_ok=True)
            (directory / "cgroup.procs").touch()
            (directory / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        with (directory / "cgroup.procs").open("a") as procs:
            procs.write(f"{pid}\n")
        here = self.proc / str(pid)
        here.mkdir(exist_ok=True)
        rest = " ".join(["1"] + ["0"] * 15 + ["1", "0", "500"] + ["0"] * 10)
        (here / "stat").write_text(f"{pid} (x) {state} {rest}\n")
        (here / "status").write_text(f"Name:\tx\nTgid:\t{pid}\nUid:\t0\t0\t0\t0\nNSpid:\t{pid}\t7\nThreads:\t1\n")
        (here / "cgroup").write_text(f"0::{now or listed}\n")

    def add_init(self, pid: int) -> None:
        self.add(pid, "/lxc/129/ns/init.scope")
        (self.proc / str(pid) / "ns").mkdir()
        (self.proc / str(pid) / "ns/pid").touch()
        status = self.proc / str(pid) / "status"
        status.write_text(status.read_text().replace(f"NSpid:\t{pid}\t7", f"NSpid:\t{pid}\t1"))

    def end(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))


def members_of(tree: Tree) -> Members:
    view = ContainerView(tree, 129)  # type: ignore[arg-type]
    try:
        return view.members()
    finally:
        view.close()


def test_members_are_those_whose_own_word_agrees_with_the_list(tmp_path: Path) -> None:
    """The pid of one that left between the two reads may be anybody's by then."""
    tree = Tree(tmp_path)
    tree.add(11, "/lxc/129/ns/init.scope")
    tree.add(12, "/lxc/129/ns/init.scope", now="/system.slice/ssh.service")
    tree.add(13, "/lxc/129/ns/init.scope", now="/lxc/130/ns/init.scope")
    tree.add(14, "/lxc/129/ns/init.scope", state="Z")
    tree.add(15, "/lxc/1290/ns")
    assert set(members_of(tree).processes) == {11}


def test_a_dead_init_does_not_stand_beside_its_successor(tmp_path: Path) -> None:
    """A container that is started again in the middle of one look: the new init is the init."""
    tree = Tree(tmp_path)
    tree.add_init(11)
    view = ContainerView(tree, 129)  # type: ignore[arg-type]
    known = view.members()
    assert known.init is not None and known.init.pid == 11
    tree.end(11)
    tree.add_init(12)
    tree.add(13, "/lxc/129/ns/init.scope")
    assert view.newcomers(known) == {12, 13}
    assert known.init is not None and known.init.pid == 12 and {r.pid for r in known.inits} == {12}
    assert not [spot for spot in known.blind_spots if spot.code == "ambiguous-init"]
    tree.add_init(14)
    view.refresh(known)
    assert known.init is None and {r.pid for r in known.inits} == {12, 14}
    assert [spot.code for spot in known.blind_spots if spot.source == "pidns"] == ["ambiguous-init"]
    view.close()


def test_a_cgroup_that_was_made_anew_is_another_incarnation(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(11, "/lxc/129/ns")
    first = members_of(tree).incarnation
    assert first is not None and members_of(tree).incarnation == first
    (tree.cgroup / "lxc/129").rename(tree.cgroup / "gone")
    assert members_of(tree).incarnation is None
    tree.add(12, "/lxc/129/ns")
    assert members_of(tree).incarnation not in (None, first)


def test_pid_1_and_0_and_ourselves_are_never_members(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for pid in (0, 1, 21, 22):
        tree.add(pid, "/lxc/129/ns")
    tree.ours = {21, os.getpid()}
    found = members_of(tree)
    assert set(found.processes) == {22}
    assert [spot.code for spot in found.blind_spots] == ["foreign-pidns"], "a 0 is somebody who cannot be seen"


def test_a_container_without_cgroup_has_no_members_and_does_not_run(tmp_path: Path) -> None:
    found = members_of(Tree(tmp_path))
    assert (found.processes, found.running, found.blind_spots) == ({}, False, [])


def test_a_tree_that_cannot_be_read_is_a_blind_spot(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tree.cgroup / "lxc").write_text("not a directory")
    found = members_of(tree)
    assert [spot.code for spot in found.blind_spots] == ["cgroup-unreadable"]


# --- small ------------------------------------------------------------------------------------------------------------


def test_command_lines_and_users() -> None:
    assert printable_cmdline(b"python3\0train.py\0\0") == "python3 train.py"
    assert printable_cmdline(b"\xff\0a") == "\udcff a" and printable_cmdline(b"") == ""
    assert user_name(0) == "root" and user_name(4242424) == "4242424"


def test_mounts_of_descriptors_and_namespaces() -> None:
    assert parse_mount_id(b"pos:\t0\nflags:\t02\nmnt_id:\t731\nino:\t5\n") == 731
    assert parse_mount_id(b"pos:\t0\n") is None
    text = b"731 29 0:40 / /dev rw - tmpfs dev rw\n732 731 0:5 /null /dev/null rw - devtmpfs d rw\n\n"
    assert parse_mount_ids(text) == {731, 732}
