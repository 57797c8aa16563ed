"""Entries back from the journal, or from a file exported from one: `systemd.journal.Reader`, else `journalctl`.

Only entries that journald itself marks as sent by root are answered (`_UID=0`): anybody on the host may send an entry
that looks like ours, but nobody can choose the fields that begin with an underscore (systemd.journal-fields(7)).
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

MAGIC = b"LPKSHHRH"
"""The first bytes of a journal file, https://systemd.io/JOURNAL_FILE_FORMAT/"""
MAX_FIELD = 16 << 20
MAX_PRETTY = 256 << 20


class JournalUnreadableError(Exception):
    """Cannot read the journal or the file; the text says why."""


class Stopped(Exception):  # noqa: N818 - not a fault
    """Nobody reads our output any more."""


@dataclass(frozen=True, slots=True)
class Record:
    """One entry: fields with all their values, and when journald took it."""

    fields: Mapping[str, tuple[str, ...]]
    realtime_us: int
    monotonic_us: int

    def get(self, name: str, default: str = "") -> str:
        values = self.fields.get(name)
        return values[0] if values else default

    def all(self, name: str) -> tuple[str, ...]:
        return self.fields.get(name, ())


Matches = Mapping[str, str]
"""Field -> value, all of which an entry must have."""


def read(
    matches: Matches, *, since_us: int | None = None, until_us: int | None = None, newest_first: bool = False
) -> Iterator[Record]:
    """Trusted entries of this machine's journal, in order. Raises JournalUnreadableError."""
    with _open(None) as source:
        yield from source.entries({**matches, "_UID": "0"}, since_us, until_us, newest_first)


def follow(matches: Matches, *, lines: int, output: IO[str]) -> Iterator[Record]:
    """The last entries, then new ones as they come; raises Stopped when nobody reads `output` any more."""
    with _open(None) as source:
        yield from source.follow({**matches, "_UID": "0"}, lines, output)


def read_file(path: str, matches: Matches) -> Iterator[Record]:
    """Trusted entries of a journal file, or of what `journalctl -o export` or `-o json` wrote, in the file's order."""
    wanted = {**matches, "_UID": "0"}
    try:
        with open(path, "rb") as stream:
            head = stream.read(len(MAGIC))
            if head != MAGIC:
                stream.seek(0)
                records = parse_json(stream) if head.lstrip()[:1] in (b"{", b"\x1e") else parse_export(stream)
                yield from (record for record in records if _has(record, wanted))
                return
    except OSError as exc:
        raise JournalUnreadableError(f"cannot read {path}: {exc.strerror or exc}") from None
    with _open(path) as source:
        yield from source.entries(wanted, None, None, False)


def _has(record: Record, wanted: Matches) -> bool:
    return all(value in record.all(name) for name, value in wanted.items())


# --- systemd.journal -------------------------------------------------------------------------------------------------


def _open(path: str | None) -> _Library | _Command:
    try:
        from systemd import journal
    except Exception:  # noqa: BLE001 - missing or broken: journalctl can do it as well
        return _Command(path)
    return _Library(journal, path)


