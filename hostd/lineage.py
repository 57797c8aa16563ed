"""Who starts a job again that no unit runs: a process (a shell loop, say) that has been seen to start a holder anew. That one
process may be signalled with `--stop-units`, and is named in the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable

from hostd.errors import is_gone
from hostd.membership import ContainerView
from hostd.model import Holder, Process, ProcessRef
from hostd.sources import Sources


class Lineage:
    """Remembers the living parents of holders, so that whoever starts a job again can be named."""

    def __init__(self, sources: Sources, view: ContainerView) -> None:
        self._sources = sources
        self._view = view
        self._parents: dict[ProcessRef, Process] = {}
        self._seen: dict[ProcessRef, ProcessRef] = {}
        """Holder -> its parent."""

    def note(self, holders: Iterable[Holder]) -> None:
        """Reads the parent of each holder that was not seen before."""
        for holder in holders:
            if holder.ref in self._seen or holder.process.ppid <= 1:
                continue
            try:
                parent = self._sources.procfs.read_process(holder.process.ppid)
            except OSError as exc:
                if is_gone(exc):
                    continue
                raise
            if parent is None or parent.is_zombie or parent.start_time > holder.process.start_time:
                continue
            if self._view.owns(parent):
                self._seen[holder.ref] = parent.ref
                self._parents[parent.ref] = parent

    def restarters(self, returned: Iterable[Holder], init: ProcessRef | None) -> list[Process]:
        """The container's processes that have started more than one holder, one of `returned` among them. Not its
        init, and no holder: a holder is dealt with as such."""
        found: dict[ProcessRef, Process] = {}
        for holder in returned:
            parent = self._seen.get(holder.ref)
            if parent is None or parent == init or parent in self._seen:
                continue
            if sum(1 for other in self._seen.values() if other == parent) > 1:
                found[parent] = self._parents[parent]
        return list(found.values())
