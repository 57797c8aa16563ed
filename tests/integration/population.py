"""Random worlds for the safety tests: who is where, moved at random, and whose he is by an oracle of its own."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.embedded.node import Container, HolderHandle, Node, Process
from tests.embedded.scope import Running, Scope

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
VMIDS = (12, 129, 130, 1290)
HEX = "0123456789abcdef" * 4
INSTANT = {"grace_s": 0.0, "kill_grace_s": 0.0, "drain_grace_s": 0.0, "settle_s": 0.0, "timeout_s": 20.0}
"""Nobody is waited for: without real signals nobody leaves."""

CGROUPS = (
    *(f"/lxc/{vmid}/ns/init.scope" for vmid in VMIDS),
    *(f"/lxc/{vmid}/ns/system.slice/vllm.service" for vmid in VMIDS),
    *(f"/lxc/{vmid}" for vmid in VMIDS),
    *(f"/lxc/{vmid}/ns/.lxc" for vmid in (129, 130)),
    *(f"/lxc/{vmid}/ns/docker/{HEX}" for vmid in (129, 130)),
    *(f"/lxc.monitor/{vmid}" for vmid in (129, 130)),
    *("/lxc.pivot", "/lxc", "/lxc/129-1", "/lxc/0129", "/lxc/foo/129", "/lxc/12x", "/lxc.pivot/lxc/129"),
    *("/system.slice/ssh.service", "/system.slice/lxc/129", "/user.slice/user-0.slice/session-1.scope"),
)
_OWNED = re.compile(r"/lxc/([1-9][0-9]{0,8})(?:/.*)?")


def vmid_of(cgroup: str) -> int | None:
    """The contract's words (DESIGN 3, owner), written down a second time."""
    match = _OWNED.fullmatch(cgroup)
    return int(match[1]) if match else None


@dataclass(slots=True)
class Member:
    """One process of the population."""

    process: Process
    space: str
    """Its PID namespace: `host`, `129`, `129/nested`, ..."""
    holds: bool
    cgroup: str
    family: HolderHandle | None = None

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(slots=True)
class Family:
    """How to start a group of processes (again)."""

    scope: Scope
    space: str
    options: Json
    holds: bool


