#!/usr/bin/python3 -Es
"""Runs in the node as hookscript and as ExecStartPre=/ExecStopPost=: see recorder.py."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def pids_below(directory: Path) -> int:
    count = 0
    for path, _, names in os.walk(directory):
        if "cgroup.procs" in names:
            try:
                count += len(Path(path, "cgroup.procs").read_text().split())
            except OSError:
                continue
    return count


def lock_is_free(vmid: int) -> bool:
    try:
        with open(f"/run/lock/lxc/pve-config-{vmid}.lock", "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False


def read_stdin() -> str:
    try:
        return repr(os.read(0, 10))
    except OSError as error:
        return str(error)


def unit_state(vmid: int) -> str:
    done = subprocess.run(
        ["systemctl", "show", f"pve-container@{vmid}", "--property=ActiveState,SubState", "--value"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "/".join(done.stdout.split())


def ignored_signals() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return int(line.split()[1], 16)


def describe(vmid: int, name: str) -> dict[str, object]:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "vmid": vmid,
        "name": name,
        "at": time.time(),
        "ct": pids_below(Path(f"/sys/fs/cgroup/lxc/{vmid}")),
        "cgroup": Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip(),
        "mount_ns": os.readlink("/proc/self/ns/mnt"),
        "net_ns": os.readlink("/proc/self/ns/net"),
        "cwd": os.getcwd(),
        "stdin": read_stdin(),
        "umask": umask,
        "environment": dict(os.environ),
        "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " "),
        "lock_free": lock_is_free(vmid),
        "unit_state": unit_state(vmid),
        "argv": sys.argv,
        "ignored": ignored_signals(),
    }


def main() -> int:
    vmid, name = int(sys.argv[1]), sys.argv[2]
    with open("/shared/events.jsonl", "a") as events:
        events.write(json.dumps(describe(vmid, name)) + "\n")
    script = Path(f"/shared/on-{name}")
    if script.exists():
        os.execv("/bin/sh", ["sh", str(script), str(vmid)])
    return 0


sys.exit(main())