class _Library:
    """`systemd.journal.Reader` with our own idea of values: text, all of them."""

    def __init__(self, journal: Any, path: str | None) -> None:
        self._journal = journal
        converters = dict.fromkeys(journal.DEFAULT_CONVERTERS, _same)
        try:
            self._reader = journal.Reader(files=[path] if path else None, converters=converters)
        except OSError as exc:
            raise JournalUnreadableError(f"cannot open {path or 'the journal'}: {exc.strerror or exc}") from None

    def __enter__(self) -> _Library:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def entries(
        self, matches: Matches, since_us: int | None, until_us: int | None, newest_first: bool
    ) -> Iterator[Record]:
        self._match(matches)
        reader = self._reader
        try:
            if newest_first:
                reader.seek_tail() if until_us is None else reader.seek_realtime((until_us + 1) / 1e6)
                step = reader.get_previous
            else:
                reader.seek_head() if since_us is None else reader.seek_realtime(since_us / 1e6)
                step = reader.get_next
            while entry := step():
                record = _record(entry)
                if since_us is not None and record.realtime_us < since_us:
                    if newest_first:
                        return
                    continue
                if until_us is not None and record.realtime_us > until_us:
                    if newest_first:
                        continue
                    return
                yield record
        except OSError as exc:
            raise JournalUnreadableError(f"cannot read the journal: {exc.strerror or exc}") from None

    def follow(self, matches: Matches, lines: int, output: IO[str]) -> Iterator[Record]:
        self._match(matches)
        reader = self._reader
        poll = select.poll()
        poll.register(reader.fileno(), reader.get_events())
        poll.register(output, 0)
        reader.seek_tail()
        for _ in range(lines + 1):  # one more: the position is before the entry that get_next answers
            if not reader.get_previous():
                reader.seek_head()
                break
        while True:
            while entry := reader.get_next():
                yield _record(entry)
            timeout = reader.get_timeout_ms()
            events = dict(poll.poll(None if timeout < 0 else timeout))
            if output.fileno() in events:
                raise Stopped
            reader.process()

    def _match(self, matches: Matches) -> None:
        for name, value in matches.items():
            self._reader.add_match(f"{name}={value}")


def _same(value: Any) -> Any:
    return value


def _record(entry: Mapping[str, Any]) -> Record:
    monotonic = entry.get("__MONOTONIC_TIMESTAMP")
    fields = {
        name: tuple(_plain(item) for item in (value if isinstance(value, list) else [value]))
        for name, value in entry.items()
        if not name.startswith("__") or name == "__CURSOR"
    }
    realtime = entry.get("__REALTIME_TIMESTAMP", 0)
    return Record(fields, int(realtime), int(monotonic[0]) if isinstance(monotonic, tuple) else 0)


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return str(value)


# --- journalctl ------------------------------------------------------------------------------------------------------


class _Command:
    """`journalctl -o export` for a machine without python3-systemd."""

    def __init__(self, path: str | None) -> None:
        self._base = ["journalctl", "--quiet", "--no-pager", "-o", "export", *(["--file", path] if path else [])]
        self._running: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()

    def entries(
        self, matches: Matches, since_us: int | None, until_us: int | None, newest_first: bool
    ) -> Iterator[Record]:
        options = ["--reverse"] if newest_first else []
        if since_us is not None:
            options.append(f"--since=@{since_us / 1e6:.6f}")
        if until_us is not None:
            options.append(f"--until=@{until_us / 1e6:.6f}")
        process = self._start(matches, options)
        assert process.stdout is not None
        yield from parse_export(process.stdout)
        if process.wait() != 0:
            raise JournalUnreadableError(f"cannot read the journal: journalctl ended with status {process.returncode}")

    def follow(self, matches: Matches, lines: int, output: IO[str]) -> Iterator[Record]:
        process = self._start(matches, ["--follow", f"--lines={lines}"])
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        poll.register(output, 0)
        buffer = b""
        while True:
            if output.fileno() in dict(poll.poll()):
                raise Stopped
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                raise JournalUnreadableError("cannot follow the journal: journalctl has ended")
            buffer += data
            while (end := _end_of_entry(buffer)) >= 0:
                yield from parse_export(iter_stream(buffer[:end]))
                buffer = buffer[end:]

    def _start(self, matches: Matches, options: list[str]) -> subprocess.Popen[bytes]:
        command = [*self._base, *options, *(f"{name}={value}" for name, value in matches.items())]
        try:
            self._running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as exc:
            raise JournalUnreadableError(f"cannot run journalctl: {exc.strerror or exc}") from None
        return self._running


def iter_stream(data: bytes) -> IO[bytes]:
    import io

    return io.BytesIO(data)


