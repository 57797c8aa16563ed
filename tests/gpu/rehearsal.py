"""Rehearse the real-GPU suite without a GPU: `python3 -m tests.gpu.rehearsal [pytest arguments]`, as root.

The suite and the product run unchanged in the embedded node (tests/embedded), on its stand-in NVML and the stand-in
libcuda beside this file. It shows that suite and product fit together before real GPU time is spent; it proves nothing
about the driver, and its times mean nothing. MPS is skipped, `nvidia-smi` is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.embedded.node import Node

HERE = Path(__file__).resolve().parent
CFLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-format-truncation")
ROOT = HERE.parent.parent


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="standin-cuda-") as directory:
        library = Path(directory) / "libcuda.so.1"
        subprocess.run(
            ["gcc", *CFLAGS, "-fPIC", "-shared", "-o", str(library), str(HERE / "standin_cuda.c")], check=True
        )
        Path(directory).chmod(0o755)
        passed_on = {key: value for key, value in os.environ.items() if key.startswith(("PGR_", "STANDIN_"))}
        env = {"LD_LIBRARY_PATH": directory, "PGR_REQUIRE_GPUS": "2"} | passed_on
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or ["tests/gpu", "-q"])]
        with Node() as node:
            node.control(reserve_mib=615)
            running = node.popen(
                command,
                env=env,
                cwd=str(ROOT),
                cgroup="system.slice/pytest.service",
                stdout=sys.stdout,
                stderr=sys.stderr,
            )
            return running.popen.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
