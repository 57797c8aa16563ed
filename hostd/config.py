"""`/etc/pve-gpu-release/config.yaml` to typed settings (DESIGN 8). The table KEYS is the whole language of the file;
`configreader.py` reads the YAML against it.

Reading never ends in a traceback: a wrong file is a `BrokenConfigError` with every mistake, its line and key path.
yaml is imported only for a file that says something: it costs more than a whole look at an idle container (FACTS), and
the file as shipped is all comments.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hostd.errors import ConfigError
from hostd.ladder import Limits, Options
from hostd.terminal import escape

DEFAULT_PATH = "/etc/pve-gpu-release/config.yaml"
MAX_BYTES = 1 << 20


class OnDirty(StrEnum):
    """What the gate at pre-start does when a GPU of the container is dirty."""

    WARN = "warn"
    BLOCK = "block"


class ResetPolicy(StrEnum):
    """Whether a release may reset a GPU without `--reset`."""

    NEVER = "never"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class HookSettings:
    """What the hook and the stop watchdog may spend and decide. Seconds where not named otherwise."""

    budget_s: float = 20.0
    pre_start_budget_s: float = 20.0
    on_dirty: OnDirty = OnDirty.WARN
    min_free_mib: int = 0
    """0 = not checked."""
    watchdog_delay_s: float = 30.0
    watchdog_interval_s: float = 60.0


@dataclass(frozen=True, slots=True)
class LadderSettings:
    limits: Limits = field(default_factory=Limits)
    stop_units: bool = False
    reset: ResetPolicy = ResetPolicy.NEVER


@dataclass(frozen=True, slots=True)
class NvmlSettings:
    deadline_s: float = Limits().nvml_deadline_s


@dataclass(frozen=True, slots=True)
class ResetSettings:
    services: tuple[str, ...] = Options().reset_services
    """Units that a reset may stop before and start again after."""


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """Everything that holds for one container, its overrides applied."""

    limits: Limits
    stop_units: bool
    reset: ResetPolicy
    hook: HookSettings


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file; a missing one is `Config()`, the built-in defaults."""

    ladder: LadderSettings = field(default_factory=LadderSettings)
    hook: HookSettings = field(default_factory=HookSettings)
    nvml: NvmlSettings = field(default_factory=NvmlSettings)
    reset: ResetSettings = field(default_factory=ResetSettings)
    containers: Mapping[int, ContainerSettings] = field(default_factory=dict)
    """Only containers with overrides."""
    notices: tuple[str, ...] = ()
    """Not errors, worth a line in the log."""

    def for_container(self, vmid: int) -> ContainerSettings:
        own = self.containers.get(vmid)
        if own is not None:
            return own
        return ContainerSettings(self.ladder.limits, self.ladder.stop_units, self.ladder.reset, self.hook)


class BrokenConfigError(ConfigError):
    """A configuration file that cannot be used; `problems` has one sentence per mistake, in the order of the file.

    `message` is one line: the first of them, and how many more there are.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more, next_step="pve-gpu-release check-config")
        self.problems = problems


# --- The language of the file --------------------------------------------------------------------------------------

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
        "First ask the job's own supervisor inside the container (systemd unit, docker) to stop it.",
    ),
    Key(
        "ladder.reset",
        "choice",
        ResetPolicy.NEVER.value,
        "Reset a GPU that nothing else frees: never, or auto (only when nobody else is on it). --reset asks once.",
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


# --- Reading -------------------------------------------------------------------------------------------------------


def load(path: str = DEFAULT_PATH, *, must_exist: bool = False) -> Config:
    """The settings in `path`; a missing file is the built-in defaults unless it must exist.

    Without a usable yaml module: the built-in defaults, and a notice that says so (DESIGN 10).
    Raises BrokenConfigError with every mistake found.
    """
    name = escape(path)
    try:
        data = _read_file(path)
    except FileNotFoundError:
        if not must_exist:
            return Config()
        raise BrokenConfigError((f"cannot read {name}: no such file",)) from None
    except OSError as exc:
        raise BrokenConfigError((f"cannot read {name}: {exc.strerror or exc}",)) from None
    return parse(data, name)


def load_or_default(path: str = DEFAULT_PATH) -> tuple[Config, list[str]]:
    """As `load`, but the built-in defaults and the reasons when that fails: a typo keeps no container from starting."""
    try:
        config = load(path)
    except BrokenConfigError as exc:
        return Config(), [*exc.problems, "the built-in defaults are used"]
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with a file must not stop the hook
        return Config(), [f"cannot read {escape(path)}: {escape(repr(exc))}", "the built-in defaults are used"]
    return config, list(config.notices)


def _read_file(path: str) -> bytes:
    """At most MAX_BYTES + 1 bytes of a regular file; never waits for a fifo or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file")
        parts: list[bytes] = []
        left = MAX_BYTES + 1
        while left and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def parse(data: bytes, name: str = "config.yaml") -> Config:
    """The settings that the content of a file gives. Raises BrokenConfigError."""
    if len(data) > MAX_BYTES:
        raise BrokenConfigError((f"cannot read {name}: larger than {MAX_BYTES >> 20} MiB",))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise BrokenConfigError((f"cannot read {name}: not UTF-8 text (line {line})",)) from None
    if says_nothing(text):
        return Config()
    try:
        import yaml  # noqa: F401
    except Exception as exc:  # noqa: BLE001 - missing or broken, in whatever way
        why = (
            "python3-yaml is not installed"
            if isinstance(exc, ImportError)
            else f"python3-yaml fails: {escape(repr(exc))}"
        )
        return Config(notices=(f"cannot read {name}: {why}; the built-in defaults are used",))
    from hostd.configreader import Reader

    reader = Reader(name.rpartition("/")[2])
    reader.read(text)
    if reader.problems:
        raise BrokenConfigError(tuple(reader.problems))
    return _build(reader.values, reader.by_container)


