"""The audit trail: every decision as one journal entry with a fixed MESSAGE_ID and fields (DESIGN 9).

Pure: functions turn what the release saw, did and decided into `(field, value)` pairs; `hostd/system/journal.py` sends
them. `kinds` the sorts of entries · `entry` how one is made · `release` `lifecycle` `node` what each says · `trail` the
listener that writes a release down.
"""

from __future__ import annotations

from hostd.audit.entry import MAX_REPEATS, MAX_TEXT, NOWHERE, Context, Entry
from hostd.audit.kinds import (
    ABANDONED,
    BLIND_SPOT,
    BY_MESSAGE_ID,
    CLEARED,
    CONFIG_FAILED,
    CONFIG_LOADED,
    DAEMON_STARTED,
    DAEMON_STOPPED,
    ENTRIES_DROPPED,
    FINISHED,
    FOREIGN_SEEN,
    GATE_BLOCKED,
    GATE_WARNED,
    GPU_VERIFIED,
    HOLDER_FATE,
    HOLDER_FOUND,
    IDENTIFIER,
    INTERNAL_ERROR,
    KINDS,
    NODES_MADE,
    NVML_RECOVERED,
    NVML_WEDGED,
    PHASE_DONE,
    RECORD_MISSING,
    REFUSED,
    RESET_RECOVERED,
    RESUMED,
    RUNG_BEGUN,
    RUNG_DONE,
    SNAPSHOT,
    STARTED,
    WATCHDOG_ARMED,
    WATCHDOG_REPORT,
    WATCHDOG_UNARMED,
    Kind,
    Priority,
)
from hostd.audit.lifecycle import (
    cleared,
    gate,
    nodes_made,
    phase_done,
    snapshot,
    watchdog_armed,
    watchdog_report,
    watchdog_unarmed,
)
from hostd.audit.node import (
    config_failed,
    config_loaded,
    daemon_started,
    daemon_stopped,
    entries_dropped,
    internal_error,
    nvml_recovered,
    nvml_wedged,
    reset_recovered,
)
from hostd.audit.release import (
    abandoned,
    blind_spot,
    fate,
    finished,
    foreign_seen,
    gpu_verified,
    holder_found,
    record_missing,
    resumed,
    rung_begun,
    rung_done,
    started,
)
from hostd.audit.trail import Trail
