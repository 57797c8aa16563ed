"""Imports point one way (docs/architecture.md, STYLE 5), nothing heavy is loaded by accident, and there are no threads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostd

ROOT = Path(hostd.__file__).parent
FACTS, PRIMITIVES, OUTSIDE, DECISIONS, SURFACES = range(5)
LAYERS = ("facts", "primitives", "outside world", "decisions", "surfaces")
RANK = {
    **dict.fromkeys(("model", "ladder", "errors", "verdicts"), FACTS),
    **dict.fromkeys(("syscalls", "disposable", "terminal"), PRIMITIVES),
    "system": OUTSIDE,
    **dict.fromkeys(("cli", "daemon", "doctor", "hook", "service"), SURFACES),
}
"""First part of a module's name below `hostd` -> its layer; everything else decides."""
FAMILIES = {
    *(("nvml", "nvml_child"), ("nvml_child", "nvml"), ("journal", "journalread"), ("journalread", "journal")),
    *(("scan", "scanhelper"), ("scanhelper", "descriptors"), ("scanhelper", "mappings")),
    ("descriptors", "rings"),
}
"""Modules of system/ that are one family: library and child, writer and reader, a scan and what its helper reads."""
HEAVY = {"psutil", "pynvml", "yaml", "proxmoxer", "systemd", "asyncio", "requests", "multiprocessing", "concurrent"}
LATE = {"configreader": {"yaml"}}
"""Modules that are themselves loaded only where they are needed (a test says so) -> what they may load."""
THREADS = {"threading", "_thread", "concurrent", "multiprocessing", "asyncio"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rank_of(name: str) -> int:
    return RANK.get(name.split(".")[0], DECISIONS)


def imports(path: Path, *, top_only: bool = False) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of every import; `top_only`: those that run when the module is loaded."""
    tree = ast.parse(path.read_text())
    nodes = _loaded(tree.body) if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _loaded(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that run at import: not the bodies of functions, not what is under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            yield from _loaded([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
            for handler in getattr(node, "handlers", ()):
                yield from _loaded(handler.body)


def within(name: str) -> str | None:
    """The part below `hostd`; None for modules of others."""
    return name.removeprefix("hostd.") if name.startswith("hostd.") else None


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_down(path: Path) -> None:
    here = name_of(path)
    wrong = []
    for module, line in imports(path):
        there = within(module)
        if there is None or not (ROOT / (there.replace(".", "/") + ".py")).exists():
            continue
        if rank_of(there) > rank_of(here):
            wrong.append(f"line {line}: {here} ({LAYERS[rank_of(here)]}) imports {there} ({LAYERS[rank_of(there)]})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted((ROOT / "system").glob("*.py")), ids=name_of)
def test_readers_of_the_outside_world_never_import_each_other(path: Path) -> None:
    here = path.stem
    others = {within(m) for m, _ in imports(path)}
    siblings = {o.split(".")[1] for o in others if o and o.startswith("system.")} - {here}
    siblings = {s for s in siblings if (ROOT / "system" / f"{s}.py").exists()}
    assert {s for s in siblings if (here, s) not in FAMILIES} == set()


@pytest.mark.parametrize("path", [p for p in modules() if rank_of(name_of(p)) == FACTS], ids=name_of)
def test_facts_need_nothing_but_the_standard_library_and_do_no_io(path: Path) -> None:
    outside = {m.split(".")[0] for m, _ in imports(path)} - set(sys.stdlib_module_names) - {"hostd"}
    assert outside == set()
    assert not {m.split(".")[0] for m, _ in imports(path, top_only=True)} & {"os", "io", "socket", "subprocess", "pathlib"}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_heavy_is_loaded_with_a_module(path: Path) -> None:
    """A missing or broken one must not break a container's stop, and import time is part of the speed goal."""
    heavy = {m.split(".")[0] for m, _ in imports(path, top_only=True)} & HEAVY
    assert heavy - LATE.get(name_of(path), set()) == set()
    assert not {m for m, _ in imports(path, top_only=True)} & {f"hostd.{late}" for late in LATE}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_there_are_no_threads(path: Path) -> None:
    """Fork is safe only in a process with a single thread (docs/architecture.md, Processes)."""
    assert {m.split(".")[0] for m, _ in imports(path)} & THREADS == set()


@pytest.mark.parametrize("entry", ["hostd.engine", "hostd.cli.main", "hostd.cli.release", "hostd.hook", "hostd.daemon"])
def test_what_a_release_loads_has_none_of_the_heavy_ones_in_it(entry: str) -> None:
    code = f"import sys, {entry}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_rules_see_a_breach() -> None:
    tree = "from hostd.cli import main\nif True:\n    import yaml\ndef f():\n    import psutil\n"
    found = [m for node in _loaded(ast.parse(tree).body) if isinstance(node, ast.Import) for m in [node.names[0].name]]
    assert found == ["yaml"] and rank_of("cli.main") > rank_of("observe") > rank_of("system.nvml") > rank_of("model")
