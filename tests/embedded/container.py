"""A container of the embedded node, with Proxmox's cgroup layout, and a docker-like one inside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from .process import Holder, HolderHandle, Process, describe
from .scope import MS_BIND, MS_MOVE, MS_NOSUID, MS_REC, STANDIN, Running, Scope
from .wire import Init, NodeError, report_socket

DEV_STAGING = "/run/.standin-dev"
RUN_STAGING = "/run/.standin-run"
ETC_STAGING = "/run/.standin-etc"
ETC_FILES = ("passwd", "group", "nsswitch.conf", "hosts", "host.conf", "os-release", "debian_version", "machine-id",
             "ld.so.cache", "localtime", "profile")  # fmt: skip
UID_BASE = 100000


class Container(Scope):
    """Container `vmid`: monitor in /lxc.monitor/VMID, init (pid 1 inside) and payload in /lxc/VMID/ns.

    Commands and holders go to `cgroup=` below /lxc/VMID/ns (default: "init.scope"); `attach=True` puts them where
    `pct exec` does (/lxc/VMID/ns/.lxc). Use `node.container(...)` to make one.
    """

    vmid: int | None
    monitor: Running

    @property
    def init_pid(self) -> int:
        """Its init's pid in the node's PID namespace."""
        return self.init_process.pid

    @property
    def payload(self) -> Path:
        """Cgroup /lxc/VMID on this machine (a nested container: its own cgroup)."""
        directory = self._cgroup_root / self._base
        return directory.parent if directory.name == "ns" else directory

    def attach(self, argv: Sequence[str | Path], **options: Any) -> Running:
        """`pct exec`: a process that is no child of the container's init, in /lxc/VMID/ns/.lxc."""
        return self.popen(argv, cgroup=".lxc", **options)

    def nested(self, name: str, devices: Sequence[str] = (), nodes: str = "bind") -> Container:
        """A docker-like container inside: own PID namespace one level deeper, cgroup ns/NAME ("docker/<64 hex>")."""
        monitor = f"{self._base}/system.slice/containerd.service"
        return build(self, None, f"{self._base}/{name}", monitor, devices, nodes, f"containerd-shim {name}")

    def become_holder(self, holder: Holder | None = None, **options: Any) -> HolderHandle:
        """Turn the init itself into a holder (an OCI-image container whose application is pid 1).

        It stops being a server: no more mounts; commands and holders can still be started.
        """
        spec = holder or Holder(**options)
        ours, theirs = report_socket()
        with closing(theirs):
            environment = [f"HOLDER_SPEC={spec.spec()}", "HOLDER_READY_FD=3"]
            words = ["exec", str(self._built.holder), str(len(environment)), *environment, *spec.argv]
            self.init.ask(*words, fd=theirs.fileno())
        handle = HolderHandle(self.monitor.popen, ours, os.memfd_create("log"), self.path(STANDIN) / "alloc")
        self._family.holders.append(handle)
        for _ in range(spec.expected_reports()):
            handle.next_report()
        return handle

    @contextmanager
    def furnisher(self, unprivileged: bool) -> Iterator[Init]:
        """Who mounts things: the init, or for an unprivileged container a helper with the host's rights (as in LXC)."""
        if not unprivileged:
            yield self.init
            return
        ours, theirs = report_socket()
        with closing(ours):
            with closing(theirs):
                env = {"NODETOOL": f"serve:{theirs.fileno()}"}
                self.popen(["furnisher"], exe=self._built.nodetool, env=env, pass_fds=(theirs.fileno(),))
            yield Init.greet(ours)

    @contextmanager
    def unwalkable(self, cgroups: int = 20_050) -> Iterator[None]:
        """More cgroups than anybody walks, met before init.scope, where the init is (as with systemd in it)."""
        tree = self._cgroup_root / self._base
        (tree / "init.scope").mkdir(exist_ok=True)
        (tree / "init.scope/cgroup.procs").write_text(str(self.init_process.outer_pid))
        number = 0
        while (first := next(os.scandir(tree)).name) == "init.scope" or not (tree / first).is_dir():
            (tree / f"z{number}").mkdir()
            number += 1
        crowd = [tree / first / str(n) for n in range(cgroups)]
        for path in crowd:
            path.mkdir()
        try:
            yield
        finally:
            for path in crowd:
                path.rmdir()

    def members(self) -> list[Process]:
        """The live processes in its payload cgroup and below (handles; the caller need not close them)."""
        found = []
        for procs in sorted(self.payload.rglob("cgroup.procs")):
            for line in procs.read_text().split():
                try:
                    found.append(describe(int(line)))
                except (NodeError, OSError):
                    continue
        self._family.processes += found
        return found

    def kill_monitor(self) -> None:
        """`kill -9` of the monitor: the payload lives on, nobody tells Proxmox."""
        self.monitor.process.kill(signal.SIGKILL)
        self.monitor.process.wait_gone()

    def stop(self) -> None:
        """Like `lxc-stop --kill`: SIGKILL to the init; the kernel ends its PID namespace, the monitor and cgroups go.

        A cgroup in which something is left (a process of another PID namespace, D state) stays, as with LXC.
        """
        self.init_process.kill(signal.SIGKILL)
        self.init_process.wait_gone()
        self.monitor.popen.wait(timeout=60)
        monitor = self._cgroup_root / f"lxc.monitor/{self.vmid}"
        for tree in (self.payload, monitor) if self.vmid else (self.payload,):
            for directory in sorted((tree, *tree.rglob("*/")), key=lambda path: len(path.parts), reverse=True):
                with suppress(OSError):
                    directory.rmdir()


