"""The sorts of entries, each with its fixed MESSAGE_ID.

`etc/catalog/pve-gpu-release.catalog` explains each id to `journalctl -x`; ids never change their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

IDENTIFIER = "pve-gpu-release"


class Priority(IntEnum):
    """syslog(3)."""

    ERR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of event."""

    name: str
    message_id: str
    priority: Priority


_P = Priority

STARTED = Kind("release-started", "b4fcccc1aa6a4fa533f22a12ae697957", _P.INFO)
HOLDER_FOUND = Kind("holder-found", "d15090ea4f0aad6e0dba8c43b09513ec", _P.NOTICE)
FOREIGN_SEEN = Kind("foreign-seen", "2ab29310127b4dd89ee4be8b4b26dea6", _P.INFO)
BLIND_SPOT = Kind("blind-spot", "54a793302c701c393d11e11c0d37f06e", _P.WARNING)
RUNG_BEGUN = Kind("rung-begun", "19defdd5486999cb85cbd22b32152ba6", _P.NOTICE)
RUNG_DONE = Kind("rung-done", "e990f9b862490356eeea6ffb27b2ad5d", _P.NOTICE)
HOLDER_FATE = Kind("holder-fate", "3e3b72d920eb9ff941fbc02204b0cb70", _P.INFO)
GPU_VERIFIED = Kind("gpu-verified", "8565bbe8a235338eeffa31520a4518ac", _P.INFO)
FINISHED = Kind("release-finished", "1700ee385d79ab1a2256523c971c7702", _P.NOTICE)
REFUSED = Kind("release-refused", "81429e9ec6137e3d078656104851d0ef", _P.WARNING)
RESUMED = Kind("release-resumed", "7018786e5d8370ff155f6d1b6afb31ea", _P.WARNING)
ABANDONED = Kind("release-abandoned", "74634e3e9bbc9324cb23ad64c5446c80", _P.WARNING)
RECORD_MISSING = Kind("record-missing", "638969f406188672f140fcb0cb95a575", _P.WARNING)
SNAPSHOT = Kind("stop-snapshot", "f1a313acc02123cabe756dce9ba6805d", _P.INFO)
CLEARED = Kind("leftovers-cleared", "ba7feb48de4d8053068199e0a5627a5d", _P.NOTICE)
GATE_WARNED = Kind("gate-warned", "da29a1628005719e95f034ac42597034", _P.WARNING)
GATE_BLOCKED = Kind("gate-blocked", "73648b0d4d288ce3140d003dc6ddb61b", _P.ERR)
NODES_MADE = Kind("nodes-made", "7bcad1ab5d27f678c37c8a3e3bb2334d", _P.NOTICE)
PHASE_DONE = Kind("phase-done", "3c4046af2bf8af2b45b214113abc9a05", _P.INFO)
WATCHDOG_ARMED = Kind("watchdog-armed", "1b5259d75a8bffa8bc4a88809aae2063", _P.INFO)
WATCHDOG_REPORT = Kind("watchdog-report", "2c9ae2c251fd5d4e77a7073d536affe8", _P.WARNING)
WATCHDOG_UNARMED = Kind("watchdog-unarmed", "67c405745d1a8eec91a06e9398708fd8", _P.WARNING)
DAEMON_STARTED = Kind("daemon-started", "07508dfb8934c6c6316d71e607a0ef2f", _P.INFO)
DAEMON_STOPPED = Kind("daemon-stopped", "e0969a3cfe1d62e7995fe7230aad05e2", _P.INFO)
CONFIG_LOADED = Kind("config-loaded", "eb90b544da541a1061fa8fd3e8b010e4", _P.INFO)
CONFIG_FAILED = Kind("config-failed", "0e658fc306ddd297414e061724cfd8d7", _P.ERR)
NVML_WEDGED = Kind("nvml-wedged", "dfc63c11886e553c259f00551a53c62d", _P.ERR)
NVML_RECOVERED = Kind("nvml-recovered", "f760900dd5870d36e9cceb577a56ec4a", _P.NOTICE)
RESET_RECOVERED = Kind("reset-recovered", "5f0b7c0d9a6e4f0fb0a4c6a1d2e37b18", _P.WARNING)
INTERNAL_ERROR = Kind("internal-error", "f4013162948eb0670ef2d03ab5244355", _P.ERR)
ENTRIES_DROPPED = Kind("entries-dropped", "925488969bf446c1de4831d785988764", _P.WARNING)

KINDS = tuple(value for value in globals().values() if isinstance(value, Kind))
BY_MESSAGE_ID = {kind.message_id: kind for kind in KINDS}
