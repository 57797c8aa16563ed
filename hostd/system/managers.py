"""Asking a service manager inside a container to stop a job, over its own socket: systemd's, Docker's, Podman's.

Nothing of the container is executed and no namespace is entered: a disposable child takes the numeric ids of that
manager's user, without capabilities, opens the socket's path inside the container's root (openat2(2),
RESOLVE_IN_ROOT) and speaks the few bytes of the protocol by itself. What comes back is hostile: bounded, and believed
only as "asked" or "not asked". Whether the job really ends is seen from outside.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from dataclasses import dataclass
from typing import NamedTuple

from hostd import syscalls
from hostd.disposable import Disposable

SYSTEMD_PRIVATE = "run/systemd/private"
"""The manager's own socket (systemd, src/core/dbus.c, bus_init_private): works without a D-Bus daemon."""
DOCKER_SOCKETS = ("run/docker.sock", "run/podman/podman.sock")
PODMAN_SOCKETS = ("run/podman/podman.sock", "run/docker.sock")
_MAX_REPLY = 64 << 10
_SOCKET_PATH_FD = "/proc/self/fd/{}"
_RESOLVE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


@dataclass(frozen=True, slots=True)
class Request:
    """One job to be stopped, and where its manager listens."""

    kind: str
    """`systemd` (also the user manager's) or `http` (Docker's API, Podman speaks it too)."""
    name: str
    """Unit name, or container id in hex."""
    sockets: tuple[str, ...]
    """Paths below the root, the first that exists is used."""
    uid: int
    gid: int
    """The manager's user as the host numbers it; whoever connects is known to the manager by these."""
    inner_uid: int
    """The same user as the manager numbers it."""
    peers: frozenset[int]
    """Pids that may listen there. Any other listener (a socket of the host that was mounted in) is not talked to."""
    grace_s: int = 10
    """For Docker: seconds between its SIGTERM and its SIGKILL."""


class Reply(NamedTuple):
    asked: bool
    text: str
    """For people."""


class Asking:
    """One request under way. Close it when the job has ended or is given up: the connection lives until then."""

    def __init__(self, root_fd: int, request: Request) -> None:
        """Raises OSError when no process can be made. `root_fd`: O_PATH descriptor of the root, stays the caller's."""
        self._helper = Disposable(lambda end, out: _serve(end, out, root_fd, request), keep=(root_fd,))

    def reply(self, deadline_s: float) -> Reply:
        """What became of the request."""
        end = time.monotonic() + deadline_s
        text = b""
        while not text.endswith(b"\n"):
            part = self._helper.read(max(0.0, end - time.monotonic()))
            if part is None:
                return Reply(False, f"no answer within {deadline_s:g} s")
            if not part:
                return Reply(False, "the helper process died")
            text += part
        return Reply(text.startswith(b"+"), text[1:-1].decode("utf-8", "backslashreplace"))

    def close(self) -> None:
        self._helper.close()


def _serve(end: int, out: int, root_fd: int, request: Request) -> None:
    """The child: become that user, connect, ask, say how it went, then keep the connection until we are ended."""
    syscalls.set_dumpable(False)
    connection = None
    try:
        if request.uid:
            os.setgroups([])
            os.setresgid(request.gid, request.gid, request.gid)
            os.setresuid(request.uid, request.uid, request.uid)
        syscalls.drop_capabilities()
        syscalls.set_dumpable(False)  # changing ids resets it to fs.suid_dumpable, and the next one to none (prctl(2))
        syscalls.set_pdeathsig(signal.SIGKILL)
        connection = _connect(root_fd, request)
        stop = _stop_systemd if request.kind == "systemd" else _stop_http
        answer = b"+" + stop(connection, request).encode("utf-8", "backslashreplace")
    except (OSError, ValueError, RefusalError) as exc:
        text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        answer = b"-" + text.encode("utf-8", "backslashreplace")
    os.write(out, answer.replace(b"\n", b" ")[:500] + b"\n")
    os.read(end, 1)  # until the caller closes its end or dies
    if connection is not None:
        connection.close()


class RefusalError(Exception):
    """The manager said no, or is not who it should be."""


def _connect(root_fd: int, request: Request) -> socket.socket:
    """A connection to the first of the sockets that exists, if the right process listens there."""
    for path in request.sockets:
        try:
            fd = syscalls.openat2(root_fd, path, os.O_PATH, _RESOLVE)
        except FileNotFoundError:
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(5.0)
        connection.connect(_SOCKET_PATH_FD.format(fd))
        os.close(fd)
        peer, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer not in request.peers:
            raise RefusalError(f"/{path} is served by pid {peer}, which is not the container's")
        return connection
    raise RefusalError(f"no socket /{request.sockets[0]} in the container")


# --- systemd: D-Bus by hand ------------------------------------------------------------------------------------------


def _stop_systemd(connection: socket.socket, request: Request) -> str:
    """`StopUnit(name, "replace")`, as `systemctl stop --no-block`. Returns when the job is queued."""
    uid = str(request.inner_uid).encode().hex()
    connection.sendall(f"\0AUTH EXTERNAL {uid}\r\nBEGIN\r\n".encode() + stop_unit_message(request.name))
    buffer = b""
    while b"\r\n" not in buffer:
        buffer += _receive(connection)
    line, _, buffer = buffer.partition(b"\r\n")
    if not line.startswith(b"OK "):
        raise RefusalError(f"systemd refuses us: {line[:80].decode('ascii', 'replace')}")
    while True:
        message, buffer = split_message(buffer)
        if message is None:
            if len(buffer) > _MAX_REPLY:
                raise RefusalError("systemd's answer is too long")
            buffer += _receive(connection)
            continue
        kind, reply_serial, text = message
        if reply_serial != 1:
            continue
        if kind == 2:
            return f"systemd stops {request.name}"
        raise RefusalError(f"systemd does not stop {request.name}: {text}")


