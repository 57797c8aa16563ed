"""Text for people: what a release shows while it runs and when it is done. Works on the dicts of `wire`, so that the
daemon's stream and an in-process release look the same."""

from __future__ import annotations

import sys

from hostd import terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TextIO

    Json = dict[str, Any]

_STYLE = {"released": "green", "held": "red", "unknown": "yellow"}


class Renderer:
    """Prints events and reports. Lines go to `out`; the one line that is overwritten while something is waited for goes
    to `live`, and only when that is a terminal. The streams are the ones of `output`: they never fail."""

    def __init__(self, out: TextIO, live: TextIO, *, quiet: bool = False, verbose: bool = False) -> None:
        self._out = out
        self._live = live if terminal.is_terminal(live) else None
        self._plain = None if quiet or self._live else out
        self._quiet = quiet
        self._verbose = verbose
        self._colour = terminal.wants_colour(out)
        self._shown: set[int] = set()
        self._seen: set[int] = set()
        self._names: dict[int, str] = {}
        self._dirty = False
        self._told_s: dict[int, float] = {}

    # --- while it runs ---

    def event(self, event: Json) -> None:
        kind = event.get("event")
        if self._quiet:
            return
        if kind == "observed":
            self._observed(event)
        elif kind == "rung_begun":
            rung = event["rung"]
            whom = f" to {self._people(rung['targets'])}" if rung["targets"] else ""
            self._status(f"{rung['step'].upper()}{whom} ...")
        elif kind == "rung_done":
            self._rung(event["rung"])
        elif kind == "waiting":
            self._waiting(event)

    def _observed(self, event: Json) -> None:
        names = gpu_names(event.get("gpus", []))
        fresh = [h for h in event["holders"] if h["pid"] not in self._shown]
        if not fresh:
            return
        again = event["vmid"] in self._seen
        self._seen.add(event["vmid"])
        title = f"container {event['vmid']}: {count(len(fresh), 'more holder' if again else 'holder')}"
        self._line(paint_bold(title, self._colour))
        rows = [self._row(h, names) for h in fresh]
        for line in table(rows, indent="  "):
            self._line(line)
        for holder in fresh:
            self._shown.add(holder["pid"])
            self._names[holder["pid"]] = terminal.escape(holder["comm"])

    def _row(self, holder: Json, names: dict[int, str]) -> list[str]:
        inside = "/".join(str(p) for p in holder["ns_pids"])
        command = terminal.escape(holder["cmdline"] or holder["comm"])
        row = [
            f"pid {holder['pid']}" + (f" [{inside}]" if inside else ""),
            terminal.escape(holder["comm"]),
            where_text(holder, names),
            memory_text(holder),
            "+".join(holder["evidence"]),
            terminal.escape(holder.get("unit") or "-"),
            terminal.shorten(command, 200 if self._verbose else 48),
        ]
        if self._verbose:
            row.append(terminal.escape(holder["cgroup"]))
        return row

    def _rung(self, rung: Json) -> None:
        step, note = rung["step"].upper(), terminal.escape(rung.get("note") or "")
        if rung["step"] == "reset":
            self._line(f"{step}: {note} ({seconds(rung['waited_ms'])})")
            return
        left = len(rung["targets"]) - rung["gone"]
        tail = f", {left} left" if left > 0 else ""
        if rung["step"] in ("stop-unit", "cgroup-kill"):
            self._line(f"{step}: {note or '-'}: {rung['gone']} gone after {seconds(rung['waited_ms'])}{tail}")
            return
        tail += f", {note}: goes on at once" if note else ""
        self._line(f"{step:<5} sent to {rung['sent']}: {rung['gone']} gone after {seconds(rung['waited_ms'])}{tail}")

    def _waiting(self, event: Json) -> None:
        text = f"{terminal.escape(event['what'])} ({event['since_s']:.0f} s)"
        if self._live:
            self._status(text)
        elif event["since_s"] - self._told_s.get(event["vmid"], -10) >= 10:  # a task log wants few lines
            self._told_s[event["vmid"]] = event["since_s"]
            self._line(text)

    def _people(self, pids: list[int]) -> str:
        text = ", ".join(f"{pid} ({self._names.get(pid, '?')})" for pid in pids[:3])
        return text + (f" and {len(pids) - 3} more" if len(pids) > 3 else "")

    # --- at the end ---

    def report(self, report: Json) -> None:
        """The result of one container: the proof per GPU, what is left, the verdict, the next step."""
        if self._quiet:
            self.problem(report)
            return
        if report.get("verdict") and "gpus" in report:
            for gpu in report["gpus"]:
                self._line(self._gpu(gpu, report))
            for holder in report["holders"]:
                if holder["fate"] in ("survived", "unkillable", "respawned"):
                    self._line(self._left(holder))
            if self._verbose or report["verdict"] == "unknown":
                for spot in report["blind_spots"]:
                    self._line(f"  could not read {terminal.escape(spot['what'])}: {terminal.escape(spot['error'])}")
            if self._verbose or report["verdict"] != "released":
                for detail in report.get("details") or ():
                    self._line(f"  {terminal.escape(detail)}")
        verdict = report.get("verdict") or "not done"
        text = terminal.paint(verdict, _STYLE.get(verdict, "yellow"), self._colour)
        took = f" ({seconds(report['duration_ms'])})" if report.get("duration_ms") else ""
        self._line(f"{text}: {terminal.escape(report['message'])}{took}")
        if report.get("next_step"):
            self._line(f"  next: {terminal.escape(report['next_step'])}")

    def problem(self, report: Json) -> None:
        """With -q: one line on the error stream unless the container is released."""
        if report.get("verdict") != "released":
            print(terminal.escape(report["message"]), file=sys.stderr)

    def note(self, text: str) -> None:
        """A remark that belongs to no release (`waiting for another release ...`)."""
        if not self._quiet:
            self._line(terminal.escape(text))

    def warn(self, text: str) -> None:
        """A remark on the error stream."""
        if not self._quiet:
            self._line(terminal.escape(text), sys.stderr)

    def _gpu(self, gpu: Json, report: Json) -> str:
        before, after = mib(gpu["used_mib_before"]), mib(gpu["used_mib_after"])
        others = gpu["other_holders"]
        line = f"{gpu_name(gpu)}  {before} -> {after} in use" if report["rungs"] else f"{gpu_name(gpu)}  {after} in use"
        if gpu["ghost_mib"]:
            line += f", {mib(gpu['ghost_mib'])} by nobody alive"
        if others:
            names = ", ".join(
                f"{'container ' + str(h['vmid']) if h['vmid'] else 'host'} pid {h['pid']}"
                f" ({terminal.escape(h['comm'])}, {mib(h['memory_mib'])})"
                for h in others[:4]
            )
            line += f"; not touched: {names}"
        return line

    def _left(self, holder: Json) -> str:
        text = f"  {holder['fate']}: pid {holder['pid']} ({terminal.escape(holder['comm'])}), state {holder['state']}"
        stuck = holder.get("stuck")
        if stuck:
            text += f", task {stuck['tid']} waits in {stuck['wchan'] or '(unknown)'}"
            if self._verbose and stuck["stack"]:
                text += "\n    " + terminal.escape(stuck["stack"]).replace("\\n", "\n    ")
        return text

    # --- output ---

    def _status(self, text: str) -> None:
        if self._live is None:
            return
        cut = terminal.shorten(text, max(10, terminal.width(self._live) - 1))
        self._write(self._live, f"\r\x1b[K{cut}")
        self._dirty = True

    def _line(self, text: str, stream: TextIO | None = None) -> None:
        if self._dirty and self._live is not None:
            self._write(self._live, "\r\x1b[K")
            self._dirty = False
        self._write(stream or self._out, text + "\n")

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


