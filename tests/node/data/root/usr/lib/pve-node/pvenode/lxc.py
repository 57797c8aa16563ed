"""What LXC says about a container: its command socket, the state messages of lxc-monitord, its init."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import time

from pvenode.run import PveError

LXC_PATH = "/var/lib/lxc"
MONITORD = "/usr/libexec/lxc/lxc-monitord"
MESSAGE = struct.Struct("=i256si")  # struct lxc_msg: type, name, value
STATES = ("STOPPED", "STARTING", "RUNNING", "STOPPING", "ABORTING", "FREEZING", "FROZEN", "THAWED")


def abstract_connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.connect(b"\0" + name.encode())
    except OSError:
        connection.close()
        raise
    return connection


def command_socket(vmid: int) -> socket.socket | None:
    """A connection to the container's monitor, or None: it closes when the monitor exits."""
    try:
        return abstract_connect(f"{LXC_PATH}/{vmid}/command")
    except ConnectionRefusedError:
        return None


def is_running(vmid: int) -> bool:
    connection = command_socket(vmid)
    if connection is None:
        return False
    connection.close()
    return True


def init_pid(vmid: int) -> int:
    done = subprocess.run(
        ["lxc-info", "-n", str(vmid), "-p", "-H"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode or not done.stdout.strip().isdigit():
        raise PveError(f"unable to get PID for CT {vmid} (not running?)")
    return int(done.stdout)


def wait_for_exit(connection: socket.socket, timeout: float | None) -> None:
    """Until the monitor is gone; the monitor never writes on a connection that asked for nothing."""
    deadline = None if timeout is None else time.monotonic() + timeout
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLHUP)
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(None if left is None else left * 1000):
            raise PveError("container did not stop")
        try:
            if not connection.recv(4096):
                return
        except ConnectionError:
            return


def monitor_socket_name() -> str:
    """lxc-monitord's abstract address: FNV-1a over "lxc/<path>/monitor-sock", without its NUL."""
    value = 0xCBF29CE484222325
    for byte in f"lxc/{LXC_PATH}/monitor-sock".encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"lxc/{value:016x}/{LXC_PATH}"


def start_monitord() -> None:
    """lxc-monitord writes a byte to the descriptor it is given once it listens; it leaves when unused for 30 s."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        subprocess.Popen(
            [MONITORD, LXC_PATH, str(write_end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            start_new_session=True,
        )
    finally:
        os.close(write_end)
    select.select([read_end], [], [], 5)
    os.close(read_end)


def monitor_connection() -> socket.socket:
    """Subscribed to the state messages of all containers. Raises PveError when lxc-monitord cannot be had."""
    name = monitor_socket_name()
    for _ in range(3):
        try:
            return abstract_connect(name)
        except ConnectionRefusedError:
            start_monitord()
    raise PveError("unable to connect to lxc-monitord")


def wait_for_start(connection: socket.socket, vmid: int, timeout: float = 10) -> None:
    """Until the RUNNING message. STOPPED or ABORTING before that: the start failed."""
    connection.settimeout(timeout)
    deadline = time.monotonic() + timeout
    buffer = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(4096)
        if not data:
            raise PveError("lxc-monitord is gone")
        buffer += data
        while len(buffer) >= MESSAGE.size:
            kind, name, value = MESSAGE.unpack_from(buffer)
            buffer = buffer[MESSAGE.size :]
            if kind != 0 or name.split(b"\0")[0] != str(vmid).encode():
                continue
            if STATES[value] == "RUNNING":
                return
            if STATES[value] in ("STOPPED", "ABORTING"):
                raise PveError(f"startup for container '{vmid}' failed")
