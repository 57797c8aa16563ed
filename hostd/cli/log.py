"""`pve-gpu-release log [VMID]`: the audit trail from the journal."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator

from hostd.audit import IDENTIFIER, Priority
from hostd.cli import output
from hostd.cli.common import file_name, shown
from hostd.cli.common import vmid as container_id
from hostd.cli.timespec import parse_time
from hostd.errors import UnreadableError, UsageError
from hostd.system.journalread import JournalUnreadableError, Record, Stopped, follow, read, read_file
from hostd.terminal import escape, paint, wants_colour

NAME = "log"
HELP = "Show the audit trail from the journal: every release and what it decided."
FOLLOW_LINES = 10
FULL_ID = 36


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # `--since -1h`, as journalctl takes it: argparse lets an option's value begin with `-` only when it is a number
    parser._negative_number_matcher = re.compile(r"-\d")
    parser.add_argument("vmid", nargs="?", type=container_id, metavar="VMID", help="only this container")
    parser.add_argument(
        "-S", "--since", metavar="TIME", help="'YYYY-MM-DD HH:MM', yesterday, -1h, '2 hours ago', @EPOCH"
    )
    parser.add_argument("-U", "--until", metavar="TIME", help="the end, written as --since")
    parser.add_argument("-f", "--follow", action="store_true", help="show new entries as they come")
    parser.add_argument("-n", "--lines", metavar="N", help="only the last N entries")
    parser.add_argument(
        "-o", "--output", choices=("short", "json", "json-pretty"), default="short", help="how entries are written"
    )
    parser.add_argument("--json", action="store_true", help="as -o json: one object per line")
    parser.add_argument("--release", metavar="ID", help="only this release (the beginning of its id is enough)")
    parser.add_argument(
        "--file", type=file_name, metavar="FILE", help="a journal file, or what journalctl -o export or -o json wrote"
    )


def run(args: argparse.Namespace) -> int:
    """0; 2 for arguments without sense, 4 when the journal cannot be read. Ends quietly on Ctrl-C or a closed pipe."""
    lines = _lines(args.lines)
    since = parse_time(args.since) if args.since is not None else None
    until = parse_time(args.until) if args.until is not None else None
    if args.release is not None:
        args.release = release_id(args.release)
    if args.follow and (args.file or args.until):
        raise UsageError("cannot follow a file, or with --until")
    records: Iterable[Record]
    matches = {"SYSLOG_IDENTIFIER": IDENTIFIER}
    if args.vmid is not None:
        matches["PVE_VMID"] = str(args.vmid)
    if args.release and len(args.release) == FULL_ID:
        matches["PVE_GPU_RELEASE_ID"] = args.release
    try:
        if args.follow:
            count = FOLLOW_LINES if lines is None else lines
            records = follow(matches, lines=count, output=sys.stdout)
        elif args.file:
            records = _last(_between(read_file(args.file, matches), since, until), lines, args.release)
        elif lines is not None:
            newest = read(matches, since_us=since, until_us=until, newest_first=True)
            records = reversed(tuple(_first(ours(newest, args.release), lines)))
        else:
            records = read(matches, since_us=since, until_us=until)
        if show(ours(records, args.release), "json" if args.json else args.output) == 0:
            _say_nothing(args.file)
    except JournalUnreadableError as exc:
        raise UnreadableError(escape(str(exc))) from None
    except Stopped:
        return 0
    except KeyboardInterrupt:
        return 130
    return 0


def release_id(text: str) -> str:
    """The beginning of a release id. Raises UsageError."""
    folded = text.lower()
    if not 1 <= len(folded) <= FULL_ID or not set(folded) <= set("0123456789abcdef-"):
        raise UsageError(f"cannot take {shown(text)} for the id of a release", next_step="pve-gpu-release log shows them")
    return folded


def _lines(text: str | None) -> int | None:
    if text is None or text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"cannot take {shown(text)} for a number of lines")
    return int(text)


def ours(records: Iterable[Record], release: str | None = None) -> Iterator[Record]:
    """Entries of the audit trail, of one release if a beginning of its id is given."""
    for record in records:
        if record.get("PVE_GPU_RELEASE_EVENT") and record.get("PVE_GPU_RELEASE_ID").startswith(release or ""):
            yield record


def _first(records: Iterable[Record], count: int) -> Iterator[Record]:
    if count:
        for number, record in enumerate(records, 1):
            yield record
            if number == count:
                return


def _last(records: Iterable[Record], count: int | None, release: str | None) -> Iterable[Record]:
    return records if count is None else deque(ours(records, release), maxlen=count)


def _between(records: Iterable[Record], since: int | None, until: int | None) -> Iterator[Record]:
    for record in records:
        if (since is None or record.realtime_us >= since) and (until is None or record.realtime_us <= until):
            yield record


def show(records: Iterable[Record], form: str) -> int:
    """Print the entries as long as anybody reads them; how many there were."""
    colour = wants_colour(sys.stdout)
    count = 0
    for record in records:
        count += 1
        if form == "short":
            print(short_line(record, colour=colour), flush=True)
        else:
            print(json.dumps(as_json(record), indent=2 if form == "json-pretty" else None), flush=True)
        if output.lost():
            break
    return count


def short_line(record: Record, *, colour: bool = False) -> str:
    """`2026-11-30 20:15:01 container 129: … [1a2b3c4d]`."""
    line = f"{local_time(record.realtime_us)} {_styled(record, colour)}"
    release = escape(record.get("PVE_GPU_RELEASE_ID"))[:8]
    return f"{line} {paint(f'[{release}]', 'dim', colour)}" if release else line


def _styled(record: Record, colour: bool) -> str:
    priority = record.get("PRIORITY")
    message = escape(record.get("MESSAGE"))
    if priority == str(int(Priority.WARNING)):
        return paint(message, "yellow", colour)
    if priority in {"0", "1", "2", str(int(Priority.ERR))}:
        return paint(message, "red", colour)
    return message


def local_time(realtime_us: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(realtime_us // 10**6))
    except (OverflowError, ValueError, OSError):
        return "(no time)"


def as_json(record: Record) -> dict[str, object]:
    """As `journalctl -o json` has it: text, and a list for a field that stands there several times."""
    fields: dict[str, object] = {name: v[0] if len(v) == 1 else list(v) for name, v in record.fields.items()}
    fields["__REALTIME_TIMESTAMP"] = str(record.realtime_us)
    fields["__MONOTONIC_TIMESTAMP"] = str(record.monotonic_us)
    return fields


def _say_nothing(file: str | None) -> None:
    print("-- no entries --", file=sys.stderr)
    if not file and os.geteuid() != 0:
        print("note: only root and members of systemd-journal see the whole journal", file=sys.stderr)
