"""Xids during one release: which stop it."""

from __future__ import annotations

from pathlib import Path

from hostd.xid import XidWatch

LINE = "3,1,1,-;NVRM: Xid (PCI:{}): {}, pid=7, name=x, text\n"


def test_only_new_ones_on_the_gpus_concerned(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LINE.format("0000:18:00", 119))
    watch = XidWatch(str(log))
    try:
        assert watch.fatal(["0000:18:00.0"]) is None, "it was there before"
        with log.open("a") as file:
            file.write(LINE.format("0000:18:00", 45) + LINE.format("0000:3b:00", 79))
        assert watch.fatal(["0000:18:00.0"]) is None
        found = watch.fatal([])
        assert found is not None and found.number == 79
        with log.open("a") as file:
            file.write(LINE.format("0000:18:00", 119))
        found = watch.fatal(["0000:18:00.0"])
        assert found is not None and found.number == 119
        assert [x.number for x in watch.seen] == [45, 79, 119] and watch.blind_spot() is None
    finally:
        watch.close()


def test_an_unreadable_log_is_a_detail(tmp_path: Path) -> None:
    watch = XidWatch(str(tmp_path / "none"))
    assert watch.fatal([]) is None
    spot = watch.blind_spot()
    assert spot is not None and spot.code == "detail-unreadable"
    watch.close()
