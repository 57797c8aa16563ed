"""`pve-gpu-release`: finds the verb, imports only its module, maps every way to end to an exit status."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hostd.errors import PgrError

VERBS = {
    "release": "free the GPUs that containers hold (the default for a number)",
    "ps": "who holds what, by container and GPU",
    "verify": "judge only, no action",
    "map": "container pid -> host pid",
    "status": "daemon, driver, GPUs, holders, last releases (--watch: live)",
    "wait": "until a GPU, or what a container holds, is free",
    "log": "the audit trail from the journal",
    "explain": "one release as a story",
    "check-config": "check the configuration file",
    "hook": "set the hookscript on containers, take it off, show it",
    "doctor": "what on this node would break the promise, and how to mend it",
}
"""Only verbs that work are listed here; each is a module of this package."""

_VALUED = (
    *("--config", "--grace", "--timeout", "--gpu", "--pid", "--free", "--storage", "--chain-limit", "--interval"),
    *("--since", "-S", "--until", "-U", "--lines", "--output", "-o", "--release", "--file"),
)
"""Options whose value is the next word (`-n N` of log is not among them: to `release` it is a flag)."""
_ONLY_SHOW = ("ps", "status", "map", "log", "explain")


def split_verb(argv: list[str]) -> tuple[str, list[str]]:
    """(verb, remaining arguments): the first word that is no option's value, if it is a verb; else `release`."""
    at = _first_word(argv)
    if at is not None and argv[at] in VERBS:
        return argv[at], argv[:at] + argv[at + 1 :]
    return "release", argv


def _first_word(argv: list[str]) -> int | None:
    """Where the first word is that is neither an option nor an option's value; None when there is none before `--`."""
    skip = False
    for i, word in enumerate(argv):
        if skip:
            skip = False
        elif word in _VALUED:
            skip = True
        elif word == "--":
            break
        elif not word.startswith("-"):
            return i
    return None


