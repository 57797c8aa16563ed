"""/etc/pve as temporary trees; its hanging by a FIFO, whose opening blocks as a dead FUSE server does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.errors import UnreadableError
from hostd.system import pve
from hostd.system.pve import DevEntry, MountEntry, Pve, parse_container_config, parse_vm_config

CONFIG = """#ML box%3A two GPUs
#hostname: not-this-one
arch: amd64
cores: 8
dev0: /dev/nvidia0,gid=44,mode=0660
dev10: path=/dev/nvidia-caps/nvidia-cap1
dev2: /dev/dri/renderD128,deny-write=1
features: nesting=1
hookscript: local:snippets/gpu-release.sh
hostname: llm
mp0: /dev/nvidia9,mp=/x
ostype: debian
unprivileged: 1
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow = c 509:* rwm
lxc.cgroup.devices.allow: c 1:* rwm
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,create=file 0 0
lxc.mount.entry: /srv/my\\040models models none bind
lxc.mount.entry: broken
what is this
[before-upgrade]
dev0: /dev/nvidia7
hostname: old
"""


class TestContainerConfig:
    def test_fields_of_the_current_section(self):
        config = parse_container_config(CONFIG)
        assert (config.hostname, config.ostype, config.unprivileged) == ("llm", "debian", True)
        assert config.hookscript == "local:snippets/gpu-release.sh"
        assert config.dev_entries == (
            DevEntry("dev0", "/dev/nvidia0", {"gid": "44", "mode": "0660"}),
            DevEntry("dev2", "/dev/dri/renderD128", {"deny-write": "1"}),
            DevEntry("dev10", "/dev/nvidia-caps/nvidia-cap1", {}),
        )
        assert config.mount_entries == (
            MountEntry("/dev/nvidia-uvm", "dev/nvidia-uvm", ("bind", "optional", "create=file")),
            MountEntry("/dev/nvidia1", "dev/nvidia1", ("bind", "create=file")),
            MountEntry("/srv/my models", "models", ("bind",)),
        )
        assert [m.optional for m in config.mount_entries] == [True, False, False]
        assert config.devices_allow == ("c 195:* rwm", "c 509:* rwm")
        assert ("lxc.cgroup.devices.allow", "c 1:* rwm") in config.lxc

    def test_the_nodes_it_is_given(self):
        paths = ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-uvm", "/dev/nvidia1")
        assert parse_container_config(CONFIG).gpu_paths == paths

    @pytest.mark.parametrize(
        ("text", "wants"),
        [
            ("hostname: web\n", False),
            ("dev0: /dev/dri/card0\n", False),
            ("dev0: /dev//nvidia0\n", True),
            ("lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind\n", True),
            ("lxc.hook.mount: /usr/share/lxc/hooks/nvidia\n", True),
            ("#dev0: /dev/nvidia0\n", False),
            ("[snap]\ndev0: /dev/nvidia0\n", False),
            ("", False),
        ],
    )
    def test_whether_it_wants_a_gpu(self, text, wants):
        assert parse_container_config(text).wants_gpu is wants

    @pytest.mark.parametrize(
        "text", ["\r\n", "dev0:\n", "dev0: ,gid=1\n", "lxc.mount.entry:\n", "devx: /dev/nvidia0", ":"]
    )
    def test_junk_is_passed_over(self, text):
        assert parse_container_config(text).gpu_paths == ()

    def test_lines_with_carriage_returns(self):
        assert parse_container_config("hostname: llm\r\ndev0: /dev/nvidia0\r\n").gpu_paths == ("/dev/nvidia0",)

    @given(st.text())
    def test_takes_any_text(self, text):
        assert isinstance(parse_container_config(text).wants_gpu, bool)

    @given(st.lists(st.sampled_from([*CONFIG.splitlines(), "dev0:", "[", "[x]", "lxc.mount.entry: a\\777 b"])))
    def test_takes_any_order_of_lines(self, lines):
        config = parse_container_config("\n".join(lines))
        assert all(path.startswith("/dev/nvidia") for path in config.gpu_paths)


class TestVmConfig:
    def test_addresses_and_mappings(self):
        text = (
            "name: win\nhostpci0: 0000:3b:00.0,pcie=1\nhostpci1: host=18:00;19:00.1,x-vga=1\nhostpci2: mapping=h200\n"
        )
        vm = parse_vm_config(101, text + "[snap]\nhostpci3: 01:00\n")
        assert vm == (101, "win", ("0000:3b:00.0", "18:00", "19:00.1"), ("h200",))

    @given(st.text())
    def test_takes_any_text(self, text):
        parse_vm_config(101, "hostpci0: " + text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for node in ("pve1", "pve2"):
        for kind in ("lxc", "qemu-server"):
            (tmp_path / "nodes" / node / kind).mkdir(parents=True)
    (tmp_path / "local").symlink_to("nodes/pve1")
    (tmp_path / "lxc").symlink_to("nodes/pve1/lxc")
    (tmp_path / "qemu-server").symlink_to("nodes/pve1/qemu-server")
    return tmp_path


class TestReading:
    def test_a_container_of_this_node(self, root: Path):
        (root / "lxc/129.conf").write_text(CONFIG)
        config = Pve(str(root)).read_container(129)
        assert config is not None and config.hostname == "llm" and config.wants_gpu

    def test_no_such_container_and_no_proxmox_at_all(self, root: Path):
        assert Pve(str(root)).read_container(129) is None
        assert Pve(str(root / "nowhere")).read_container(129) is None
        assert Pve(str(root / "nowhere")).containers() == []
        assert Pve(str(root / "nowhere")).find_node(129) is None
        assert Pve(str(root / "nowhere")).vms_with_hostpci() == []

    def test_bytes_that_are_no_utf8(self, root: Path):
        (root / "lxc/129.conf").write_bytes(b"hostname: \xff\xfe\ndev0: /dev/nvidia0\n")
        config = Pve(str(root)).read_container(129)
        assert config is not None and config.wants_gpu

    def test_a_long_tail_of_snapshots_is_not_read(self, root: Path):
        (root / "lxc/129.conf").write_text(CONFIG + "x: y\n" * 1_000_000)
        config = Pve(str(root)).read_container(129)
        assert config is not None and config.hostname == "llm"

    def test_a_file_past_the_limit_is_unreadable(self, root: Path):
        (root / "lxc/129.conf").write_text("x: y\n" * 300_000)
        with pytest.raises(UnreadableError, match="File too large") as caught:
            Pve(str(root)).read_container(129)
        assert caught.value.reason == "pve-unreadable" and caught.value.vmid == 129

    def test_a_directory_in_its_place_is_unreadable(self, root: Path):
        (root / "lxc/129.conf").mkdir()
        with pytest.raises(UnreadableError, match=r"cannot read .*129\.conf: Is a directory"):
            Pve(str(root)).read_container(129)

    def test_a_hanging_file_system_costs_the_deadline(self, root: Path):
        os.mkfifo(root / "lxc/129.conf")
        begin = time.monotonic()
        with pytest.raises(UnreadableError, match="no answer") as caught:
            Pve(str(root), deadline_s=0.1).read_container(129)
        assert caught.value.reason == "pve-unreadable" and time.monotonic() - begin < 20

    def test_containers_of_this_node(self, root: Path):
        for name in ("129.conf", "1290.conf", "100.conf", "0129.conf", "129.conf.bak", "x.conf", "12.conf"):
            (root / "lxc" / name).write_text("")
        (root / "nodes/pve2/lxc/200.conf").write_text("")
        assert Pve(str(root)).containers() == [100, 129, 1290]

    def test_the_other_node_that_has_it(self, root: Path):
        (root / "nodes/pve2/lxc/129.conf").write_text("")
        (root / "nodes/pve1/lxc/130.conf").write_text("")
        (root / "nodes/pve2/qemu-server/131.conf").write_text("")
        node = Pve(str(root))
        assert (node.find_node(129), node.find_node(130), node.find_node(131)) == ("pve2", None, None)

    def test_vms_with_passthrough(self, root: Path):
        (root / "qemu-server/101.conf").write_text("name: win\nhostpci0: 3b:00,pcie=1\n")
        (root / "qemu-server/102.conf").write_text("name: plain\n")
        assert Pve(str(root)).vms_with_hostpci() == [pve.VmPassthrough(101, "win", ("3b:00",), ())]

    def test_leaves_no_process_and_no_descriptor(self, root: Path):
        before = len(os.listdir("/proc/self/fd"))
        (root / "lxc/129.conf").write_text(CONFIG)
        for _ in range(5):
            Pve(str(root)).read_container(129)
        assert len(os.listdir("/proc/self/fd")) == before
        assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
