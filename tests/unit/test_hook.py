"""The hook's own process: what it prints, its exit status, its limits; the shell script around it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostd import hook
from hostd.service.client import DaemonAbsent

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "hookscripts/pve-gpu-release"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`said(reply, phase)` -> (exit status, stdout, stderr) of a daemon that answers `reply`."""

    def run(reply: dict[str, object], phase: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(hook, "by_daemon", lambda *_: reply)
        status = hook.main(["129", phase], {})
        return (status, *capfd.readouterr())

    return run


@pytest.mark.parametrize("phase", ["pre-start", "exec-start-pre"])
def test_a_refusal_is_77_and_goes_to_the_error_stream(said: Any, phase: str, capfd: pytest.CaptureFixture[str]) -> None:
    reply = {"allow": False, "message": "start REFUSED: held", "next_step": "free it"}
    text = "pre-gpu"
    status, out, err = said(reply, phase, capfd)
    assert (status, out) == (77, "") and text not in out
    assert err == "pve-gpu-release: container 129: start REFUSED: held\n  next: free it\n"


@pytest.mark.parametrize("phase", ["post-start", "pre-stop", "post-stop", "exec-stop-post"])
def test_only_a_start_can_be_refused(said: Any, phase: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert said({"allow": False, "message": "x"}, phase, capfd)[0] == 0


def test_a_container_that_is_none_of_our_business_gets_no_word(said: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert said({"allow": True, "message": "", "next_step": "x"}, "pre-start", capfd) == (0, "", "")


def test_control_characters_never_reach_the_task_log(said: Any, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said({"allow": True, "message": "a\x1b[31mb\rTASK OK\nc\udcff"}, "pre-start", capfd)
    assert status == 0 and out.count("\n") == 2 and out.endswith("\n")
    assert "\x1b" not in out and "\r" not in out


@pytest.mark.parametrize(
    "argv", [[], ["129"], ["129", "no-phase"], ["x", "pre-start"], ["-1", "pre-start"], ["¹", "pre-start"]]
)
def test_nonsense_lets_the_container_go(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert hook.main(argv, {}) == 0
    assert capfd.readouterr().err.endswith("\n")


def test_a_fault_of_ours_lets_the_container_go(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object) -> dict[str, object]:
        raise DaemonAbsent("no daemon")

    def broken(*_: object) -> dict[str, object]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(hook, "by_daemon", absent)
    monkeypatch.setattr("hostd.lifecycle.here.deal_with", broken)
    assert hook.main(["129", "pre-start"], {}) == 0
    assert "internal error, nothing was checked: RuntimeError: a bug" in capfd.readouterr().out


def test_it_imports_next_to_nothing() -> None:
    code = "import sys; import hostd.hook; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    loaded = set(done.stdout.split())
    assert not loaded & {
        "json",
        "re",
        "socket",
        "dataclasses",
        "argparse",
        "yaml",
        "pynvml",
        "hostd.lifecycle.phases",
        "ctypes",
    }


# --- the shell script --------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Any]:
    """`script(phase, python="…")`: the script with a library in which `entry` runs that Python text."""
    lib = tmp_path / "lib"
    (lib / "hostd").mkdir(parents=True)
    (lib / "hostd/__init__.py").write_text("")
    copy = tmp_path / "pve-gpu-release"

    def run(phase: str, python: str | None, chained: str = "", env: dict[str, str] | None = None) -> Any:
        text = (
            SCRIPT.read_text()
            .replace("/usr/lib/pve-gpu-release", str(lib))
            .replace("chained=\n", f"chained={chained}\n")
        )
        copy.write_text(text)
        if python is not None:
            body = "\n".join(f"    {line}" for line in python.split("\n"))
            (lib / "hostd/hook.py").write_text(f"import os, sys\ndef entry():\n{body}\n")
        command = ["/bin/sh", str(copy), "129", phase]
        return subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=30, stdin=subprocess.DEVNULL, check=False
        )

    return run


def test_without_the_package_it_does_nothing(script: Any) -> None:
    done = script("pre-start", None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("phase", "status"), [("pre-start", 77), ("exec-start-pre", 77), ("post-start", 0), ("pre-stop", 0),
                                               ("post-stop", 0), ("exec-stop-post", 0)])  # fmt: skip
def test_77_refuses_a_start_and_nothing_else(script: Any, phase: str, status: int) -> None:
    assert script(phase, "sys.exit(77)").returncode == status


@pytest.mark.parametrize("how", ["sys.exit(1)", "os.kill(os.getpid(), 9)", "raise ImportError('gone')"])
def test_every_other_end_lets_the_container_go(script: Any, how: str) -> None:
    assert script("pre-start", how).returncode == 0


def test_the_callers_environment_does_not_reach_python(script: Any, tmp_path: Path) -> None:
    env = {
        "PATH": "/nowhere",
        "PYTHONPATH": str(tmp_path),
        "PYTHONSTARTUP": "x",
        "INVOCATION_ID": "abc",
        "SECRET": "s",
        "LD_PRELOAD": "",
    }
    done = script("pre-start", "print(sorted(os.environ), os.environ['INVOCATION_ID'], sys.flags.isolated)", env=env)
    assert "SECRET" not in done.stdout and "PYTHON" not in done.stdout and "abc 1" in done.stdout


def test_a_chained_hookscript_runs_after_ours_with_its_status_and_environment(script: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text('#!/bin/sh\necho "other $1 $2 $SECRET"\nexit 5\n')
    other.chmod(0o755)
    done = script("pre-start", "print('ours', flush=True)", str(other), {"SECRET": "s", "PATH": "/bin"})
    assert (done.returncode, done.stdout) == (5, "ours\nother 129 pre-start s\n")
    assert script("exec-start-pre", "pass", str(other)).returncode == 0
    done = script("pre-start", "sys.exit(77)", str(other))
    assert (done.returncode, done.stdout) == (77, "")


def test_a_chained_hookscript_that_is_not_there_fails_as_with_proxmox(script: Any) -> None:
    done = script("pre-start", "pass", "/nonexistent")
    assert done.returncode == 1 and "/nonexistent" in done.stderr and done.stderr.endswith("\n")


# --- through a socket ---------------------------------------------------------------------------------------------------


def test_a_daemon_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    if os.geteuid() != 0:
        pytest.skip("only root's sockets are trusted")
    monkeypatch.setattr(hook, "CONNECT_S", 0.3)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(DaemonAbsent):
            hook.by_daemon(129, "pre-start", "hookscript", {}, str(tmp_path / "socket"))
        assert time.monotonic() - began < 20
