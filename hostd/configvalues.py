"""Between the values of the file, by key path, and settings."""

from __future__ import annotations

from hostd.config import (
    Config,
    ContainerSettings,
    HookSettings,
    LadderSettings,
    NvmlSettings,
    OnDirty,
    ResetPolicy,
    ResetSettings,
)
from hostd.configkeys import BY_PATH, Value
from hostd.ladder import Limits


def build(values: dict[str, Value], by_container: dict[int, dict[str, Value]]) -> Config:
    """The settings of a file that was read without a mistake."""
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
        on_dirty=OnDirty(str(values.get("hook.on_dirty", BY_PATH["hook.on_dirty"].default))),
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
