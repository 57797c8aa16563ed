"""Text for people: hostile names made harmless, lines cut to width, colour only where it is wanted.

Everything that comes from inside a container passes `escape` before it reaches a terminal, a log line or a journal
message (DESIGN 12). Standard library only, nothing heavy: the release path imports this.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

BLANK_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Characters that Unicode calls letters or marks (so `str.isprintable` lets them pass) and that show nothing."""

ELLIPSIS = "…"

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str | bytes) -> str:
    """`text` with everything that is not a visible character or a plain space written as a visible escape.

    Escaped are controls (C0, C1, DEL), bidi overrides and all other format characters, line and paragraph separators,
    unusual spaces, private and unassigned code points, lone surrogates and blank letters; bytes that are not UTF-8
    become `\\xNN`. Backslashes stay as they are, so escaping twice changes nothing: text may be escaped where it enters
    and again where it leaves.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if text.isprintable() and (text.isascii() or BLANK_LETTERS.isdisjoint(text)):
        return text
    return "".join(c if c.isprintable() and c not in BLANK_LETTERS else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code < 0x80:
        return f"\\x{code:02x}"
    if 0xDC80 <= code <= 0xDCFF:  # a raw byte that surrogateescape carried through (PEP 383)
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def columns(text: str) -> int:
    """Terminal columns that escaped text takes: wide East Asian characters two, combining marks none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(_columns_of(c, unicodedata.combining(c), unicodedata.east_asian_width(c)) for c in text)


def _columns_of(char: str, combining: int, width: str) -> int:
    if combining or "\ufe00" <= char <= "\ufe0f":
        return 0
    return 2 if width in "WF" else 1


def shorten(text: str, width: int) -> str:
    """Escaped text cut to at most `width` columns, the cut marked with an ellipsis; a width below 1 gives nothing."""
    if width < 1:
        return ""
    if columns(text) <= width:
        return text
    if text.isascii():
        return text[: width - 1] + ELLIPSIS
    taken, used = [], 0
    for char in text:
        needed = columns(char)
        if used + needed > width - 1:
            break
        taken.append(char)
        used += needed
    return "".join(taken) + ELLIPSIS


def pad(text: str, width: int) -> str:
    """Escaped text filled with spaces to `width` columns; longer text is returned whole."""
    return text + " " * max(0, width - columns(text))


def is_terminal(stream: TextIO) -> bool:
    """True when the stream is open and a terminal."""
    try:
        return stream.isatty()
    except ValueError:
        return False


def width(stream: TextIO, default: int = 80) -> int:
    """Columns of the terminal behind the stream; `COLUMNS` wins, as in a shell; `default` where there is none."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit() and 0 < len(asked) < 6 and int(asked):
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or default
    except (OSError, ValueError):
        return default


def wants_colour(stream: TextIO) -> bool:
    """True on a terminal that can (`TERM` is set and not `dumb`) unless `NO_COLOR` is set (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("TERM", "dumb") != "dumb" and is_terminal(stream)


def paint(text: str, style: str, on: bool) -> str:
    """Escaped text in one of STYLES when `on`."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if on else text
