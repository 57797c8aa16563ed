"""Xid messages: texts as drivers print them, and a log that is a file or the machine's own /dev/kmsg."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.system.kmsg import MEANINGS, Kmsg, Severity, Xid, parse_message, parse_records

LOST = "GPU has fallen off the bus."


class TestMessages:
    @pytest.mark.parametrize(
        ("message", "expected"),
        [
            (
                f"NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, {LOST}",
                Xid("0000:3b:00.0", 79, f"pid=1234, name=python3, {LOST}", 1234),
            ),
            (f"NVRM: Xid (PCI:0000:3b:00): 79, {LOST}", Xid("0000:3b:00.0", 79, LOST)),
            (
                "NVRM: Xid (PCI:0000:3B:00): 119, pid='<unknown>', name=<unknown>, Timeout after 6s of waiting for RPC",
                Xid("0000:3b:00.0", 119, "pid='<unknown>', name=<unknown>, Timeout after 6s of waiting for RPC"),
            ),
            ("NVRM: Xid (0000:03:00): 31, Ch 00000010", Xid("0000:03:00.0", 31, "Ch 00000010")),
            ("NVRM: Xid (PCI:0000:17:00 GPU-I:03): 94, pid=5", Xid("0000:17:00.0", 94, "pid=5", 5)),
            ("NVRM: Xid (PCI:10001:00:00): 45", Xid("10001:00:00.0", 45, "")),
            (f"NVRM: GPU 0000:3b:00.0: {LOST}", Xid("0000:3b:00.0", None, f"GPU 0000:3b:00.0: {LOST}")),
            (
                "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2335) NVRM: fallen off the bus and is not responding",
                Xid(
                    "0000:3b:00.0",
                    None,
                    "The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2335) NVRM: fallen off the bus and is not responding",
                ),
            ),
        ],
    )
    def test_are_understood(self, message, expected):
        assert parse_message(message) == expected

    @pytest.mark.parametrize(
        "message",
        [
            "",
            "NVRM: loading NVIDIA UNIX Open Kernel Module",
            "NVRM: GPU at PCI:0000:3b:00: GPU-6a1f0e52-93c4-4d0b-8f2e-0d5c7b1a2e50",
            "python3: NVRM: Xid (PCI:0000:3b:00): 79, forged",
            "NVRM: Xid (PCI:0000:3b:00): none",
            f"NVRM: {LOST}",
        ],
    )
    def test_others_are_not_for_us(self, message):
        assert parse_message(message) is None

    @given(st.text())
    def test_takes_any_text(self, text):
        parse_message("NVRM: Xid (PCI:0000:3b:00): " + text)
        parse_message("NVRM: " + text)
        parse_records(text)


class TestMeanings:
    @pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 94])
    def test_errors_of_an_application_do_not_stop_us(self, number):
        assert not Xid("0000:3b:00.0", number, "").fatal

    @pytest.mark.parametrize("number", [48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 999, None])
    def test_fatal_and_unknown_ones_do(self, number):
        assert Xid("0000:3b:00.0", number, "").fatal

    def test_a_lost_gpu_needs_more_than_a_reset(self):
        for xid in (Xid("0000:3b:00.0", None, ""), Xid("0000:3b:00.0", 79, "")):
            assert xid.meaning.severity is Severity.REBOOT and "reboot" in xid.advice

    def test_read_as_a_sentence(self):
        assert str(Xid("0000:3b:00.0", 119, "")).startswith("Xid 119 on 0000:3b:00.0: GPU firmware")
        assert "without a number" in str(Xid("0000:3b:00.0", None, ""))
        assert all(meaning.text and not meaning.text.endswith(".") for meaning in MEANINGS.values())


class TestRecords:
    def test_of_the_kernel_only(self):
        text = "".join(
            f"{priority},100,5,-;NVRM: Xid (PCI:0000:3b:00): {number}, x\n SUBSYSTEM=pci\n"
            for priority, number in ((4, 79), (12, 13), (0, 31), ("x", 43))
        )
        assert [xid.number for xid in parse_records(text)] == [79, 31]


class TestLog:
    def test_only_what_is_new(self, tmp_path: Path):
        path = tmp_path / "kmsg"
        path.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 13, old\n")
        log = Kmsg(str(path))
        assert log.error is None and log.new_xids() == []
        with path.open("a") as file:
            file.write("6,2,2,-;eth0: link up\n4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 79, new\n")
        assert [xid.number for xid in log.new_xids() or ()] == [79]
        assert log.new_xids() == []
        log.close()

    def test_a_missing_or_unreadable_log_says_why(self, tmp_path: Path):
        log = Kmsg(str(tmp_path / "none"))
        assert log.new_xids() is None and "No such file" in (log.error or "")
        log.close()

    @pytest.mark.root
    def test_of_this_machine(self):
        if os.geteuid() or not os.access("/dev/kmsg", os.R_OK | os.W_OK):
            pytest.skip("needs root and /dev/kmsg")
        log = Kmsg()
        with open("/dev/kmsg", "w", encoding="ascii") as kmsg:
            kmsg.write("<6>pve-gpu-release: a line of its tests\n")
        assert select.select([log], [], [], 0)[0]
        assert log.new_xids() == []
        log.close()
        log.close()
