"""The kernel log during one release: an Xid that is more than an application's error stops the escalation."""

from __future__ import annotations

from collections.abc import Iterable

from hostd.model import BlindSpot
from hostd.system.kmsg import PATH, Kmsg, Xid

NOT_READ = "kmsg-unreadable"


class XidWatch:
    """What the driver reported since this was made. Close it. An unreadable log takes nothing away from a verdict."""

    def __init__(self, path: str = PATH) -> None:
        self._log = Kmsg(path)
        self.seen: list[Xid] = []
        """Oldest first."""

    def look(self) -> list[Xid]:
        """Reads what is new; returns everything so far."""
        self.seen += self._log.new_xids() or []
        return self.seen

    def fatal(self, pci_bus_ids: Iterable[str]) -> Xid | None:
        """The first one on these GPUs (none named: on any) that asks for a reset or a reboot."""
        wanted = set(pci_bus_ids)
        return next((x for x in self.look() if x.fatal and (not wanted or x.pci in wanted)), None)

    def blind_spot(self) -> BlindSpot | None:
        """Why the log cannot be read: a detail, no blind spot of the verdict."""
        return BlindSpot("kmsg", PATH, self._log.error, "detail-unreadable") if self._log.error else None

    def close(self) -> None:
        self._log.close()


def text_of(xid: Xid) -> str:
    """`Xid 119 on 0000:3b:00.0: GPU firmware (GSP) does not answer`."""
    return str(xid)


__all__ = ["XidWatch", "text_of"]
