"""The quick way to parse a plain command line means what argparse means."""

from __future__ import annotations

import itertools

import pytest

from hostd.cli import quick, release
from hostd.cli.parser import Parser


def by_argparse(argv: list[str]) -> dict[str, object]:
    parser = Parser(prog="pve-gpu-release")
    release.add_arguments(parser)
    return vars(parser.parse_intermixed_args(argv) if getattr(release, "INTERMIXED", False) else parser.parse_args(argv))


@pytest.mark.parametrize("flags", [[], *([f] for f in quick.FLAGS), *map(list, itertools.combinations(quick.FLAGS, 2))])
def test_both_ways_agree(flags: list[str]) -> None:
    argv = ["129", *flags]
    found = quick.parse(argv)
    assert found is not None and vars(found) == by_argparse(argv)


@pytest.mark.parametrize("argv", [["129", "130", "129"], ["--now", "129"], ["0129"], ["1", "--json", "999999999"]])
def test_order_and_repetition(argv: list[str]) -> None:
    found = quick.parse(argv)
    assert found is not None and vars(found) == by_argparse(argv)


@pytest.mark.parametrize(
    "argv",
    [[], ["--now"], ["129", "--gpu", "0"], ["129", "--gpu=0"], ["ps"], ["129", "x"], ["0"], ["1" * 10], ["-nq", "129"],
     ["129", "--help"], ["\u0661\u0662\u0669"], ["--", "129"], [""], ["129", "--dry"]],
)  # fmt: skip
def test_everything_else_is_argparses(argv: list[str]) -> None:
    assert quick.parse(argv) is None
