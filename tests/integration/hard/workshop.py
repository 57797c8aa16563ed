"""Stand-ins for `nvidia-smi` and `systemctl`, over the node's /usr/bin, that can be told to misbehave or to wait."""

from __future__ import annotations

from tests.embedded.node import Node, wait_until

SMI = r"""#!/bin/sh
echo "$*" >> /run/workshop/smi.log
mode=$(cat /run/workshop/mode)
for fd in /proc/[0-9]*/fd/*; do
    case $(stat -L -c %t:%T "$fd" 2>/dev/null) in
        4:32|4:33) echo "$(readlink -f ${fd%/fd/*}) has it open" >> /run/workshop/open.log; mode=inuse ;;
    esac
done
if [ -e /run/workshop/pause-smi ]; then
    touch /run/workshop/paused
    while [ -e /run/workshop/pause-smi ]; do sleep 0.01; done
fi
case $mode in
    ok|sick) sed -i -e '/^ghost_mib/d' -e '/^recovery_action/d' -e '/^leak_mib/d' /run/nvidia-standin/control
        [ $mode = ok ] || echo 'recovery_action 2' >> /run/nvidia-standin/control
        echo "GPU was successfully reset."; exit 0 ;;
    inuse) echo "GPU is currently in use by another process."; exit 3 ;;
    *) echo "Unable to reset this GPU: not supported."; exit 2 ;;
esac
"""
"""In use whenever any process of the node has a GPU open, as the real one says."""
SYSTEMCTL = r"""#!/bin/sh
echo "$*" >> /run/workshop/systemctl.log
verb=$1
[ "$verb" = is-active ] && shift
service=/run/workshop/services/$2
if [ -e "/run/workshop/pause-$verb" ]; then
    touch /run/workshop/paused
    while [ -e "/run/workshop/pause-$verb" ]; do sleep 0.01; done
fi
case $verb in
    is-active) [ "$(cat "$service" 2>/dev/null)" = active ]; exit $? ;;
    stop) echo inactive > "$service" ;;
    start) [ -e /run/workshop/no-start ] && { echo "Job failed."; exit 1; }; echo active > "$service" ;;
esac
"""


class Workshop:
    """The node's /usr/bin with the two programs in it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        for name in ("services", "upper", "work"):
            node.path(f"/run/workshop/{name}").mkdir(parents=True)
        options = "lowerdir=/usr/bin,upperdir=/run/workshop/upper,workdir=/run/workshop/work"
        node.init.mount("bin", "/usr/bin", "overlay", 0, options)
        for name, text in (("nvidia-smi", SMI), ("systemctl", SYSTEMCTL)):
            target = node.path(f"/usr/bin/{name}")
            target.unlink(missing_ok=True)
            node.write(f"/usr/bin/{name}", text, 0o755)
        self.mode("ok")

    def mode(self, word: str) -> None:
        """ok · sick (done, but the driver then asks for a reboot) · inuse · unsupported."""
        self.node.write("/run/workshop/mode", word)

    def service(self, name: str, state: str = "active") -> None:
        self.node.write(f"/run/workshop/services/{name}", state + "\n")

    def is_active(self, name: str) -> bool:
        return self.node.read(f"/run/workshop/services/{name}") == "active\n"

    def log(self, name: str) -> list[str]:
        path = self.node.path(f"/run/workshop/{name}.log")
        return path.read_text().splitlines() if path.exists() else []

    def pause(self, verb: str) -> None:
        """The next `systemctl VERB` (or `smi`) waits until `go_on`."""
        self.node.write(f"/run/workshop/pause-{verb}", "")

    def wait_paused(self) -> None:
        wait_until(lambda: self.node.path("/run/workshop/paused").exists(), "paused")

    def go_on(self) -> None:
        for path in self.node.path("/run/workshop").glob("pause*"):
            path.unlink()

    def persistence(self, minor: int) -> str:
        return self.node.read(f"/run/nvidia-standin/state/persistence.{minor}").strip()

    def records(self) -> list[str]:
        directory = self.node.path("/run/pve-gpu-release/resets")
        return sorted(p.name for p in directory.glob("*.json")) if directory.is_dir() else []
