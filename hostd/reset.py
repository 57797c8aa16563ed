"""The last rung: the reset of a GPU that nothing else frees, and the way back to how the node was.

What is changed around it (services stopped, persistence mode) is written down before it is changed, in
`/run/pve-gpu-release/resets/`, and undone on every way out: success, failure, an exception, or, when we are killed, by
whoever comes next (the daemon at its start, the next release, the oneshot unit's ExecStopPost=).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from hostd.errors import RefusedError
from hostd.lock import RUN_DIR, ensure_run_dir
from hostd.model import Holder, ProcessRef
from hostd.resetplan import REBOOT, RECOVERY, Radius, radius_of, vfio_pci
from hostd.sources import Sources, read_driver
from hostd.statefile import read_json, write_json
from hostd.system.nvml import Nvml
from hostd.verdicts import say

Json = dict[str, Any]
NVIDIA_SMI = ("/usr/bin/nvidia-smi",)
SYSTEMCTL = ("/usr/bin/systemctl", "/bin/systemctl")
"""Fixed paths: never from the caller's PATH."""
UNIT = "pve-gpu-release-reset@{}.service"
UNIT_DIRECTORIES = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
RESET_DEADLINE_S = 90.0
SERVICE_DEADLINE_S = 20.0
HEALTH_DEADLINE_S = 20.0
LOCK_DEADLINE_S = 5.0
UNIT_DEADLINE_S = 180.0
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_MAX_OUTPUT = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a reset ended."""

    done: bool
    """The reset was carried out and the GPUs are healthy."""
    text: str
    reboot: bool = False
    """Only a reboot of the node helps."""


@dataclass(slots=True)
class Resetter:
    """How this process resets GPUs. `services`: what the configuration allows it to stop meanwhile."""

    services: tuple[str, ...] = ()
    run_dir: str = RUN_DIR
    by_unit: bool = False
    """The sandbox forbids it here: a oneshot unit of its own does it."""

    def reset(
        self,
        sources: Sources,
        release_id: str,
        vmid: int | None,
        wanted: tuple[str, ...],
        dealt: Iterable[ProcessRef],
        tell: Callable[[str], None],
    ) -> Outcome:
        """Resets the GPUs with these PCI addresses. `dealt`: processes of the container that could not be ended. Raises
        RefusedError naming everybody else whom it would hit."""
        refs = tuple(dealt)
        radius = look_at_radius(sources, wanted, refs, self.services)
        refuse(radius, vmid)
        if radius.reboot:
            return Outcome(False, f"the driver asks for {RECOVERY[REBOOT]} for {', '.join(radius.reboot)}", reboot=True)
        request: Json = {
            "release_id": release_id,
            "vmid": vmid,
            "wanted": list(wanted),
            "dealt": [list(ref) for ref in refs],
            "services": list(self.services),
        }
        sources.nvml.close()  # an open handle is a client, and would be in the way of the reset
        if self.by_unit and (unit := _unit_of(release_id)):
            return _by_unit(Journal(self.run_dir), unit, request, tell)
        return perform(Journal(self.run_dir), request, radius, tell)


def refuse(radius: Radius, vmid: int | None) -> None:
    """Raises RefusedError when the reset would hit anybody else."""
    if not radius.others:
        return
    gpus = ", ".join(f"GPU {g.index}" if g.index is not None else f"GPU {g.pci_bus_id}" for g in radius.gpus)
    message, step = say("reset-refused", vmid=vmid, gpus=gpus, others=", ".join(radius.others))
    raise RefusedError(message, next_step=step, reason="reset-refused", vmid=vmid)


def look_at_radius(
    sources: Sources, wanted: tuple[str, ...], dealt: tuple[ProcessRef, ...], services: tuple[str, ...]
) -> Radius:
    """The radius as it is now: every process of the node is looked at."""
    from hostd.nodeview import look_at_node

    view = look_at_node(sources)
    snapshot = sources.nvml.snapshot(nvlink=True)
    holders: tuple[Holder, ...] = view.holders
    radius = radius_of(snapshot, wanted, holders, dealt, services, vfio_pci(), read_driver([]).gpu_majors)
    blind = [s for s in (*view.blind_spots, *snapshot.blind_spots) if s.code != "detail-unreadable"]
    if blind:  # whoever cannot be seen may be hit
        unseen = tuple(f"what could not be looked at ({s.what}: {s.error})" for s in blind[:3])
        return Radius(radius.gpus, (*radius.others, *unseen), radius.persistence, radius.reboot)
    return radius


# --- the way there and back ------------------------------------------------------------------------------------------


class Journal:
    """What has been changed and has to be undone: one file a reset, written before each change."""

    def __init__(self, run_dir: str = RUN_DIR) -> None:
        self._run_dir = run_dir
        self.path = os.path.join(run_dir, "resets")

    @contextlib.contextmanager
    def lock(self, deadline_s: float) -> Iterator[int]:
        """One reset on the node at a time: a descriptor that holds the lock, -1 when somebody else is at it.

        The kernel gives it back when we die; nvidia-smi inherits it, so that nobody undoes anything under a reset
        that outlives us.
        """
        ensure_run_dir(self._run_dir)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        fd = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield fd if _flock(fd, deadline_s) else -1
        finally:
            os.close(fd)

    def write(self, record: Json) -> None:
        """Replaces the record. Raises OSError: what cannot be undone later is not done."""
        write_json(self._file(str(record["release_id"])), record)

    def read(self, release_id: str) -> Json | None:
        """One record; None when there is none or it is damaged."""
        try:
            path = self._file(release_id)
        except ValueError:
            return None
        record = read_json(path)
        return record if _is_record(record) else None

    def names(self) -> list[str]:
        try:
            return sorted(n.removesuffix(".json") for n in os.listdir(self.path) if n.endswith(".json"))
        except OSError:
            return []

    def remove(self, name: str) -> None:
        """Whatever is there under this name, if it can be removed."""
        path = os.path.join(self.path, f"{name}.json")
        with contextlib.suppress(OSError):
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    def make(self) -> None:
        ensure_run_dir(self._run_dir)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)

    def _file(self, release_id: str) -> str:
        if not release_id or not all(c in "0123456789abcdef-" for c in release_id):
            raise ValueError(f"not a release id: {release_id!r}")
        return os.path.join(self.path, f"{release_id}.json")


def _is_record(value: object) -> TypeGuard[Json]:
    """True when what is in it has the types that its readers count on."""
    if not isinstance(value, dict):
        return False
    lists = [value.get(key) or [] for key in ("wanted", "services", "stopped")]
    return (
        isinstance(value.get("at", 0), (int, float))
        and all(isinstance(items, list) and all(isinstance(item, str) for item in items) for items in lists)
        and all(isinstance(value.get(key) or {}, dict) for key in ("persistence", "outcome"))
    )


def perform(journal: Journal, request: Json, radius: Radius, tell: Callable[[str], None]) -> Outcome:
    """Stops what is in the way, resets, looks whether the GPUs are well, puts everything back."""
    with journal.lock(LOCK_DEADLINE_S) as lock_fd:
        if lock_fd < 0:
            return Outcome(False, "another reset is under way on this node")
        record: Json = dict(request) | {"pid": os.getpid(), "stopped": [], "persistence": {}}
        try:
            journal.write(record)
        except OSError as exc:
            return Outcome(False, f"cannot write down what has to be undone: {exc.strerror}; nothing was changed")
        try:
            outcome = _prepare_and_reset(journal, record, radius, lock_fd, tell)
        finally:
            trouble = undo(record, tell)
            if not trouble:
                journal.remove(str(record["release_id"]))
        if trouble:
            return Outcome(outcome.done, f"{outcome.text}; {'; '.join(trouble)}", outcome.reboot)
        return outcome


def _prepare_and_reset(
    journal: Journal, record: Json, radius: Radius, lock_fd: int, tell: Callable[[str], None]
) -> Outcome:
    for name in record["services"]:
        if _systemctl("is-active", "--quiet", name).status != 0:
            continue
        record["stopped"].append(name)
        journal.write(record)
        tell(f"stopping {name}")
        ended = _systemctl("stop", name, keep=(lock_fd,))
        if ended.status != 0:
            return Outcome(False, f"cannot stop {name}: {ended.text}; the GPU was not reset")
    persistent = sorted(uuid for uuid, on in radius.persistence.items() if on)
    if persistent:
        record["persistence"] = dict.fromkeys(persistent, True)
        journal.write(record)
        tell("switching persistence mode off")
        problem = _set_persistence(dict.fromkeys(persistent, False))
        if problem:
            return Outcome(False, f"cannot switch persistence mode off: {problem}; the GPU was not reset")
    return _reset(radius, lock_fd, tell)


def _reset(radius: Radius, lock_fd: int, tell: Callable[[str], None]) -> Outcome:
    names = ",".join(g.uuid or g.pci_bus_id for g in radius.gpus)
    tell(f"nvidia-smi --gpu-reset -i {names}")
    program = next((path for path in NVIDIA_SMI if os.access(path, os.X_OK)), None)
    if program is None:
        return Outcome(False, f"{NVIDIA_SMI[0]} is not installed; the GPU was not reset")
    ended = run_bounded([program, "--gpu-reset", "-i", names], RESET_DEADLINE_S, keep=(lock_fd,))
    if ended.status is None:
        return Outcome(
            False, f"nvidia-smi has not ended within {RESET_DEADLINE_S:g} s and was left behind", reboot=True
        )
    if ended.status != 0:
        return Outcome(False, f"nvidia-smi refused the reset (exit status {ended.status}): {ended.text}")
    problem = health(radius)
    if problem:
        return Outcome(False, f"the reset was carried out, but {problem}", reboot=True)
    return Outcome(True, f"{names} reset")


def health(radius: Radius) -> str:
    """What is wrong with the GPUs after their reset; empty when nothing is."""
    with Nvml(HEALTH_DEADLINE_S) as nvml:
        snapshot = nvml.snapshot()
    if snapshot.blind_spots:
        return f"the driver does not answer: {snapshot.blind_spots[0].error}"
    by_pci = {g.info.pci_bus_id: g for g in snapshot.gpus}
    for info in radius.gpus:
        gpu = by_pci.get(info.pci_bus_id)
        if gpu is None:
            return f"GPU {info.pci_bus_id} is no longer there"
        if gpu.error and gpu.error_code != "figures-unavailable":
            return f"GPU {info.pci_bus_id} answers: {gpu.error}"
        if gpu.recovery_action:
            return f"the driver still asks for {RECOVERY.get(gpu.recovery_action, 'help')} for GPU {info.pci_bus_id}"
    return ""


def undo(record: Mapping[str, Any], tell: Callable[[str], None] = lambda _: None) -> list[str]:
    """Puts back what a record says; returns what could not be. Idempotent."""
    trouble: list[str] = []
    persistence = {str(uuid): bool(on) for uuid, on in dict(record.get("persistence") or {}).items()}
    if persistence:
        tell("putting persistence mode back")
        problem = _set_persistence(persistence)
        if problem:
            trouble.append(f"cannot put persistence mode back: {problem}")
    for name in reversed(list(record.get("stopped") or ())):
        tell(f"starting {name}")
        ended = _systemctl("start", str(name))
        if ended.status != 0:
            trouble.append(f"cannot start {name} again: {ended.text}")
    return trouble


def recover(run_dir: str = RUN_DIR, patience_s: float = 0.0) -> list[str]:
    """Undoes what resets that were killed have left behind; one sentence each. Nothing to do costs one listdir.

    `patience_s`: for a reset that is still under way, an nvidia-smi that has outlived its caller among them.
    """
    journal = Journal(run_dir)
    if not journal.names():
        return []
    said: list[str] = []
    with journal.lock(patience_s) as lock_fd:
        if lock_fd < 0:
            return []  # a reset is under way: whoever performs it puts things back
        for name in journal.names():
            record = journal.read(name)
            if record is None:
                journal.remove(name)
                continue
            if "pid" not in record or record.get("outcome") is not None:
                if time.time() - float(record.get("at", 0)) > UNIT_DEADLINE_S:
                    journal.remove(name)  # asked for and never begun, or done and nobody has come for the answer
                continue
            trouble = undo(record)
            if not trouble:
                journal.remove(name)
            what = "; ".join(trouble) or "services and persistence mode are as they were"
            said.append(f"the reset of release {name} was cut off: {what}")
    return said


# --- in a unit of its own --------------------------------------------------------------------------------------------


def _unit_of(release_id: str) -> str:
    """The oneshot unit for this reset, if it is installed."""
    template = UNIT.format("")
    installed = any(os.path.exists(f"{directory}/{template}") for directory in UNIT_DIRECTORIES)
    return UNIT.format(release_id) if installed else ""


def _by_unit(journal: Journal, unit: str, request: Json, tell: Callable[[str], None]) -> Outcome:
    release_id = str(request["release_id"])
    try:
        journal.make()
        journal.write(request | {"at": time.time()})
    except OSError as exc:
        return Outcome(False, f"cannot write down what is asked for: {exc.strerror}; nothing was changed")
    tell(f"reset by {unit}")
    ended = run_bounded([_program(SYSTEMCTL), "start", unit], UNIT_DEADLINE_S)
    record = journal.read(release_id) or {}
    found = record.get("outcome")
    if not isinstance(found, dict):
        return Outcome(False, f"{unit} came to no end: {ended.text or 'see its journal'}")
    journal.remove(release_id)
    if found.get("refused"):
        raise RefusedError(
            str(found["text"]), next_step=str(found["next_step"]), reason="reset-refused", vmid=request.get("vmid")
        )
    return Outcome(bool(found["done"]), str(found["text"]), bool(found["reboot"]))


def perform_request(release_id: str, run_dir: str = RUN_DIR) -> int:
    """What the oneshot unit runs: reads the request, looks again by itself, resets, writes the outcome."""
    from hostd.sources import open_sources

    journal = Journal(run_dir)
    request = journal.read(release_id)
    if request is None:
        print(f"no reset was asked for under {release_id}", file=sys.stderr)
        return 2
    vmid = request.get("vmid")
    wanted = tuple(str(pci) for pci in request.get("wanted", ()))
    services = tuple(str(name) for name in request.get("services", ()))
    dealt = tuple(ProcessRef(int(pid), int(start)) for pid, start in request.get("dealt", ()))
    asked = {key: request[key] for key in ("release_id", "vmid", "wanted", "services")}
    sources = open_sources(nvml_deadline_s=HEALTH_DEADLINE_S, read_deadline_s=1.0)
    try:
        radius = look_at_radius(sources, wanted, dealt, services)
        sources.nvml.close()
        refuse(radius, vmid)
        outcome = perform(journal, asked, radius, lambda text: print(text, flush=True))
        found: Json = {"done": outcome.done, "text": outcome.text, "reboot": outcome.reboot}
    except RefusedError as exc:
        found = {"done": False, "text": exc.message, "next_step": exc.next_step, "refused": True, "reboot": False}
    finally:
        sources.close()
    journal.write((journal.read(release_id) or asked) | {"outcome": found, "at": time.time()})
    print(found["text"], flush=True)
    return 0


# --- programs of the host --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    status: int | None
    """None: it did not end in time and was left behind."""
    text: str = field(default="")
    """The last of what it wrote."""


def run_bounded(argv: list[str], deadline_s: float, keep: tuple[int, ...] = ()) -> Ended:
    """Runs a program of the host in a session of its own; kills and leaves it behind at the deadline."""
    import subprocess

    if not argv[0]:
        return Ended(127, "systemctl is not installed")
    out, child_out = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=child_out,
            stderr=child_out,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
            pass_fds=keep,
        )
    except OSError as exc:
        os.close(out)
        return Ended(127, f"{argv[0]}: {exc.strerror}")
    finally:
        os.close(child_out)
    try:
        return _await(process, out, time.monotonic() + deadline_s)
    finally:
        os.close(out)


def _await(process: Any, out: int, end_s: float) -> Ended:
    pidfd = os.pidfd_open(process.pid)
    text = b""
    try:
        while True:
            ready, _, _ = select.select([pidfd, out], [], [], max(0.0, end_s - time.monotonic()))
            if out in ready:
                part = os.read(out, 65536)
                text = (text + part)[-_MAX_OUTPUT:]
                if part:
                    continue
            if pidfd in ready or (out in ready and select.select([pidfd], [], [], 1.0)[0]):
                return Ended(process.wait(), _last_line(text))
            if time.monotonic() >= end_s:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if select.select([pidfd], [], [], 0.2)[0]:
                    process.wait()
                else:
                    process.returncode = -9  # in D state: nobody waits for it any more
                return Ended(None, _last_line(text))
    finally:
        os.close(pidfd)


def _last_line(text: bytes) -> str:
    lines = [line.strip() for line in text.decode("utf-8", "backslashreplace").splitlines() if line.strip()]
    return " ".join(lines[-3:])[:300]


def _program(candidates: tuple[str, ...]) -> str:
    return next((path for path in candidates if os.access(path, os.X_OK)), "")


def _systemctl(*words: str, keep: tuple[int, ...] = ()) -> Ended:
    return run_bounded([_program(SYSTEMCTL), *words], SERVICE_DEADLINE_S, keep)


def _set_persistence(modes: Mapping[str, bool]) -> str:
    """Why it could not be set; empty when it was."""
    with Nvml(HEALTH_DEADLINE_S) as nvml:
        for uuid, on in modes.items():
            problem = nvml.set_persistence(uuid, on)
            if problem is not None:
                return problem.error
    return ""


def _flock(fd: int, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)


def main(argv: list[str]) -> int:
    """`perform RELEASE_ID` and `recover`: for the oneshot unit."""
    if argv[:1] == ["recover"] and len(argv) == 1:
        for line in recover(patience_s=RESET_DEADLINE_S):
            print(line, flush=True)
        return 0
    if argv[:1] == ["perform"] and len(argv) == 2:
        return perform_request(argv[1])
    print("usage: python3 -I -m hostd.reset perform RELEASE_ID | recover", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
