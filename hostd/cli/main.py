"""`pve-gpu-release`: finds the verb, imports only its module, maps every way to end to an exit status."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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

_VALUED = ("--config", "--grace", "--timeout", "--gpu", "--pid", "--free", "--storage", "--chain-limit")


def split_verb(argv: list[str]) -> tuple[str, list[str]]:
    """(verb, remaining arguments): the first word that is no option's value, if it is a verb; else `release`."""
    skip = False
    for i, word in enumerate(argv):
        if skip:
            skip = False
        elif word in _VALUED:
            skip = True
        elif word == "--":
            break
        elif not word.startswith("-"):
            if word in VERBS:
                return word, argv[:i] + argv[i + 1 :]
            break
    return "release", argv


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

pve-gpu-release VERB --help shows the options of a verb; `pve-gpu-release release --help` those of the default one.
Exit status: 0 released, 3 held, 4 unknown, 5 unkillable, 6 memory stays in use, 7 refused, 8 no such container,
9 not root, 75 busy, 2 usage, 1 internal error, 130 interrupted."""


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
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
    verb, rest = split_verb(argv)
    word = next((w for w in rest if not w.startswith("-")), "")
    if verb == "release" and word.isalpha() and len(argv) and argv[0] == word:
        return _unknown_verb(word)
    from importlib import import_module

    from hostd.cli.parser import Parser

    module = import_module(f"hostd.cli.{verb.replace('-', '_')}")
    parser = Parser(prog=f"pve-gpu-release {verb}" if verb != "release" else "pve-gpu-release", description=module.HELP)
    module.add_arguments(parser)
    parse = parser.parse_intermixed_args if getattr(module, "INTERMIXED", False) else parser.parse_args
    return _run(module.run, parse(rest))


def _run(run: Callable[[Any], int], args: object) -> int:
    from hostd.cli.common import fail
    from hostd.errors import PgrError

    try:
        return int(run(args))
    except PgrError as exc:
        return fail(exc, as_json=getattr(args, "json", False))


def _unknown_verb(word: str) -> int:
    from difflib import get_close_matches

    close = get_close_matches(word, VERBS, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    print(f"pve-gpu-release: {word!r} is neither a container id nor a verb{hint} (see --help)", file=sys.stderr)
    return 2


def entry() -> None:
    """Console script: flushes, survives a closed pipe, keeps tracebacks off the terminal."""
    _open_missing_streams()
    status = 1
    try:
        status = _guarded(sys.argv[1:])
    except BaseException:  # noqa: BLE001 - nowhere is left to say it
        pass
    finally:
        os._exit(status)


def _open_missing_streams() -> None:
    """`>&-` and a bare exec leave out descriptors: what is opened next must not take their numbers and be written to."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))


def _guarded(argv: list[str]) -> int:
    try:
        status = main(argv)
        sys.stdout.flush()
        return status
    except SystemExit as exc:  # argparse: --help, or wrong arguments
        try:
            sys.stdout.flush()
        except OSError:
            return 141
        return exc.code if isinstance(exc.code, int) else 2
    except BrokenPipeError:
        return 141  # as a shell reports a process that SIGPIPE ended
    except KeyboardInterrupt:
        print("pve-gpu-release: interrupted", file=sys.stderr)
        return 130
    except Exception as exc:  # noqa: BLE001 - the one place where a bug becomes exit status 1
        from hostd import terminal

        print(f"pve-gpu-release: internal error: {terminal.escape(f'{type(exc).__name__}: {exc}')}", file=sys.stderr)
        _log_traceback(exc)
        return 1


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
