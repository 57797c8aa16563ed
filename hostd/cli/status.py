"""`pve-gpu-release status [--watch]`: daemon, driver, GPUs, holders per container, last releases."""

from __future__ import annotations

import argparse
import os
import sys
import time

from hostd import terminal
from hostd.cli import output, remote
from hostd.cli.common import add_common_options, named_config, print_json, require_root, seconds
from hostd.cli.render import count, gpu_name, gpu_names, memory_text, mib, paint_bold, table, unowned_mib, where_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

NAME = "status"
HELP = "Show the node at a glance: daemon, driver, GPUs, holders per container, the last releases."
NOT_RUNNING = "not running: releases are done by the command line itself (systemctl start pve-gpu-hostd)"
_VERDICT_STYLE = {"released": "green", "held": "red", "unknown": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--watch", action="store_true", help="a live view of the whole screen; q or Ctrl-C ends it")
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="S", help="seconds between two looks (default 2)")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """0 when everything could be looked at, 4 when not."""
    require_root()
    named_config(args.config)
    if args.watch and not args.json and terminal.is_terminal(sys.stdout):
        return watch(args)
    status, why_here = look(args)
    if args.json:
        print_json(status)
    elif not args.quiet:
        print("\n".join(lines(status, colour=terminal.wants_colour(sys.stdout), why_here=why_here)))
    return 4 if status["blind_spots"] else 0


def look(args: argparse.Namespace) -> tuple[Json, str]:
    """The status by the daemon, or by this process, and why by this process."""
    why_here = NOT_RUNNING
    if not remote.wanted(args):
        why_here = f"not asked ({'--no-daemon' if args.no_daemon else '--config: it has its own'})"
    else:
        try:
            return remote.ask("Status", {}), ""
        except remote.DaemonLost as exc:
            why_here = f"gives no answer ({exc}); this is what the command line sees itself"
        except remote.DaemonAbsent:
            pass
    from hostd.status import node_status

    config = named_config(args.config)
    return node_status(None, nvml_deadline_s=config.nvml.deadline_s if config else 5.0), why_here


# --- what it says ----------------------------------------------------------------------------------------------------


def lines(status: Json, *, colour: bool, why_here: str = NOT_RUNNING) -> list[str]:
    """The whole status as escaped lines; `why_here`: what is said of the daemon where it was not its look."""
    return [
        *_daemon(status["daemon"], why_here),
        *_namespace(status),
        *_driver(status["driver"]),
        *_gpus(status, colour),
        *_troubles(status, colour),
        *_holders(status, colour),
        *_releases(status["releases"], colour),
        *(
            f"could not read {terminal.escape(s['what'])}: {terminal.escape(s['error'])}"
            for s in status["blind_spots"]
        ),
    ]


def _daemon(daemon: Json | None, why_here: str) -> list[str]:
    if daemon is None:
        return [f"daemon   {terminal.escape(why_here)}"]
    busy = f", {count(daemon['workers'], 'request')} at work" if daemon["workers"] else ""
    found = [f"daemon   pve-gpu-hostd {daemon['version']}, pid {daemon['pid']}, since {daemon['since']}{busy}"]
    if daemon["config_error"]:
        good = "" if "built-in defaults" in daemon["config_error"] else ", the last good one is in force"
        found.append(f"         configuration broken{good}: {terminal.escape(daemon['config_error'])}")
    return found


def _namespace(status: Json) -> list[str]:
    first = status.get("first_pid_namespace")
    if first is None:  # an older daemon says it of itself alone
        first = status["daemon"]["first_pid_namespace"] if status["daemon"] else True
    return [] if first else ["node     not the machine's first PID namespace: the driver's lists may be shortened here"]


def _driver(driver: Json) -> list[str]:
    if not driver["present"]:
        return ["driver   no NVIDIA driver is loaded"]
    detail = f": {terminal.escape(driver['detail'])}" if driver["detail"] else ""
    return [f"driver   {terminal.escape(driver['version'] or 'version unknown')}, NVML {driver['nvml']}{detail}"]


