"""A bare Debian tree to install packages into: an overlay on the tree that packages are built in, without systemd,
Proxmox, a driver or network. Every call runs in namespaces of its own, so nothing stays mounted."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive",
}
ENTER = """
set -e
mount --make-rprivate /
mount -t overlay overlay -o lowerdir="$1",upperdir="$2/upper",workdir="$2/work" "$2/root"
mount -t proc proc "$2/root/proc"
mount -t tmpfs tmpfs "$2/root/tmp"
mount --bind "$2/run" "$2/root/run"
root=$2/root
shift 2
exec chroot "$root" "$@"
"""
NOT_OURS = r"^/(proc|dev|tmp|run/lock|var/(cache|log|lib/apt|lib/dpkg/.*-old$)|root)"
LISTING = f"find / -xdev -printf '%p %y %m %U:%G %l\\n' -path /proc -prune | grep -Ev '{NOT_OURS}' | sort; ls -A /run"


@dataclass
class Chroot:
    tree: Path
    work: Path

    def __post_init__(self) -> None:
        for name in ("upper/root", "work", "root", "run"):
            (self.work / name).mkdir(parents=True, exist_ok=True)

    def run(self, script: str, *, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A bash script in the tree; stdout and stderr as text."""
        enter = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--"]
        command = [*enter, "bash", "-c", ENTER, "enter", str(self.tree), str(self.work), "bash", "-c", script]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{script}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def copy_in(self, source: Path, name: str = "") -> str:
        """A file or a directory to /root; returns its path inside."""
        target = self.work / "upper/root" / (name or source.name)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
        return f"/root/{target.name}"

    def install(self, package: Path) -> str:
        """As an administrator does it, without the recommended packages; returns what apt said."""
        path = self.copy_in(package)
        return self.run(f"apt-get install -y --no-install-recommends {path} 2>&1").stdout

    def files(self) -> list[str]:
        """Everything that is there, with type, mode, owner and target."""
        return self.run(LISTING).stdout.splitlines()