def says_nothing(text: str) -> bool:
    """True when only comments and blank lines are there, so that yaml need not be asked."""
    return all(not line or line.startswith("#") for line in map(str.strip, text.split("\n")))


def parse_vmid(text: str) -> int | None:
    """A Proxmox container id, 100 to 999999999; None when the text is none."""
    if text.isascii() and text.isdigit() and 3 <= len(text) <= 9 and not text.startswith("0"):
        return int(text)
    return None


# --- Values to settings --------------------------------------------------------------------------------------------


def _build(values: dict[str, Value], by_container: dict[int, dict[str, Value]]) -> Config:
    everywhere = _container_settings(values)
    services = values.get("reset.services", ResetSettings().services)
    return Config(
        ladder=LadderSettings(everywhere.limits, everywhere.stop_units, everywhere.reset),
        hook=everywhere.hook,
        nvml=NvmlSettings(everywhere.limits.nvml_deadline_s),
        reset=ResetSettings(services if isinstance(services, tuple) else ()),
        containers={vmid: _container_settings({**values, **own}) for vmid, own in sorted(by_container.items()) if own},
    )


def _container_settings(values: dict[str, Value]) -> ContainerSettings:
    def number(path: str) -> float:
        value = values.get(path, BY_PATH[path].default)
        return value if isinstance(value, float) else 0.0

    def whole(path: str) -> int:
        value = values.get(path, BY_PATH[path].default)
        return value if isinstance(value, int) else 0

    limits = Limits(
        grace_s=number("ladder.grace"),
        kill_grace_s=number("ladder.kill_grace"),
        drain_grace_s=number("ladder.drain_grace"),
        timeout_s=number("ladder.timeout"),
        nvml_deadline_s=number("nvml.deadline"),
        read_deadline_s=number("ladder.read_deadline"),
        settle_s=number("ladder.settle"),
        respawn_rounds=whole("ladder.respawn_rounds"),
    )
    hook = HookSettings(
        budget_s=number("hook.budget"),
        pre_start_budget_s=number("hook.pre_start_budget"),
        on_dirty=OnDirty(str(values.get("hook.on_dirty", _H.on_dirty))),
        min_free_mib=whole("hook.min_free_mib"),
        watchdog_delay_s=number("hook.watchdog_delay"),
        watchdog_interval_s=number("hook.watchdog_interval"),
    )
    reset = ResetPolicy(str(values.get("ladder.reset", ResetPolicy.NEVER)))
    return ContainerSettings(limits, bool(values.get("ladder.stop_units", False)), reset, hook)


def effective_values(config: Config, vmid: int | None = None) -> dict[str, Value]:
    """Key path -> value in force, for a container or for all without overrides."""
    own = config.for_container(vmid) if vmid is not None else config.for_container(0)
    limits, hook = own.limits, own.hook
    found: dict[str, Value] = {
        "ladder.grace": limits.grace_s,
        "ladder.kill_grace": limits.kill_grace_s,
        "ladder.drain_grace": limits.drain_grace_s,
        "ladder.timeout": limits.timeout_s,
        "ladder.read_deadline": limits.read_deadline_s,
        "ladder.settle": limits.settle_s,
        "ladder.respawn_rounds": limits.respawn_rounds,
        "ladder.stop_units": own.stop_units,
        "ladder.reset": own.reset.value,
        "hook.budget": hook.budget_s,
        "hook.pre_start_budget": hook.pre_start_budget_s,
        "hook.on_dirty": hook.on_dirty.value,
        "hook.min_free_mib": hook.min_free_mib,
        "hook.watchdog_delay": hook.watchdog_delay_s,
        "hook.watchdog_interval": hook.watchdog_interval_s,
    }
    if vmid is None:
        found["nvml.deadline"] = config.nvml.deadline_s
        found["reset.services"] = config.reset.services
    return found