def _end_of_entry(data: bytes) -> int:
    """Where the first complete entry of an export stream ends, -1 when there is none yet."""
    at = 0
    while (newline := data.find(b"\n", at)) >= 0:
        line = data[at:newline]
        at = newline + 1
        if not line:
            return at
        if b"=" not in line:
            if len(data) < at + 8:
                return -1
            at += 8 + int(struct.unpack_from("<Q", data, at)[0]) + 1
            if at > len(data):
                return -1
    return -1


# --- exported files --------------------------------------------------------------------------------------------------


def parse_export(stream: IO[bytes]) -> Iterator[Record]:
    """`journalctl -o export`, https://systemd.io/JOURNAL_EXPORT_FORMATS/; anything else is a JournalUnreadableError."""
    fields: dict[str, list[str]] = {}
    while line := stream.readline(MAX_FIELD):
        data = line.rstrip(b"\n")
        if not data:
            if fields:
                yield _exported(fields)
                fields = {}
            continue
        name, separator, value = data.partition(b"=")
        if not line.endswith(b"\n") or not _is_name(name):
            raise JournalUnreadableError("cannot read the file: not a journal export")
        if not separator:
            value = _binary_value(stream)
        fields.setdefault(name.decode(), []).append(value.decode("utf-8", "surrogateescape"))
    if fields:
        yield _exported(fields)


def _is_name(name: bytes) -> bool:
    return 0 < len(name) <= 64 and name.replace(b"_", b"").isalnum() and name.isascii()


def _binary_value(stream: IO[bytes]) -> bytes:
    head = stream.read(8)
    length = int(struct.unpack("<Q", head)[0]) if len(head) == 8 else MAX_FIELD + 1
    value = stream.read(length) if length <= MAX_FIELD else b""
    if len(value) != length or stream.read(1) != b"\n":
        raise JournalUnreadableError("cannot read the file: a journal export that is cut off or broken")
    return value


def _exported(fields: Mapping[str, Iterable[str]]) -> Record:
    plain = {name: tuple(values) for name, values in fields.items()}
    return Record(plain, _number(plain, "__REALTIME_TIMESTAMP"), _number(plain, "__MONOTONIC_TIMESTAMP"))


def _number(fields: Mapping[str, tuple[str, ...]], name: str) -> int:
    text = fields.get(name, ("",))[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def parse_json(stream: IO[bytes]) -> Iterator[Record]:
    """`journalctl -o json`, `json-seq` or `json-pretty`. Raises JournalUnreadableError on anything else."""
    first = stream.readline(MAX_FIELD)
    try:
        json.loads(first.strip(b"\x1e\n "))
    except ValueError:
        yield from _parse_pretty(first + stream.read(MAX_PRETTY))
        return
    line = first
    while line:
        text = line.strip(b"\x1e\n ")
        if text:
            try:
                yield _from_json(json.loads(text))
            except (ValueError, RecursionError):
                raise JournalUnreadableError("cannot read the file: not the JSON of journalctl") from None
        line = stream.readline(MAX_FIELD)


def _parse_pretty(data: bytes) -> Iterator[Record]:
    text = data.decode("utf-8", "surrogateescape")
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \n\r\t\x1e,":
            at += 1
        if at >= len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
            record = _from_json(value)
        except (ValueError, RecursionError):
            raise JournalUnreadableError("cannot read the file: not the JSON of journalctl") from None
        yield record


def _from_json(value: object) -> Record:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return _exported({str(name): _json_values(item) for name, item in value.items()})


def _json_values(value: object) -> list[str]:
    """journalctl writes text, a list for a repeated field, a list of numbers for bytes, null for what is too long."""
    if value is None:
        return []
    if isinstance(value, list):
        if value and all(isinstance(item, int) and 0 <= item < 256 for item in value):
            return [bytes(value).decode("utf-8", "surrogateescape")]
        return [text for item in value for text in _json_values(item)]
    return [str(value)]
