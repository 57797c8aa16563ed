"""`make bench`: speed beside the peers, in one run; ratios count, not milliseconds (DESIGN 11, rows 1, 2, 5, 6).

In an embedded node with a crowd of host processes. Rows 3 and 4 need a real GPU: `python3 -m tests.gpu.bench`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable

from tests.embedded.node import GPU_NODES, Node
from tests.product_command import ROOT, command
from tests.startup import Took, whole_processes

GPU = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
DESCRIPTORS = 30

WARM = """
import json, sys, time
sys.path.insert(0, {root!r})
from hostd.nodeview import look_at_node
from hostd.observe import Observer
from hostd.sources import open_sources

def best(run, times):
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        result = run()
        found.append(time.perf_counter() - begun)
    return min(found) * 1000, sorted(found)[len(found) // 2] * 1000, result

sources = open_sources(nvml_deadline_s=10, read_deadline_s=5)
sources.nvml.start()
observer = Observer(sources, 129)
observer.look()
one = best(lambda: observer.look(nvml=False), 15)
node = best(lambda: look_at_node(sources), 3)
print(json.dumps({{
    "container": one[:2], "container_holders": len(one[2].holders),
    "node": node[:2], "node_holders": len(node[2].holders),
}}))
sources.close()
"""


def timed(run: Callable[[], object], times: int) -> tuple[float, float]:
    """(best, median) in milliseconds."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        found.append((time.perf_counter() - begun) * 1000)
    return min(found), statistics.median(found)


def scan_rows(node: Node, processes: int) -> dict[str, float]:
    """Milliseconds of one look at a container and at the node, beside fuser and lsof, with a crowd on the host."""
    crowd = node.spawn_holder(argv=("host-daemon",), open=("/dev/null",) * DESCRIPTORS, crowd=processes)
    try:
        done = node.run([sys.executable, "-I", "-c", WARM.format(root=str(ROOT))], timeout=300)
        ours = json.loads(done.stdout)
        nodes = [f"/dev/{name}" for name in GPU_NODES]
        fuser = timed(lambda: node.run([shutil.which("fuser") or "fuser", "-v", *nodes], timeout=300), 3)
        lsof = timed(lambda: node.run([shutil.which("lsof") or "lsof", "-w", *nodes], timeout=300), 3)
        seen = node.run(["fuser", *nodes]).stdout.split()
        return {
            "container": ours["container"][1],
            "node": ours["node"][1],
            "fuser": fuser[1],
            "lsof": lsof[1],
            "found": ours["node_holders"],
            "fuser_found": len(set(seen)),
        }
    finally:
        crowd.kill()
        crowd.wait_gone()


def startup_rows(node: Node) -> dict[str, Took]:
    """Whole processes with nothing held: with and without the daemon, beside an interpreter that does nothing."""
    commands = {
        "python3 -I -c pass": [sys.executable, "-I", "-c", "pass"],
        "pve-gpu-release 131, daemon running": [*command(), "131", "-q"],
        "pve-gpu-release 131, no daemon": [*command(), "131", "-q", "--no-daemon"],
    }
    daemon = node.popen(command("hostd.daemon"))
    try:
        wait_for_socket(node)
        return whole_processes(
            lambda argv, text: node.run(argv, input=text, check=True).stdout, sys.executable, commands, 20
        )
    finally:
        daemon.kill()


def wait_for_socket(node: Node) -> None:
    from tests.embedded.node import wait_until

    wait_until(lambda: node.path("/run/pve-gpu-release/io.pve.GpuRelease").exists(), "the daemon's socket")


def main() -> int:
    with Node() as node:
        ct129 = node.container(129, devices=GPU_NODES)
        node.container(131, devices=GPU_NODES)
        ct129.spawn_holder(argv=("VLLM::EngineCore",), open=GPU, alloc=("50:42759:compute",))
        ct129.spawn_holder(argv=("trainer",), open=("/dev/null",) * DESCRIPTORS, crowd=40)
        print("\nholders (milliseconds, median; a container of 44 processes)")
        print(f"{'host processes':>15} {'container':>10} {'node':>8} {'fuser -v':>9} {'lsof':>9}   ratios")
        for processes in (500, 5000):
            row = scan_rows(node, processes)
            print(
                f"{processes:>15} {row['container']:>10.1f} {row['node']:>8.0f} {row['fuser']:>9.0f} {row['lsof']:>9.0f}"
                f"   container: {row['fuser'] / row['container']:.0f} x faster than fuser (goal 100);"
                f" node: {row['fuser'] / row['node']:.1f} x fuser, {row['lsof'] / row['node']:.1f} x lsof (goal > 1);"
                f" found {row['found']:.0f}, fuser {row['fuser_found']:.0f}"
            )
        print("\nwhole process, nothing held (milliseconds, median)")
        rows = startup_rows(node)
        base = next(iter(rows.values()))
        for name, took in rows.items():
            print(f"  {name:<38} {took.median:>7.1f}   {took.median / base.median:.1f} x")
        print("  goals: 5 x with the daemon, 15 x without; the installed package: make bench-package")
    return 0


if __name__ == "__main__":
    sys.exit(main())
