"""The output that README.md shows is what `make demo` prints."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.product_command import ROOT

pytestmark = pytest.mark.embedded


def comparable(line: str) -> str:
    """Without what differs from run to run: times, and how wide a column is."""
    return re.sub(r"\b\d+\.\d s\b|\b\d+ ms\b", "TIME", " ".join(line.split()))


def test_the_output_in_the_readme_is_the_demo_s(require_node: None) -> None:
    shown = (ROOT / "README.md").read_text().partition("## See it")[2].split("```")[1].strip().splitlines()
    demo = subprocess.run(
        [sys.executable, "-m", "tests.demo"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    printed = {comparable(line) for line in demo.stdout.splitlines()}
    assert [line for line in shown if comparable(line) not in printed] == []
