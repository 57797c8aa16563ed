"""The argument parser of every verb. Not imported for a plain `pve-gpu-release 129` (`quick`)."""

from __future__ import annotations

import argparse
import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from hostd.cli.common import close_to, shown
from hostd.terminal import escape, shorten

LONGEST = 400
"""Characters of an error message."""


def module_of(verb: str) -> ModuleType:
    return import_module(f"hostd.cli.{verb.replace('-', '_')}")


def parse(verb: str, words: list[str], *, as_json: bool = False) -> argparse.Namespace:
    """The arguments of a verb. SystemExit for `--help` (0) and for a mistake (2), which has been said then."""
    module = module_of(verb)
    name = "pve-gpu-release" if verb == "release" else f"pve-gpu-release {verb}"
    parser = Parser(prog=name, description=module.HELP, as_json=as_json)
    module.add_arguments(parser)
    intermixed = getattr(module, "INTERMIXED", False)
    found: argparse.Namespace = parser.parse_intermixed_args(words) if intermixed else parser.parse_args(words)
    return found


class Parser(argparse.ArgumentParser):
    """Errors are one clear line, or one JSON object, and exit status 2; no abbreviations, so that a typo never becomes
    another option; what looks like a typo is named."""

    def __init__(self, *, as_json: bool = False, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._as_json = as_json

    def error(self, message: str) -> NoReturn:
        # argparse's own messages have repr(): bytes that were not UTF-8 stand there as surrogates (PEP 383)
        message = re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", message)
        message = shorten(escape(message), LONGEST)
        if self._as_json:
            from hostd.cli.common import fail
            from hostd.errors import UsageError

            fail(UsageError(message, next_step=f"{self.prog} --help"), as_json=True)
        else:
            print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._check_options(args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._check_options(args)  # from Python 3.13 on it does not come by the other one
        return super().parse_known_intermixed_args(args, namespace)

    def _check_options(self, words: list[str] | None) -> None:
        """An unknown option is named before anything else is found missing."""
        for word in sys.argv[1:] if words is None else words:
            if word == "--":
                break
            if word.startswith("--"):
                self._check_long(word)
            elif len(word) > 1 and word[0] == "-" and not word[1].isdigit():
                self._check_short(word[1:])

    def _check_long(self, word: str) -> None:
        name, valued, value = word.partition("=")
        action = self._option_string_actions.get(name)
        if action is None:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            self.error(f"unknown option {shown(name)}{close_to(name, known)}")
        if valued and action.nargs == 0:
            self.error(f"{name} takes no value, not {shown(value)} either")

    def _check_short(self, letters: str) -> None:
        """`-nq` is two options; what follows one that takes a value is its value (`-n5` of log)."""
        for letter in letters:
            action = self._option_string_actions.get(f"-{letter}")
            if action is None:
                self.error(f"unknown option {shown(f'-{letter}')}")
            if action.nargs != 0:
                return

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            text = f"{shown(str(value))} is not one of {', '.join(known)}{close_to(str(value), known)}"
            raise argparse.ArgumentError(action, text)


class Once(argparse.Action):
    """An option that selects one thing: a second one would silently take the place of the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) not in (None, values):
            raise argparse.ArgumentError(self, "given twice: one run takes one")
        setattr(namespace, self.dest, values)


class Several(argparse.Action):
    """An option that may be given again: the values with commas between, as one value may have them too."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")
