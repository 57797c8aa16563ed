"""How the tests start the product: the interpreter of this run, isolated, with the package of this checkout."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def command(entry: str = "hostd.cli.main", python: str = sys.executable) -> list[str]:
    """argv in front of the product's own arguments: `python -I`, as the packaged scripts do it."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {entry} import entry; entry()"
    return [python, "-I", "-c", code]
