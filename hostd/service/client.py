"""The caller's side of the socket. Small and quick to import: a whole `pve-gpu-release 129` may cost five times
`python3 -c pass`, and `socket` (with `enum`, `selectors`) and `json` (with `re`) alone would take most of that.
"""

from __future__ import annotations

import _socket
import os
import stat
import time

from hostd.service.interface import INTERFACE, LOST, SERVICE, SOCKET_PATH, STOPPING, error_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_REPLY = 16 * 1024 * 1024
CONNECT_TIMEOUT_S = 3.0
"""Socket activation may have to start the daemon first."""
READ_S = 0.25
"""One recv(2) waits no longer. A signal that comes between Python's last look for one and the system call does not
interrupt it, and its handler runs when the call returns; two of them meanwhile are one."""


class DaemonUnavailable(Exception):  # noqa: N818 - base of the two cases below
    """The daemon cannot do it, the caller can."""


class DaemonAbsent(DaemonUnavailable):
    """Nobody listens, nobody answers, or whoever does is not root's: nothing was asked."""


class DaemonLost(DaemonUnavailable):
    """The call was sent and the connection ended without its final reply: what was done is not known."""


class Connection:
    """One connection; calls on it go one after the other. A context manager."""

    def __init__(self, sock: _socket.socket, timeout: float) -> None:
        self._sock = sock
        self._timeout = timeout
        self._buffer = bytearray()

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def call(
        self, method: str, parameters: dict[str, object] | None = None, timeout: float | None = None
    ) -> dict[str, object]:
        """The reply's parameters. A method without a dot is one of ours.

        `timeout`: seconds without a byte from the daemon; None waits for ever.
        Raises PgrError for a typed error, DaemonLost when there is no reply.
        """
        self._send(method, parameters, more=False)
        reply, _continues = self._receive(timeout)
        return reply

    def call_more(
        self,
        method: str,
        parameters: dict[str, object] | None = None,
        timeout: float | Callable[[], float] | None = None,
    ) -> Iterator[dict[str, object]]:
        """The parameters of every reply as it comes; the last one is the result. Raises as `call`.

        A `timeout` that can be called is asked before each reply; nothing left (<= 0) is DaemonLost.
        """
        self._send(method, parameters, more=True)
        continues = True
        while continues:
            limit = timeout() if callable(timeout) else timeout
            if callable(timeout) and limit is not None and limit <= 0:
                raise DaemonLost("no answer from the daemon: timed out")
            reply, continues = self._receive(limit)
            yield reply

    def is_silent(self, seconds: float) -> bool:
        """True when nothing has come and nothing comes within that time; an end or an error is for the next read."""
        if self._buffer:
            return False
        try:
            self._buffer += self._read(seconds)
        except TimeoutError:
            return True
        except OSError:
            pass
        return False

    def cancel(self) -> None:
        """Ask to stop what is being done with `on_disconnect: cancel`; its final reply still comes. Async-safe."""
        try:
            self._sock.shutdown(_socket.SHUT_WR)
        except OSError:
            pass  # lost already: the reader will notice

    def _send(self, method: str, parameters: dict[str, object] | None, more: bool) -> None:
        qualified = method if "." in method else f"{INTERFACE}.{method}"
        message: dict[str, object] = {"method": qualified, "parameters": parameters or {}}
        if more:
            message["more"] = True
        self._sock.settimeout(self._timeout)
        try:
            self._sock.sendall(encode(message))
        except OSError as exc:
            raise DaemonLost(f"cannot send to the daemon: {exc}") from exc

    def _receive(self, timeout: float | None) -> tuple[dict[str, object], bool]:
        reply = decode(self._message(timeout))
        parameters = reply.get("parameters")
        values: dict[str, object] = parameters if isinstance(parameters, dict) else {}
        error = reply.get("error")
        if error is None:
            return values, reply.get("continues") is True
        raise _exception(str(error), values)

    def _message(self, timeout: float | None) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\0", searched)) < 0:
            searched = len(self._buffer)
            try:
                data = self._read(timeout)
            except OSError as exc:  # a timeout is one too
                raise DaemonLost(f"no answer from the daemon: {exc}") from exc
            if not data:
                raise DaemonLost("the daemon closed the connection without an answer")
            self._buffer += data
            if len(self._buffer) > MAX_REPLY:
                raise DaemonLost(f"an answer of the daemon is longer than {MAX_REPLY} bytes")
        message = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        return message

    def _read(self, timeout: float | None) -> bytes:
        """What comes next; empty at the end. Raises TimeoutError after that many seconds, and other OSErrors."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = READ_S if until is None else until - time.monotonic()
            self._sock.settimeout(min(READ_S, max(0.001, left)))
            try:
                return self._sock.recv(262144)
            except TimeoutError:
                if left <= READ_S and until is not None:
                    raise


def connect(path: str = SOCKET_PATH, timeout: float = CONNECT_TIMEOUT_S) -> Connection:
    """A connection to a daemon that has answered. Raises DaemonAbsent within about `timeout`.

    A connect alone proves little: it succeeds while nobody accepts. So the daemon is asked its name first.
    """
    _check_owner(path)
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        # A non-blocking connect to a full backlog fails at once on AF_UNIX; this one waits, but not for ever.
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, _timeval(timeout))
        sock.connect(path)
        peer = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
        if int.from_bytes(peer[4:8], "little") != 0:
            raise DaemonAbsent(f"cannot trust {path}: whoever listens there is not root")
        connection = Connection(sock, timeout)
        connection.call(f"{SERVICE}.GetInfo", timeout=timeout)
        return connection
    except (OSError, DaemonLost) as exc:
        sock.close()
        raise DaemonAbsent(f"cannot reach the daemon at {path}: {exc}") from exc
    except BaseException:
        sock.close()
        raise


def _check_owner(path: str) -> None:
    """Only a socket that root made, in a directory that only root can change, is trusted."""
    try:
        entry, folder = os.lstat(path), os.stat(os.path.dirname(path) or ".")
    except OSError as exc:
        raise DaemonAbsent(f"no daemon: {exc}") from exc
    if not stat.S_ISSOCK(entry.st_mode) or entry.st_uid != 0:
        raise DaemonAbsent(f"cannot trust {path}: not a socket of root's")
    if folder.st_uid != 0 or (folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX):
        raise DaemonAbsent(f"cannot trust {path}: others than root can change its directory")


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return whole.to_bytes(8, "little") + int((seconds - whole) * 1e6).to_bytes(8, "little")


def _exception(name: str, parameters: dict[str, object]) -> Exception:
    """Our own typed error; DaemonLost for every other one. It comes from another version, which does not know a method or
    a parameter, or names its errors otherwise: what it cannot do the caller can, and says what is wrong with the request."""
    if name in (STOPPING, LOST):
        return DaemonLost(str(parameters.get("message") or "the daemon is being stopped"))
    return error_from(name, parameters) or DaemonLost(f"the daemon does not do this ({name[:100]})")


# --- JSON without `re` ---------------------------------------------------------------------------------------------

_scan: Callable[[str, int], tuple[object, int]] | None = None
_chunks: Callable[[object, int], Iterable[str]] | None = None
try:
    from _json import encode_basestring_ascii as _quote
    from _json import make_encoder as _make_encoder
    from _json import make_scanner as _make_scanner

    class _Options:
        """What the scanner reads off its context (json.scanner.c_make_scanner)."""

        strict = True
        object_hook = None
        object_pairs_hook = None
        parse_float = float
        parse_int = int
        parse_constant = float
        memo: dict[str, str] = {}  # noqa: RUF012

    def _refuse(value: object) -> object:
        raise TypeError(f"cannot say {type(value).__name__} in JSON")

    _scan = _make_scanner(_Options)  # type: ignore[arg-type]
    _chunks = _make_encoder(None, _refuse, _quote, None, ":", ",", False, False, False)
except (ImportError, TypeError, AttributeError):  # another implementation: the public, slower way
    pass


def encode(message: dict[str, object]) -> bytes:
    """One message as bytes, with its NUL."""
    if _chunks is not None:
        return "".join(_chunks(message, 0)).encode("ascii") + b"\0"
    import json

    return json.dumps(message, allow_nan=False).encode("ascii") + b"\0"


def decode(message: bytes) -> dict[str, object]:
    """One message without its NUL; DaemonLost when it is none."""
    try:
        text = message.decode("utf-8").strip()
        if _scan is not None:
            value, end = _scan(text, 0)
            if end != len(text):
                raise ValueError("text after the end")
        else:
            import json

            value = json.loads(text)
    except (ValueError, StopIteration, RecursionError) as exc:
        raise DaemonLost(f"cannot read the daemon's answer: {exc}") from exc
    if not isinstance(value, dict):
        raise DaemonLost("cannot read the daemon's answer: not an object")
    return value
