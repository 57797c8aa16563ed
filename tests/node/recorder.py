"""A hookscript and a drop-in that write down what they saw, and do what a test wants.

recorder = Recorder(node)
recorder.attach(ct)                         # hookscript of ct and drop-in of both container units
recorder.on("pre-start", "exit 1")          # shell text run in that phase, after it was recorded
recorder.names(129)                         # ["pre-start", "ExecStartPre", "post-start"]
recorder.events(129, "post-stop")[0].cgroup
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.node.node import Container, VirtualNode

EVENTS = "/shared/events.jsonl"
PROGRAM = "/shared/record"
VOLID = "local:snippets/record"
UNITS = ("pve-container@.service", "pve-container-debug@.service")


@dataclass
class Event:
    """One call of the hookscript (name = phase) or of the drop-in (name = ExecStartPre or ExecStopPost)."""

    vmid: int
    name: str
    at: float
    ct: int
    cgroup: str
    mount_ns: str
    net_ns: str
    cwd: str
    stdin: str
    umask: int
    environment: dict[str, str]
    parent: str
    lock_free: bool
    unit_state: str
    argv: list[str]
    ignored: int
    extra: dict[str, Any] = field(default_factory=dict)


class Recorder:
    def __init__(self, node: VirtualNode) -> None:
        self.node = node
        node.copy_in(Path(__file__).with_name("record.py"), PROGRAM)
        node.host_path(PROGRAM).chmod(0o755)
        node.copy_in(Path(__file__).with_name("record.py"), "/var/lib/vz/snippets/record")
        node.host_path("/var/lib/vz/snippets/record").chmod(0o755)
        node.write(EVENTS, "")

    def attach(self, container: Container, drop_in: bool = True) -> None:
        container.hookscript(VOLID)
        if drop_in:
            self.drop_in()

    def drop_in(self, extra: str = "") -> None:
        text = f"[Service]\nExecStartPre={PROGRAM} %i ExecStartPre\nExecStopPost={PROGRAM} %i ExecStopPost\n{extra}"
        for unit in UNITS:
            self.node.write(f"/etc/systemd/system/{unit}.d/60-record.conf", text)
        self.node.systemctl("daemon-reload")

    def on(self, name: str, script: str) -> None:
        """Shell text for an event; $1 is the vmid. An exit status other than 0 becomes the event's."""
        self.node.write(f"/shared/on-{name}", script)

    def forget(self) -> None:
        self.node.write(EVENTS, "")

    def events(self, vmid: int, name: str | None = None) -> list[Event]:
        lines = [json.loads(line) for line in self.node.read(EVENTS).splitlines()]
        return [Event(**line) for line in lines if line["vmid"] == vmid and name in (None, line["name"])]

    def names(self, vmid: int) -> list[str]:
        return [event.name for event in self.events(vmid)]

    def wait_for(self, vmid: int, name: str, count: int = 1, timeout: float = 60) -> Event:
        """Until this event was recorded `count` times; the last of them."""
        self.node.wait_until(lambda: len(self.events(vmid, name)) >= count, f"{name} of {vmid}", timeout)
        return self.events(vmid, name)[count - 1]
