"""The YAML of a configuration file, read against the table of `config.KEYS`: values, and every mistake with its line.

Imported only when there is something to read: importing yaml costs more than a look at an idle container.
"""

from __future__ import annotations

import difflib

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from hostd.config import BrokenConfigError, parse_vmid
from hostd.configkeys import BY_PATH, CONTAINER_SECTIONS, KEYS, SECTIONS, Key, Value
from hostd.terminal import escape, shorten

MAX_NODES = 40_000
"""Bounds the time that a large file can take: 1,000 containers with every override are 31,000 nodes."""
MAX_DEPTH = 8
MAX_ERRORS = 50
MAX_UNITS = 100


class _RefusedError(Exception):
    """YAML that this file has no use for: bombs, recursion, objects."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


class _Composer(yaml.SafeLoader):
    """Builds nodes (nothing is constructed from them), and refuses what could grow or recurse without bound."""

    depth = 0
    nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _RefusedError("anchors and aliases (& and *) are not supported here", line)
        if getattr(event, "tag", None) not in (None, "!"):
            raise _RefusedError("tags (!...) are not supported here", line)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _RefusedError(f"more than {MAX_NODES} keys and values", line)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _RefusedError(f"nested deeper than {MAX_DEPTH} levels", line)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _TooManyError(Exception):
    """Enough mistakes were found."""


class Reader:
    """Walks the YAML nodes of one file, collects values and mistakes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []
        self.values: dict[str, Value] = {}
        self.by_container: dict[int, dict[str, Value]] = {}

    def read(self, text: str) -> None:
        """Fill `values`, `by_container` and `problems`. Raises BrokenConfigError where the YAML itself is wrong."""
        try:
            self._read_root(self._compose(text))
        except _TooManyError:
            self.problems.append(f"more than {MAX_ERRORS} mistakes; the rest is not listed")

    def _compose(self, text: str) -> Node | None:
        composer = None
        try:
            composer = _Composer(text)
            return composer.get_single_node()
        except _RefusedError as exc:
            problem, line = exc.problem, exc.line
        except yaml.reader.ReaderError as exc:
            code = exc.character if isinstance(exc.character, int) else ord(exc.character)
            problem, line = f"character U+{code:04X} is not allowed", text.count("\n", 0, exc.position) + 1
        except yaml.MarkedYAMLError as exc:
            mark = exc.problem_mark or exc.context_mark
            problem = " ".join(part for part in (exc.context, exc.problem) if part)
            if "'\\t'" in problem:
                problem += "; indent with spaces"
            line = mark.line + 1 if mark else 0
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as exc:
            problem, line = str(exc) or type(exc).__name__, 0
        finally:
            if composer is not None:
                composer.dispose()
        where = f"{self.name}, line {line}" if line else self.name
        raise BrokenConfigError((f"cannot read the configuration: {shorten(escape(problem), 300)} ({where})",))

    def _read_root(self, root: Node | None) -> None:
        for head, node in self._entries(root, "", (*SECTIONS, "containers")):
            if head == "containers":
                self._read_containers(node)
            else:
                self._read_section(head, node, head, self.values, per_container=False)

    def _read_containers(self, node: Node) -> None:
        seen: dict[int, int] = {}
        for key, value in self._pairs(node, "containers"):
            line = key.start_mark.line + 1
            vmid = parse_vmid(key.value) if isinstance(key.value, str) else None
            if vmid is None:
                self._problem("containers", f"expected a container id from 100 to 999999999, got {_got(key)}", line)
            elif vmid in seen:
                self._problem(f"containers.{vmid}", f"given twice, first in line {seen[vmid]}", line)
            else:
                seen[vmid] = line
                own = self.by_container.setdefault(vmid, {})
                path = f"containers.{vmid}"
                for head, section in self._entries(value, path, CONTAINER_SECTIONS):
                    self._read_section(head, section, f"{path}.{head}", own, per_container=True)

    def _read_section(self, head: str, node: Node, path: str, into: dict[str, Value], *, per_container: bool) -> None:
        known = tuple(
            key.path.partition(".")[2]
            for key in KEYS
            if key.path.startswith(f"{head}.") and (key.per_container or not per_container)
        )
        for leaf, value in self._entries(node, path, known):
            key = BY_PATH[f"{head}.{leaf}"]
            parsed = parse_value(key, value)
            if parsed is None:
                wrong = _wrong_part(key, value)
                what = f"expected {key.expected}, got {_got(wrong)}"
                self._problem(f"{path}.{leaf}", what, wrong.start_mark.line + 1)
            else:
                into[key.path] = parsed

    def _entries(self, node: Node | None, path: str, known: tuple[str, ...]) -> list[tuple[str, Node]]:
        """(key, value) of a mapping with known keys; unknown and repeated ones become problems."""
        found: dict[str, tuple[int, Node]] = {}
        for key, value in self._pairs(node, path):
            line = key.start_mark.line + 1
            name = key.value
            full = f"{path}.{_got(key, quote=False)}" if path else _got(key, quote=False)
            if not isinstance(name, str):
                self._problem(path or "the file", f"expected a key, got {_got(key)}", line)
            elif name not in known:
                self._add(f"unknown key {full}{_did_you_mean(name, path, known)}", line)
            elif name in found:
                self._problem(full, f"given twice, first in line {found[name][0]}", line)
            else:
                found[name] = (line, value)
        return [(name, value) for name, (_, value) in found.items()]

    def _pairs(self, node: Node | None, path: str) -> list[tuple[Node, Node]]:
        """The pairs of a mapping; an empty section (all of it commented out) has none."""
        if node is None or _is_null(node):
            return []
        if not _is_mapping(node):
            what = path or "the file"
            self._problem(what, f"expected `key: value` lines, got {_got(node)}", node.start_mark.line + 1)
            return []
        return list(node.value)

    def _problem(self, path: str, what: str, line: int) -> None:
        self._add(f"cannot read {path}: {what}", line)

    def _add(self, problem: str, line: int) -> None:
        self.problems.append(f"{problem} ({self.name}, line {line})")
        if len(self.problems) >= MAX_ERRORS:
            raise _TooManyError


