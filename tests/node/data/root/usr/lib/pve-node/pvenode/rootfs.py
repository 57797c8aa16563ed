"""The work of the LXC hooks: old cgroups, the root file system, device nodes, reboot trigger, hookscript post-stop."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from pvenode import conf, guest

CGROUP = Path("/sys/fs/cgroup")
PASSTHROUGH = conf.LXC_DIR / ".passthrough"  # not below /run, which is mounted nodev


def remove_cgroup(directory: Path) -> None:
    """Children first. Raises OSError (EBUSY) where a process is left."""
    if not directory.is_dir():
        return
    for child in sorted(entry for entry in directory.iterdir() if entry.is_dir()):
        remove_cgroup(child)
    directory.rmdir()


def remove_old_cgroups(vmid: int) -> None:
    """Ends the process with the error's number, saying nothing: LXC prints "Script exited with status 16"."""
    try:
        for parent in ("lxc", "lxc.monitor"):
            remove_cgroup(CGROUP / parent / str(vmid))
    except OSError as error:
        os._exit(error.errno or 1)


def reboot_trigger(vmid: int) -> Path:
    return conf.LXC_DIR / str(vmid) / "reboot"


def mount_rootfs(config: conf.Config) -> None:
    """The container's own layer over the shared tree; this is the monitor's private mount namespace."""
    base = conf.BASE / ("ct-unpriv" if config.unprivileged else "ct")
    volume = conf.volume_dir(config.vmid)
    for part in ("upper", "work"):
        (volume / part).mkdir(parents=True, exist_ok=True)
    info = base.stat()
    os.chown(volume / "upper", info.st_uid, info.st_gid)
    os.chmod(volume / "upper", 0o755)
    options = f"lowerdir={conf.BASE}/ct-tools:{base},upperdir={volume}/upper,workdir={volume}/work"
    target = conf.LXC_DIR / str(config.vmid) / "rootfs"
    subprocess.run(["mount", "-t", "overlay", f"ct-{config.vmid}", "-o", options, str(target)], check=True)


def make_passthrough_nodes(config: conf.Config) -> None:
    """devN: a fresh node with the same device number, ready before the container's namespaces exist."""
    shutil.rmtree(PASSTHROUGH / str(config.vmid), ignore_errors=True)
    for path, options in config.devices():
        try:
            info = os.stat(path)
        except FileNotFoundError:
            sys.exit(f"Device {path} does not exist")
        if not (stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode)):
            sys.exit(f"{path} is not a device")
        node = PASSTHROUGH / str(config.vmid) / path.lstrip("/")
        node.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(node, stat.S_IFMT(info.st_mode) | 0o600, info.st_rdev)
        os.chmod(node, int(options.get("mode", "0660"), 8))
        shift = 100000 if config.unprivileged else 0
        os.chown(node, int(options.get("uid", "0")) + shift, int(options.get("gid", "0")) + shift)


def pre_start(vmid: int) -> None:
    config = conf.load_config(vmid)
    remove_old_cgroups(vmid)
    reboot_trigger(vmid).unlink(missing_ok=True)
    make_passthrough_nodes(config)
    mount_rootfs(config)


def autodev(vmid: int) -> None:
    """Bind the prepared nodes into the container's /dev. Runs in its user namespace: /etc/pve is not readable here."""
    prepared = PASSTHROUGH / str(vmid)
    root = Path(os.environ["LXC_ROOTFS_MOUNT"])
    for source in (path for path in prepared.rglob("*") if not path.is_dir()):
        target = root / source.relative_to(prepared)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        subprocess.run(["mount", "--bind", str(source), str(target)], check=True)


def post_stop(vmid: int) -> int:
    """Unmount; on a reboot leave the trigger and fail, so that LXC does not restart by itself; else the hookscript."""
    done = subprocess.run(["umount", "--recursive", str(conf.LXC_DIR / str(vmid) / "rootfs")], check=False)
    if done.returncode:
        return done.returncode
    if os.environ.get("LXC_TARGET") == "reboot":
        reboot_trigger(vmid).touch()
        return 1
    guest.run_hookscript(conf.load_config(vmid), "post-stop")
    return 0