class World:
    """A node full of processes."""

    def __init__(self, node: Node, chance: random.Random) -> None:
        self.node = node
        self.chance = chance
        self.members: dict[int, Member] = {}
        self.inits: dict[str, Member] = {}
        self._families: list[Family] = []
        for cgroup in CGROUPS:
            node.cgroup(cgroup.lstrip("/"))
        self._settle("host", node)
        for vmid in VMIDS:
            container = node.container(vmid, nodes=chance.choice(["mknod", "bind"]))
            self._settle(str(vmid), container, few=vmid not in (129, 130))
            if vmid in (129, 130):
                nested = container.nested(f"docker/{HEX}", ["nvidia0", "nvidia1", "nvidiactl"])
                self._settle(f"{vmid}/nested", nested, few=True)

    def _settle(self, space: str, scope: Scope, *, few: bool = False) -> None:
        if isinstance(scope, Container):
            cgroup = scope.init_process.cgroup()
            self.inits[space] = Member(scope.init_process, space, False, cgroup)
        nodes = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
        every: list[tuple[Json, bool]] = [
            ({"open": nodes, "children": 1, "child_setsid": True, "alloc": ("50:100:compute",)}, True),
            ({"argv": ("bash",)}, False),
            ({"open": ("/dev/nvidiactl",)}, True),
            ({"open": nodes[:1], "mode": "dead-leader"}, True),
            ({"open": nodes[:1], "mode": "private-table", "threads": 1}, True),
        ]
        for options, holds in every[: 2 if few else None]:
            family = Family(scope, space, options, holds)
            self._families.append(family)
            self.start(family)

    def start(self, family: Family) -> None:
        handle = family.scope.spawn_holder(**family.options)
        for process in handle.processes:
            self.members[process.pid] = Member(process, family.space, family.holds, process.cgroup(), handle)

    def one_more(self, space: str) -> Member:
        """Another holder there, alone in its family."""
        scope = next(family.scope for family in self._families if family.space == space)
        handle = scope.spawn_holder(open=("/dev/nvidia0",))
        member = Member(handle.main, space, True, handle.main.cgroup(), handle)
        self.members[handle.pid] = member
        return member

    def restock(self) -> None:
        """Starts again what has been ended."""
        dead = {id(m.family) for m in self.members.values() if not m.process.alive()}
        for handle in {id(m.family): m.family for m in self.members.values() if id(m.family) in dead}.values():
            assert handle is not None
            handle.kill()
            handle.wait_gone()
        again: dict[tuple[str, int], Family] = {}
        for pid, member in tuple(self.members.items()):
            if id(member.family) in dead:
                del self.members[pid]
        present = {(m.space, id(m.family)) for m in self.members.values()}
        counts = {space: sum(1 for s, _ in present if s == space) for space in {f.space for f in self._families}}
        for family in self._families:
            wanted = [f for f in self._families if f.space == family.space]
            if counts[family.space] < len(wanted):
                again[family.space, len(again)] = family
        for space in {space for space, _ in again}:
            for member in [m for m in self.members.values() if m.space == space]:
                member.process.kill()
            for member in [m for m in self.members.values() if m.space == space]:
                member.process.wait_gone()
                del self.members[member.pid]
            for family in self._families:
                if family.space == space:
                    self.start(family)

    # --- chance ---

    def shuffle(self) -> None:
        """Moves a part of everybody to cgroups by chance; sometimes an init, too."""
        for member in self.members.values():
            if self.chance.random() < 0.1:
                self.move(member, self.chance.choice(CGROUPS))
        for space, init in self.inits.items():
            if "/" in space:
                continue
            draw = self.chance.random()
            if draw < 0.05:
                self.move(init, self.chance.choice(CGROUPS))
            elif draw < 0.6:
                self.move(init, f"/lxc/{space}/ns/init.scope")

    def move(self, member: Member, cgroup: str) -> None:
        path = self.node.cgroup(cgroup.lstrip("/")) / "cgroup.procs"
        if member.process.state() == "Z":  # a dead leader: its live threads move, /proc goes on naming the old cgroup
            return
        path.write_text(str(member.process.outer_pid))
        member.cgroup = cgroup

    def lie(self) -> None:
        """Puts pids of anybody, and of nobody, into the driver's lists."""
        pids = [*self.members, *(init.pid for init in self.inits.values()), 0, 1, 4294967295, 31_999]
        chosen = self.chance.sample(pids, self.chance.randint(0, 6))
        words = [
            f"{pid}:{self.chance.randint(0, 900)}:{self.chance.choice(['compute', 'graphics', 'mps'])}"
            for pid in chosen
        ]
        half = len(words) // 2
        self.node.control(extra_clients={50: " ".join(words[:half]) or None, 51: " ".join(words[half:]) or None})

    # --- the oracle ---

    def owned_by(self, vmid: int, member: Member) -> bool:
        owner = vmid_of(member.cgroup)
        if owner is not None:
            return owner == vmid
        inits = [i for space, i in self.inits.items() if "/" not in space and vmid_of(i.cgroup) == vmid]
        return len(inits) == 1 and f"{member.space}/".startswith(f"{inits[0].space}/")

    def of(self, vmid: int) -> set[int]:
        return {pid for pid, member in self.members.items() if self.owned_by(vmid, member)}

    def holders_of(self, vmid: int) -> set[int]:
        return {pid for pid in self.of(vmid) if self.members[pid].holds}

    def describe(self) -> str:
        rows = [f"{m.pid:6} {m.space:12} {'holds' if m.holds else '-':6} {m.cgroup}" for m in self.members.values()]
        return "\n".join([*rows, *(f"{i.pid:6} init of {s:5} {i.cgroup}" for s, i in self.inits.items())])


@dataclass(slots=True)
class Referee:
    """The product in one process of the node; see referee.py."""

    running: Running
    orders: int = field(default=0)

    @classmethod
    def of(cls, node: Node) -> Referee:
        import subprocess

        command = [sys.executable, "-I", str(Path(__file__).with_name("referee.py")), str(ROOT)]
        return cls(node.popen(command, stdin=subprocess.PIPE, stderr=None))

    def release(
        self,
        vmid: int,
        *,
        real: bool = False,
        hook: Json | None = None,
        limits: Json | None = None,
        **options: object,
    ) -> Outcome:
        order = {"vmid": vmid, "real": real, "hook": hook, "limits": limits or INSTANT, "options": options}
        popen = self.running.popen
        assert popen.stdin is not None and popen.stdout is not None
        popen.stdin.write(json.dumps(order) + "\n")
        popen.stdin.flush()
        line = popen.stdout.readline()
        assert line, f"the referee died: {popen.poll()}"
        answer = json.loads(line)
        return Outcome([tuple(s) for s in answer["sent"]], answer["units"], answer["report"])

    def close(self) -> None:
        popen = self.running.popen
        assert popen.stdin is not None
        popen.stdin.close()
        assert popen.wait(timeout=60) == 0


@dataclass(frozen=True, slots=True)
class Outcome:
    sent: Sequence[tuple[int, int, int]]
    """(pid by the kernel, start time, signal)"""
    units: Sequence[str]
    report: Json

    @property
    def hit(self) -> set[int]:
        return {pid for pid, _, _ in self.sent}

    @property
    def seen(self) -> set[int]:
        """Holders by what they have open (not by the driver's word alone)."""
        return {h["pid"] for h in self.report["holders"] if set(h["evidence"]) & {"fd", "map"}}


def referee_of(node: Node) -> Iterator[Referee]:
    referee = Referee.of(node)
    try:
        yield referee
    finally:
        referee.close()