def _receive(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    if not part:
        raise RefusalError("the connection was closed")
    return part


def stop_unit_message(unit: str) -> bytes:
    """The method call in D-Bus's wire format, little endian, serial 1. Raises ValueError for what is no unit name."""
    name = unit.encode("utf-8")
    if not 0 < len(name) < 256 or b"\0" in name:
        raise ValueError("not a unit name")
    body = b""
    for text in (name, b"replace"):
        body += b"\0" * (-len(body) % 4) + struct.pack("<I", len(text)) + text + b"\0"
    fields = b""
    for code, signature, text in (
        (1, b"o", b"/org/freedesktop/systemd1"),
        (6, b"s", b"org.freedesktop.systemd1"),
        (2, b"s", b"org.freedesktop.systemd1.Manager"),
        (3, b"s", b"StopUnit"),
        (8, b"g", b"ss"),
    ):
        fields += b"\0" * (-len(fields) % 8) + bytes((code, 1)) + signature + b"\0"
        length = bytes((len(text),)) if signature == b"g" else struct.pack("<I", len(text))
        fields += length + text + b"\0"
    head = struct.pack("<cBBBIII", b"l", 1, 0, 1, len(body), 1, len(fields)) + fields
    return head + b"\0" * (-len(head) % 8) + body


def split_message(buffer: bytes) -> tuple[tuple[int, int, str] | None, bytes]:
    """((type, reply serial, error text), rest); (None, buffer) while it is incomplete. ValueError: no D-Bus."""
    if len(buffer) < 16:
        return None, buffer
    order = {0x6C: "<", 0x42: ">"}.get(buffer[0])
    if order is None or buffer[3] != 1:
        raise ValueError("not a D-Bus message")
    body_length, _, fields_length = struct.unpack_from(order + "III", buffer, 4)
    start = 16 + fields_length + (-fields_length % 8)
    if body_length > _MAX_REPLY or fields_length > _MAX_REPLY:
        raise ValueError("a D-Bus message that is too long")
    if len(buffer) < start + body_length:
        return None, buffer
    serial, error = _reply_fields(buffer[16 : 16 + fields_length], order)
    text = error
    if buffer[1] == 3 and body_length >= 5:
        (length,) = struct.unpack_from(order + "I", buffer, start)
        text += ": " + buffer[start + 4 : start + 4 + min(length, 200, body_length - 5)].decode("utf-8", "replace")
    return (buffer[1], serial, text), buffer[start + body_length :]


def _reply_fields(fields: bytes, order: str) -> tuple[int, str]:
    """REPLY_SERIAL (5) and ERROR_NAME (4) of a header; only types o, s, g and u occur in headers."""
    serial, error, at = 0, "", 0
    while at + 4 <= len(fields):
        code, signature = fields[at], fields[at + 2 : at + 3]
        at += 4
        if signature == b"g":
            at += 1 + fields[at] + 1
        elif signature in (b"s", b"o", b"u"):
            if at + 4 > len(fields):
                break
            (number,) = struct.unpack_from(order + "I", fields, at)
            at += 4
            if signature == b"u":
                serial = number if code == 5 else serial
            else:
                error = fields[at : at + number].decode("utf-8", "replace") if code == 4 else error
                at += number + 1
        else:
            raise ValueError("a D-Bus header that we do not understand")
        at += -at % 8
    return serial, error


# --- Docker and Podman -----------------------------------------------------------------------------------------------

_HTTP_PATIENCE_S = 0.5
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


def _stop_http(connection: socket.socket, request: Request) -> str:
    """`POST /containers/ID/stop`: it is answered when the container has stopped, so only an early no is waited for."""
    if not re.fullmatch(r"[0-9a-f]{12,64}", request.name):
        raise ValueError("not a container id")
    text = f"POST /containers/{request.name}/stop?t={request.grace_s} HTTP/1.1\r\nHost: localhost\r\n"
    connection.sendall(f"{text}Content-Length: 0\r\n\r\n".encode())
    connection.settimeout(_HTTP_PATIENCE_S)
    reply = b""
    try:
        while b"\r\n" not in reply and len(reply) < 1024:
            reply += _receive(connection)
    except TimeoutError:
        return f"stop of container {request.name[:12]} is under way"
    match = _STATUS.match(reply)
    if match is None or match[1] not in (b"204", b"304"):
        raise RefusalError(f"the answer to stop {request.name[:12]} was {reply.splitlines()[0][:60]!r}")
    return f"container {request.name[:12]} was stopped"


def kernel_id(id_map: bytes, inner: int) -> int | None:
    """The host's number of `inner` by /proc/PID/uid_map or gid_map (user_namespaces(7)); None: it has none."""
    for line in id_map.splitlines():
        fields = line.split()
        if len(fields) == 3:
            first, outer, count = map(int, fields)
            if first <= inner < first + count:
                return outer + inner - first
    return None


__all__ = ["Asking", "Reply", "Request", "kernel_id"]
