"""The language of the configuration file: every key, what it may be, what it means; and the reference made from that."""

from __future__ import annotations

from typing import NamedTuple

from hostd.config import HookSettings, OnDirty, ResetPolicy, ResetSettings
from hostd.ladder import Limits

Value = float | int | bool | str | tuple[str, ...]


class Key(NamedTuple):
    """One setting: where it stands in the file, what it may be, what it means."""

    path: str
    kind: str
    """`seconds`, `number`, `mib`, `yes-no`, `choice` or `units`."""
    default: Value
    meaning: str
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()
    per_container: bool = True

    @property
    def expected(self) -> str:
        match self.kind:
            case "seconds":
                return f"a number of seconds > 0 and <= {self.high}"
            case "number":
                return f"a whole number from {self.low} to {self.high}"
            case "mib":
                return f"a whole number of MiB from {self.low} to {self.high}"
            case "yes-no":
                return "true or false"
            case "choice":
                return " or ".join(self.choices)
            case _:
                return "a list of systemd service names"

    @property
    def unit(self) -> str:
        return {"seconds": "s", "mib": "MiB"}.get(self.kind, "")


_L, _H = Limits(), HookSettings()
DAY = 86_400

KEYS = (
    Key("ladder.grace", "seconds", _L.grace_s, "After SIGTERM: seconds without progress before SIGKILL.", high=DAY),
    Key(
        "ladder.kill_grace",
        "seconds",
        _L.kill_grace_s,
        "After SIGKILL: a task that has not moved for this long is called unkillable.",
        high=DAY,
    ),
    Key(
        "ladder.drain_grace",
        "seconds",
        _L.drain_grace_s,
        "GPU memory that has not fallen for this long after the last holder left will not fall.",
        high=DAY,
    ),
    Key("ladder.timeout", "seconds", _L.timeout_s, "Limit on a whole release.", high=DAY),
    Key(
        "ladder.read_deadline",
        "seconds",
        _L.read_deadline_s,
        "On reading the mappings or the command line of one process: a stuck process blocks its reader.",
        high=DAY,
    ),
    Key(
        "ladder.settle",
        "seconds",
        _L.settle_s,
        "How long to look again for a job that something alive would start again.",
        high=DAY,
    ),
    Key(
        "ladder.respawn_rounds",
        "number",
        _L.respawn_rounds,
        "How often holders that came back are ended again before the release says so and stops.",
        high=100,
    ),
    Key(
        "ladder.stop_units",
        "yes-no",
        False,
        "First ask the job's own supervisor inside the container (systemd unit, docker) to stop it; not at a stop or start.",
    ),
    Key(
        "ladder.reset",
        "choice",
        ResetPolicy.NEVER.value,
        "Reset a GPU that nothing else frees: never, or auto (nobody else on it; not at a stop or start). --reset asks once.",
        choices=tuple(ResetPolicy),
    ),
    Key(
        "hook.budget",
        "seconds",
        _H.budget_s,
        "The longest that post-stop may hold up a stop; the daemon goes on in the background.",
        high=3600,
    ),
    Key("hook.pre_start_budget", "seconds", _H.pre_start_budget_s, "The longest that pre-start may take.", high=3600),
    Key(
        "hook.on_dirty",
        "choice",
        _H.on_dirty.value,
        "A start onto a GPU that is still held or short of memory: warn in the log, or block the start.",
        choices=tuple(OnDirty),
    ),
    Key(
        "hook.min_free_mib",
        "mib",
        _H.min_free_mib,
        "A GPU of the container with less free memory than this is dirty (what others use counts as free); 0 = not checked.",
        high=1 << 24,
    ),
    Key(
        "hook.watchdog_delay",
        "seconds",
        _H.watchdog_delay_s,
        "A stop that takes longer than this is looked at and reported.",
        high=DAY,
    ),
    Key("hook.watchdog_interval", "seconds", _H.watchdog_interval_s, "Then again every so often.", high=DAY),
    Key(
        "nvml.deadline",
        "seconds",
        _L.nvml_deadline_s,
        "On one call of the driver's library; without persistence mode opening a GPU takes seconds.",
        high=3600,
        per_container=False,
    ),
    Key(
        "reset.services",
        "units",
        ResetSettings().services,
        "Services of the host that a reset may stop before and start again after.",
        per_container=False,
    ),
)

BY_PATH = {key.path: key for key in KEYS}
SECTIONS = tuple(dict.fromkeys(key.path.partition(".")[0] for key in KEYS))
CONTAINER_SECTIONS = tuple(dict.fromkeys(key.path.partition(".")[0] for key in KEYS if key.per_container))


class Row(NamedTuple):
    """One line of the configuration reference."""

    path: str
    type: str
    default: str
    unit: str
    per_container: bool
    meaning: str


def reference_rows() -> tuple[Row, ...]:
    """The data of the generated configuration reference, in the order of the file."""
    return tuple(
        Row(key.path, key.expected, as_yaml(key.default), key.unit, key.per_container, key.meaning) for key in KEYS
    )


def default_yaml() -> str:
    """The commented `etc/config.yaml`: every key with its meaning and its default, nothing in force."""
    lines = [
        "# Configuration of pve-gpu-release. Everything is optional: what is commented out is the built-in default.",
        "# To change a setting take `#` away from its line AND from the line of its section (`#ladder:`, `#hook:`).",
        "# Check with `pve-gpu-release check-config`; apply to a running daemon with `systemctl reload pve-gpu-hostd`.",
    ]
    section = ""
    for key in KEYS:
        head, _, leaf = key.path.partition(".")
        if head != section:
            lines += ["", f"#{head}:"]
            section = head
        lines += [f"# {key.meaning}", f"# ({key.expected})", f"#  {leaf}: {as_yaml(key.default)}"]
    lines += [
        "",
        "# Overrides for single containers, by their id; every key of "
        + " and ".join(f"`{name}`" for name in CONTAINER_SECTIONS)
        + " may stand there:",
        "#     containers:",
        "#       129:",
        "#         ladder: {grace: 60}",
        "#         hook: {on_dirty: block}",
        "#containers: {}",
    ]
    return "\n".join(lines) + "\n"


def as_yaml(value: object) -> str:
    """A value as it is written in the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
