#!/usr/bin/python3
"""Man pages and shell completion, made from the code: `packaging/generate.py [--date YYYY-MM-DD] OUTPUT`.

Options come from the argparse parsers, settings from `hostd.configkeys`, exit statuses and reasons from `hostd.verdicts`;
prose comes from packaging/man/*.in. Needs nothing but the interpreter, so that a package builds in a bare tree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import hostd  # noqa: E402
from hostd.cli.main import VERBS  # noqa: E402
from hostd.cli.parser import Parser, Several  # noqa: E402
from hostd.config import DEFAULT_PATH  # noqa: E402
from hostd.configkeys import reference_rows  # noqa: E402
from hostd.verdicts import EXIT_PRECEDENCE, REASONS  # noqa: E402

STATUSES = {
    0: "Released: a fresh look found no holder and the driver gave the memory back (also when nothing was held).",
    1: "Internal error; the traceback is in the journal.",
    2: "Usage or configuration error.",
    3: "Held: holders survive, came back, or the time limit passed.",
    4: "Unknown: it was not possible to look everywhere, or the driver could not confirm.",
    5: "Held by a task that cannot die: a reset of the GPU or a reboot of the node is needed.",
    6: "Held: no holder is left, but memory stays in use.",
    7: "Refused: it would stop the container, or hit somebody else.",
    8: "No such container on this node.",
    9: "Not permitted: root is needed.",
    75: "Busy: another release of this container is in flight (with --no-wait).",
    130: "Interrupted; what was already signalled is said.",
}


# --- what the code says ----------------------------------------------------------------------------------------------


def verb_parser(verb: str) -> argparse.ArgumentParser:
    """The parser that `pve-gpu-release VERB` uses."""
    module = import_module(f"hostd.cli.{verb.replace('-', '_')}")
    name = "pve-gpu-release" if verb == "release" else f"pve-gpu-release {verb}"
    parser = Parser(prog=name, description=module.HELP)
    module.add_arguments(parser)
    return parser


def daemon_parser() -> argparse.ArgumentParser:
    """The parser of pve-gpu-hostd, caught where its main() uses it."""
    from hostd import daemon

    class CaughtError(Exception):
        pass

    def catch(self: argparse.ArgumentParser, *_: object) -> None:
        raise CaughtError(self)

    original, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, catch  # type: ignore
    try:
        daemon.main([])
    except CaughtError as caught:
        return caught.args[0]
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore
    raise AssertionError("pve-gpu-hostd parses no arguments")


def parsers() -> dict[str, argparse.ArgumentParser]:
    return {verb: verb_parser(verb) for verb in VERBS}


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Its own arguments, without --help and what is not to be seen."""
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """`hook enable` and the like."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found


def every_option(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options of a parser and of its subcommands, each once."""
    found = {tuple(a.option_strings): a for p in (parser, *subcommands(parser).values()) for a in actions(p)}
    return [action for strings, action in found.items() if strings]


# --- man pages -------------------------------------------------------------------------------------------------------


def roff(text: str) -> str:
    """Plain text for troff: nothing in it is a request or an escape."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def bold(text: str) -> str:
    return f"\\fB{roff(text)}\\fR"


def italic(text: str) -> str:
    return f"\\fI{roff(text)}\\fR"


def value_of(action: argparse.Action) -> str:
    """How the value of an option or a positional argument is written: `S`, `{a,b}`; empty when it takes none."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def positional(action: argparse.Action) -> str:
    name = italic(value_of(action))
    return {"*": f"[{name}...]", "+": f"{name}...", "?": f"[{name}]"}.get(str(action.nargs), name)


def option_entry(action: argparse.Action) -> str:
    value = value_of(action)
    names = ", ".join(bold(name) + (f" {italic(value)}" if value else "") for name in action.option_strings)
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f".TP\n{names}\n{roff(sentence(text))}"


def sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def synopsis(verb: str, parser: argparse.ArgumentParser) -> str:
    words = [bold("pve-gpu-release")] + ([bold(verb)] if verb != "release" else [])
    if names := subcommands(parser):
        words.append("|".join(bold(name) for name in names))
        parser = next(iter(names.values()))
    words += [positional(action) for action in actions(parser) if not action.option_strings]
    return " ".join([*words, f"[{italic('options')}]"])


def verb_section(verb: str, parser: argparse.ArgumentParser) -> str:
    lines = [f".SS {roff(verb)}", synopsis(verb, parser), ".PP", roff(sentence(parser.description or VERBS[verb]))]
    for name, sub in subcommands(parser).items():
        lines += [".TP", bold(name), roff(sentence(sub.description or name))]
    known = {(*a.option_strings, a.help) for a in every_option(verb_parser("release"))}
    same = [a for a in every_option(parser) if (*a.option_strings, a.help) in known]
    lines += [option_entry(action) for action in every_option(parser) if action not in same]
    if same:
        lines += [".PP", "As above: " + ", ".join(bold(a.option_strings[-1]) for a in same) + "."]
    return "\n".join(lines)


def exit_statuses() -> str:
    lines = []
    for status, meaning in STATUSES.items():
        codes = [reason.code for reason in REASONS.values() if reason.exit_status == status]
        lines += [".TP", bold(str(status)), roff(meaning)]
        if codes:
            lines.append("Reasons: " + ", ".join(bold(code) for code in codes) + ".")
    return "\n".join(lines)


