"""Asking a service manager inside a container to stop a job, over its own socket: systemd's, Docker's, Podman's.

Nothing of the container is executed: a disposable child takes the numeric ids of that manager's user, gives up every
capability, connects to the socket inside the container's root and speaks the few bytes of the protocol by itself. What
comes back is hostile: bounded, and believed only as "asked" or "not asked". Whether the job really ends is seen from
outside.

systemd refuses a peer that has no pid in its own PID namespace (socket-util.c, getpeercred), so there the child is born
into that namespace, for milliseconds: with nothing open, not dumpable, in the container's mount namespace. (Where our
own sandbox forbids the latter the socket is opened through no symbolic link, as it is for the others.)
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable
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
    """Pids that may listen there, as numbered in the PID namespace entered, else in ours. Any other listener (a socket
    of the host that was mounted in) is not talked to."""
    grace_s: int = 10
    """For Docker: seconds between its SIGTERM and its SIGKILL."""


class Reply(NamedTuple):
    asked: bool
    text: str
    """For people."""


class Place(NamedTuple):
    """Descriptors of where the manager runs."""

    root_fd: int
    """O_PATH, its root directory."""
    mount_fd: int = -1
    """Its mount namespace; -1: not to be entered."""
    pid_fd: int = -1
    """Its PID namespace; -1: not to be entered."""


class Asking:
    """One request under way. Close it when the job has ended or is given up: the connection lives until then."""

    def __init__(self, place: Place, request: Request) -> None:
        """Raises OSError when no process can be made. `place` stays the caller's."""
        fds = tuple(fd for fd in (place.root_fd, place.mount_fd, place.pid_fd) if fd >= 0)
        self._helper = Disposable(lambda end, out: _serve(end, out, place, request), keep=fds)

    def reply(self, deadline_s: float) -> Reply:
        """What became of the request."""
        end = time.monotonic() + deadline_s
        text = b""
        while not text.endswith(b"\n"):
            part = self._helper.read(max(0.0, end - time.monotonic()))
            if part is None:
                return Reply(False, "no answer in time")
            if not part:
                return Reply(False, "the helper process died")
            text += part
        return Reply(text.startswith(b"+"), text[1:-1].decode("utf-8", "backslashreplace"))

    def close(self) -> None:
        self._helper.close()


def _serve(end: int, out: int, place: Place, request: Request) -> None:
    """The helper: becomes that user, asks, says how it went, then keeps the connection until it is ended."""
    syscalls.set_dumpable(False)
    connection = None
    try:
        inside = _enter(place)
        _become(request)
        if place.pid_fd < 0:
            connection = _connect(place.root_fd, request)
            answer = b"+" + _stop_http(connection, request).encode("utf-8", "backslashreplace")
        else:
            answer = _in_child(lambda: _ask_systemd(place.root_fd, request, inside))
    except (OSError, ValueError, RefusalError) as exc:
        answer = _failure(exc)
    os.write(out, answer.replace(b"\n", b" ")[:500] + b"\n")
    os.read(end, 1)  # until the caller closes its end or dies
    if connection is not None:
        connection.close()


def _enter(place: Place) -> bool:
    """Joins the namespaces of `place` that there are; True when paths are the container's from now on."""
    inside = False
    if place.mount_fd >= 0:
        try:
            syscalls.setns(place.mount_fd, syscalls.CLONE_NEWNS)
            inside = True
        except PermissionError:  # the daemon's sandbox: no CAP_SYS_CHROOT, RestrictNamespaces=
            pass
    if place.pid_fd >= 0:
        syscalls.setns(place.pid_fd, syscalls.CLONE_NEWPID)
    return inside


def _become(request: Request) -> None:
    """Takes that user's ids and gives up every right of ours."""
    if request.uid:
        os.setgroups([])
        os.setresgid(request.gid, request.gid, request.gid)
        os.setresuid(request.uid, request.uid, request.uid)
    syscalls.drop_capabilities()
    syscalls.set_dumpable(False)  # changing ids resets it to fs.suid_dumpable, and the next one to none (prctl(2))
    syscalls.set_pdeathsig(signal.SIGKILL)


def _in_child(ask: Callable[[], bytes]) -> bytes:
    """Runs `ask` in a child, which is the one that has a pid in the namespace entered."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.set_pdeathsig(signal.SIGKILL)
            os.write(theirs, ask())
        except (OSError, ValueError, RefusalError) as exc:
            os.write(theirs, _failure(exc))
        finally:
            os._exit(0)
    os.close(theirs)
    answer = b""
    while part := os.read(ours, 4096):
        answer += part
    os.close(ours)
    os.waitpid(child, 0)
    return answer or b"-the process that asked was killed inside the container"


def _ask_systemd(root_fd: int, request: Request, inside: bool) -> bytes:
    with _connect(root_fd, request, inside) as connection:
        return b"+" + _stop_systemd(connection, request).encode("utf-8", "backslashreplace")


def _failure(exc: Exception) -> bytes:
    text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return b"-" + text.encode("utf-8", "backslashreplace")


class RefusalError(Exception):
    """The manager said no, or is not who it should be."""


def _connect(root_fd: int, request: Request, inside: bool = False) -> socket.socket:
    """A connection to the first of the sockets that exists, if the right process listens there.

    `inside`: our own root is the container's.
    """
    for path in request.sockets:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(5.0)
        try:
            if inside:
                connection.connect(f"/{path}")
            else:
                fd = _open_socket(root_fd, path)
                connection.connect(_SOCKET_PATH_FD.format(fd))
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            connection.close()
            continue
        peer, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer not in request.peers:
            connection.close()
            raise RefusalError(f"/{path} is not served by who should ({f'pid {peer} in there' if peer else 'nobody in there'})")
        return connection
    raise RefusalError(f"no socket /{request.sockets[0]} in the container")


def _open_socket(root_fd: int, path: str) -> int:
    """O_PATH descriptor of a socket below `root_fd`, component by component, through no symbolic link.

    Not openat2(2): `RestrictSUIDSGID=` of the daemon's unit makes that say ENOSYS (systemd, seccomp-util.c).
    """
    here, flags = os.dup(root_fd), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    parts = path.split("/")
    for depth, part in enumerate(parts):
        try:
            below = os.open(part, flags | (os.O_DIRECTORY if depth < len(parts) - 1 else 0), dir_fd=here)
        finally:
            os.close(here)
        here = below
    if not stat.S_ISSOCK(os.fstat(here).st_mode):
        os.close(here)
        raise NotADirectoryError(errno.ENOTDIR, "not a socket", path)
    return here


# --- systemd: D-Bus by hand ------------------------------------------------------------------------------------------


def _stop_systemd(connection: socket.socket, request: Request) -> str:
    """`StopUnit(name, "replace")`, as `systemctl stop --no-block`. Returns when the job is queued."""
    uid = str(request.inner_uid).encode().hex()
    connection.sendall(f"\0AUTH EXTERNAL {uid}\r\nBEGIN\r\n".encode())
    buffer = b""
    while b"\r\n" not in buffer:
        buffer += _receive(connection)
    line, _, buffer = buffer.partition(b"\r\n")
    if not line.startswith(b"OK "):
        raise RefusalError(f"systemd refuses us: {line[:80].decode('ascii', 'replace')}")
    # Not before: what comes in one piece with BEGIN lies in sd-bus's buffer until something more comes.
    connection.sendall(stop_unit_message(request.name))
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
        if at >= len(fields):
            break
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


__all__ = ["Asking", "Place", "Reply", "Request", "kernel_id"]
