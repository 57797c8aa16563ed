"""Tools of the system, run with an absolute path, a clean environment and a deadline that holds even in D state."""

from __future__ import annotations

import marshal
import os
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from hostd.disposable import Outcome, call_with_deadline
from hostd.doctor.finding import CannotLookError

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
SYSTEMCTL = "/usr/bin/systemctl"
FUSER = "/usr/bin/fuser"


class Output(NamedTuple):
    status: int
    out: str
    err: str


def installed(path: str) -> bool:
    return os.access(path, os.X_OK)


def run_tool(argv: Sequence[str], deadline_s: float) -> Output:
    """What the tool says. Raises CannotLookError when it cannot be run or does not end in time."""

    def run() -> bytes:
        try:
            done = subprocess.run(
                list(argv), env=ENVIRONMENT, cwd="/", stdin=subprocess.PIPE, capture_output=True, timeout=deadline_s
            )
        except subprocess.TimeoutExpired as exc:
            raise TimeoutError(f"no answer within {deadline_s:g} s") from exc
        return marshal.dumps((done.returncode, done.stdout[: 1 << 20], done.stderr[: 1 << 16]))

    try:
        answer = call_with_deadline(run, deadline_s + 0.5)
    except OSError as exc:
        raise CannotLookError(f"cannot run {argv[0]}: {exc}") from exc
    if answer.outcome is not Outcome.ANSWER:
        raise CannotLookError(f"cannot run {argv[0]}: {answer.error}")
    status, out, err = marshal.loads(answer.data)
    return Output(status, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
