"""/proc/devices and /proc/driver/nvidia as temporary trees."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.model import DeviceId, DriverNumbers, GpuInfo
from hostd.system import devices

MODERN = """Character devices:
  1 mem
  4 /dev/vc/0
195 nvidia
195 nvidiactl
234 nvidia-nvswitch
235 nvidia-caps-imex-channels
236 nvidia-caps
237 nvidia-nvlink
509 nvidia-uvm
510 hidraw-nvidia

Block devices:
  7 loop
259 nvidia-is-no-block-device
"""

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 120
GPU UUID: \t GPU-6a1f0e52-93c4-4d0b-8f2e-0d5c7b1a2e50
Video BIOS: \t 96.00.a5.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:3b:00.0
Device Minor: \t 3
GPU Firmware: \t 580.159
GPU Excluded:\t No
"""

UUID = "GPU-6a1f0e52-93c4-4d0b-8f2e-0d5c7b1a2e50"


def gpu(minor: int, uuid: str = "", pci: str = "", name: str = "", index: int | None = None) -> GpuInfo:
    return GpuInfo(minor, uuid, pci, name, index)


class TestProcDevices:
    def test_every_character_major_whose_name_begins_with_nvidia(self):
        numbers = devices.parse_proc_devices(MODERN)
        assert sorted(numbers.by_major) == [195, 234, 235, 236, 237, 509]
        assert numbers.by_major[195] == {"nvidia", "nvidiactl"}
        assert numbers.gpu_majors == {195} and numbers.present

    def test_an_old_driver(self):
        numbers = devices.parse_proc_devices("Character devices:\n195 nvidia-frontend\n243 nvidia-uvm\n")
        assert numbers.gpu_majors == {195} and 243 in numbers

    def test_no_driver(self):
        assert not devices.parse_proc_devices("Character devices:\n  1 mem\n\nBlock devices:\n  7 loop\n").present

    def test_reads_a_file_and_raises_when_it_cannot(self, tmp_path: Path):
        (tmp_path / "devices").write_text(MODERN)
        assert 509 in devices.read_driver_numbers(str(tmp_path / "devices"))
        with pytest.raises(FileNotFoundError):
            devices.read_driver_numbers(str(tmp_path / "missing"))

    def test_this_machine(self):
        devices.read_driver_numbers()

    @given(st.text())
    def test_takes_any_text(self, text):
        devices.parse_proc_devices("Character devices:\n" + text)

    @given(st.dictionaries(st.integers(0, 4095), st.sampled_from(["nvidia", "nvidia-uvm", "mem", "xnvidia"])))
    def test_is_the_inverse_of_the_kernels_printing(self, table):
        text = "Character devices:\n" + "".join(f"{major:3d} {name}\n" for major, name in table.items())
        numbers = devices.parse_proc_devices(text + "\nBlock devices:\n")
        assert numbers.by_major == {m: {n} for m, n in table.items() if n.startswith("nvidia")}


class TestProcGpus:
    def tree(self, root: Path, *addresses: str) -> str:
        for minor, address in enumerate(addresses):
            directory = root / "gpus" / address
            directory.mkdir(parents=True)
            text = INFORMATION.replace("0000:3b:00.0", address).replace("Minor: \t 3", f"Minor: \t {minor}")
            (directory / "information").write_text(text)
        return str(root)

    def test_information(self):
        assert devices.parse_information(INFORMATION) == gpu(3, UUID, "0000:3b:00.0", "NVIDIA H200")

    def test_a_gpu_that_is_not_initialised_yet_has_no_uuid(self):
        text = INFORMATION.replace(UUID, "GPU-????????-????-????-????-????????????")
        assert devices.parse_information(text).uuid == ""

    def test_an_empty_file_keeps_the_address_of_its_directory(self):
        assert devices.parse_information("", "0000:3B:00.0") == gpu(-1, "", "0000:3b:00.0")

    def test_reads_every_gpu(self, tmp_path: Path):
        root = self.tree(tmp_path, "0000:18:00.0", "0000:3b:00.0")
        assert [(g.minor, g.pci_bus_id) for g in devices.read_proc_gpus(root)] == [
            (0, "0000:18:00.0"),
            (1, "0000:3b:00.0"),
        ]

    def test_without_the_driver_there_are_none(self, tmp_path: Path):
        assert devices.read_proc_gpus(str(tmp_path)) == ()

    def test_a_gpu_that_leaves_while_we_read_is_no_error(self, tmp_path: Path):
        root = self.tree(tmp_path, "0000:18:00.0", "0000:3b:00.0")
        (tmp_path / "gpus/0000:18:00.0/information").unlink()
        assert [g.minor for g in devices.read_proc_gpus(root)] == [1]

    def test_what_is_known_already_is_not_read_and_cannot_block(self, tmp_path: Path):
        root = self.tree(tmp_path, "0000:18:00.0", "0000:3b:00.0")
        (tmp_path / "gpus/0000:18:00.0/information").unlink()
        os.mkfifo(tmp_path / "gpus/0000:18:00.0/information")
        known = [gpu(0, UUID, "0000:18:00.0")]
        assert [g.minor for g in devices.read_proc_gpus(root, known=known)] == [1]

    def test_a_driver_that_hangs_costs_the_deadline(self, tmp_path: Path):
        root = self.tree(tmp_path, "0000:18:00.0")
        (tmp_path / "gpus/0000:18:00.0/information").unlink()
        os.mkfifo(tmp_path / "gpus/0000:18:00.0/information")  # opening it for reading blocks
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            devices.read_proc_gpus(root, deadline_s=0.1)
        assert time.monotonic() - begin < 20

    def test_an_unreadable_one_is_an_error(self, tmp_path: Path):
        root = self.tree(tmp_path, "0000:18:00.0")
        (tmp_path / "gpus/0000:18:00.0/information").unlink()
        (tmp_path / "gpus/0000:18:00.0/information").mkdir()
        with pytest.raises(OSError, match="Is a directory") as caught:
            devices.read_proc_gpus(root)
        assert caught.value.errno == errno.EISDIR

    @given(st.text())
    def test_takes_any_text(self, text):
        devices.parse_information(text)


