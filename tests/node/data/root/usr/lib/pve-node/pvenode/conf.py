"""Container configuration: /etc/pve/lxc/VMID.conf, the lock around it, and the LXC configuration made from it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from pvenode.run import PveError

PVE = Path("/etc/pve")
LXC_DIR = Path("/var/lib/lxc")
IMAGES = Path("/var/lib/vz/images")
BASE = Path("/usr/share/pve-node")
LOCK_TIMEOUT = 10
# What common.conf allows; userns.conf drops it, and a list with the GPUs alone would shut out /dev/null.
COMMON_DEVICES = ("1:3", "1:5", "1:7", "1:8", "1:9", "5:0", "5:1", "5:2", "136:*", "10:229")
NOT_PASSED_ON = {"lxc.hook.start-host"}


@dataclass
class Config:
    """One configuration up to its first [section]; `raw` holds the lxc.* lines in order."""

    vmid: int
    values: dict[str, str] = field(default_factory=dict)
    raw: list[tuple[str, str]] = field(default_factory=list)
    rest: str = ""
    digest: str = ""

    @property
    def unprivileged(self) -> bool:
        return self.values.get("unprivileged") == "1"

    def devices(self) -> list[tuple[str, dict[str, str]]]:
        """(path, options) of each devN, in order."""
        found = []
        for key in sorted((k for k in self.values if re.fullmatch(r"dev\d+", k)), key=lambda k: int(k[3:])):
            first, *options = self.values[key].split(",")
            found.append((first.removeprefix("path="), dict(option.split("=", 1) for option in options)))
        return found


def node_name() -> str:
    """From /etc/pve, not from uname: the autodev hook already has the container's host name."""
    return os.readlink(PVE / "local").rpartition("/")[2]


def config_path(vmid: int) -> Path:
    return PVE / "nodes" / node_name() / "lxc" / f"{vmid}.conf"


def parse_config(vmid: int, text: str) -> Config:
    config = Config(vmid, digest=hashlib.sha1(text.encode()).hexdigest())
    head, separator, rest = re.match(r"(?s)(.*?)(^\[|\Z)(.*)", text, re.M).groups()  # type: ignore[union-attr]
    config.rest = separator + rest
    for line in head.splitlines():
        match = re.match(r"([a-zA-Z0-9_.-]+)\s*[:=]\s*(.*\S)\s*$", line)
        if not match or line.startswith("#"):
            continue
        key, value = match.groups()
        if key.startswith("lxc."):
            config.raw.append((key, value))
        else:
            config.values[key] = value
    return config


def load_config(vmid: int) -> Config:
    try:
        return parse_config(vmid, config_path(vmid).read_text())
    except FileNotFoundError:
        raise PveError(f"Configuration file 'nodes/{node_name()}/lxc/{vmid}.conf' does not exist") from None


def save_config(config: Config) -> None:
    lines = [f"{key}: {value}" for key, value in sorted(config.values.items())]
    lines += [f"{key}: {value}" for key, value in config.raw]
    path = config_path(config.vmid)
    temporary = path.with_suffix(f".conf.tmp.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n" + (f"\n{config.rest}" if config.rest else ""))
    temporary.rename(path)


def vmids() -> list[int]:
    return sorted(int(path.stem) for path in config_path(0).parent.glob("*.conf") if path.stem.isdigit())


@contextmanager
def config_lock(vmid: int, timeout: int = LOCK_TIMEOUT) -> Iterator[None]:
    path = Path(f"/run/lock/lxc/pve-config-{vmid}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)

    def give_up(_signum: int, _frame: FrameType | None) -> None:
        raise PveError(f"can't lock file '{path}' - got timeout")

    with open(path, "a") as handle:
        before = signal.signal(signal.SIGALRM, give_up)
        signal.alarm(timeout)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        yield


def lxc_lines(config: Config) -> list[str]:
    vmid = config.vmid
    lines = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        "lxc.arch = amd64",
        "lxc.include = /usr/share/lxc/config/common.conf",
    ]
    if config.unprivileged:
        lines += ["lxc.include = /usr/share/lxc/config/userns.conf"]
        lines += ["lxc.idmap = u 0 100000 65536", "lxc.idmap = g 0 100000 65536", "lxc.cgroup2.devices.deny = a"]
        lines += ["lxc.cgroup2.devices.allow = c *:* m", "lxc.cgroup2.devices.allow = b *:* m"]
        lines += [f"lxc.cgroup2.devices.allow = c {number} rwm" for number in COMMON_DEVICES]
    lines += [
        "lxc.apparmor.profile = unconfined",
        "lxc.monitor.unshare = 1",
        "lxc.tty.max = 2",
        f"lxc.uts.name = {config.values.get('hostname', f'CT{vmid}')}",
        f"lxc.rootfs.path = {LXC_DIR}/{vmid}/rootfs",
        "lxc.net.0.type = empty",
    ]
    # The stand-in driver's state, for holders inside (tests/embedded); a /run of its own keeps systemd from hiding it.
    lines += ["lxc.mount.entry = tmpfs run tmpfs rw,nosuid,nodev,mode=755,create=dir"]
    lines += ["lxc.mount.entry = /run/nvidia-standin run/nvidia-standin none rbind,optional,create=dir"]
    for path, _ in config.devices():
        try:
            rdev = os.stat(path).st_rdev
        except OSError:
            continue  # the pre-start hook says it
        lines.append(f"lxc.cgroup2.devices.allow = c {os.major(rdev)}:{os.minor(rdev)} rw")
    return lines + [f"{key} = {value}" for key, value in config.raw if key not in NOT_PASSED_ON]


def write_lxc_config(config: Config) -> None:
    directory = LXC_DIR / str(config.vmid)
    (directory / "rootfs").mkdir(parents=True, exist_ok=True)
    (directory / "config").write_text("\n".join(lxc_lines(config)) + "\n")


def volume_dir(vmid: int) -> Path:
    """The container's own layer over the shared root file system."""
    return IMAGES / str(vmid) / f"vm-{vmid}-disk-0.subvol"