def _is_mapping(node: Node) -> bool:
    return isinstance(node, MappingNode)


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _is_plain(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.style is None


def _got(node: Node, *, quote: bool = True) -> str:
    """What stands there, for an error message."""
    if isinstance(node, MappingNode):
        return "a section"
    if isinstance(node, SequenceNode):
        return "a list"
    if _is_null(node):
        return "nothing"
    text = shorten(escape(str(node.value)), 60)
    if quote and getattr(node, "style", None) in ("'", '"'):
        return f"the quoted text '{text}'"
    return f"'{text}'" if quote else text


def _did_you_mean(name: str, path: str, known: tuple[str, ...]) -> str:
    """`; did you mean …?`, with the whole path: the same key in its own section, or what is spelled alike, here first;
    else what is known here."""
    name = name[:100].lower().replace("-", "_")
    prefix = f"containers.{path.split('.')[1]}." if path.startswith("containers.") else ""
    paths = [key.path for key in KEYS if key.per_container or not prefix]
    if name in paths:
        section, _, leaf = name.partition(".")
        return f"; write it as {section}: and below it, indented, {leaf}:"
    if not path and parse_vmid(name) is not None:
        return f"; did you mean containers.{name}?"
    leaves: dict[str, str] = {}
    for full in paths:
        leaves.setdefault(full.partition(".")[2], full)
    if name in leaves and name not in known:
        return f"; did you mean {prefix}{leaves[name]}?"
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"; did you mean {path}.{close[0]}?" if path else f"; did you mean {close[0]}?"
    if close := difflib.get_close_matches(name, leaves, n=1, cutoff=0.7):
        return f"; did you mean {prefix}{leaves[close[0]]}?"
    return "; known here: " + ", ".join(known)


def parse_value(key: Key, node: Node) -> Value | None:
    """The value of a setting, None when it is not what the key expects.

    Numbers are read from the text, not by YAML's own rules, by which `010` is 8 and `1:30` is 90.
    """
    if key.kind == "units":
        return _parse_units(node)
    if not _is_plain(node) and not (key.kind == "choice" and isinstance(node, ScalarNode)):
        return None
    text = str(node.value)
    if key.kind == "choice":
        return text if text in key.choices else None
    if key.kind == "yes-no":
        return _parse_bool(node)
    whole, dot, fraction = text.partition(".")
    if not _is_digits(whole) or (dot and not _is_digits(fraction)) or (len(whole) > 1 and whole[0] == "0"):
        return None
    if key.kind == "seconds":
        seconds = float(text)
        return seconds if 0 < seconds <= key.high else None
    if dot:
        return None
    return int(text) if key.low <= int(text) <= key.high else None


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15


def _parse_bool(node: Node) -> bool | None:
    if node.tag != "tag:yaml.org,2002:bool":
        return None
    return str(node.value).lower() in ("true", "yes", "on")


UNIT_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\\@")


def _wrong_part(key: Key, node: Node) -> Node:
    """The item of a list that is wrong, else the whole value."""
    if key.kind == "units" and isinstance(node, SequenceNode) and len(node.value) <= MAX_UNITS:
        return next((item for item in node.value if _parse_unit(item) is None), node)
    return node


def _parse_units(node: Node) -> tuple[str, ...] | None:
    """Service names as in systemd.unit(5), `.service` added where it is left out; never an option of a command."""
    if not isinstance(node, SequenceNode) or len(node.value) > MAX_UNITS:
        return None
    names = [_parse_unit(item) for item in node.value]
    found = [name for name in names if name is not None]
    return tuple(dict.fromkeys(found)) if len(found) == len(names) else None


def _parse_unit(node: Node) -> str | None:
    name = str(node.value)
    if not isinstance(node, ScalarNode) or _is_null(node) or not name or len(name) > 200:
        return None
    if name[0] in "-." or not UNIT_CHARACTERS.issuperset(name):
        return None
    return name if name.endswith(".service") else f"{name}.service"
