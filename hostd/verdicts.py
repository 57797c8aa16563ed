"""The verdict table: every way a run can end, as data. `docs/verdicts.md` is made from it, tests read it.

A row is added here before code can end that way. Messages are templates for `str.format_map`; a message says what is
so, a next step says what the administrator can do about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostd.model import Verdict

EXIT_PRECEDENCE = (130, 1, 5, 3, 6, 4, 7, 2, 9, 8, 75, 0)
"""Several containers: the worst status wins, in this order (DESIGN 5; 130 and 2 end the whole run and are put first
and beside refusals)."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One way to end: `code` is the stable `reason` of JSON and journal."""

    code: str
    verdict: Verdict | None
    exit_status: int
    message: str
    next_step: str = ""


R, H, U = Verdict.RELEASED, Verdict.HELD, Verdict.UNKNOWN

_ROWS = (
    # --- released ---
    Reason("released", R, 0, "container {vmid}: {gone} released, memory verified on {gpus}"),
    Reason("nothing-held", R, 0, "container {vmid} holds no GPU"),
    Reason("not-running", R, 0, "container {vmid} is not running and holds no GPU"),
    Reason("no-driver", R, 0, "no NVIDIA driver is loaded on this node; container {vmid} holds no GPU"),
    Reason(
        "memory-not-verified",
        R,
        0,
        "container {vmid}: no holder is left; the memory was NOT verified ({detail}), as --no-verify-memory accepts",
    ),
    Reason("gpu-free", R, 0, "{gpus} is free: {free} of memory, no stale holder"),
    Reason("gpu-not-ours", R, 0, "{gpus} is bound to {driver}: not ours, nothing of any container is on it"),
    Reason("gpu-idle", R, 0, "no container has {gpus} open"),
    # --- held, 3 ---
    Reason(
        "gpu-in-use",
        H,
        3,
        "{gpus} has {free} of free memory, {wanted} wanted; in use by {holders}",
        "pve-gpu-release ps shows who they are",
    ),
    Reason(
        "gpu-in-containers",
        H,
        3,
        "{gpus} is still open in {others}",
        "pve-gpu-release --gpu ... --all-containers --stop-units, or stop these containers",
    ),
    Reason(
        "gpu-host-holds",
        H,
        3,
        "no container has {gpus} open any more, but the host has: {others}",
        "stop them before the GPU is handed over: {others}",
    ),
    Reason(
        "holders-present",
        H,
        3,
        "container {vmid} holds {gpus} through {holders}",
        "pve-gpu-release {vmid}",
    ),
    Reason(
        "holders-survive",
        H,
        3,
        "container {vmid}: {holders} still hold {gpus} after {waited}",
        "run pve-gpu-release {vmid} again with a longer --timeout; pve-gpu-release ps {vmid} shows who they are",
    ),
    Reason(
        "respawned",
        H,
        3,
        "container {vmid}: holders come back as fast as they are killed, started by {supervisor}",
        "pve-gpu-release {vmid} --stop-units, or inside the container: {how}",
    ),
    Reason(
        "holder-appeared",
        H,
        3,
        "container {vmid}: {holders} opened {gpus} after the memory had been verified",
        "pve-gpu-release {vmid}",
    ),
    Reason(
        "container-restarted",
        H,
        3,
        "container {vmid} was started again during the release: {holders} of the new run hold {gpus} and were left alone",
        "pve-gpu-release {vmid}",
    ),
    Reason(
        "new-xid",
        H,
        3,
        "container {vmid}: the driver reported {detail} during the release; escalation stopped, {holders} still there",
        "see the kernel log (journalctl -k -g NVRM); {advice}",
    ),
    # --- held, 5 ---
    Reason(
        "unkillable",
        H,
        5,
        "container {vmid}: {holders} cannot die: SIGKILL is pending, state {state}, waiting in {wchan}",
        "what the task waits for has to end (see wchan); if it waits in the NVIDIA driver, only a GPU reset or a "
        "reboot of the node clears it",
    ),
    # --- held, 6 ---
    Reason(
        "ghost-memory",
        H,
        6,
        "container {vmid}: no holder is left, but {ghost} stay in use with no live client",
        "pve-gpu-release doctor; when nobody else uses the GPU: pve-gpu-release {vmid} --reset",
    ),
    Reason(
        "ghost-memory-before",
        H,
        6,
        "container {vmid}: {ghost} are in use with no live client, and were before this release began",
        "when nobody else uses the GPU: pve-gpu-release {vmid} --reset, or reboot the node",
    ),
    Reason(
        "draining",
        H,
        6,
        "container {vmid}: no holder is left and the memory is still falling ({ghost} to go) at the time limit",
        "pve-gpu-release verify {vmid} in a moment, or a longer --timeout",
    ),
    Reason(
        "held-by-other",
        H,
        6,
        "container {vmid}: no holder is left here, but its memory on {gpus} is kept by {others}, to whom a "
        "descriptor was passed",
        "release the other owner: {others}",
    ),
    Reason(
        "held-by-rest",
        H,
        6,
        "container {vmid}: what was selected is gone, but its memory on {gpus} is kept by {holders} of the same "
        "container, which inherited it",
        "pve-gpu-release {vmid}",
    ),
    Reason(
        "taken-over",
        H,
        6,
        "container {vmid}: its memory on {gpus} went over to {others} (CUDA IPC importer), which was not touched",
        "release the other owner: {others}",
    ),
    Reason(
        "gpu-stale",
        H,
        6,
        "{gpus}: {ghost} still in use by {holders}",
        "pve-gpu-release doctor; pve-gpu-release ps shows whose it may be",
    ),
    # --- unknown, 4 ---
    Reason(
        "driver-silent",
        U,
        4,
        "container {vmid}: no holder is left, but the driver did not answer ({detail})",
        "pve-gpu-release doctor; accept it without the driver's word: --no-verify-memory",
    ),
    Reason(
        "driver-mismatch",
        U,
        4,
        "container {vmid}: no holder is left, but library and kernel module of the driver differ ({detail})",
        "reload the driver or reboot the node after the upgrade; accept it without the driver's word: "
        "--no-verify-memory",
    ),
    Reason(
        "nvml-missing",
        U,
        4,
        "container {vmid}: no holder is left, but NVML is not installed here ({detail})",
        "pve-gpu-release doctor names what brings it beside this node's driver; accept it without: --no-verify-memory",
    ),
    Reason(
        "gpu-lost",
        U,
        4,
        "container {vmid}: no holder is left, but {gpus} cannot be asked: {detail}",
        "the GPU needs a reset or the node a reboot: journalctl -k -g Xid",
    ),
    Reason(
        "figures-unavailable",
        U,
        4,
        "container {vmid}: no holder is left, but the driver gives no memory figures for {gpus} (MIG or vGPU)",
        "accept it without figures: --no-verify-memory",
    ),
    Reason(
        "driver-only-holder",
        U,
        4,
        "container {vmid}: the driver lists {holders} of this container, but no descriptor or mapping can be seen",
        "a descriptor may be in flight in a socket; ending that process inside the container frees it",
    ),
    Reason(
        "placement-unknown",
        U,
        4,
        "container {vmid}: {holders} has {gpus} open beside other GPUs, and the driver does not say which of them it uses; "
        "it was left alone",
        "pve-gpu-release {vmid} --pid PID, or without --gpu",
    ),
    Reason(
        "blind-spots",
        U,
        4,
        "container {vmid}: no holder was found, but not everything could be read ({detail})",
        "see blind_spots in --json; run as root in the host's first PID namespace",
    ),
    Reason(
        "cannot-look",
        U,
        4,
        "cannot look: {detail}",
        "pve-gpu-release doctor",
    ),
    Reason(
        "pve-unreadable",
        U,
        4,
        "cannot read the configuration of container {vmid}: {detail}",
        "check pve-cluster: systemctl status pve-cluster",
    ),
    # --- refused, 7 ---
    Reason(
        "would-stop-container",
        None,
        7,
        "container {vmid}: its init (pid {pid}, {comm}) holds a GPU; ending it stops the container",
        "pve-gpu-release {vmid} --stop, or pct stop {vmid}",
    ),
    Reason(
        "reset-refused",
        None,
        7,
        "a reset of {gpus} would hit others: {others}",
        "release or stop them first: {others}",
    ),
    Reason("refused", None, 7, "refused: {detail}"),
    # --- the rest ---
    Reason(
        "no-such-container",
        None,
        8,
        "no container {vmid} on this node",
        "pct list shows the containers of this node",
    ),
    Reason(
        "container-elsewhere",
        None,
        8,
        "container {vmid} is on node {node}, not on this one",
        "ssh {node} pve-gpu-release {vmid}",
    ),
    Reason("not-root", None, 9, "cannot do this as uid {uid}: root is needed", "sudo pve-gpu-release ..."),
    Reason("usage", None, 2, "{detail}", "pve-gpu-release --help"),
    Reason("config-error", None, 2, "{detail}", "pve-gpu-release check-config"),
    Reason(
        "busy",
        None,
        75,
        "another release of container {vmid} is in flight (pid {pid})",
        "leave out --no-wait to wait for it",
    ),
    Reason("interrupted", None, 130, "interrupted: {detail}", "pve-gpu-release verify {vmid} shows what is left"),
    Reason(
        "internal-error",
        None,
        1,
        "internal error: {detail}",
        "this is a bug in pve-gpu-release; the journal has the traceback",
    ),
)

REASONS: dict[str, Reason] = {row.code: row for row in _ROWS}


def exit_status(reason: str) -> int:
    """The exit status of a reason; 1 for one that is not in the table."""
    row = REASONS.get(reason)
    return row.exit_status if row else 1


def worst(statuses: list[int]) -> int:
    """The status of a run over several containers, by DESIGN 5's order; 0 for none."""
    return min(statuses, key=lambda s: EXIT_PRECEDENCE.index(s) if s in EXIT_PRECEDENCE else 1, default=0)


class _Blank(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def say(reason: str, **facts: object) -> tuple[str, str]:
    """(message, next step) of a reason with its facts filled in."""
    row = REASONS[reason]
    values = _Blank(facts)
    return row.message.format_map(values), row.next_step.format_map(values)
