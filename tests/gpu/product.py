"""Runs the product as a user would, from the working tree, started as the installed script is (`python3 -I`).

None of it is imported here.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..product_command import command
from .driver import Gpu

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = tuple(command())
SOCKET = "/run/pve-gpu-release/io.pve.GpuRelease"
VERDICTS = {0: "released", 3: "held", 4: "unknown", 5: "held", 6: "held"}
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
RELEASE_KEYS = (
    *("schema", "release_id", "vmid", "trigger", "verdict", "reason", "message", "was_held", "dry_run", "started"),
    *("duration_ms", "holders", "gpus", "rungs", "blind_spots", "next_step"),
)


@dataclass
class Run:
    """One finished run of the product, with a few questions that the tests ask its JSON."""

    argv: list[str]
    status: int
    stdout: str
    stderr: str
    wall_ms: float
    ended_at: float
    """CLOCK_MONOTONIC, seconds."""
    report: dict[str, Any] = field(default_factory=dict)

    # --- what the JSON says ---

    def holder(self, pid: int) -> dict[str, Any]:
        """The entry of this host pid. Raises AssertionError."""
        found = [h for h in self.report["holders"] if h["pid"] == pid]
        assert len(found) == 1, f"pid {pid} is listed {len(found)} times among {self.holder_pids()}"
        entry: dict[str, Any] = found[0]
        return entry

    def holder_pids(self) -> set[int]:
        return {h["pid"] for h in self.report["holders"]}

    def gpu(self, gpu: Gpu) -> dict[str, Any]:
        """The entry of this GPU. Raises AssertionError."""
        found = [g for g in self.report["gpus"] if g["uuid"] == gpu.uuid]
        assert len(found) == 1, f"{gpu} is listed {len(found)} times in gpus[]"
        entry: dict[str, Any] = found[0]
        return entry

    def steps(self) -> list[str]:
        return [rung["step"] for rung in self.report["rungs"]]

    def kill_to_verdict_ms(self) -> float | None:
        """From the first SIGKILL rung to the verdict; None when there was none."""
        for rung in self.report.get("rungs", []):
            if rung["step"] == "kill":
                return float(self.report["duration_ms"] - rung["at_ms"])
        return None

    # --- what must hold ---

    def must_end(self, status: int, *reasons: str) -> Run:
        """Exit status, verdict and reason are those of the contract, and agree with each other."""
        said = (self.status, self.report.get("verdict"), self.report.get("reason"))
        assert self.status == status, f"exit status, verdict, reason = {said}; wanted {status}"
        assert self.report.get("schema") == 1
        assert self.report.get("verdict") == VERDICTS.get(status), said
        assert KEBAB.fullmatch(str(self.report.get("reason"))), said
        assert not reasons or self.report["reason"] in reasons, f"{said}; wanted one of {reasons}"
        return self

    def must_be_complete(self) -> Run:
        """A release's JSON has every key of schema 1."""
        missing = [key for key in RELEASE_KEYS if key not in self.report]
        assert not missing, f"keys missing in the report: {missing}"
        return self

    def describe(self) -> str:
        command = shlex.join(["pve-gpu-release", *self.argv])
        body = json.dumps(self.report, indent=1) if self.report else self.stdout
        return f"$ {command}\nexit status {self.status} after {self.wall_ms:.0f} ms\n{body}\nstderr: {self.stderr}"


def run(*argv: str, timeout_s: float = 180.0) -> Run:
    """Run it to its end. Raises AssertionError when it hangs; a crash is a status like any other."""
    began = time.monotonic()
    child = subprocess.Popen(
        [*PROGRAM, *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        stdout, stderr = child.communicate()
        raise AssertionError(
            f"{shlex.join(argv)} did not end within {timeout_s:g} s\nstdout: {stdout}\nstderr: {stderr}"
        ) from None
    ended = time.monotonic()
    done = Run(list(argv), child.returncode, stdout, stderr, (ended - began) * 1000, ended)
    if "--json" in argv:
        try:
            done.report = json.loads(stdout)
        except json.JSONDecodeError:
            done.report = {}
    return done


@contextmanager
def daemon(directory: Path) -> Iterator[None]:
    """The daemon, as it runs without systemd, until the block ends. Raises AssertionError when it does not listen."""
    with (directory / "daemon.log").open("w+") as log:
        child = subprocess.Popen(
            command("hostd.daemon"), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_for_socket(child, log)
            yield
        finally:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _wait_for_socket(child: subprocess.Popen[bytes], log: IO[str]) -> None:
    until = time.monotonic() + 20
    while True:
        with socket.socket(socket.AF_UNIX) as tried:
            try:
                tried.connect(SOCKET)
                return
            except OSError as exc:
                why = exc
        if child.poll() is not None or time.monotonic() > until:
            log.seek(0)
            raise AssertionError(f"the daemon does not listen: {why}, status {child.returncode}\n{log.read()}")
        time.sleep(0.01)


@dataclass
class Watched:
    """A run on a terminal: what it printed and when, and what the world looked like meanwhile."""

    run: Run
    chunks: list[tuple[float, str]]
    """(CLOCK_MONOTONIC, text without escape sequences)"""
    samples: list[tuple[float, Any]]

    def text_until(self, moment: float) -> str:
        return "".join(text for when, text in self.chunks if when <= moment)


def watch(*argv: str, sample: Callable[[], Any], timeout_s: float = 180.0) -> Watched:
    """Run it on a pseudo-terminal and call `sample` every few milliseconds until it ends."""
    master, slave = pty.openpty()
    began = time.monotonic()
    child = subprocess.Popen(
        [*PROGRAM, *argv],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    chunks: list[tuple[float, str]] = []
    samples: list[tuple[float, Any]] = []
    try:
        while True:
            ready, _, _ = select.select([master], [], [], 0.005)
            if ready:
                try:
                    raw = os.read(master, 65536)
                except OSError:  # EIO: the last writer closed the terminal
                    raw = b""
                if not raw:
                    break
                chunks.append((time.monotonic(), ESCAPES.sub("", raw.decode(errors="replace"))))
            elif child.poll() is not None:
                break
            samples.append((time.monotonic(), sample()))
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"{shlex.join(argv)} did not end within {timeout_s:g} s: {chunks[-5:]}")
        status = child.wait(10)
    finally:
        child.kill()
        child.wait()
        os.close(master)
    ended = time.monotonic()
    text = "".join(text for _when, text in chunks)
    return Watched(Run(list(argv), status, text, "", (ended - began) * 1000, ended), chunks, samples)


def help_text() -> str:
    """Everything it says about its options, hidden ones too where it has a way to show them."""
    texts = []
    for argv in (("--help",), ("release", "--help"), ("--help-all",), ("wait", "--help")):
        done = run(*argv, timeout_s=30)
        texts.append(f"[{shlex.join(argv)} -> {done.status}]\n{done.stdout}{done.stderr}")
    return "\n".join(texts)
