"""The Varlink protocol as pure functions: frames, calls, typed parameters, replies, errors. No I/O.

A message is one JSON object followed by a NUL byte (varlink.org/Method-Call). What comes in is hostile: whatever the
bytes, the only exceptions that leave this module are its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

MAX_CALL = 64 * 1024
"""Bytes of one message that a client may send; ours are a few hundred."""
MAX_REPLY = 16 * 1024 * 1024
"""Bytes of one message that we send: what sd-varlink accepts (VARLINK_BUFFER_MAX)."""
MAX_DEPTH = 32
"""Nested arrays and objects in a call. Far below Python's recursion limit, far above our deepest call (3)."""
INT_MIN, INT_MAX = -(2**63), 2**63 - 1

SERVICE = "org.varlink.service"

_T = TypeVar("_T")


class MalformedMessage(Exception):  # noqa: N818 - what it is, in the words of the protocol
    """Not a Varlink call at all: the connection is answered once and closed, nothing after it can be trusted."""


class VarlinkError(Exception):
    """A typed error reply: qualified name and parameters. `str()` is for the log."""

    def __init__(self, name: str, parameters: Mapping[str, object] | None = None, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name = name
        self.parameters: dict[str, object] = dict(parameters or {})


class Unencodable(Exception):  # noqa: N818
    """A reply of ours cannot be said in JSON, or is too long: a bug on our side."""


def method_not_found(method: str) -> VarlinkError:
    return VarlinkError(f"{SERVICE}.MethodNotFound", {"method": method})


def method_not_implemented(method: str) -> VarlinkError:
    return VarlinkError(f"{SERVICE}.MethodNotImplemented", {"method": method})


def interface_not_found(interface: str) -> VarlinkError:
    return VarlinkError(f"{SERVICE}.InterfaceNotFound", {"interface": interface})


def expected_more() -> VarlinkError:
    return VarlinkError(f"{SERVICE}.ExpectedMore")


def invalid_parameter(path: str, detail: str = "") -> VarlinkError:
    return VarlinkError(f"{SERVICE}.InvalidParameter", {"parameter": path}, f"{path}: {detail}" if detail else path)


# --- frames --------------------------------------------------------------------------------------------------------


class Framer:
    """Bytes in, complete messages out. Work is linear in the bytes, memory at most `limit` plus one read.

    Once a message has passed the limit `overflow` is true and everything after it is ignored.
    """

    __slots__ = ("_limit", "_tail", "overflow")

    def __init__(self, limit: int = MAX_CALL) -> None:
        self._limit = limit
        self._tail = bytearray()
        self.overflow = False

    @property
    def partial(self) -> bool:
        """True when the beginning of a message has come and its end has not."""
        return bool(self._tail)

    def feed(self, data: bytes) -> list[bytes]:
        """Messages that are complete with `data`, without their NUL."""
        complete: list[bytes] = []
        if self.overflow:
            return complete
        *ended, rest = data.split(b"\0")
        for piece in ended:
            if len(self._tail) + len(piece) > self._limit:
                return self._give_up(complete)
            if self._tail:
                self._tail += piece
                complete.append(bytes(self._tail))
                self._tail.clear()
            else:
                complete.append(piece)
        if len(self._tail) + len(rest) > self._limit:
            return self._give_up(complete)
        self._tail += rest
        return complete

    def _give_up(self, complete: list[bytes]) -> list[bytes]:
        self.overflow = True
        self._tail.clear()
        return complete


# --- calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it came."""

    method: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    more: bool = False
    oneway: bool = False

    @property
    def interface(self) -> str:
        return self.method.rpartition(".")[0]

    @property
    def member(self) -> str:
        return self.method.rpartition(".")[2]


def _refuse_constant(text: str) -> NoReturn:
    raise MalformedMessage(f"{text} is not JSON")


def _parse_int(text: str) -> int:
    if len(text) > 20:  # more digits than any 64 bit number; int() of thousands of digits is slow
        raise MalformedMessage("a number has too many digits")
    return int(text)


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_parse_int)


def parse_json(raw: bytes) -> object:
    """One JSON value within our limits, or MalformedMessage. Strings may hold lone surrogates (JSON allows them)."""
    try:
        value: object = _decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise MalformedMessage("not UTF-8") from None
    except RecursionError:
        raise MalformedMessage("nested too deeply") from None
    except ValueError as exc:
        raise MalformedMessage(f"not JSON: {exc}") from None
    except MemoryError:
        raise MalformedMessage("too large") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise MalformedMessage("nested too deeply")
    return value