class TestVersion:
    @pytest.mark.parametrize(
        ("text", "version"),
        [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version: 12.2\n",
                "535.183.01",
            ),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build\n", "580.159"),
            ("", None),
            ("NVRM version: none", None),
        ],
    )
    def test_is_found(self, text, version):
        assert devices.parse_driver_version(text) == version

    def test_without_driver_there_is_none(self, tmp_path: Path):
        assert devices.read_driver_version(str(tmp_path)) is None


class TestPci:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("00000000:3B:00.0", "0000:3b:00.0"),
            ("3b:00.0", "0000:3b:00.0"),
            ("0000:3b:00.0", "0000:3b:00.0"),
            ("3b:00", "0000:3b:00.0"),
            ("0000:3b:00", "0000:3b:00.0"),
            ("00010001:00:00.1", "10001:00:00.1"),
            (" 3B:0.0\n", "0000:3b:00.0"),
        ],
    )
    def test_forms(self, text, expected):
        assert devices.canonical_pci(text) == expected

    @pytest.mark.parametrize("text", ["", "3b", "nvidia0", "0000:3b:00.9", "g0:00.0", "1:2:3:4", "٣b:00.0", UUID])
    def test_nonsense_is_refused(self, text):
        with pytest.raises(ValueError, match="not a PCI address"):
            devices.canonical_pci(text)

    @given(st.integers(0, 0xFFFFFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
    def test_every_way_of_writing_gives_the_same(self, domain, bus, device, function):
        canonical = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
        assert devices.canonical_pci(f"{domain:08X}:{bus:02X}:{device:02X}.{function}") == canonical
        assert devices.canonical_pci(canonical) == canonical

    @given(st.text())
    def test_takes_any_text(self, text):
        try:
            devices.canonical_pci(text)
        except ValueError:
            pass


class TestMerge:
    def test_by_uuid_then_by_address_ordered_by_minor(self):
        proc = [gpu(0, "", "0000:18:00.0", "old name"), gpu(1, "GPU-b", "0000:3b:00.0")]
        nvml = [gpu(1, "GPU-b", "0000:3b:00.0", "H200", 0), gpu(0, "GPU-a", "0000:18:00.0", "H200", 1)]
        assert devices.merge_gpus(proc, nvml) == (nvml[1], nvml[0])

    def test_a_gpu_that_nvml_does_not_know_stays_without_index(self):
        proc = [gpu(0, "GPU-a", "0000:18:00.0"), gpu(1, "GPU-b", "0000:3b:00.0")]
        merged = devices.merge_gpus(proc, [gpu(0, "GPU-a", "0000:18:00.0", "H200", 0)])
        assert [(g.minor, g.index) for g in merged] == [(0, 0), (1, None)]

    def test_a_gpu_lost_before_nvml_began_is_the_one_that_is_left_over(self):
        proc = [gpu(0, "GPU-a", "0000:18:00.0"), gpu(1, "GPU-b", "0000:3b:00.0")]
        merged = devices.merge_gpus(proc, [gpu(0, "GPU-a", "0000:18:00.0", "H200", 0), gpu(-1, index=1)])
        assert merged[1] == gpu(1, "GPU-b", "0000:3b:00.0", "", 1)

    def test_two_lost_ones_are_not_guessed(self):
        proc = [gpu(0, "GPU-a", "0000:18:00.0"), gpu(1, "GPU-b", "0000:3b:00.0")]
        merged = devices.merge_gpus(proc, [gpu(-1, index=0), gpu(-1, index=1)])
        assert [(g.minor, g.index) for g in merged] == [(0, None), (1, None), (-1, 0), (-1, 1)]

    def test_what_nvml_does_not_say_comes_from_the_kernel(self):
        merged = devices.merge_gpus([gpu(4, "GPU-a", "0000:18:00.0")], [gpu(-1, "GPU-a", "", "H200", 0)])
        assert merged == (gpu(4, "GPU-a", "0000:18:00.0", "H200", 0),)

    def test_neither(self):
        assert devices.merge_gpus([], []) == ()


class TestWhichNodesAreGpus:
    DRIVER = DriverNumbers({195: frozenset({"nvidia", "nvidiactl"}), 509: frozenset({"nvidia-uvm"})})
    NODES = (DeviceId(195, 0), DeviceId(195, 3), DeviceId(195, 254), DeviceId(195, 255), DeviceId(509, 0))

    def test_the_known_minors(self):
        assert devices.gpu_minors(self.NODES, self.DRIVER, [gpu(3), gpu(7)]) == {3}

    def test_all_but_control_nodes_when_nobody_knows(self):
        assert devices.gpu_minors(self.NODES, self.DRIVER, []) == {0, 3}
        assert devices.gpu_minors(self.NODES, self.DRIVER, [gpu(-1, index=0)]) == {0, 3}

    def test_none_without_a_driver(self):
        assert devices.gpu_minors(self.NODES, DriverNumbers({}), []) == frozenset()

    @pytest.mark.parametrize(("minor", "expected"), [(3, True), (0, False), (254, False), (255, False)])
    def test_one_node(self, minor, expected):
        assert devices.is_gpu(DeviceId(195, minor), self.DRIVER, [gpu(3)]) is expected
