"""`pve-gpu-release wait VMID|--gpu SEL`: until a GPU, or what a container holds, is free."""

from __future__ import annotations

import signal
import sys

from hostd.cli.common import add_common_options, gpu, loaded, print_json, require_root, seconds, shown, vmid
from hostd.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from hostd.wait import ContainerTarget, GpuTarget

NAME = "wait"
HELP = (
    "Wait until a GPU is free: no process that is still ending, no memory without a live process, and so much free "
    "memory if asked for. With a container: until none of its processes holds a GPU. Nothing is signalled. Exit status "
    "0: free; at the time limit 3 (in use), 6 (stale) or 4 (cannot look). Usable as ExecStartPre= of a job."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmid", nargs="?", type=vmid, metavar="VMID", help="container id, such as 129")
    from hostd.cli.parser import Once

    parser.add_argument(
        "--gpu", action=Once, type=gpu, metavar="SEL", help="a GPU instead: NVML index, minor, UUID or PCI address"
    )
    parser.add_argument("--free", type=mib, metavar="MIB", help="so much free memory, too (MiB, or 40G)")
    parser.add_argument(
        "--timeout", type=seconds, default=150.0, metavar="S", help="give up after S seconds (default 150; 0: look once)"
    )
    add_common_options(parser)


def mib(text: str) -> int:
    """An amount of memory in MiB as argparse type: `40960`, `40G`, `40960M`."""
    import argparse

    factor = {"M": 1, "G": 1024}.get(text[-1:].upper(), 0)
    digits = text[:-1] if factor else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not an amount of memory (40960 or 40G)")
    return int(digits) * (factor or 1)


def run(args: argparse.Namespace) -> int:
    from hostd.cancel import Cancel
    from hostd.sources import open_sources
    from hostd.verdicts import exit_status
    from hostd.wait import result, wait

    if (args.vmid is None) == (args.gpu is None):
        raise UsageError("cannot wait: say either a container id or --gpu", next_step="pve-gpu-release wait --help")
    require_root()
    config = loaded(args.config)
    sources = open_sources(nvml_deadline_s=config.nvml.deadline_s, read_deadline_s=1.0)
    cancel = Cancel()
    cancel.install(signal.SIGINT, signal.SIGTERM)
    teller = Teller(args.quiet or args.json)
    try:
        sources.nvml.start()
        target = _target(args, sources)
        try:
            found, waited_s = wait(target, args.timeout, cancel, teller, config.nvml.deadline_s)
        finally:
            target.close()
    finally:
        teller.done()
        sources.close()
        cancel.close()
    answer = result(found, waited_s, args.vmid, args.gpu)
    status = exit_status(found.reason)
    if args.json:
        print_json(answer)
    elif status or not args.quiet:
        from hostd import terminal

        out = sys.stderr if args.quiet else sys.stdout
        print(f"{terminal.escape(answer['message'])} (waited {waited_s:.1f} s)", file=out)
        if status and answer["next_step"]:
            print(f"  next: {terminal.escape(answer['next_step'])}", file=out)
    return status


def _target(args: argparse.Namespace, sources: object) -> ContainerTarget | GpuTarget:
    from hostd.engine import find_subject
    from hostd.sources import Sources
    from hostd.system.pve import Pve
    from hostd.wait import ContainerTarget, GpuTarget

    assert isinstance(sources, Sources)
    if args.gpu is not None:
        return GpuTarget(sources, args.gpu, args.free)
    return ContainerTarget(sources, find_subject(sources, args.vmid, Pve()), args.free)


class Teller:
    """What is being waited for: one line that is overwritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, quiet: bool) -> None:
        from hostd import terminal

        self._quiet = quiet
        self._live = terminal.is_terminal(sys.stderr)
        self._told_s = -10.0
        self._dirty = False

    def __call__(self, what: str, since_s: float) -> None:
        from hostd import terminal

        text = f"waiting: {terminal.escape(what)} ({since_s:.0f} s)"
        if self._quiet:
            return
        if self._live:
            cut = terminal.shorten(text, max(10, terminal.width(sys.stderr) - 1))
            sys.stderr.write(f"\r\x1b[K{cut}")
            sys.stderr.flush()
            self._dirty = True
        elif since_s - self._told_s >= 10:
            self._told_s = since_s
            print(text, flush=True)

    def done(self) -> None:
        if self._dirty:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