def _gpus(status: Json, colour: bool) -> list[str]:
    rows = []
    for gpu in status["gpus"]:
        unowned = unowned_mib(gpu)
        ghost = f"{mib(unowned)} by nobody alive" if unowned else ""
        problem = terminal.escape(gpu["error"])
        total = f" of {mib(gpu['total_mib'])}" if gpu.get("total_mib") else ""
        rows.append(
            [
                gpu_name(gpu),
                terminal.escape(gpu["name"]),
                gpu["pci_bus_id"],
                f"{mib(gpu['used_mib'])}{total} in use",
                f"{mib(gpu['reserved_mib'])} reserved",
                terminal.paint(ghost or problem, "yellow", colour and bool(ghost or problem)),
            ]
        )
    return ["", *table(rows)] if rows else []


def _holders(status: Json, colour: bool) -> list[str]:
    names = gpu_names(status["gpus"])
    found: list[str] = [""]
    holders = status["holders"]
    for owner in sorted({h["vmid"] for h in holders}, key=lambda v: (v is None, v or 0)):
        own = [h for h in holders if h["vmid"] == owner]
        title = f"container {owner}" if owner is not None else "host"
        total = sum(h["memory_mib"] or 0 for h in own)
        found.append(paint_bold(f"{title}: {count(len(own), 'holder')}, {mib(total)}", colour))
        rows = [
            [
                f"pid {h['pid']}",
                terminal.escape(h["comm"]),
                where_text(h, names),
                memory_text(h),
                terminal.escape(h["unit"] or "-"),
            ]
            for h in own
        ]
        found += table(rows, indent="  ")
    return found if len(found) > 1 else ["", "no holder on this node"]


def _troubles(status: Json, colour: bool) -> list[str]:
    """Stops that hang and starts that were refused: what Proxmox tells nobody."""
    found = []
    for stop in status.get("stops") or ():
        text = f"container {stop['vmid']}: {terminal.escape(stop['message'])}"
        found.append(terminal.paint(text, "red", colour))
        if stop["next_step"]:
            found.append(f"  next: {terminal.escape(stop['next_step'])}")
    for start in status.get("refused") or ():
        text = f"container {start['vmid']}, {start['since_s']:.0f} s ago: {terminal.escape(start['message'])}"
        found += [terminal.paint(text, "red", colour), f"  pve-gpu-release explain {start['release_id']}"]
    return ["", *found] if found else []


def _releases(releases: list[Json], colour: bool) -> list[str]:
    if not releases:
        return []
    rows = []
    for release in releases:
        verdict = release["verdict"] or release["reason"]
        rows.append(
            [
                release["started"].replace("T", " ").partition(".")[0],
                f"container {release['vmid']}",
                terminal.paint(verdict, _VERDICT_STYLE.get(verdict, "yellow"), colour),
                terminal.escape(release["trigger"]),
                f"{release['duration_ms']} ms",
                release["release_id"][:8],
            ]
        )
    return ["", paint_bold("last releases (UTC; pve-gpu-release explain ID tells the story)", colour), *table(rows, "  ")]


# --- the live view ---------------------------------------------------------------------------------------------------


def watch(args: argparse.Namespace) -> int:
    """Redraws the whole screen until q, Ctrl-C or the end of the terminal; the terminal is as before afterwards."""
    import select
    import signal
    import termios
    import tty

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):  # else the terminal would stay as it is
        signal.signal(number, leave)
    keys = sys.stdin.fileno() if terminal.is_terminal(sys.stdin) else None
    before = termios.tcgetattr(keys) if keys is not None else None
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        if keys is not None:
            tty.setcbreak(keys)
        while True:
            draw(*look(args), args.interval)
            if output.lost():
                return 0
            ready = select.select([keys] if keys is not None else [], [], [], max(0.2, args.interval))[0]
            if ready and keys is not None:
                pressed = os.read(keys, 64)  # bytes: not every key is text
                if not pressed or b"q" in pressed.lower():
                    return 0
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def draw(status: Json, why_here: str, interval_s: float) -> None:
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:  # it went away
        columns, rows = 0, 0
    columns, rows = columns or 80, rows or 24  # a serial console does not know its size
    head = f"pve-gpu-release status  {time.strftime('%H:%M:%S')}  every {interval_s:g} s, q ends it"
    shown = [terminal.shorten(head, columns), "", *lines(status, colour=False, why_here=why_here)]
    body = "\r\n".join(terminal.shorten(line, columns) + "\x1b[K" for line in shown[: rows - 1])
    sys.stdout.write(f"\x1b[H{body}\x1b[J")
    sys.stdout.flush()
