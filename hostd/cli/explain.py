"""`pve-gpu-release explain RELEASE_ID`: one release as a story, from the journal's fields alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from hostd import audit
from hostd.cli.common import file_name, print_json
from hostd.cli.log import FULL_ID, local_time, ours
from hostd.config import parse_vmid
from hostd.errors import UnreadableError, UsageError
from hostd.story import rebuild, tell
from hostd.system.journalread import JournalUnreadableError, Record, read, read_file
from hostd.terminal import escape

NAME = "explain"
HELP = "Tell one release as a story: trigger, evidence, rungs, verification."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "release", metavar="RELEASE_ID", help="the beginning is enough; a VMID: its last release; last: the last of all"
    )
    parser.add_argument(
        "--file", type=file_name, metavar="FILE", help="a journal file, or what journalctl -o export or -o json wrote"
    )
    parser.add_argument("--json", action="store_true", help="the rebuilt data for programs")


def run(args: argparse.Namespace) -> int:
    """0; 2 when there is no such release, 4 when the journal cannot be read."""
    source = Source(args.file)
    try:
        release_id = find(source, args.release)
        story = rebuild(ours(source.of_release(release_id)))
    except JournalUnreadableError as exc:
        raise UnreadableError(escape(str(exc))) from None
    if story is None:
        raise UsageError(
            f"cannot find release {escape(args.release)} in {source.name}", next_step="pve-gpu-release log"
        )
    if args.json:
        print_json({"schema": 1, **asdict(story)})
    else:
        print(tell(story, local_time(story.started_us)))
    return 0


class Source:
    """The journal of this machine, or a file."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.name = escape(file) if file else "the journal"

    def advice(self) -> str:
        """What to do when nothing is found."""
        if self.file:
            return f"pve-gpu-release log --file {self.name} shows what is in it"
        if os.geteuid() != 0:
            return "try again as root: others do not see the whole journal"
        return "every release and every stop with the hook writes its record there; pve-gpu-release log shows them"

    def of_release(self, release_id: str) -> Iterator[Record]:
        return self._read({"PVE_GPU_RELEASE_ID": release_id})

    def heads_newest_first(self, vmid: int | None = None) -> Iterable[Record]:
        """Entries that begin or end a release: enough to know every release by."""
        matches = {"PVE_VMID": str(vmid)} if vmid is not None else {}
        if self.file:
            return reversed(list(_heads(self._read(matches))))
        return _heads(self._read(matches, newest_first=True))

    def _read(self, matches: dict[str, str], *, newest_first: bool = False) -> Iterator[Record]:
        wanted = {**matches, "SYSLOG_IDENTIFIER": audit.IDENTIFIER}
        if self.file:
            return read_file(self.file, wanted)
        return read(wanted, newest_first=newest_first)


_HEAD_IDS = frozenset(kind.message_id for kind in (audit.STARTED, audit.FINISHED, audit.REFUSED, audit.ABANDONED))


def _heads(records: Iterable[Record]) -> Iterator[Record]:
    return (r for r in records if r.get("MESSAGE_ID") in _HEAD_IDS and r.get("PVE_GPU_RELEASE_ID"))


def find(source: Source, wanted: str) -> str:
    """The id of the release that `wanted` names. Raises UsageError when it names none, or several."""
    prefix = wanted.lower()
    is_id = bool(prefix) and set(prefix) <= set("0123456789abcdef-")
    if is_id and len(wanted) == FULL_ID:
        return prefix
    vmid = parse_vmid(wanted)
    if wanted == "last" or vmid is not None:
        newest = next(iter(source.heads_newest_first(vmid)), None)
        if newest is not None:
            return newest.get("PVE_GPU_RELEASE_ID")
        if vmid is None or len(wanted) < 4:
            whose = f" of container {vmid}" if vmid is not None else ""
            raise UsageError(f"cannot find a release{whose} in {source.name}: none is there yet", next_step=source.advice())
    if not is_id:
        raise UsageError(f"cannot take '{escape(wanted)}' for a release id, a container id or `last`")
    found = dict.fromkeys(
        record.get("PVE_GPU_RELEASE_ID")
        for record in source.heads_newest_first()
        if record.get("PVE_GPU_RELEASE_ID").startswith(prefix)
    )
    if not found:
        raise UsageError(f"cannot find release {prefix} in {source.name}", next_step="pve-gpu-release log")
    if len(found) > 1:
        some = ", ".join(escape(name) for name in list(found)[:5])
        raise UsageError(f"cannot tell which release {prefix} is: {len(found)} begin so ({some})")
    return next(iter(found))
