"""`/etc/pve-gpu-release/config.yaml` to typed settings (DESIGN 8). `configkeys.py` is the whole language of the file;
`configreader.py` reads the YAML against it, `configvalues.py` makes settings of what it finds.

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
    from hostd.configvalues import build

    reader = Reader(name.rpartition("/")[2])
    reader.read(text)
    if reader.problems:
        raise BrokenConfigError(tuple(reader.problems))
    return build(reader.values, reader.by_container)


def says_nothing(text: str) -> bool:
    """True when only comments and blank lines are there, so that yaml need not be asked."""
    return all(not line or line.startswith("#") for line in map(str.strip, text.split("\n")))


def parse_vmid(text: str) -> int | None:
    """A Proxmox container id, 100 to 999999999; None when the text is none."""
    if text.isascii() and text.isdigit() and 3 <= len(text) <= 9 and not text.startswith("0"):
        return int(text)
    return None
