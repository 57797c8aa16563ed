"""What a caller leaves behind (ignored SIGCHLD, blocked signals, closed 0 to 2) troubles none of the programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.product_command import ROOT

PROBE = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import {module} as program
def probe(*_):
    child = os.posix_spawn("/bin/false", ["false"], {{}})
    found = {{
        "waited": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "open": [os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(3)],
        "next": os.open("/", os.O_RDONLY),
    }}
    with open(sys.argv[2], "w") as out:
        json.dump(found, out)
    return 3
program.main = probe
program.entry()
"""
SPOIL = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for fd in range(3):
    os.close(fd)
os.execv(sys.executable, [sys.executable, "-I", "-c", *sys.argv[1:]])
"""


@pytest.mark.parametrize("module", ["hostd.cli.main", "hostd.hook", "hostd.daemon"])
def test_every_program_sets_right_what_it_inherits(tmp_path: Path, module: str) -> None:
    told = tmp_path / "told"
    code = PROBE.format(module=module)
    done = subprocess.run([sys.executable, "-I", "-c", SPOIL, code, str(ROOT), str(told)], stdin=subprocess.DEVNULL)
    assert done.returncode == 3
    found = json.loads(told.read_text())
    assert found["waited"] == 1 and found["blocked"] == []
    assert found["open"] == [os.devnull] * 3 and found["next"] > 2


def test_a_program_that_inherits_what_is_usual_keeps_it() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from hostd import inherited; inherited.set_right(); print('here')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "here\n" and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