def parse_reply(message: bytes) -> object:
    """One of our own encoded messages, read back."""
    return json.loads(message[:-1])


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def parse_call(raw: bytes) -> Call:
    """A call from one message, or MalformedMessage. Unknown members of the envelope are ignored, as Varlink asks."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise MalformedMessage("a call must be a JSON object")
    method = value.get("method")
    if not isinstance(method, str):
        raise MalformedMessage("a call needs a method")
    if not _is_method_name(method):
        raise MalformedMessage("the method is not a qualified name")
    parameters = value.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise MalformedMessage("the parameters must be a JSON object")
    flags = {key: value.get(key) for key in ("more", "oneway", "upgrade")}
    for key, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise MalformedMessage(f"{key} must be true or false")
    if flags["upgrade"]:
        raise MalformedMessage("this service upgrades no connection")
    if flags["more"] and flags["oneway"]:
        raise MalformedMessage("a call cannot be both more and oneway")
    return Call(method, parameters, bool(flags["more"]), bool(flags["oneway"]))


def _is_method_name(text: str) -> bool:
    return len(text) <= 255 and "." in text and text.isascii() and text.replace(".", "").replace("-", "").isalnum()


# --- parameters ----------------------------------------------------------------------------------------------------


class Params:
    """Typed getters over the parameters of a call; each failure is an InvalidParameter with the key's full path.

    An absent key and `null` are the same (that is what `?type` means in Varlink). `X(key)` requires a value,
    `X_or(key, default)` does not.
    """

    __slots__ = ("_path", "_seen", "_values")

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path
        self._seen: set[str] = set()

    def path(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _get(self, key: str) -> object:
        self._seen.add(key)
        return self._values.get(key)

    def integer(self, key: str, minimum: int = 0, maximum: int = INT_MAX) -> int:
        return _integer(self._get(key), self.path(key), minimum, maximum)

    def integer_or(self, key: str, default: _T, minimum: int = 0, maximum: int = INT_MAX) -> int | _T:
        value = self._get(key)
        return default if value is None else _integer(value, self.path(key), minimum, maximum)

    def integers_or(
        self, key: str, default: _T, minimum: int = 0, maximum: int = INT_MAX, at_most: int = 4096
    ) -> tuple[int, ...] | _T:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) > at_most:
            raise invalid_parameter(self.path(key), f"expected an array of at most {at_most} integers")
        path = self.path(key)
        return tuple(_integer(item, f"{path}[{i}]", minimum, maximum) for i, item in enumerate(value))

    def number_or(self, key: str, default: _T, minimum: float = 0.0, maximum: float = 1e9) -> float | _T:
        """A finite number within the bounds; an integer is a number."""
        value = self._get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid_parameter(self.path(key), "expected a number")
        if not math.isfinite(value) or not minimum <= value <= maximum:
            raise invalid_parameter(self.path(key), f"expected {minimum:g} to {maximum:g}")
        return float(value)

    def flag_or(self, key: str, default: _T) -> bool | _T:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid_parameter(self.path(key), "expected true or false")
        return value

    def text(self, key: str, at_most: int = 1024) -> str:
        return _text(self._get(key), self.path(key), at_most)

    def text_or(self, key: str, default: _T, at_most: int = 1024) -> str | _T:
        value = self._get(key)
        return default if value is None else _text(value, self.path(key), at_most)

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        value = self.text(key)
        if value not in allowed:
            raise invalid_parameter(self.path(key), f"expected one of {', '.join(allowed)}")
        return value

    def choice_or(self, key: str, default: _T, allowed: Sequence[str]) -> str | _T:
        return default if self._get(key) is None else self.choice(key, allowed)

    def section(self, key: str) -> Params:
        """A nested object; an absent one is an empty one."""
        value = self._get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise invalid_parameter(self.path(key), "expected an object")
        return Params(value, self.path(key))

    def texts(self, key: str, at_most: int = 64, each_at_most: int = 4096) -> dict[str, str]:
        """A map of strings (`[string]string`); an absent one is an empty one."""
        inner = self.section(key)
        if len(inner._values) > at_most:
            raise invalid_parameter(self.path(key), f"expected at most {at_most} entries")
        return {_text(name, inner._path, 256): inner.text(name, each_at_most) for name in inner._values}

    def no_others(self) -> None:
        """Refuse a key that nobody asked for: a misspelt option must not be an ignored one."""
        for key in self._values:
            if key not in self._seen:
                raise invalid_parameter(printable(self.path(key), 128), "unknown")


def _integer(value: object, path: str, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_parameter(path, "expected an integer")
    if not minimum <= value <= maximum:
        raise invalid_parameter(path, f"expected {minimum} to {maximum}")
    return value


def _text(value: object, path: str, at_most: int) -> str:
    if not isinstance(value, str):
        raise invalid_parameter(path, "expected a string")
    if len(value) > at_most or not value.isprintable():  # control characters and surrogates are not printable
        raise invalid_parameter(path, f"expected at most {at_most} printable characters")
    return value


def printable(text: str, at_most: int) -> str:
    """`text` cut and with everything escaped that could hurt a terminal, a log or a JSON parser."""
    cut = text if len(text) <= at_most else text[:at_most] + "…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


# --- replies -------------------------------------------------------------------------------------------------------


def encode_reply(parameters: Mapping[str, object], continues: bool = False) -> bytes:
    """A reply as bytes with its NUL; Unencodable when it cannot be said."""
    return _encode({"parameters": parameters, "continues": True} if continues else {"parameters": parameters})


def encode_error(error: VarlinkError) -> bytes:
    """An error reply as bytes with its NUL; Unencodable when it cannot be said."""
    return _encode({"error": error.name, "parameters": error.parameters})


def encode_call(
    method: str, parameters: Mapping[str, object] | None = None, more: bool = False, oneway: bool = False
) -> bytes:
    """A call as bytes with its NUL."""
    message: dict[str, object] = {"method": method, "parameters": parameters or {}}
    if more:
        message["more"] = True
    if oneway:
        message["oneway"] = True
    return _encode(message)


def _encode(message: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(message, allow_nan=False, separators=(",", ":"))
        if "\\ud" in text or "\\u0000" in text:
            text = json.dumps(_clean(message), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError, MemoryError) as exc:
        raise Unencodable(f"cannot say a reply in JSON: {type(exc).__name__}: {exc}") from exc
    for characters, items in _SHORTER:
        if len(text) < MAX_REPLY:
            break
        text = json.dumps(_clean(_shortened(message, characters, items)), allow_nan=False, separators=(",", ":"))
    if len(text) >= MAX_REPLY:
        raise Unencodable(f"a reply of {len(text)} bytes is longer than {MAX_REPLY}")
    return text.encode("ascii") + b"\0"


_SHORTER = ((1024, 1 << 30), (64, 1 << 30), (64, 4096), (64, 64))
"""(characters of a text, items of a list) that a reply may have at most, from the first that makes it short enough:
what a container may make long (command lines, cgroup names, the number of its processes) must not cost the answer."""
_OURS = frozenset({"message", "next_step", "details"})
"""Sentences of our own: of them each has so many characters at least."""
_OURS_CHARACTERS = 1024


def _shortened(value: object, characters: int, items: int) -> object:
    """The same with long texts and lists cut. `details` or `blind_spots`, where there are any, say what was left out."""
    if isinstance(value, str):
        return value if len(value) <= characters else value[:characters] + "..."
    if isinstance(value, list | tuple):
        return [_shortened(item, characters, items) for item in value[:items]]
    if not isinstance(value, Mapping):
        return value
    result = {
        key: _shortened(item, max(characters, _OURS_CHARACTERS) if key in _OURS else characters, items)
        for key, item in value.items()
    }
    left_out = {
        key: f"{len(item) - items} of {len(item)} {key} are left out: the answer would be too long"
        for key, item in value.items()
        if isinstance(item, list | tuple) and len(item) > items
    }
    texts = f"texts are cut at {characters} characters: the answer would be too long"
    if isinstance(details := result.get("details"), list):
        details += [*left_out.values(), texts]
    elif isinstance(spots := result.get("blind_spots"), list):
        spots += [{"source": "daemon", "what": key, "error": said} for key, said in left_out.items()]
    return result


def _clean(value: object) -> object:
    """The same without lone surrogates and NUL, which systemd's JSON parser refuses (it would drop the connection)."""
    if isinstance(value, str):
        text = value.replace("\0", "\\x00")
        # An undecodable byte of a name from the kernel is a lone surrogate here (surrogateescape).
        return text.encode("utf-8", "surrogateescape" if _escaped_bytes_only(text) else "surrogatepass").decode(
            "utf-8", "backslashreplace"
        )
    if isinstance(value, Mapping):
        return {str(_clean(str(key))): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def _escaped_bytes_only(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text)
