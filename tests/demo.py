"""`make demo`: the story of the README, played for real in an embedded node. Only the GPUs are stand-ins.

Real processes, namespaces and cgroups; the real pynvml on a stand-in driver library. The product has no test switch.
"""

from __future__ import annotations

import sys
import time

from tests.embedded.node import GPU_NODES, Container, HolderHandle, Node
from tests.product_command import command

GPU = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
BOLD, DIM, OFF = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")


def say(text: str = "") -> None:
    print(f"{BOLD}{text}{OFF}" if text else "", flush=True)


def run(where: Node | Container, shown: str, argv: list[str], *, lines: int | None = None, note: str = "") -> int:
    """Shows a command as an administrator would type it, runs it, shows its output."""
    print(f"{BOLD}# {shown}{OFF}", flush=True)
    done = where.run(argv, timeout=60)
    output = (done.stdout + done.stderr).rstrip().splitlines()
    for line in output[:lines]:
        print(line)
    if lines is not None and len(output) > lines:
        print(f"{DIM}  ... {len(output) - lines} more lines{OFF}")
    print(f"{DIM}exit status {done.returncode}{note}{OFF}\n", flush=True)
    return done.returncode


def start_jobs(ct129: Container, ct130: Container) -> tuple[list[HolderHandle], HolderHandle]:
    """Container 129 holds 42,759 MiB on each GPU through five processes of four kinds; 130 uses GPU 0."""
    engine = ct129.spawn_holder(
        argv=("VLLM::EngineCore",), comm="VLLM::EngineCor", cgroup="system.slice/vllm.service", open=GPU,
        alloc=("50:20759:compute", "51:20759:compute"), ignore_term=True,
    )  # fmt: skip
    workers = [
        ct129.spawn_holder(
            argv=(f"VLLM::Worker_TP{n}",), comm=f"VLLM::Worker_TP{n}", setsid=True, daemon=True, open=GPU,
            alloc=(f"{50 + n}:20000:compute",),
        )
        for n in (0, 1)
    ]  # fmt: skip
    loader = ct129.spawn_holder(
        argv=("pt_data_worker",), comm="pt_main_thread", children=1, child_comm="pt_data_worker", die=True, open=GPU,
        alloc=("50:2000:compute", "51:2000:compute"),
    )  # fmt: skip
    monitor = ct129.spawn_holder(argv=("nvtop",), comm="nvtop", open=("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"))
    other = ct130.spawn_holder(
        argv=("python3", "train.py"), comm="python3", open=GPU, alloc=("50:8192:compute",),
    )  # fmt: skip
    return [engine, *workers, loader, monitor], other


def main() -> int:
    begun = time.monotonic()
    tool = command()
    say("A node with two GPUs; containers 129 (a vLLM job) and 130 (somebody else's training on GPU 0).\n")
    with Node() as node:
        ct129 = node.container(129, devices=GPU_NODES)
        ct130 = node.container(130, devices=GPU_NODES)
        server = ct129.spawn_holder(argv=("python3", "-m", "vllm.entrypoints.openai.api_server"), comm="python3")
        jobs, other = start_jobs(ct129, ct130)

        say("The job is killed inside the container, as everybody does it:")
        run(ct129, 'pct exec 129 -- bash -c "pkill -9 -f vllm; pkill -9 -f python3"',
            ["bash", "-c", "pkill -9 -f '[v]llm'; pkill -9 -f '[p]ython3'"],
            note=" (of the second pkill: the first has killed the server, and no other process is called python3)")  # fmt: skip
        server.main.wait_gone()

        say("The API server is gone. The memory is not:")
        run(node, "pve-gpu-release ps 129", [*tool, "ps", "129"])

        say("From the host, by what holds the device and not by name:")
        status = run(node, "pve-gpu-release 129 --grace 1", [*tool, "129", "--grace", "1"])

        say("The same for programs (a new job on GPU 0, ended at once):")
        jobs.append(ct129.spawn_holder(argv=("python3", "-m", "vllm"), comm="python3", open=GPU[:1] + GPU[2:],
                                       alloc=("50:20000:compute",)))  # fmt: skip
        status |= run(node, "pve-gpu-release 129 --now --json", [*tool, "129", "--now", "--json"])

        survivors = [p.pid for job in jobs for p in job.processes if p.alive()]
        ok = status == 0 and not survivors and other.main.alive()
        say(f"Container 130's process is {'alive, with its 8,192 MiB' if other.main.alive() else 'DEAD'}.")
        clients = node.nvml()["gpus"][0]["compute"]
        print(f"{DIM}driver's list of GPU 0 now: {clients}{OFF}")
    print(f"{DIM}demo took {time.monotonic() - begun:.1f} s{OFF}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
