"""Advice as lines for bash: whatever a finding is about is one quoted word in it, and remarks stand behind `#`.

The names come from configurations, so from whoever may write them: nothing in them may end a quotation or a comment, and
a line stays one line when it is printed (the terminal's escapes would change a control character, `$'...'` keeps it).
"""

from __future__ import annotations

import shlex


class Shell(str):
    """A part of a command that is shell already."""

    __slots__ = ()


def word(value: object) -> str:
    """One word for bash, all of it printable."""
    if isinstance(value, Shell):
        return value
    text = str(value)
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_char, text))}'"


def _char(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    errors = "surrogateescape" if "\udc80" <= char <= "\udcff" else "replace"
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", errors))


def remark(text: str) -> Shell:
    """Text for behind a `#`."""
    return Shell("".join(char if char.isprintable() else "?" for char in " ".join(text.split())))


def sed_literal(text: str) -> str:
    """A text as part of a basic or extended regular expression of sed between slashes."""
    return "".join(f"[{char}]" if char in ".*[+?|(){}$" else f"\\{char}" if char in "\\/^]" else char for char in text)
