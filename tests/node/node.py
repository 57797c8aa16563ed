"""The virtual node: systemd as pid 1, a real journal, real LXC with Proxmox's layout, stand-ins for Proxmox's programs.

    with VirtualNode("bookworm") as node:                        # boots in seconds from the cached tree (build.py)
        node.install_product()                                   # apt install ./the package of this checkout
        ct = node.add_container(129, gpus=(0, 1))                # /etc/pve/lxc/129.conf, started by nobody yet
        ct.hookscript("local:snippets/pve-gpu-release")          # = pct set 129 -hookscript ...
        node.pct("start", 129)                                   # CompletedProcess[str]; raises NodeError unless check=False
        holder = ct.hold(open=("/dev/nvidia0",), alloc=("50:4096:compute",), ignore_term=True)
        node.pct("stop", 129)
        holder.wait_gone()
        for entry in node.journal(PVE_VMID="129"): ...

Running things
    node.run(argv, check=True, timeout=60, input=None, env=None, cgroup="user.slice/...")   text in, text out
    node.popen(argv, ...)            -> NodeProcess: .pid (in the node), .host_pid, .signal(n), .wait(), .communicate()
    node.pct(verb, *words)           node.systemctl(*words)           node.pvesh(*words) -> parsed JSON
    node.python(source)              the node's own Python
Files (paths as the node sees them)
    node.read(path)  node.write(path, text, mode=0o644)  node.exists(path)  node.remove(path)  node.host_path(path)
    node.shared                      a directory of the host that the node sees as /shared
Looking
    node.journal(since=CURSOR, **FIELDS)  node.cursor()  node.processes(cgroup)  node.populated(cgroup)
    node.tasks()                     task logs, oldest first: Task(upid, kind, vmid, log)
    node.wait_until(callable, what, timeout)   node.wait_unit(unit, state)   node.wait_empty(cgroup)
    node.move(host_pids, cgroup)     puts processes into a cgroup of the node
Containers
    ct.start() ct.stop() ct.shutdown() ct.reboot()        through pct
    ct.attach(argv)  ct.attach_popen(argv)                lxc-attach
    ct.running  ct.init_pid  ct.host_init_pid  ct.monitor_pid  ct.config  ct.root (a host path)
    ct.processes()                                        pids (of the node) in lxc/VMID and below
    ct.wait_booted()  ct.wait_ready()                     the container's systemd is up; the tiny init obeys signals
    ct.wait_stopped()                                     monitor gone, unit at rest
    ct.hold(**fields of Holder) -> GpuHolder              a holder inside, see tests/embedded/process.py
Boots
    node.reboot()  node.reboot(clean=False)     same files, new boot        VirtualNode(driver=, nvml=, nodes=) variants
GPUs (the stand-ins of tests/embedded): node.gpus, node.control(KEY=VALUE), node.clear_control(), node.hold(Holder(...))
Stuck tasks
    with node.frozen() as frozen: ...                     an ext4 at /frozen; frozen.freeze(): writing there is D state

Everything belongs to a keeper process (keeper.py) and goes when it goes: at the end of the `with`, when the test process
dies, or at the next start after the keeper itself was killed.

Nothing here works without root, cgroup v2 and systemd-nspawn: `requirement()` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.embedded import process as embedded
from tests.embedded.node import Gpu
from tests.node import build, keeper, standin
from tests.node.standin import GPU_NODES, GpuHolder
from tests.package import built

DEFAULT_CGROUP = "user.slice/user-0.slice/session-1.scope"
PRODUCT = "/usr/lib/pve-gpu-release"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


T = TypeVar("T")


class NodeError(AssertionError):
    """Something in the node did not do what the test asked for."""


def requirement() -> str | None:
    """Why a node cannot boot on this machine, or None."""
    if os.geteuid() != 0:
        return "the virtual node needs root"
    try:
        keeper.cgroup2_root()
    except keeper.KeeperError as error:
        return str(error)
    if shutil.which("systemd-nspawn") is None and shutil.which("apt-get") is None:
        return "the virtual node needs systemd-nspawn"
    return None


@dataclass(frozen=True)
class Task:
    """One Proxmox task and everything in its log."""

    upid: str
    kind: str
    vmid: int
    log: str

    @property
    def status(self) -> str:
        """The last line: TASK OK, TASK ERROR: ..., or whatever stands there."""
        return self.log.rstrip("\n").rpartition("\n")[2]


class NodeProcess:
    """A process in the node, started through nsenter."""

    def __init__(self, popen: subprocess.Popen[str], node: VirtualNode) -> None:
        self.popen = popen
        self.node = node

    @property
    def host_pid(self) -> int:
        """The program itself, not the nsenter that waits for it."""
        return self.node.wait_until(self._child, "nsenter's child", 60)

    def _child(self) -> int:
        pid = self.popen.pid
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return 0

    @property
    def pid(self) -> int:
        return self.node.node_pid(self.host_pid)

    def signal(self, number: int) -> None:
        os.kill(self.host_pid, number)

    def poll(self) -> int | None:
        return self.popen.poll()

    def wait(self, timeout: float = 60) -> int:
        return self.popen.wait(timeout)

    def communicate(self, text: str | None = None, timeout: float = 60) -> tuple[str, str]:
        return self.popen.communicate(text, timeout)

    @property
    def closed(self) -> bool:
        """Ended, collected, and no pipe of it is open here."""
        pipes = (self.popen.stdin, self.popen.stdout, self.popen.stderr)
        return self.popen.returncode is not None and all(pipe is None or pipe.closed for pipe in pipes)

    def kill(self) -> None:
        """End the program with everything it started and its nsenter; nobody waits for who else holds the pipes."""
        for pid in reversed(descendants(self.popen.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


class VirtualNode:
    """One booted node. Use as a context manager."""

    def __init__(
        self, suite: str | None = None, *, driver: bool = True, nvml: str = "current", nodes: bool = True
    ) -> None:
        """`driver` False: a node without NVIDIA. `nvml`: "current", "old" (no _v3 lists) or "none" (library missing).

        `nodes` False: no /dev/nvidia* after a boot until somebody runs nvidia-modprobe.
        """
        self.suite = suite or os.environ.get("PGR_SUITE") or os.environ.get("SUITE") or "bookworm"
        self.name = uuid.uuid4().hex[:8]
        self.driver = driver
        self.nvml = nvml
        self.nodes = nodes
        self.leader = 0
        self.cgroup_dir = Path()
        self.containers: dict[int, Container] = {}
        self.standin = standin.GpuStandin(self, driver)
        self._started: list[NodeProcess] = []
        self._keeper: subprocess.Popen[str] | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Boot; returns when systemd says that it is ready. Raises NodeError with the console's text."""
        tree = build.ensure_tree(self.suite)
        if self.driver:
            standin.create_consoles()
        with tempfile.TemporaryDirectory(prefix="pgr-layer-") as layer:
            standin.write_layer(Path(layer), self.driver, self.nvml, self.nodes)
            directory = build.cache_root() / "run" / self.name
            command = [sys.executable, "-I", str(Path(keeper.__file__)), str(tree), str(directory), layer]
            self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._wait_booted()

    def _wait_booted(self) -> None:
        assert self._keeper and self._keeper.stdout
        answer = json.loads(self._keeper.stdout.readline() or '{"error": "the keeper died"}')
        if "ready" not in answer:
            self.leader = 0
            with contextlib.suppress(NodeError):
                self.stop()
            raise NodeError(answer["error"])
        self.leader = answer["ready"]["leader"]
        self.cgroup_dir = Path(answer["ready"]["payload"])
        self._make_cgroup(DEFAULT_CGROUP)

    def reboot(self, clean: bool = True) -> None:
        """Boot again with the same files. `clean`: systemd stops everything first; else as after a power failure.

        Holders, processes and the stand-in driver's settings are gone; files, journal and containers' volumes stay.
        """
        assert self._keeper and self._keeper.stdin
        if clean:
            self.run(["systemctl", "poweroff"], check=False)
            if not wait_exit(self.leader, 120):
                raise NodeError("the node did not power off within 120 s")
        self._end_processes()
        self._keeper.stdin.write("boot\n")
        self._keeper.stdin.flush()
        self._wait_booted()

    def _end_processes(self) -> None:
        self.standin.close()
        for process in self._started:
            process.kill()
        self._started = []

    def stop(self) -> None:
        """Take everything down. Raises NodeError when something would not go."""
        if not self._keeper:
            return
        assert self._keeper.stdin and self._keeper.stdout
        self._end_processes()
        self._keeper.stdin.close()
        rest = self._keeper.stdout.read()
        self._keeper.stdout.close()
        status = self._keeper.wait()
        self._keeper = None
        if status:
            raise NodeError(f"cannot take the node down: {rest}")

    # ---- running ---------------------------------------------------------------------------------------------------

    def _make_cgroup(self, cgroup: str) -> Path:
        directory = self.cgroup_dir / cgroup.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _command(self, argv: Sequence[str | Path | int], cgroup: str, cwd: str) -> list[str]:
        """nsenter forks into the PID namespace and stays outside; its child joins the cgroup, then the other namespaces.

        (A process of this machine in a cgroup of the node would be listed there as pid 0.)
        """
        procs = self._make_cgroup(cgroup) / "cgroup.procs"
        target = ["-t", str(self.leader)]
        join = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(procs)]
        enter = ["nsenter", *target, "-m", "-u", "-i", "-n", "-C", f"--wdns={cwd}", "--"]
        return ["nsenter", *target, "-p", "--", *join, *enter, *(str(word) for word in argv)]

    def popen(
        self,
        argv: Sequence[str | Path | int],
        *,
        env: Mapping[str, str] | None = None,
        cgroup: str = DEFAULT_CGROUP,
        cwd: str = "/root",
        stdin: int = subprocess.PIPE,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
    ) -> NodeProcess:
        """Start a program in the node's namespaces, by default in the cgroup of a login session."""
        popen = subprocess.Popen(
            self._command(argv, cgroup, cwd),
            env={**ENVIRONMENT, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="surrogateescape",
            start_new_session=True,
            pass_fds=pass_fds,
        )
        process = NodeProcess(popen, self)
        self._started = [*(one for one in self._started if not one.closed), process]
        return process

    def run(
        self,
        argv: Sequence[str | Path | int],
        *,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cgroup: str = DEFAULT_CGROUP,
        cwd: str = "/root",
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end. NodeError on a status other than 0 (unless check=False) and on a timeout."""
        process = self.popen(argv, env=env, cgroup=cgroup, cwd=cwd)
        words = [str(word) for word in argv]
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise NodeError(f"{words} did not end within {timeout} s") from error
        done = subprocess.CompletedProcess(words, process.popen.returncode, out, err)
        if check and done.returncode:
            raise NodeError(f"{words} exited with {done.returncode}\n{out}{err}")
        return done

    def pct(self, *words: str | int, check: bool = True, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        return self.run(["pct", *words], check=check, timeout=timeout)

    def pct_in_daemon(self, *words: str | int, environment: str = "priv") -> int:
        """As the API does it: in a service of its own, output to the task log only. Returns the exit status."""
        command = [
            "systemd-run",
            "--quiet",
            "--wait",
            "--collect",
            f"--setenv=PVE_STANDIN_RPCENV={environment}",
            "pct",
            *words,
        ]
        return self.run(command, check=False, timeout=120).returncode

    def pvesh(self, *words: str) -> Any:
        text = self.run(["pvesh", *words, "--output-format", "json"]).stdout
        return json.loads(text) if text.strip() else None

    def systemctl(self, *words: str, check: bool = True, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        return self.run(["systemctl", *words], check=check, timeout=timeout)

    def python(self, source: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(["/usr/bin/python3", "-c", source, *words], check=check)

    # ---- files -----------------------------------------------------------------------------------------------------

    def host_path(self, path: str | Path) -> Path:
        """The file as this machine sees it. Absolute symbolic links on the way would lead out of the node."""
        return Path(f"/proc/{self.leader}/root{path}")

    @property
    def shared(self) -> Path:
        return self.host_path("/shared")

    def read(self, path: str | Path) -> str:
        return self.host_path(path).read_bytes().decode(errors="surrogateescape")

    def write(self, path: str | Path, text: str, mode: int = 0o644) -> None:
        target = self.host_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode(errors="surrogateescape"))
        target.chmod(mode)

    def exists(self, path: str | Path) -> bool:
        return os.path.lexists(self.host_path(path))

    def remove(self, path: str | Path) -> None:
        target = self.host_path(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def copy_in(self, source: Path, target: str) -> None:
        destination = self.host_path(target)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, destination, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*cache")
            )
        else:
            shutil.copy2(source, destination)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def cursor(self) -> str:
        """Where the journal ends now, for `journal(since=...)`."""
        self.run(["journalctl", "--sync"], check=False)
        out = self.run(["journalctl", "-n", "0", "--show-cursor", "--quiet"])
        return out.stdout.rpartition("-- cursor: ")[2].strip()

    def journal(self, since: str | None = None, **matches: str | int) -> list[dict[str, Any]]:
        """Entries with all these fields, oldest first, as journalctl's JSON gives them.

        (Matched here after a cursor: journalctl 252 skips the first match when the cursor's own entry is none.)
        """
        self.run(["journalctl", "--sync"], check=False)
        command = ["journalctl", "-o", "json", "--all", "--quiet"]
        wanted = {key: str(value) for key, value in matches.items()}
        command += [f"--after-cursor={since}"] if since else [f"{key}={value}" for key, value in wanted.items()]
        entries = [json.loads(line) for line in self.run(command).stdout.splitlines() if line]
        return [entry for entry in entries if all(has_value(entry.get(key), value) for key, value in wanted.items())]

    def node_pid(self, host_pid: int) -> int:
        """The pid in the node's PID namespace: the level of NSpid on which the node's own systemd is the last."""
        return self._pid_at(host_pid, self._depth())

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.standin.gpus

    def host_pid(self, node_pid: int) -> int:
        """This machine's pid for a pid of the node."""
        depth = self._depth()
        for process in self._all_host_pids():
            with contextlib.suppress(NodeError):
                if self._pid_at(process, depth) == node_pid:
                    return process
        raise NodeError(f"no process {node_pid} in the node")

    def _depth(self) -> int:
        return len(ns_pids(self.leader))

    @staticmethod
    def _pid_at(host_pid: int, depth: int) -> int:
        pids = ns_pids(host_pid)
        if len(pids) < depth:
            raise NodeError(f"process {host_pid} is not in the node")
        return pids[depth - 1]

    def _all_host_pids(self) -> list[int]:
        return [
            pid
            for path, _, names in os.walk(self.cgroup_dir)
            if "cgroup.procs" in names
            for pid in read_pids(Path(path) / "cgroup.procs")
        ]

    def host_processes(self, cgroup: str) -> list[int]:
        """This machine's pids of everything in a cgroup of the node and below it."""
        found = []
        for path, _, _ in os.walk(self.cgroup_dir / cgroup.strip("/")):
            found += read_pids(Path(path) / "cgroup.procs")
        return sorted(found)

    def processes(self, cgroup: str) -> list[int]:
        """The same as pids of the node; a process that leaves meanwhile is left out."""
        found = []
        for pid in self.host_processes(cgroup):
            with contextlib.suppress(NodeError):
                found.append(self.node_pid(pid))
        return sorted(found)

    def move(self, host_pids: Sequence[int], cgroup: str) -> None:
        """Put processes (pids of this machine) into a cgroup of the node, which is made if need be."""
        directory = self._make_cgroup(cgroup)
        for pid in host_pids:
            (directory / "cgroup.procs").write_text(str(pid))

    def populated(self, cgroup: str) -> bool:
        """Whether anything lives there; False when there is no such cgroup."""
        try:
            return "populated 1" in (self.cgroup_dir / cgroup.strip("/") / "cgroup.events").read_text()
        except OSError:
            return False

    def wait_empty(self, cgroup: str, timeout: float = 10) -> None:
        """Until `populated 0` or the cgroup is gone."""
        self.wait_until(lambda: not self.populated(cgroup), f"{cgroup} to become empty", timeout)

    def cgroup_exists(self, cgroup: str) -> bool:
        return (self.cgroup_dir / cgroup.strip("/")).is_dir()

    def wait_until(self, question: Callable[[], T], what: str, timeout: float = 60) -> T:
        """Ask again and again until the answer is true; the answer. NodeError after `timeout` seconds."""
        return wait_until(question, what, timeout)

    def unit(self, unit: str, *properties: str) -> dict[str, str]:
        text = self.systemctl("show", unit, *(f"--property={name}" for name in properties)).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def wait_unit(self, unit: str, state: str, timeout: float = 20) -> None:
        self.wait_until(
            lambda: self.unit(unit, "ActiveState")["ActiveState"] == state, f"{unit} to be {state}", timeout
        )

    def tasks(self) -> list[Task]:
        found = []
        for path in self.host_path("/var/log/pve/tasks").glob("?/UPID:*"):
            parts = path.name.split(":")
            log = path.read_bytes().decode(errors="surrogateescape")
            found.append((path.stat().st_mtime_ns, Task(path.name, parts[5], int(parts[6] or 0), log)))
        return [task for _, task in sorted(found, key=lambda pair: pair[0])]

    # ---- product ---------------------------------------------------------------------------------------------------

    def install_product(self) -> None:
        """The Debian package of this checkout, built in a clean tree of this node's suite, or the one PGR_DEB names."""
        self.install_deb(built.package(self.suite))

    def install_deb(self, package: Path) -> subprocess.CompletedProcess[str]:
        """apt install ./package (no network: the dependencies are in the tree)."""
        self.copy_in(package, f"/shared/{package.name}")
        keep = "Dpkg::Options::=--force-confold"
        command = ["apt-get", "install", "-y", "--allow-downgrades", "-o", keep, f"/shared/{package.name}"]
        return self.run(command, env={"DEBIAN_FRONTEND": "noninteractive"}, timeout=180)

    # ---- GPUs ------------------------------------------------------------------------------------------------------

    def control(self, **settings: object) -> None:
        """Make the stand-in driver misbehave; the keys are those of tests/embedded/node.py. None takes one back."""
        self.standin.control(**settings)

    def clear_control(self) -> None:
        self.standin.clear_control()

    def hold(
        self, holder: embedded.Holder, *, cgroup: str = "system.slice/job.service", prefix: Sequence[str] = ()
    ) -> GpuHolder:
        """A process of the host (no container) that holds GPUs."""
        return self.standin.hold(holder, list(prefix), cgroup)

    # ---- containers ------------------------------------------------------------------------------------------------

    def add_container(
        self,
        vmid: int,
        *,
        gpus: Sequence[int] = (),
        how: str = "entry",
        unprivileged: bool = False,
        init: str = "systemd",
        options: Mapping[str, str] | None = None,
        raw: Sequence[str] = (),
    ) -> Container:
        """Write VMID.conf. `how`: "entry" bind-mounts the nodes (lxc.mount.entry), "dev" uses devN:.

        `init`: "systemd", or "tiny" (a C init that boots in no time and obeys the same signals).
        `raw`: further lines such as "lxc.init.cmd: /nonexistent".
        """
        container = Container(self, vmid)
        lines = {
            "arch": "amd64",
            "hostname": f"ct{vmid}",
            "memory": "512",
            "ostype": "debian",
            "swap": "0",
            "rootfs": f"local:{vmid}/vm-{vmid}-disk-0.subvol,size=0T",
            **(options or {}),
        }
        if unprivileged:
            lines["unprivileged"] = "1"
        more = list(raw)
        if init == "tiny":
            more.append("lxc.init.cmd: /opt/standin/tiny-init")
        if gpus:
            nodes = [f"nvidia{index}" for index in gpus] + ["nvidiactl", "nvidia-uvm"]
            if how == "dev":
                lines |= {f"dev{number}": f"/dev/{name},mode=0666" for number, name in enumerate(nodes)}
            else:
                more += [f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file" for name in nodes]
                more += [
                    f"lxc.cgroup2.devices.allow: c {major}:{minor} rwm"
                    for major, minor in (GPU_NODES[name] for name in nodes)
                ]
        text = "".join(f"{key}: {value}\n" for key, value in sorted(lines.items())) + "".join(
            f"{line}\n" for line in more
        )
        self.write(container.config_path, text, 0o640)
        self.run(["/usr/bin/python3", "-Es", "-c", WRITE_LXC_CONFIG, vmid])
        self.containers[vmid] = container
        return container

    # ---- stuck tasks -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self) -> Iterator[FrozenFileSystem]:
        """A small ext4 at /frozen, not frozen yet: `freeze()` makes every write on it wait in D state until `thaw()`."""
        file_system = FrozenFileSystem(self)
        try:
            yield file_system
        finally:
            file_system.close()


WRITE_LXC_CONFIG = """
import sys
sys.path.insert(0, "/usr/lib/pve-node")
from pvenode import conf
conf.write_lxc_config(conf.load_config(int(sys.argv[1])))
"""


@dataclass
class Container:
    """One container of a node."""

    node: VirtualNode
    vmid: int

    @property
    def cgroup(self) -> str:
        return f"lxc/{self.vmid}"

    @property
    def config_path(self) -> str:
        return f"/etc/pve/nodes/pve-test/lxc/{self.vmid}.conf"

    @property
    def unit(self) -> str:
        return f"pve-container@{self.vmid}.service"

    @property
    def config(self) -> str:
        return self.node.read(self.config_path)

    def start(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.node.pct("start", self.vmid, *words)

    def stop(self) -> subprocess.CompletedProcess[str]:
        return self.node.pct("stop", self.vmid)

    def shutdown(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.node.pct("shutdown", self.vmid, *words)

    def reboot(self) -> subprocess.CompletedProcess[str]:
        return self.node.pct("reboot", self.vmid)

    def hookscript(self, volid: str | None) -> None:
        words = ("-hookscript", volid) if volid else ("-delete", "hookscript")
        self.node.pct("set", self.vmid, *words)

    @property
    def running(self) -> bool:
        return "running" in self.node.pct("status", self.vmid).stdout

    @property
    def init_pid(self) -> int:
        """pid of the container's init in the node; 0 when there is none."""
        out = self.node.run(["lxc-info", "-n", str(self.vmid), "-p", "-H"], check=False).stdout.strip()
        return int(out) if out.isdigit() else 0

    @property
    def host_init_pid(self) -> int:
        return self.node.host_pid(self.init_pid)

    @property
    def monitor_pid(self) -> int:
        """The lxc-start of this container, a pid of the node; 0 when there is none."""
        pids = self.node.processes(f"lxc.monitor/{self.vmid}")
        return pids[0] if pids else 0

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.host_init_pid}/root")

    def processes(self) -> list[int]:
        return self.node.processes(self.cgroup)

    def attach_command(self, argv: Sequence[str | Path | int], options: Sequence[str] = ()) -> list[str | Path | int]:
        return ["lxc-attach", "-n", self.vmid, *options, "--", *argv]

    def attach(
        self, argv: Sequence[str | Path | int], *, options: Sequence[str] = (), check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return self.node.run(self.attach_command(argv, options), check=check, timeout=timeout)

    def attach_popen(self, argv: Sequence[str | Path | int], *, options: Sequence[str] = ()) -> NodeProcess:
        return self.node.popen(self.attach_command(argv, options), stdin=subprocess.DEVNULL)

    def wait_stopped(self, timeout: float = 20) -> None:
        """Until the monitor is gone and the unit has settled."""
        self.node.wait_until(lambda: not self.running, f"container {self.vmid} to stop", timeout)
        settled = ("inactive", "failed")
        self.node.wait_until(
            lambda: self.node.unit(self.unit, "ActiveState")["ActiveState"] in settled,
            f"{self.unit} to settle",
            timeout,
        )

    def wait_booted(self, timeout: float = 30) -> None:
        """Until the container's own systemd has finished booting (needed for a clean shutdown or reboot)."""
        asked = "until systemctl is-system-running --wait 2>&1 | grep -Eq 'running|degraded'; do sleep 0.02; done"
        self.attach(["sh", "-c", asked], timeout=timeout)

    def wait_ready(self) -> None:
        """Until the tiny init waits for signals: one that comes earlier is lost on a pid 1."""
        self.node.wait_until(lambda: self.init_pid and waits_as(self.host_init_pid, "tiny-init"), "the tiny init", 60)

    def hold(
        self,
        holder: embedded.Holder | None = None,
        *,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        cgroup: str | None = None,
        **spec: Any,
    ) -> GpuHolder:
        """Run a holder inside, through lxc-attach; returns when all its processes are ready.

        `holder` or its fields as keywords (tests/embedded/process.py). `options` are lxc-attach's; `prefix` is put before
        the program (["unshare", "--pid", "--fork", "--mount-proc"] for a nested namespace); `cgroup` (below lxc/VMID/ns,
        e.g. "system.slice/vllm.service") is where the whole family is moved once it is ready.
        """
        description = holder or embedded.Holder(**spec)
        command = ["lxc-attach", "-n", str(self.vmid), *options, "--", *prefix]
        started = self.node.standin.hold(description, command, DEFAULT_CGROUP)
        if cgroup:
            self.node.move(started.live_outer_pids, f"{self.cgroup}/ns/{cgroup}")
        return started


@dataclass
class FrozenFileSystem:
    """An ext4 on a loop device that can be frozen; seen at /frozen in the node."""

    node: VirtualNode
    device: str = ""
    is_frozen: bool = field(default=False)

    PATH = "/frozen"

    def __post_init__(self) -> None:
        """The image is in the node's own files: its name carries the mark by which the keeper finds the loop device."""
        image = f"/shared/pgr-node-{self.node.name}.ext4"
        self.node.run(["truncate", "-s", "16M", image])
        self.node.run(["mkfs.ext4", "-q", image])
        done = subprocess.run(
            ["losetup", "-f", "--show", str(self.node.host_path(image))], capture_output=True, text=True, check=True
        )
        self.device = done.stdout.strip()
        minor = os.minor(os.stat(self.device).st_rdev)
        make = f"test -e {self.device} || mknod {self.device} b 7 {minor}"
        script = f"mkdir -p {self.PATH}; {make}; mount -t ext4 {self.device} {self.PATH}"
        self.node.run(["sh", "-ec", script])

    def freeze(self) -> None:
        self.node.run(["fsfreeze", "-f", self.PATH])
        self.is_frozen = True

    def thaw(self) -> None:
        if self.is_frozen:
            self.node.run(["fsfreeze", "-u", self.PATH])
            self.is_frozen = False

    def close(self) -> None:
        self.thaw()
        self.node.run(["umount", "-l", self.PATH], check=False)
        subprocess.run(["losetup", "-d", self.device], capture_output=True, check=False)


def has_value(field: Any, value: str) -> bool:
    """A field given several times is a list of them."""
    return value in field if isinstance(field, list) else value == field


def ns_pids(host_pid: int) -> list[int]:
    """The process's pid in every PID namespace it is in, outermost first. NodeError when it is gone."""
    try:
        text = Path(f"/proc/{host_pid}/status").read_text()
    except OSError as error:
        raise NodeError(f"process {host_pid} is gone") from error
    match = re.search(r"^NSpid:\s*(.*)$", text, re.M)
    return [int(pid) for pid in match.group(1).split()] if match else [host_pid]


def waits_as(host_pid: int, comm: str) -> bool:
    """Whether a process has that name and sleeps (stat of proc(5)); False when it is gone."""
    with contextlib.suppress(OSError):
        name, _, rest = Path(f"/proc/{host_pid}/stat").read_text().partition("(")[2].rpartition(")")
        return name == comm and rest.split()[0] == "S"
    return False


def descendants(host_pid: int) -> list[int]:
    """All processes below this one, parents before children."""
    found, front = [], [host_pid]
    while front:
        children = [child for pid in front for task in tasks_of(pid) for child in read_pids(task / "children")]
        found += children
        front = children
    return found


def tasks_of(host_pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{host_pid}/task").iterdir())
    except OSError:
        return []


def read_pids(path: Path) -> list[int]:
    try:
        return [int(line) for line in path.read_text().split() if line != "0"]
    except OSError:
        return []


def wait_exit(pid: int, timeout: float) -> bool:
    """Whether the process ends within `timeout` seconds, by its pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], max(0.0, timeout))[0])
    finally:
        os.close(fd)


def wait_until(question: Callable[[], T], what: str, timeout: float = 60) -> T:
    deadline = time.monotonic() + timeout
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise NodeError(f"gave up waiting for {what} after {timeout} s")
        time.sleep(0.02)
