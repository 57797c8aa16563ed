"""Malformed frames: whatever the bytes, a typed answer or a closed connection, and the server goes on."""

from __future__ import annotations

import json
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostd.config import Config
from hostd.ladder import Options
from hostd.service import varlink
from hostd.service.api import Api
from hostd.wire import options_dict
from tests.unit.test_server import METHODS, fast
from tests.unit.varlink_harness import DEADLINE_S, IFACE, Client, ServerProcess

SEED = 20240129

API = Api(Config, dict)
RELEASE = {"vmid": 129, "options": options_dict(Options())}
VALID = [
    varlink.encode_call("org.varlink.service.GetInfo")[:-1],
    varlink.encode_call("org.varlink.service.GetInterfaceDescription", {"interface": IFACE})[:-1],
    varlink.encode_call(f"{IFACE}.Echo", {"text": "héllo 🚀"}, more=True)[:-1],
    varlink.encode_call(f"{IFACE}.Echo", {"text": "x"}, oneway=True)[:-1],
    varlink.encode_call(f"{IFACE}.Release", RELEASE)[:-1],
    b'{"method":"io.pve.GpuRelease.Event","parameters":{"vmid":129,"phase":"post-stop","source":"hookscript",'
    b'"context":{"A":"b"}}}',
    b'{"method":"io.pve.GpuRelease.Observe","parameters":{"vmids":[129,130]},"more":false}',
]
TOKENS = [
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b"\\",
        b"\\u0000",
        b"\\ud800",
        b"\\udc00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xf4\x90",
    ),
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 30, b"9" * 5000, b"0.1e-400", b"null", b"true", b"{}", b"[]"),
    *(b'"method"', b'"parameters"', b'"more":true', b'"oneway":true', b'"upgrade":true', b"\r\n\t ", b"\xef\xbb\xbf"),
    *(b"[" * 500, b'{"a":' * 500, b"x" * 3000, b"\x1b[31m", b"\x01"),
]


def cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def splice(rng: random.Random, raw: bytes) -> bytes:
    at, end = sorted(rng.randrange(len(raw) + 1) for _ in "ab")
    return raw[:at] + rng.choice(TOKENS) + raw[end if rng.random() < 0.5 else at :]


def flip(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(1, 256)
    return bytes(changed)


def noise(rng: random.Random, _raw: bytes) -> bytes:
    return rng.randbytes(rng.randrange(200)).replace(b"\0", b"\1")


def nest(rng: random.Random, raw: bytes) -> bytes:
    depth = rng.choice([5, 31, 33, 900, 1100, 20_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    value = opening * min(depth, 60_000 // len(opening) // 2) + b"1" + closing * rng.choice([0, depth])
    return raw.replace(b"129", value, 1) if rng.random() < 0.7 else value


def swap(rng: random.Random, raw: bytes) -> bytes:
    """A valid frame whose values are of other types."""
    message = json.loads(raw)
    values = [None, True, -1, 0, 1.5, 2**63, -(2**70), "", "x" * 5000, "\ud800", "a\0b", [], [[]], {}, {"vmid": {}}]
    target = rng.choice([message, message.get("parameters") or message])
    target[rng.choice([*target, "extra", ""])] = rng.choice(values)
    return json.dumps(message).encode()


WAYS: list[Callable[[random.Random, bytes], bytes]] = [cut, splice, flip, noise, nest, swap]


def frames(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        raw = rng.choice(VALID)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            try:
                raw = rng.choice(WAYS)(rng, raw)
            except (ValueError, TypeError, AttributeError, RecursionError):  # swap of what is no call any more
                raw = flip(rng, raw)
        yield raw[: varlink.MAX_CALL]


def test_forty_thousand_malformed_frames_raise_nothing_but_our_own_errors() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = {"malformed": 0, "refused": 0, "read": 0}
    for raw in frames(40_000, SEED):
        try:
            call = varlink.parse_call(raw)
            method = API.methods().get(call.method, API.methods()[f"{IFACE}.Release"])
            method.parse(varlink.Params(call.parameters))
            ends["read"] += 1
        except varlink.MalformedMessage as exc:
            ends["malformed"] += 1
            varlink.printable(str(exc), 200)
        except varlink.VarlinkError as exc:
            ends["refused"] += 1
            assert varlink.encode_error(exc).endswith(b"\0")
    assert min(ends.values()) > 100, f"the fuzz does not reach every end: {ends}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_valid_frames_split_at_every_byte_and_joined_at_random_come_out_the_same() -> None:
    rng = random.Random(SEED)
    stream = b"\0".join(VALID) + b"\0"
    for at in range(len(stream)):
        framer = varlink.Framer()
        assert framer.feed(stream[:at]) + framer.feed(stream[at:]) == VALID
    for _ in range(2000):
        framer, out, at = varlink.Framer(), [], 0
        while at < len(stream):
            step = rng.choice([1, 2, 3, 50, 1000])
            out += framer.feed(stream[at : at + step])
            at += step
        assert out == VALID and not framer.partial


@pytest.fixture
def served() -> Iterator[ServerProcess]:
    room = Path(tempfile.mkdtemp(prefix="vl"))
    with ServerProcess(room / "s", METHODS, fast(connections=64, idle_s=5.0)) as process:
        yield process
    shutil.rmtree(room)


def test_ten_thousand_malformed_frames_get_a_typed_answer_or_a_closed_connection(served: ServerProcess) -> None:
    rng = random.Random(SEED + 1)
    witness = served.client()
    assert witness.ask("Echo", {"text": "x"})
    fds = served.descriptors()
    ends = {"answered": 0, "closed": 0}
    for number, raw in enumerate(frames(10_000, SEED + 1)):
        if number % 500 == 0:  # a silent client is closed after a while, and this takes its time on a busy machine
            assert witness.ask("Echo", {"text": "meanwhile"})
        client = Client(served.path)
        # What follows a malformed frame is not looked at: so one a connection, at times behind good ones.
        data = b"\0".join([*rng.choices(VALID[:1], k=rng.choice([0, 0, 0, 7])), raw, b""])
        try:
            step = rng.choice([len(data), len(data), 7000, 1 + len(data) // 3])
            for at in range(0, len(data), step):
                client.send(data[at : at + step])
            client.send(varlink.encode_call("org.varlink.service.GetInfo", {"the": "end"}))
        except (BrokenPipeError, ConnectionResetError):
            pass
        while True:
            reply = client.hear()  # fails when nothing comes within DEADLINE_S
            if reply is None:
                ends["closed"] += 1
                break
            assert "parameters" in reply, reply
            ends["answered"] += 1
            if reply.get("error", "").endswith("InvalidParameter") and reply["parameters"] == {"parameter": "the"}:
                break
        client.close()
    assert min(ends.values()) > 100, ends
    assert witness.ask("Echo", {"text": "still here"}) is not None
    assert "Traceback" not in served.stderr(), served.stderr()[-2000:]
    witness.ask("Echo", {"text": "every close was seen"})
    assert served.descriptors() <= fds
    assert served.status("VmHWM") < 150_000  # KiB
    assert DEADLINE_S > 5.0