def settings() -> str:
    lines: list[str] = []
    section = ""
    for row in reference_rows():
        head, _, leaf = row.path.partition(".")
        if head != section:
            lines.append(f".SS {roff(head)}:")
            section = head
        scope = "" if row.per_container else " Not for single containers."
        lines += [
            ".TP",
            f"{bold(leaf)}: {italic(row.default)}",
            roff(f"{row.meaning} Expected: {row.type}.{scope}"),
        ]
    return "\n".join(lines)


def man_pages(date: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every page."""
    found = parsers()
    parts = {
        "VERSION": roff(hostd.__version__),
        "DATE": date,
        "DEFAULT_CONFIG": roff(DEFAULT_PATH),
        "SYNOPSIS": "\n.br\n".join(synopsis(verb, parser) for verb, parser in found.items()),
        "RELEASE_OPTIONS": "\n".join(map(option_entry, every_option(found["release"]))),
        "VERBS": "\n".join(verb_section(verb, parser) for verb, parser in found.items() if verb != "release"),
        "EXIT_STATUS": exit_statuses(),
        "EXIT_ORDER": ", ".join(map(str, EXIT_PRECEDENCE)),
        "SETTINGS": settings(),
        "DAEMON_OPTIONS": "\n".join(map(option_entry, actions(daemon_parser()))),
    }
    for source in sorted((HERE / "man").glob("*.in")):
        text = source.read_text()
        for name, value in parts.items():
            text = text.replace(f"@{name}@", value)
        yield source.name.removesuffix(".in"), text


# --- completion ------------------------------------------------------------------------------------------------------


def kind_of(action: argparse.Action) -> str:
    """What a value is completed with: vmid, gpu, file, a list of words, or nothing."""
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    return {"VMID": "@vmid", "SEL": "@gpu", "FILE": "@file"}.get(value_of(action).strip("[]."), "")


def bash_cases() -> str:
    """One `case` branch for each verb: its options, what its words are, its subcommands."""
    lines = []
    for verb, parser in parsers().items():
        options = [*(name for action in every_option(parser) for name in action.option_strings), "--help"]
        subs = subcommands(parser)
        own = next(iter(subs.values()), parser)
        words = [kind_of(action) for action in actions(own) if not action.option_strings]
        first = "'" + " ".join(subs) + "'" if subs else "''"
        lines.append(f"    {verb}) options='{' '.join(options)}' words='{' '.join(filter(None, words))}' subs={first} ;;")
    return "\n".join(lines)


def bash_values() -> str:
    """One `case` branch for each option that takes a value."""
    kinds: dict[str, set[str]] = {}
    for parser in (*parsers().values(), daemon_parser()):
        for action in every_option(parser):
            if value_of(action):
                for name in action.option_strings:
                    kinds.setdefault(name, set()).add(kind_of(action))
    by_kind: dict[str, list[str]] = {}
    for name, found in kinds.items():
        by_kind.setdefault(" ".join(sorted(filter(None, found))), []).append(name)
    return "\n".join(f"    {' | '.join(sorted(names))}) values='{kind}' ;;" for kind, names in sorted(by_kind.items()))


def zsh_quote(text: str) -> str:
    for char in "\\[]:":
        text = text.replace(char, f"\\{char}")
    return "'" + text.replace("'", "'\\''") + "'"


def zsh_value(action: argparse.Action) -> str:
    kind = kind_of(action)
    name = value_of(action).strip("{}").split(",")[0].lower()
    what = {"@vmid": "_pve_gpu_release_vmids", "@gpu": "_pve_gpu_release_gpus", "@file": "_files"}.get(kind)
    return f":{name}:{what or (f'({kind})' if kind else ' ')}"


def zsh_arguments(parser: argparse.ArgumentParser) -> str:
    specs = []
    for action in every_option(parser):
        for name in action.option_strings:
            text = zsh_quote(f"{name}\0{action.help or ''}")[1:-1].replace("\0", "[", 1) + "]"
            again = "*" if isinstance(action, Several) else ""
            specs.append(f"'{again}{text}{zsh_value(action) if value_of(action) else ''}'")
    subs = subcommands(parser)
    if subs:
        specs.append(f"'1:what:({' '.join(subs)})'")
    own = next(iter(subs.values()), parser)
    for action in actions(own):
        if not action.option_strings:
            many = "*" if str(action.nargs) in ("*", "+") else ""
            specs.append(f"'{many}{zsh_value(action)}'")
    return " ".join(specs)


def zsh_cases() -> str:
    return "\n".join(f"    {verb}) _arguments {zsh_arguments(parser)} ;;" for verb, parser in parsers().items())


def zsh_verbs() -> str:
    return "\n".join(f"    {zsh_quote(verb)[:-1]}:{zsh_quote(text)[1:]}" for verb, text in VERBS.items())


def completions() -> Iterator[tuple[str, str]]:
    parts = {
        "VERBS": " ".join(VERBS),
        "CASES": bash_cases(),
        "VALUES": bash_values(),
        "DAEMON": " ".join(name for action in actions(daemon_parser()) for name in action.option_strings),
        "ZSH_VERBS": zsh_verbs(),
        "ZSH_CASES": zsh_cases(),
        "ZSH_DAEMON": zsh_arguments(daemon_parser()),
    }
    for source in sorted((HERE / "completion").glob("*.in")):
        text = source.read_text()
        for name, value in parts.items():
            text = text.replace(f"@{name}@", value)
        yield source.name.removesuffix(".in"), text


def write(directory: Path, date: str) -> None:
    for part, made in (("man", man_pages(date)), ("completion", completions())):
        (directory / part).mkdir(parents=True, exist_ok=True)
        for name, text in made:
            (directory / part / name).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--date", default="unreleased")
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    write(given.output, given.date)