def build(
    parent: Scope,
    vmid: int | None,
    payload: str,
    monitor: str,
    devices: Sequence[str],
    nodes: str,
    title: str,
    unprivileged: bool = False,
) -> Container:
    """Make the namespaces and their init below `parent`; `payload` and `monitor` are cgroups of the node."""
    root = parent._cgroup_root
    for path in (payload, monitor):
        (root / path).mkdir(parents=True, exist_ok=True)
    procs = os.open(root / payload / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    log = os.memfd_create("log")
    ours, theirs = report_socket()
    with closing(theirs):
        try:
            running = parent.popen(
                [title],
                exe=parent._built.nodetool,
                cgroup=os.path.relpath(monitor, parent._base) if parent._base else monitor,
                env={"NODETOOL": f"monitor:{theirs.fileno()}:{procs}:{UID_BASE if unprivileged else 0}"},
                pass_fds=(theirs.fileno(), procs),
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(procs)
            os.close(log)
    init = Init.greet(ours)
    container = Container(init, parent._built, parent._family, root, payload, "init.scope")
    container.vmid = vmid
    container.monitor = running
    has_own_users = unprivileged or parent._without == ""
    with container.furnisher(has_own_users) as furnisher:
        _furnish(container, furnisher, devices, nodes)
    if has_own_users:
        container._without = ""
    return container


def _furnish(container: Container, init: Init, devices: Sequence[str], nodes: str) -> None:
    """Own /proc, /etc, /dev with the GPUs, and /run; the stand-in driver's state is shared with the node."""
    container.path(RUN_STAGING).mkdir(exist_ok=True)
    init.mount("run", RUN_STAGING, "tmpfs", MS_NOSUID, "mode=755")
    container.path(f"{RUN_STAGING}/nvidia-standin").mkdir()
    init.mount(STANDIN, f"{RUN_STAGING}/nvidia-standin", "", MS_BIND | MS_REC)
    container._make_dev(DEV_STAGING, init)
    for device in devices:
        _make_device(container, init, device, nodes)
    _make_etc(container, init)
    init.mount(DEV_STAGING, "/dev", "", MS_MOVE)
    init.mount(RUN_STAGING, "/run", "", MS_MOVE)
    init.mount("proc", "/proc", "proc")
    if container.path(f"{STANDIN}/devices").exists():
        init.mount(f"{STANDIN}/devices", "/proc/devices", "", MS_BIND)
    init.ask("hostname", f"ct{container.vmid}" if container.vmid else "nested")


def _make_etc(container: Container, init: Init) -> None:
    """An /etc of its own, so that whatever a test writes there is the container's alone."""
    staging = container.path(ETC_STAGING)
    staging.mkdir(exist_ok=True)
    init.mount("etc", ETC_STAGING, "tmpfs", MS_NOSUID, "mode=755")
    for name in ETC_FILES:
        with suppress(FileNotFoundError):
            (staging / name).write_bytes(container.path(f"/etc/{name}").read_bytes())
    if container.path("/etc/alternatives").is_dir():
        (staging / "alternatives").mkdir()
        init.mount("/etc/alternatives", f"{ETC_STAGING}/alternatives", "", MS_BIND)
    init.mount(ETC_STAGING, "/etc", "", MS_MOVE)


def _make_device(container: Container, init: Init, name: str, nodes: str) -> None:
    target, source = f"{DEV_STAGING}/{name}", container.path(f"/dev/{name}")
    container.path(target).parent.mkdir(parents=True, exist_ok=True)
    if nodes == "mknod":
        number = source.stat().st_rdev
        container.mknod(target, os.major(number), os.minor(number))
    elif nodes == "bind":
        container.path(target).touch()
        init.mount(f"/dev/{name}", target, "", MS_BIND)
    else:
        raise NodeError(f"nodes={nodes!r}: expected 'mknod' or 'bind'")
