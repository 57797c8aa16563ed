"""Hostile text never reaches a terminal as it is; ordinary text stays readable."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd import terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("python3", "python3"),
        ("größe 模型 😀", "größe 模型 😀"),
        ("\x1b]0;pwned\x07", "\\x1b]0;pwned\\x07"),
        ("a\nMESSAGE=b\r\t", "a\\nMESSAGE=b\\r\\t"),
        ("\x00\x7f", "\\x00\\x7f"),
        ("\x9b31m", "\\u009b31m"),
        ("\u202egnp.exe\u202c", "\\u202egnp.exe\\u202c"),
        ("\u2066\u2069\u200b\ufeff", "\\u2066\\u2069\\u200b\\ufeff"),
        ("\u2028\u2029\x85", "\\u2028\\u2029\\u0085"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("\udc80", "\\x80"),
        ("\u3164\u2800", "\\u3164\\u2800"),
        ("a\u00a0b", "a\\u00a0b"),
        ("C:\\x1b", "C:\\x1b"),
        ("", ""),
    ],
)
def test_what_is_shown_for_a_name(text: str, shown: str) -> None:
    assert terminal.escape(text) == shown


def test_bytes_that_are_not_utf_8_are_shown_as_bytes() -> None:
    assert terminal.escape(b"ok \xff\x1b \xc3\xa9") == "ok \\xff\\x1b é"


@given(st.one_of(st.text(st.characters()), st.binary()))
def test_escaped_text_is_visible_and_escaping_it_again_changes_nothing(text: str | bytes) -> None:
    shown = terminal.escape(text)
    assert all(c == " " or unicodedata.category(c)[0] not in "CZ" for c in shown)
    assert terminal.escape(shown) == shown
    shown.encode()


@given(st.text(st.characters()), st.integers(-1, 40))
def test_shortened_text_fits(text: str, width: int) -> None:
    shown = terminal.shorten(terminal.escape(text), width)
    assert terminal.columns(shown) <= max(0, width)


def test_wide_characters_take_two_columns_and_marks_none() -> None:
    assert terminal.columns("模e\u0301") == 3
    assert terminal.shorten("模型模型", 5) == "模型…"
    assert terminal.shorten("abcdef", 4) == "abc…"
    assert terminal.shorten("abcd", 4) == "abcd"
    assert terminal.pad("模", 4) == "模  "


def test_colour_only_on_a_terminal_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import pty

    ours, theirs = pty.openpty()
    try:
        with open(theirs, "w", closefd=False) as stream:
            monkeypatch.delenv("NO_COLOR", raising=False)
            monkeypatch.setenv("TERM", "xterm")
            assert terminal.wants_colour(stream)
            monkeypatch.setenv("TERM", "dumb")
            assert not terminal.wants_colour(stream)
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setenv("NO_COLOR", "1")
            assert not terminal.wants_colour(stream)
    finally:
        os.close(ours)
        os.close(theirs)
    monkeypatch.delenv("NO_COLOR")
    assert not terminal.wants_colour(io.StringIO())
    assert terminal.paint("x", "red", False) == "x"


def test_the_width_comes_from_columns_or_the_terminal_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert terminal.width(sys.stdout) == 120
    monkeypatch.setenv("COLUMNS", "none")
    assert terminal.width(io.StringIO(), 72) == 72
