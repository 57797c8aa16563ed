"""The hook as hookscript and drop-in run it, in an embedded node, with and without the daemon."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.node import Node
from tests.embedded.scope import Running
from tests.integration.product import QUICK

REPOSITORY = Path(__file__).resolve().parents[3]
RUN = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from hostd.hook import entry; entry()"
INVOCATION = "0123456789abcdef0123456789abcdef"
STORE = "/run/pve-gpu-release"
HOOK_QUICK = "hook: {budget: 8, pre_start_budget: 8, watchdog_delay: 0.5, watchdog_interval: 0.5}\n"


class Hook:
    """`hook("pre-stop")` runs one phase for container 129 and returns what Proxmox would see."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.configure("")

    def configure(self, text: str) -> None:
        """Configuration beside the short limits of tests."""
        base = QUICK if "hook:" in text else QUICK + HOOK_QUICK
        self.node.write("/etc/pve-gpu-release/config.yaml", base + text)

    def __call__(
        self, phase: str, vmid: int = 129, timeout: float = 60, prefix: Sequence[str] = (), **env: str
    ) -> Any:
        command = [*prefix, sys.executable, "-I", "-S", "-c", RUN, str(vmid), phase]
        done = self.node.run(command, timeout=timeout, env=env, cwd="/")
        assert done.stdout == "" or done.stdout.endswith("\n")
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    def start(self, phase: str, vmid: int = 129, **env: str) -> Running:
        return self.node.popen([sys.executable, "-I", "-S", "-c", RUN, str(vmid), phase], env=env, cwd="/")

    # --- what is left in /run ---

    def records(self, vmid: int = 129) -> list[dict[str, Any]]:
        """Release records of a container, oldest first."""
        folder = self.node.path(f"{STORE}/releases")
        if not folder.exists():
            return []
        found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        return sorted((r for r in found if r["vmid"] == vmid), key=lambda r: str(r["started"]))

    def triggers(self, vmid: int = 129) -> list[str]:
        return [record["trigger"] for record in self.records(vmid)]

    def report(self) -> dict[str, Any]:
        """Of the last record, which must be finished."""
        report = self.records()[-1]["report"]
        assert report is not None
        return dict(report)

    def remembered(self, kind: str, vmid: int = 129) -> dict[str, Any] | None:
        path = self.node.path(f"{STORE}/{kind}/{vmid}.json")
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def hook(node: Node) -> Hook:
    return Hook(node)


@pytest.fixture
def daemon(node: Node, hook: Hook) -> Iterator[Callable[[], Running]]:
    """`daemon()` starts pve-gpu-hostd in the node and waits for its socket; ended at the end."""
    started: list[Running] = []

    def start() -> Running:
        path = node.path(f"{STORE}/io.pve.GpuRelease")
        path.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-c", RUN.replace("hook", "daemon"), "--socket", f"{STORE}/io.pve.GpuRelease"]
        running = node.popen(command, cwd="/")
        started.append(running)
        end = time.monotonic() + 20
        while not path.exists():
            assert running.popen.poll() is None, running.popen.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        return running

    yield start
    for running in started:
        if running.popen.poll() is None:
            running.process.kill(signal.SIGTERM)
        running.popen.communicate(timeout=60)


def of_unit(node: Node, invocation: str) -> None:
    """systemd says that this is the invocation of the container's unit."""
    path = node.path("/run/systemd/units/invocation:pve-container@129.service")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(invocation)


def until(question: Callable[[], Any], what: str, timeout: float = 60) -> Any:
    end = time.monotonic() + timeout
    while not (answer := question()):
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(0.01)
    return answer
