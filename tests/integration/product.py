"""The product as its user meets it: run inside an embedded node, and what it answers."""

from __future__ import annotations

import fcntl
import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

from hostd.verdicts import REASONS
from tests.embedded.node import STANDIN, HolderHandle, Node, wait_until
from tests.embedded.scope import Running
from tests.product_command import command
from tests.verdict_cases import CASES

QUICK = """\
ladder: {grace: 5, kill_grace: 0.8, drain_grace: 0.6, timeout: 30, read_deadline: 0.3}
nvml: {deadline: 5}
"""
"""Limits for tests: long enough for a busy machine where something comes, short where nothing will."""
RELEASE_KEYS = {
    *("schema", "release_id", "vmid", "trigger", "verdict", "reason", "message", "was_held", "dry_run", "started"),
    *("duration_ms", "holders", "gpus", "rungs", "blind_spots", "details", "next_step"),
}
"""The contract's (DESIGN 5), and `details`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One run: exit status, what it wrote, and the JSON in it."""

    status: int
    out: str
    err: str
    json: dict[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        return str(self.json["reason"])

    @property
    def message(self) -> str:
        return str(self.json["message"])

    def must_be(self, reason: str) -> Answer:
        """Asserts verdict, reason and exit status as the verdict table has them; returns itself."""
        row = REASONS[reason]
        found = (self.json.get("reason"), self.json.get("verdict"), self.status)
        assert found == (reason, row.verdict and row.verdict.value, row.exit_status), self.out + self.err
        return self

    def fates(self) -> dict[int, str]:
        return {h["pid"]: h["fate"] for h in self.json["holders"]}

    def holder(self, pid: int) -> dict[str, Any]:
        found: dict[str, Any] = next(h for h in self.json["holders"] if h["pid"] == pid)
        return found

    def steps(self) -> list[str]:
        return [rung["step"] for rung in self.json["rungs"]]

    def signalled(self) -> set[int]:
        """Every pid that a rung names as its target."""
        return {pid for rung in self.json["rungs"] for pid in rung["targets"]}

    def gpu(self, minor: int) -> dict[str, Any]:
        found: dict[str, Any] = next(g for g in self.json["gpus"] if g["minor"] == minor)
        return found


class Product:
    """`pve-gpu-release` inside one node."""

    def __init__(self, node: Node, config: str = QUICK) -> None:
        self.node = node
        self.command = tuple(command())
        self.configure(config)

    def configure(self, text: str) -> None:
        self.node.write("/etc/pve-gpu-release/config.yaml", text)

    def run(self, *words: object, timeout: float = 60, **options: Any) -> Answer:
        """Any command line."""
        done = self.node.run([*self.command, *map(str, words)], timeout=timeout, **options)
        return Answer(done.returncode, done.stdout, done.stderr)

    def start(self, *words: object, **options: Any) -> Running:
        """Any command line, not waited for."""
        return self.node.popen([*self.command, *map(str, words)], **options)

    def ask(self, *words: object, timeout: float = 60, **options: Any) -> Answer:
        """A command line with --json, whose answer must be one JSON object of schema 1 and nothing else."""
        done = self.run(*words, "--json", timeout=timeout, **options)
        return parsed(done.status, done.out, done.err)

    def release(self, *words: object, timeout: float = 60) -> Answer:
        """One release; the report must be complete as the contract has it."""
        answer = self.ask(*words, timeout=timeout)
        if answer.json.get("verdict") is not None:
            assert set(answer.json) == RELEASE_KEYS, answer.out
        assert answer.err == ""
        return answer


def parsed(status: int, out: str, err: str) -> Answer:
    try:
        found = json.loads(out)
    except ValueError:
        raise AssertionError(f"no JSON (exit status {status}): {out!r} {err!r}") from None
    assert found["schema"] == 1, out
    return Answer(status, out, err, found)


def finish(running: Running, timeout: float = 60) -> Answer:
    """Waits for a started command."""
    try:
        out, err = running.popen.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        running.process.kill()
        running.popen.communicate()
        raise
    return Answer(running.popen.returncode, out, err)


def expected_of(key: str) -> str:
    """The reason that a case of the verdict table must end with."""
    return CASES[key][1]


# --- the node's own truth, whatever product and driver say -----------------------------------------------------------


def held_mib(node: Node) -> dict[int, int]:
    """GPU minor -> MiB of the allocations whose record a living process still has locked."""
    found: dict[int, int] = {}
    for name in node.allocations():
        with open(node.path(f"{STANDIN}/alloc/{name}")) as record:
            words = record.read().split()
            try:
                fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if words[0] != "import":
                    found[int(words[2])] = found.get(int(words[2]), 0) + int(words[3])
    return found


def written_ahead(node: Node) -> str:
    """What releases have written ahead so far."""
    try:
        return "".join(path.read_text() for path in node.path("/run/pve-gpu-release/releases").glob("*.json"))
    except FileNotFoundError:
        return ""


def wait_for_rung(node: Node, step: str = "term") -> None:
    """Until a release has written down that it begins this step."""
    wait_until(lambda: f'"step": "{step}"' in written_ahead(node), f"{step} has begun")


def dead(*families: HolderHandle) -> bool:
    return not [process for family in families for process in family.alive()]


def lives(*families: HolderHandle) -> bool:
    """All of their processes."""
    return all(process.alive() for family in families for process in family.processes)
