"""Starting and stopping a container, phase by phase (PCT_FLOWS 3 to 5)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pvenode import conf, lxc, storage
from pvenode.run import PveError, run_command


def warn(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def run_hookscript(config: conf.Config, phase: str, fatal: bool = False) -> None:
    volid = config.values.get("hookscript")
    if not volid:
        return
    try:
        path = storage.check_hookscript(volid)
        run_command([str(path), str(config.vmid), phase])
    except PveError as error:
        text = f"hookscript error for {config.vmid} on {phase}: {error}"
        if fatal:
            raise PveError(text) from error
        warn(text)


def stderr_file(vmid: int) -> Path:
    return Path(f"/run/pve/ct-{vmid}.stderr")


def print_stderr_file(vmid: int) -> None:
    try:
        text = stderr_file(vmid).read_bytes().decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if line.strip("\0 "):
            warn(line.strip("\0"))


def start_unit(vmid: int, debug: bool) -> None:
    unit = f"pve-container-debug@{vmid}" if debug else f"pve-container@{vmid}"
    try:
        connection = lxc.monitor_connection()
    except PveError as error:
        connection = None
        warn(f"problem with monitor socket, but continuing anyway: {error}")
    try:
        run_command(["systemctl", "start", unit])
        if connection:
            try:
                lxc.wait_for_start(connection, vmid)
            except TimeoutError:
                warn("problem with monitor socket, but continuing anyway: got timeout")
    except PveError:
        print_stderr_file(vmid)
        raise
    finally:
        if connection:
            connection.close()
    if debug:
        print_stderr_file(vmid)


def start_locked(vmid: int, debug: bool = False) -> None:
    config = conf.load_config(vmid)
    conf.write_lxc_config(config)
    stderr_file(vmid).unlink(missing_ok=True)
    run_hookscript(config, "pre-start", fatal=True)
    start_unit(vmid, debug)
    run_hookscript(config, "post-start")
    lxc.init_pid(vmid)


def stop_locked(vmid: int, kill: bool, timeout: int = 60, kill_after: bool = False) -> None:
    config = conf.load_config(vmid)
    connection = lxc.command_socket(vmid)
    if connection is None:
        return
    with connection:
        run_hookscript(config, "pre-stop")
        command = ["lxc-stop", "-n", str(vmid)]
        if kill:
            command += ["--kill"]
        else:
            command += ([] if kill_after else ["--nokill"]) + ["--timeout", str(timeout)]
        limit = None if kill else timeout + 5
        try:
            run_command(command, timeout=limit)
        except PveError as error:
            warn(str(error))
        lxc.wait_for_exit(connection, limit)


def check_lock(vmid: int) -> None:
    """The `lock:` of a configuration (backup, migrate, ...), which is not the lock file."""
    reason = conf.load_config(vmid).values.get("lock")
    if reason:
        raise PveError(f"CT is locked ({reason})")


def start(vmid: int, debug: bool = False) -> None:
    with conf.config_lock(vmid):
        check_lock(vmid)
        if lxc.is_running(vmid):
            raise PveError(f"CT {vmid} already running")
        start_locked(vmid, debug)


def stop(vmid: int) -> None:
    with conf.config_lock(vmid):
        check_lock(vmid)
        if not lxc.is_running(vmid):
            raise PveError(f"CT {vmid} not running")
        stop_locked(vmid, kill=True)


def shutdown(vmid: int, timeout: int = 60, force: bool = False) -> None:
    with conf.config_lock(vmid):
        check_lock(vmid)
        if not lxc.is_running(vmid):
            raise PveError(f"CT {vmid} not running")
        stop_locked(vmid, kill=False, timeout=timeout, kill_after=force)


def reboot(vmid: int, timeout: int = 60) -> None:
    with conf.config_lock(vmid):
        check_lock(vmid)
        if not lxc.is_running(vmid):
            raise PveError(f"CT {vmid} not running")
        stop_locked(vmid, kill=False, timeout=timeout, kill_after=True)
        wait_until_unit_stops(vmid)
        start_locked(vmid)


def wait_until_unit_stops(vmid: int) -> None:
    """Proxmox's own pace: its pre-start comes some 80 ms after the monitor's exit, when systemd has noticed that."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if (
            run_command(
                ["systemctl", "show", f"pve-container@{vmid}", "--property=SubState", "--value"], keep_stdout=True
            )
            != b"running\n"
        ):
            return
        time.sleep(0.01)


def set_options(vmid: int, values: dict[str, str], delete: list[str]) -> None:
    with conf.config_lock(vmid):
        config = conf.load_config(vmid)
        if "hookscript" in values:
            storage.check_hookscript(values["hookscript"])
        for key in delete:
            config.values.pop(key, None)
        config.values.update(values)
        conf.save_config(config)
        if not lxc.is_running(vmid):
            conf.write_lxc_config(config)
