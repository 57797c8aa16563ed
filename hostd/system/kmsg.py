"""New Xid messages of the NVIDIA driver in the kernel log, and what the numbers mean.

An Xid is the driver's report of an error on a GPU (docs.nvidia.com/deploy/xid-errors). A new one in the middle of a
release stops the escalation, unless it is one that an application's error or the killing itself brings about.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

PATH = "/dev/kmsg"

_RECORD_BYTES = 8192
"""CONSOLE_EXT_LOG_MAX (kernel/printk): the longest record; a smaller buffer gets EINVAL."""
_MOST_RECORDS = 20_000
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f]+:[0-9a-f]+:[0-9a-f]+)[^)]*\): ?(\d+)(?:, ?(.*))?", re.IGNORECASE)
_LOST = re.compile(
    r"NVRM: .*?\b(?:GPU(?: at)? )(?:PCI:)?([0-9a-f]+:[0-9a-f]+:[0-9a-f]+)(?:\.[0-7])?\b.*fallen off the bus",
    re.IGNORECASE,
)
_PID = re.compile(r"\bpid='?(\d+)")


class Severity(StrEnum):
    """What an Xid asks for."""

    HARMLESS = "harmless"
    """An error of one application, or a note: the GPU goes on."""
    RESET = "reset"
    """The GPU needs a reset."""
    REBOOT = "reboot"
    """The node needs a reboot, or the GPU attention."""


class Meaning(NamedTuple):
    severity: Severity
    text: str


A, S, B = Severity.HARMLESS, Severity.RESET, Severity.REBOOT

MEANINGS: dict[int, Meaning] = {
    13: Meaning(A, "graphics engine exception: an error of the application"),
    31: Meaning(A, "GPU memory page fault: an error of the application"),
    32: Meaning(A, "invalid or corrupted push buffer stream: an error of the application"),
    38: Meaning(S, "driver firmware error"),
    43: Meaning(A, "GPU stopped processing: the application was reset"),
    45: Meaning(A, "preemptive cleanup: normal when a process is killed"),
    46: Meaning(S, "GPU stopped processing"),
    48: Meaning(S, "double bit ECC error"),
    61: Meaning(S, "internal micro-controller breakpoint"),
    62: Meaning(S, "internal micro-controller halt"),
    63: Meaning(A, "ECC page retirement or row remapping recorded; takes effect with the next reset"),
    64: Meaning(S, "ECC page retirement or row remapping failed"),
    66: Meaning(A, "illegal access by the driver for an application"),
    68: Meaning(A, "video processor exception: an error of the application"),
    69: Meaning(A, "graphics engine class error: an error of the application"),
    74: Meaning(S, "NVLink error"),
    79: Meaning(B, "GPU has fallen off the bus"),
    92: Meaning(A, "high rate of single bit ECC errors"),
    94: Meaning(A, "contained ECC error: the application that met it has to be restarted"),
    95: Meaning(S, "uncontained ECC error"),
    109: Meaning(S, "context switch timeout"),
    110: Meaning(B, "security fault"),
    119: Meaning(S, "GPU firmware (GSP) does not answer; a reboot if the reset fails"),
    120: Meaning(S, "GPU firmware (GSP) error; a reboot if the reset fails"),
    121: Meaning(A, "corrected C2C link error"),
    136: Meaning(S, "link training failed"),
    137: Meaning(A, "NVLink privilege error of an application"),
    140: Meaning(S, "unrecovered ECC error"),
    143: Meaning(S, "GPU initialisation failed"),
    154: Meaning(A, "the recommended recovery action has changed; field value 230 says to what"),
}

ADVICE: dict[Severity, str] = {
    Severity.HARMLESS: "nothing to do for the GPU",
    Severity.RESET: "the GPU needs a reset",
    Severity.REBOOT: "the node needs a reboot",
}


@dataclass(frozen=True, slots=True)
class Xid:
    """One message of the driver about an error on one GPU."""

    pci: str
    """Canonical `0000:3b:00.0`."""
    number: int | None
    """None: "GPU has fallen off the bus" without one."""
    text: str
    """The message after the number, or all of it."""
    pid: int | None = None
    """The process that the driver names. A hint, as every pid from the driver."""

    @property
    def meaning(self) -> Meaning:
        """Of its number; one that is not in the table asks for a reset, to be on the safe side."""
        number = 79 if self.number is None else self.number
        return MEANINGS.get(number, Meaning(Severity.RESET, "an Xid that is not in our table"))

    @property
    def fatal(self) -> bool:
        """True when it must stop the escalation."""
        return self.meaning.severity is not Severity.HARMLESS

    @property
    def advice(self) -> str:
        return ADVICE[self.meaning.severity]

    def __str__(self) -> str:
        number = "without a number" if self.number is None else str(self.number)
        return f"Xid {number} on {self.pci}: {self.meaning.text}"


class Kmsg:
    """The kernel log from the moment this is made. Opens nothing but the log; close it."""

    def __init__(self, path: str = PATH) -> None:
        self._fd = -1
        self.error: str | None = None
        """Why the log cannot be read; None when it can."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)  # /dev/kmsg: behind the last record there is now
        except OSError as exc:
            self.error = f"cannot read {path}: {exc.strerror}"
            self.close()

    def new_xids(self) -> list[Xid] | None:
        """Xids since the last call (or since this was made), oldest first. None when the log cannot be read:
        `error`.
        """
        if self._fd < 0:
            return None
        found: list[Xid] = []
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before we read them; the next read has the oldest left
                continue
            except OSError as exc:
                self.error = f"cannot read the kernel log: {exc.strerror}"
                return found or None
            if not record:
                break
            found += parse_records(record.decode("utf-8", "replace"))
        return found

    def fileno(self) -> int:
        """For poll; -1 when the log cannot be read."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_records(text: str) -> list[Xid]:
    """Xids in records of /dev/kmsg (Documentation/ABI/testing/dev-kmsg): `PRIORITY,SEQUENCE,TIME,FLAGS;MESSAGE`.

    Only those of the kernel itself, facility 0: whoever may write to /dev/kmsg can write any other (never 0).
    """
    found = []
    for line in text.splitlines():
        prefix, separator, message = line.partition(";")
        priority = prefix.split(",", 1)[0]
        if not separator or not (priority.isascii() and priority.isdigit()) or int(priority[:9]) >> 3:
            continue
        xid = parse_message(message)
        if xid is not None:
            found.append(xid)
    return found


def parse_message(message: str) -> Xid | None:
    """`NVRM: Xid (PCI:0000:3b:00): 79, pid=…` or "GPU has fallen off the bus"; None for anything else."""
    if not message.startswith("NVRM: "):
        return None
    if match := _XID.match(message):
        pid = _PID.search(match.group(3) or "")
        return Xid(
            _pci(match.group(1)),
            int(match.group(2)[:9]),
            (match.group(3) or "").strip(),
            int(pid.group(1)) if pid else None,
        )
    if match := _LOST.match(message):
        return Xid(_pci(match.group(1)), None, message[len("NVRM: ") :])
    return None


def _pci(text: str) -> str:
    domain, bus, device = (int(part, 16) for part in text.split(":"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
