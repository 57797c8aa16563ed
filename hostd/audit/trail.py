"""The listener that writes a release down as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from hostd.audit.entry import Context, Entry
from hostd.audit.release import (
    blind_spot,
    fate,
    finished,
    foreign_seen,
    gpu_verified,
    holder_found,
    rung_begun,
    rung_done,
    started,
)
from hostd.events import Silent
from hostd.model import BlindSpot, GpuInfo, Holder, HolderReport, Observation, ProcessRef, Report, RungRecord


class Trail(Silent):
    """Writes a release down as it happens: give it to `Fanout`, with `Journal.send` as `send`."""

    def __init__(
        self,
        send: Callable[[Entry], None],
        *,
        phase: str = "",
        caller_uid: int | None = None,
        caller_pid: int | None = None,
        began_s: float | None = None,
    ) -> None:
        self._send = send
        self._ctx = Context(phase=phase, caller_uid=caller_uid, caller_pid=caller_pid, began_s=began_s)
        self._seen: set[ProcessRef] = set()
        self._blind: set[BlindSpot] = set()
        self._infos: list[GpuInfo] = []

    @property
    def context(self) -> Context:
        """For entries that belong to this release and that the loop does not know of."""
        return self._ctx

    def started(self, report: Report) -> None:
        ctx = self._ctx
        began = time.monotonic() if ctx.began_s is None else ctx.began_s
        self._ctx = replace(
            ctx,
            vmid=report.vmid,
            release_id=report.release_id,
            trigger=report.trigger,
            dry_run=report.dry_run,
            began_s=began,
        )
        self._send(started(self._ctx, report))

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        """Holders, others and blind spots, each once in a release."""
        self._infos = [gpu.info for gpu in observation.gpus] or self._infos
        chosen = {minor for holder in holders for minor in self._note(holder)}
        for holder in observation.foreign:
            if holder.ref not in self._seen and chosen & set(holder.gpus):
                self._seen.add(holder.ref)
                self._send(foreign_seen(self._ctx, holder, self._infos))
        self._note_blind(observation.blind_spots)

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        targets = tuple(targets)
        for holder in targets:
            self._note(holder)
        self._send(rung_begun(self._ctx, rung, targets))

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        self._send(rung_done(self._ctx, rung))

    def fate(self, report: Report, holder: HolderReport) -> None:
        self._note(holder.holder)
        self._send(fate(self._ctx, holder))

    def finished(self, report: Report) -> None:
        for gpu in report.gpus:
            self._send(gpu_verified(self._ctx, gpu))
        self._note_blind(report.blind_spots)
        self._send(finished(self._ctx, report))

    def _note(self, holder: Holder) -> tuple[int, ...]:
        if holder.ref not in self._seen:
            self._seen.add(holder.ref)
            self._send(holder_found(self._ctx, holder, self._infos))
        return holder.gpus

    def _note_blind(self, spots: Iterable[BlindSpot]) -> None:
        for spot in spots:
            if spot not in self._blind:
                self._blind.add(spot)
                self._send(blind_spot(self._ctx, spot))
