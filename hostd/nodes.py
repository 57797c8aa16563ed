"""Missing device nodes of NVIDIA's driver are made: by nvidia-modprobe where there is one, else modprobe and mknod.

Nodes appear only after first use; a container with `devN:` does not start without them, one with an `optional` mount
entry starts without its GPU (FACTS, Proxmox). The daemon's sandbox allows none of this: it starts the oneshot unit
`pve-gpu-release-nodes.service`, which runs `entry` here; so does `pve-gpu-release-boot.service` before the guests.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from hostd.model import DriverNumbers
from hostd.system.devices import read_driver_numbers, read_proc_gpus

UNIT = "pve-gpu-release-nodes.service"
DEV = "/dev"
COMMAND_S = 30.0
"""Loading the module for the first time takes seconds."""
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_CONTROL = {"nvidiactl": 255, "nvidia-modeset": 254}
_UVM = {"nvidia-uvm": 0, "nvidia-uvm-tools": 1}


@dataclass(slots=True)
class MadeNodes:
    made: list[str] = field(default_factory=list)
    error: str = ""


def missing_paths(paths: Iterable[str]) -> list[str]:
    """Those below /dev/nvidia* that do not exist. What exists but is no device node is doctor's finding."""
    return [path for path in paths if path.startswith("/dev/nvidia") and not os.path.lexists(path)]


def wanted_paths() -> list[str]:
    """What a node with this driver should have: the control nodes, uvm, and one node per GPU."""
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    names += [f"nvidia{minor}" for minor in _gpu_minors()]
    return [f"{DEV}/{name}" for name in names]


def node_number(name: str, driver: DriverNumbers, gpu_minors: Iterable[int]) -> tuple[int, int] | None:
    """(major, minor) that the driver has for a node's name; None when it has none. Pure."""
    if name in _UVM:
        majors = [major for major, names in driver.by_major.items() if "nvidia-uvm" in names]
        return (majors[0], _UVM[name]) if majors else None
    majors = sorted(driver.gpu_majors)
    if not majors:
        return None
    if name in _CONTROL:
        return majors[0], _CONTROL[name]
    digits = name.removeprefix("nvidia")
    if digits.isdigit() and int(digits) in set(gpu_minors):
        return majors[0], int(digits)
    return None


def make_nodes(paths: Iterable[str]) -> MadeNodes:
    """Makes those of the paths that are missing, as far as the driver has a number for them."""
    wanted = missing_paths(paths)
    result = MadeNodes()
    if not wanted:
        return result
    result.error = _by_modprobe(wanted)
    left = missing_paths(wanted)
    if left:
        result.error = _by_mknod(left) or result.error
    result.made = [path for path in wanted if path not in missing_paths(wanted)]
    if not missing_paths(wanted):
        result.error = ""
    return result


def make_all_nodes() -> MadeNodes:
    """Loads the driver where it is not, and makes every node that is missing.

    Twice: at a cold boot which GPUs there are is known only once the driver is loaded.
    """
    error = "" if _is_loaded() else _by_modprobe([f"{DEV}/nvidia-uvm"])
    first, second = make_nodes(wanted_paths()), make_nodes(wanted_paths())
    return MadeNodes([*first.made, *second.made], second.error if _is_loaded() else error or second.error)


def _is_loaded() -> bool:
    """nvidia-uvm has a number: then nvidia, which it needs, has one, too."""
    try:
        return node_number("nvidia-uvm", read_driver_numbers(), ()) is not None
    except OSError:
        return False


def make_nodes_by_unit(paths: Iterable[str]) -> MadeNodes:
    """The same through the oneshot unit, from inside the daemon's sandbox."""
    wanted = missing_paths(paths)
    error = _run(["systemctl", "--no-ask-password", "start", UNIT])
    left = missing_paths(wanted)
    return MadeNodes([path for path in wanted if path not in left], error if left else "")


def _by_modprobe(paths: list[str]) -> str:
    """Why it did not work; nvidia-modprobe loads the module, too."""
    uvm = any(os.path.basename(path) in _UVM for path in paths)
    numbers = [os.path.basename(path).removeprefix("nvidia") for path in paths]
    minors = [number for number in numbers if number.isdigit()]
    program = _find("nvidia-modprobe")
    if program is None:
        return _run(["modprobe", "nvidia-uvm"]) if uvm else _run(["modprobe", "nvidia"])
    words = [program, *(["-u"] if uvm else []), *(word for minor in minors for word in ("-c", minor))]
    return _run(words)


def _by_mknod(paths: list[str]) -> str:
    try:
        driver, minors = read_driver_numbers(), _gpu_minors()
    except OSError as exc:
        return f"cannot read the driver's device numbers: {exc}"
    problem = ""
    for path in paths:
        number = node_number(os.path.basename(path), driver, minors)
        if number is None:
            problem = f"the driver has no device number for {path}"
            continue
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*number))
            os.chmod(path, 0o666)  # mknod(2) obeys the umask
        except FileExistsError:
            continue
        except OSError as exc:
            problem = f"cannot make {path}: {exc.strerror}"
    return problem


def _gpu_minors() -> list[int]:
    try:
        return [gpu.minor for gpu in read_proc_gpus() if gpu.minor >= 0]
    except OSError:
        return []


def _find(program: str) -> str | None:
    for folder in _PATH.split(":"):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK):
            return path
    return None


def _run(words: list[str]) -> str:
    """Why a command failed; empty when it did not. It holds nothing of ours."""
    import subprocess  # not at the top: the daemon has it in memory all the time, and needs it once in a blue moon

    path = words[0] if "/" in words[0] else _find(words[0])
    if path is None:
        return f"{words[0]} is not installed"
    try:
        done = subprocess.run(
            [path, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": _PATH, "LC_ALL": "C"},
            timeout=COMMAND_S,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} did not end within {COMMAND_S:g} s"
    except OSError as exc:
        return f"cannot run {words[0]}: {exc.strerror}"
    if done.returncode == 0:
        return ""
    last = done.stderr.decode("utf-8", "backslashreplace").strip().rpartition("\n")[2]
    return f"{words[0]}: {last or f'exit status {done.returncode}'}"


def entry() -> int:
    """The oneshot units. Never fails the boot: what could not be made is said, exit status 0."""
    try:
        made = make_all_nodes()
        if made.made:
            print(f"made missing device nodes: {', '.join(made.made)}")
        if made.error:
            print(f"not all device nodes could be made: {made.error}", file=sys.stderr)
    except Exception as exc:  # noqa: BLE001 - a fault here must not hold up the guests
        print(f"cannot make device nodes: {type(exc).__name__}: {exc}", file=sys.stderr)
    return 0
