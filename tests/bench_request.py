"""What a request costs in the daemon over the work itself: `python3 -m tests.bench_request` (issue 3, at most 5 ms).

The work itself: the very function that a worker runs, in a fork of a process that has everything imported, timed from
before the fork to its result in the parent's hands. Beside it the same question through the socket.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from tests.bench import wait_for_socket
from tests.embedded.node import GPU_NODES, Node
from tests.product_command import ROOT, command
from tests.unit.varlink_harness import Client

TIMES = 60
DIRECT = """
import json, os, pickle, sys, time
sys.path.insert(0, {root!r})
from hostd.config import Config
from hostd.daemon import preload
from hostd.service.api import Api, DaemonFacts
from hostd.service.varlink import Params
from hostd.service.worker import Caller, Context
preload()
import gc; gc.collect(); gc.freeze()
methods = Api(Config, DaemonFacts()).methods()
calls = {calls!r}
for line in sys.stdin:
    name, parameters = calls[int(line)]
    how = methods["io.pve.GpuRelease." + name]
    begun = time.perf_counter()
    request = how.parse(Params(dict(parameters)))
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        result = how.run(request, lambda value: None, Context(name, Caller(0, 0, 0), False))
        os.write(theirs, json.dumps(result).encode()[:60000])
        os._exit(0)
    os.close(theirs)
    while os.read(ours, 65536):
        pass
    print((time.perf_counter() - begun) * 1000, flush=True)
    os.close(ours)
    os.waitpid(pid, 0)
"""
CALLS = (
    ("Map", {"vmid": 129, "pid": 1}), ("Verify", {"vmid": 129}), ("Release", {"vmid": 131}), ("Status", {}),
)  # fmt: skip


def main() -> int:
    with Node() as node:
        node.container(129, devices=GPU_NODES).spawn_holder(
            open=("/dev/nvidia0", "/dev/nvidiactl"), alloc=("50:42759:compute",)
        )
        node.container(131, devices=GPU_NODES)
        code = DIRECT.format(root=str(ROOT), calls=CALLS)
        direct = node.popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE)
        assert direct.popen.stdin and direct.popen.stdout
        daemon = node.popen(command("hostd.daemon"))
        try:
            wait_for_socket(node)
            print(f"{'request':<10} {'the work':>15} {'by the daemon':>15} {'added':>15}   (ms, best / median of {TIMES})")
            for number, (name, parameters) in enumerate(CALLS):
                work, whole = [], []
                for _ in range(TIMES):  # in turns: the machine has other things to do, too
                    print(number, file=direct.popen.stdin, flush=True)
                    work.append(float(direct.popen.stdout.readline()))
                    whole.append(ask(node, name, parameters))
                added = [b - a for a, b in zip(work, whole, strict=True)]
                pairs = [(min(work), median(work)), (min(whole), median(whole)), (min(whole) - min(work), median(added))]
                print(f"{name:<10}" + "".join(f" {a:>7.2f}/{b:>7.2f}" for a, b in pairs) + "   (goal: <= 5 added)")
        finally:
            daemon.kill()
            direct.kill()
    return 0


def ask(node: Node, name: str, parameters: dict[str, int]) -> float:
    """Milliseconds from connect() to the reply."""
    begun = time.perf_counter()
    client = Client(str(node.path("/run/pve-gpu-release/io.pve.GpuRelease")))
    reply = client.ask(name, parameters)
    taken = (time.perf_counter() - begun) * 1000
    assert reply is not None and "error" not in reply, reply
    client.close()
    return taken


if __name__ == "__main__":
    sys.exit(main())
