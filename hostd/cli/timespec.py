"""Times as journalctl takes them (systemd.time(7)): `2026-11-30 20:15`, `yesterday`, `-1h`, `2 hours ago`, `@epoch`."""

from __future__ import annotations

import re
import time

from hostd.errors import UsageError
from hostd.terminal import escape

_UNITS_US = {
    "us": 1,
    "usec": 1,
    "µs": 1,
    "ms": 1000,
    "msec": 1000,
    "": 10**6,
    "s": 10**6,
    "sec": 10**6,
    "second": 10**6,
    "seconds": 10**6,
    "m": 60 * 10**6,
    "min": 60 * 10**6,
    "minute": 60 * 10**6,
    "minutes": 60 * 10**6,
    "h": 3600 * 10**6,
    "hr": 3600 * 10**6,
    "hour": 3600 * 10**6,
    "hours": 3600 * 10**6,
    "d": 86_400 * 10**6,
    "day": 86_400 * 10**6,
    "days": 86_400 * 10**6,
    "w": 7 * 86_400 * 10**6,
    "week": 7 * 86_400 * 10**6,
    "weeks": 7 * 86_400 * 10**6,
    "M": 2_629_800 * 10**6,
    "month": 2_629_800 * 10**6,
    "months": 2_629_800 * 10**6,
    "y": 31_557_600 * 10**6,
    "year": 31_557_600 * 10**6,
    "years": 31_557_600 * 10**6,
}
_SPAN = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?\s*([a-zA-Zµ]*)\s*")
_ABSOLUTE = re.compile(
    r"(?:([0-9]{4})-([0-9]{1,2})-([0-9]{1,2}))?[ T]?(?:([0-9]{1,2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6}))?)?)?"
    r"\s*(Z|UTC)?"
)
_DAYS = {"today": 0, "yesterday": -1, "tomorrow": 1}


def parse_time(text: str, now_s: float | None = None) -> int:
    """Microseconds since the epoch. Raises UsageError."""
    now = time.time() if now_s is None else now_s
    plain = text.strip()
    try:
        found = _parse(plain, now)
    except (ValueError, OverflowError):
        found = None
    if found is None or not 0 <= found < 1 << 62:
        raise UsageError(
            f"cannot understand the time '{escape(text)}'",
            next_step="use 'YYYY-MM-DD HH:MM:SS', today, yesterday, now, -1h, '2 hours ago' or @SECONDS",
        )
    return found


def _parse(text: str, now_s: float) -> int | None:
    now_us = int(now_s * 1e6)
    if text == "now":
        return now_us
    if text in _DAYS:
        today = time.localtime(now_s)
        return int(time.mktime((today.tm_year, today.tm_mon, today.tm_mday + _DAYS[text], 0, 0, 0, 0, 0, -1)) * 1e6)
    if text.startswith("@"):
        whole, _, fraction = text[1:].partition(".")
        if not (whole.isascii() and whole.isdigit() and (fraction + "0").isdigit() and fraction.isascii()):
            return None
        return int(whole) * 10**6 + int((fraction + "000000")[:6])
    if text[:1] in ("-", "+"):
        span = _span_us(text[1:])
        return None if span is None else now_us + (span if text[0] == "+" else -span)
    if text.endswith(" ago"):
        span = _span_us(text[:-4])
        return None if span is None else now_us - span
    return _absolute_us(text, now_s)


def _span_us(text: str) -> int | None:
    """`1h30min`, `2 hours`, `90`; None when it is no span."""
    at, total = 0, 0
    text = text.strip()
    while at < len(text):
        match = _SPAN.match(text, at)
        if match is None or match[3] not in _UNITS_US:
            return None
        unit = _UNITS_US[match[3]]
        total += int(match[1]) * unit + int((match[2] or "0").ljust(6, "0")) * unit // 10**6
        at = match.end()
    return total if text else None


def _absolute_us(text: str, now_s: float) -> int | None:
    match = _ABSOLUTE.fullmatch(text)
    if match is None or not (match[1] or match[4]):
        return None
    today = time.localtime(now_s) if not match[8] else time.gmtime(now_s)
    year, month, day = (int(match[i]) for i in (1, 2, 3)) if match[1] else today[:3]
    hour, minute, second = (int(match[i] or 0) for i in (4, 5, 6))
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 60):
        return None
    if match[8]:
        import calendar

        seconds = calendar.timegm((year, month, day, hour, minute, second))
        back = time.gmtime(seconds)
    else:
        seconds = int(time.mktime((year, month, day, hour, minute, second, 0, 0, -1)))
        back = time.localtime(seconds)
    if back.tm_mday != day:  # 31 February
        return None
    return seconds * 10**6 + int((match[7] or "0").ljust(6, "0"))