def usage() -> str:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {name:<{width}}{text}" for name, text in VERBS.items())
    return f"""\
usage: pve-gpu-release VMID... [options]
       pve-gpu-release VERB ...

Frees the NVIDIA GPUs that Proxmox LXC containers hold, from the host, and proves it.

  pve-gpu-release 129              free container 129's GPUs, verify, report
  pve-gpu-release 129 --dry-run    show who would be signalled
  pve-gpu-release ps               who holds what on this node

verbs:
{verbs}

pve-gpu-release VERB --help (or help VERB) shows the options of a verb; `pve-gpu-release release --help` those of the
default one.
Exit status: 0 released, 3 held, 4 unknown, 5 unkillable, 6 memory stays in use, 7 refused, 8 no such container,
9 not root, 75 busy, 2 usage, 1 internal error, 130 interrupted."""


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit status."""
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version", "version"):
        from hostd import __version__

        print(f"pve-gpu-release {__version__}")
        return 0
    from hostd.cli import quick

    plain = quick.parse(argv)
    if plain is not None:
        from hostd.cli import release

        return _run(release.run, plain)
    as_json = wants_json(argv)
    if argv[0] == "help":  # `help ps` is `ps --help`
        words = argv[1:]
        wrong = [word for word in words if word not in VERBS] or words[1:]
        if wrong:
            return _unknown_word(wrong[0], "is not a verb" if wrong[0] not in VERBS else "is one verb too many", as_json)
        argv = [words[0], "--help"]
    at = _first_word(argv)
    if at is not None and argv[at] not in VERBS and not (argv[at].isascii() and argv[at].isdigit()):
        return _unknown_word(argv[at], "is neither a container id nor a verb", as_json)
    verb, rest = split_verb(argv)
    if rest == ["help"]:
        rest = ["--help"]
    from hostd.cli.parser import module_of, parse

    return _run(module_of(verb).run, parse(verb, rest, as_json=as_json))


def wants_json(argv: list[str]) -> bool:
    return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


def _run(run: Callable[[Any], int], args: object) -> int:
    from hostd.cli.common import fail
    from hostd.errors import PgrError

    try:
        return int(run(args))
    except PgrError as exc:
        vmids = getattr(args, "vmids", None) or [getattr(args, "vmid", None)]
        return fail(exc, as_json=getattr(args, "json", False), vmid=vmids[0] if len(vmids) == 1 else None)


def _unknown_word(word: str, what: str, as_json: bool) -> int:
    from hostd.cli.common import apart, close_to, fail, shown
    from hostd.errors import UsageError

    step = "pve-gpu-release --help" if as_json else ""
    see = "" if as_json else " (see --help)"
    hint = "" if word in VERBS else apart(word) or close_to(word, VERBS)
    return fail(UsageError(f"{shown(word)} {what}{hint}{see}", next_step=step), as_json=as_json)


def entry() -> None:
    """Console script: outlives its output, keeps tracebacks off the terminal."""
    status = 1
    argv = sys.argv[1:]
    try:
        try:
            from hostd import inherited
            from hostd.cli import interrupt, output

            interrupt.install()
            inherited.set_right()
            output.take_over()
            status = main(argv)
        except BaseException as exc:  # noqa: BLE001 - every way to end has a status
            status = _status_of(argv, exc)
        status = _said(argv, status)
    except BaseException:  # noqa: BLE001 - nowhere is left to say it
        pass
    finally:
        os._exit(status)


def _status_of(argv: list[str], exc: BaseException) -> int:
    """Says why it ended, and the exit status for that."""
    from hostd.cli import interrupt

    if isinstance(exc, KeyboardInterrupt) or interrupt.came:
        interrupt.ignore()
        from hostd.errors import InterruptedRelease

        return _fail_late(argv, InterruptedRelease("interrupted"))
    if isinstance(exc, SystemExit):  # argparse: --help, or wrong arguments
        return exc.code if isinstance(exc.code, int) else 2
    from hostd.errors import PgrError, is_exhausted

    if is_exhausted(exc):
        from hostd.cli.common import exhausted

        return _fail_late(argv, exhausted(exc))

    status = _fail_late(argv, PgrError(f"internal error: {type(exc).__name__}: {exc}"))
    _log_traceback(exc)
    return status


def _fail_late(argv: list[str], error: PgrError) -> int:
    """As JSON only when nothing was written before: it would not be one object any more."""
    from hostd.cli.common import fail

    return fail(error, as_json=wants_json(argv) and not getattr(sys.stdout, "wrote", False))


def _said(argv: list[str], status: int) -> int:
    """Writes what is left to write; the exit status when that fails (`output` has the rule)."""
    import errno

    from hostd.cli import output

    sys.stdout.flush()
    error = output.lost()
    if error is not None and error.errno != errno.EPIPE:
        print(f"pve-gpu-release: cannot write the output: {error.strerror}", file=sys.stderr)
        if status == 0 and _only_shows(argv):
            status = 1
    sys.stderr.flush()
    return status


def _only_shows(argv: list[str]) -> bool:
    """True for what was run only to be read: lost output is then a failure and not a detail."""
    return split_verb(argv)[0] in _ONLY_SHOW or not {"-h", "--help", "help", "-V", "--version", "version"}.isdisjoint(argv)


def _log_traceback(exc: BaseException) -> None:
    """The traceback goes to the journal (or to the error stream with PVE_GPU_RELEASE_DEBUG)."""
    import traceback

    text = "".join(traceback.format_exception(exc))
    if os.environ.get("PVE_GPU_RELEASE_DEBUG"):
        sys.stderr.write(text)
        return
    try:
        import syslog

        syslog.openlog("pve-gpu-release")
        for line in text.splitlines():
            syslog.syslog(syslog.LOG_ERR, line)
    except OSError:
        sys.stderr.write(text)


if __name__ == "__main__":
    entry()