def paint_bold(text: str, on: bool) -> str:
    return terminal.paint(text, "bold", on)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def seconds(milliseconds: float) -> str:
    """`84 ms`, `1.3 s`."""
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def mib(value: int | None) -> str:
    return "? MiB" if value is None else f"{value:,} MiB"


def memory_text(holder: Json) -> str:
    text = "-" if holder["memory_mib"] is None else mib(holder["memory_mib"])
    if holder.get("inherited_from"):
        text += f" from dead pid {holder['inherited_from']}"
    return text


def unowned_mib(gpu: Json) -> int:
    """MiB that nobody alive keeps."""
    return int(gpu["ghost_mib"] or 0)


def gpu_name(gpu: Json) -> str:
    return f"GPU {gpu['index']}" if gpu.get("index") is not None else f"GPU {gpu['pci_bus_id'] or gpu['minor']}"


def gpu_names(gpus: Iterable[Json]) -> dict[int, str]:
    """Minor -> the name by which administrators know it (the NVML index, as nvidia-smi counts)."""
    return {g["minor"]: gpu_name(g) for g in gpus}


def where_text(holder: Json, names: dict[int, str]) -> str:
    if not holder["gpus"]:
        return "control nodes only"
    return ", ".join(names.get(m, f"GPU minor {m}") for m in holder["gpus"])


def table(rows: list[list[str]], indent: str = "") -> list[str]:
    """Aligned columns; the last one is not padded."""
    if not rows:
        return []
    widths = [max(terminal.columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        indent
        + "  ".join(cell if i == len(row) - 1 else terminal.pad(cell, widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
