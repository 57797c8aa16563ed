"""The v2 tree: parsers on text, everything else on real cgroups below a directory of our own."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.errors import UnreadableError
from hostd.system import cgroupfs
from hostd.system.cgroupfs import (
    Cgroupfs,
    ContainerCgroup,
    find_mount,
    owner_of,
    parse_events,
    parse_mountinfo,
    parse_pids,
)

root = pytest.mark.root


# --- pure ---


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/lxc/129", 129),
        ("/lxc/129/ns/.lxc", 129),
        ("/lxc/129/ns/lxc/130", 129),
        ("/lxc/12", 12),
        ("/lxc/1290", 1290),
        ("/lxc/0129", None),
        ("/lxc/129x", None),
        ("/lxc/129-1", None),
        ("/lxc/+129", None),
        ("/lxc/１２９", None),
        ("/lxc/", None),
        ("/lxc", None),
        ("/lxc//129", None),
        ("lxc/129", None),
        ("/a/lxc/129", None),
        ("/lxc.monitor/129", None),
        ("/lxc.pivot", None),
        ("/../lxc/129", None),
        ("/", None),
        ("", None),
        ("/lxc/9999999999999", None),
    ],
)
def test_a_path_belongs_to_a_container_by_whole_components(path: str, owner: int | None) -> None:
    assert owner_of(path) == owner


@given(st.text(alphabet="/lxc.monitr0129 \n-", max_size=24))
def test_only_lxc_and_a_canonical_number_make_an_owner(path: str) -> None:
    owner = owner_of(path)
    assert owner is None or path == f"/lxc/{owner}" or path.startswith(f"/lxc/{owner}/")


def test_whole_cgroup2_mounts_are_found_last_first() -> None:
    text = (
        b"25 1 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
        b"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
        b"42 31 0:39 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
        b"43 31 0:38 /lxc/129 /var/lib/lxc/129/rootfs/sys/fs/cgroup rw - cgroup2 none rw\n"
        b"44 31 0:38 / /odd\\040place\\134x rw - cgroup2 - cgroup2\n"
        b"45 31 8:1 / /cgroup2 rw - ext4 cgroup2 rw\n"
        b"\n"
    )
    assert parse_mountinfo(text) == ["/odd place\\x", "/sys/fs/cgroup/unified"]


def test_no_cgroup2_mount_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text("25 1 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n")
    with pytest.raises(UnreadableError, match="cannot find") as caught:
        find_mount(str(tmp_path / "mountinfo"))
    assert caught.value.next_step
    with pytest.raises(UnreadableError, match="cannot read"):
        find_mount(str(tmp_path / "none"))


def test_a_mount_that_a_later_one_hides_is_not_taken(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one/cgroup.controllers").touch()
    lines = [f"4 3 0:38 / {tmp_path}/{name} rw - cgroup2 cgroup2 rw\n" for name in ("one", "two")]
    (tmp_path / "mountinfo").write_text("".join(lines))
    assert find_mount(str(tmp_path / "mountinfo")) == f"{tmp_path}/one"


@given(st.lists(st.integers(0, 2**22)))
def test_pid_0_is_never_a_pid(pids: list[int]) -> None:
    assert parse_pids(b"".join(b"%d\n" % pid for pid in pids)) == ({pid for pid in pids if pid}, 0 in pids)


def test_events_are_read_by_name() -> None:
    assert parse_events(b"populated 1\nfrozen 0\n") == {"populated": True, "frozen": False}
    assert parse_events(b"") == {}
    assert parse_events(b"future\nfrozen 1\n") == {"frozen": True}


# --- a tree of text ---


def test_containers_are_the_canonical_numbers_in_lxc(tmp_path: Path) -> None:
    for name in ("129", "1290", "12", "0129", "129x", "129-1", "other"):
        (tmp_path / "lxc" / name).mkdir(parents=True)
    assert Cgroupfs(str(tmp_path)).containers() == ([12, 129, 1290], [])


def test_no_lxc_is_no_container_but_no_tree_is_a_blind_spot(tmp_path: Path) -> None:
    assert Cgroupfs(str(tmp_path)).containers() == ([], [])
    vmids, blind = Cgroupfs(str(tmp_path / "none")).containers()
    assert vmids == []
    assert [spot.source for spot in blind] == ["cgroupfs"]
    assert Cgroupfs(str(tmp_path)).open(129) is None
    with pytest.raises(FileNotFoundError):
        Cgroupfs(str(tmp_path / "none")).open(129)


def test_a_link_in_place_of_the_cgroup_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lxc/130").mkdir(parents=True)
    (tmp_path / "lxc/129").symlink_to("130")
    with pytest.raises(OSError):
        Cgroupfs(str(tmp_path)).open(129)


def deep(tmp_path: Path, levels: int) -> Cgroupfs:
    path = tmp_path / "lxc/129"
    for _ in range(levels):
        path.mkdir(parents=True)
        (path / "cgroup.procs").touch()
        path = path / "d"
    return Cgroupfs(str(tmp_path))


def test_a_tree_deeper_than_the_bound_is_one_blind_spot(tmp_path: Path) -> None:
    cgroup = deep(tmp_path, cgroupfs.MAX_DEPTH + 3).open(129)
    assert cgroup is not None
    with cgroup:
        assert [spot.code for spot in cgroup.pids()[1]] == ["cgroup-tree-too-large"]


def test_a_tree_wider_than_the_bound_is_one_blind_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroupfs, "MAX_DIRECTORIES", 5)
    for number in range(7):
        (tmp_path / "lxc/129/a" / str(number)).mkdir(parents=True)
        (tmp_path / "lxc/129/a" / str(number) / "cgroup.procs").write_text(f"{number + 2}\n")
    (tmp_path / "lxc/129/cgroup.procs").touch()
    (tmp_path / "lxc/129/a/cgroup.procs").touch()
    cgroup = Cgroupfs(str(tmp_path)).open(129)
    assert cgroup is not None
    with cgroup:
        pids, blind = cgroup.pids()
    assert len(pids) == 4
    assert [spot.code for spot in blind] == ["cgroup-tree-too-large"]


@pytest.mark.parametrize("path", ["", "/", "/ns", "..", "ns/../..", "."])
def test_a_path_that_does_not_stay_below_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "lxc/129/ns").mkdir(parents=True)
    cgroup = Cgroupfs(str(tmp_path)).open(129)
    assert cgroup is not None
    with cgroup, pytest.raises(ValueError):
        cgroup.sub(path)


# --- real cgroups ---


class Tree:
    """A real v2 directory that stands for the mount, with processes in it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.fs = Cgroupfs(str(top))
        self.children: list[subprocess.Popen[bytes]] = []

    def make(self, path: str) -> Path:
        (self.top / path).mkdir(parents=True, exist_ok=True)
        return self.top / path

    def start(self, path: str, *command: str) -> int:
        child = subprocess.Popen(command or ("sleep", "600"), stdin=subprocess.PIPE)
        self.children.append(child)
        (self.make(path) / "cgroup.procs").write_text(str(child.pid))
        return child.pid

    def open(self, vmid: int = 129, kind: str = "lxc") -> ContainerCgroup:
        cgroup = self.fs.open(vmid, kind)
        assert cgroup is not None
        return cgroup

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
            if child.stdin:
                child.stdin.close()
        for path, _, _ in sorted(os.walk(self.top), reverse=True):
            with suppress(FileNotFoundError):
                os.rmdir(path)


@pytest.fixture
def tree() -> Iterator[Tree]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    top = Path(find_mount()) / f"pgr-test-{os.getpid()}-{time.monotonic_ns()}"
    top.mkdir()
    made = Tree(top)
    try:
        yield made
    finally:
        made.end()


@root
def test_every_process_of_the_tree_is_found_and_none_beside_it(tree: Tree) -> None:
    mine = {tree.start(path) for path in ("lxc/129", "lxc/129/ns", "lxc/129/ns/a.slice/b.service", "lxc/129/ns/.lxc")}
    for path in ("lxc/12", "lxc/1290", "lxc/130/129", "lxc.monitor/129"):
        tree.start(path)
    with tree.open() as cgroup:
        assert cgroup.pids() == (mine, [])
        assert cgroup.populated()
        assert not cgroup.frozen()
        assert cgroup.exists()
    with tree.open(kind="lxc.monitor") as monitor:
        assert len(monitor.pids()[0]) == 1
    assert tree.fs.containers() == ([12, 129, 130, 1290], [])


@root
def test_kill_reaches_everything_below_and_nothing_beside(tree: Tree) -> None:
    mine = [tree.start("lxc/129"), tree.start("lxc/129/ns/x")]
    other = tree.start("lxc/130")
    with tree.open() as cgroup:
        assert not cgroup.wait_empty(0)
        assert cgroup.kill()
        for pid in mine:
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
        assert cgroup.wait_empty(10)
        assert not cgroup.populated()
        assert cgroup.pids() == (set(), [])
        assert cgroup.remove_empty()
        assert not cgroup.exists()
        assert cgroup.remove_empty()
    assert not (tree.top / "lxc/129").exists()
    assert other in parse_pids((tree.top / "lxc/130/cgroup.procs").read_bytes())[0]


@root
def test_what_was_opened_never_means_a_directory_made_later(tree: Tree) -> None:
    tree.make("lxc/129/ns")
    with tree.open() as old:
        (tree.top / "lxc/129/ns").rmdir()
        (tree.top / "lxc/129").rmdir()
        assert not old.exists()
        new = tree.start("lxc/129/ns")
        assert old.pids() == (set(), [])
        assert not old.populated()
        assert not old.frozen()
        assert not old.kill()
        assert old.wait_empty(0)
        assert old.sub("ns") is None
        assert old.remove_empty()
        assert (tree.top / "lxc/129/ns").is_dir()
        with tree.open() as cgroup:
            assert cgroup.pids() == ({new}, [])


@root
def test_an_empty_new_directory_of_the_same_name_is_not_removed(tree: Tree) -> None:
    tree.make("lxc/129")
    with tree.open() as old:
        (tree.top / "lxc/129").rmdir()
        tree.make("lxc/129")
        assert old.remove_empty()
        assert (tree.top / "lxc/129").is_dir()


@root
def test_remove_empty_leaves_what_is_populated(tree: Tree) -> None:
    tree.make("lxc/129/a/b/c")
    tree.start("lxc/129/ns/x")
    with tree.open() as cgroup:
        assert not cgroup.remove_empty()
    assert not (tree.top / "lxc/129/a").exists()
    assert (tree.top / "lxc/129/ns/x").is_dir()


@root
def test_frozen_is_seen_and_kill_works_all_the_same(tree: Tree) -> None:
    pid = tree.start("lxc/129/ns")
    with tree.open() as cgroup:
        fd = cgroup.events_fd()
        try:
            (tree.top / "lxc/129/cgroup.freeze").write_text("1")
            wait_for(cgroup.frozen)
        finally:
            os.close(fd)
        assert cgroup.kill()
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9


@root
def test_wait_empty_wakes_when_the_last_process_leaves(tree: Tree) -> None:
    tree.start("lxc/129/ns/deep/er")
    child = tree.children[0]
    with tree.open() as cgroup:
        timer = threading.Timer(0.1, child.kill)
        timer.start()
        assert cgroup.wait_empty(20)
        timer.join()


@root
def test_a_sub_cgroup_is_opened_below_and_killed_alone(tree: Tree) -> None:
    job = tree.start("lxc/129/ns/system.slice/vllm.service")
    rest = tree.start("lxc/129/ns")
    with tree.open() as cgroup:
        sub = cgroup.sub("ns/system.slice/vllm.service")
        assert sub is not None
        with sub:
            assert sub.path == "/lxc/129/ns/system.slice/vllm.service"
            assert sub.pids() == ({job}, [])
            assert sub.kill()
            os.waitpid(job, 0)
            assert sub.remove_empty()
        assert cgroup.pids() == ({rest}, [])
        assert cgroup.sub("ns/none") is None


THREADED = (
    "import os, sys, threading\n"
    "threading.Thread(target=lambda: os.read(0, 1)).start()\n"
    "print('ready', flush=True); os.read(0, 1)"
)


def threaded(tree: Tree) -> int:
    """129/ns/t is threaded and holds one thread of a process whose domain root is 129/ns."""
    child = subprocess.Popen(["python3", "-c", THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tree.children.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.stdout.close()
    (tree.make("lxc/129/ns") / "cgroup.procs").write_text(str(child.pid))
    (tree.make("lxc/129/ns/t") / "cgroup.type").write_text("threaded")
    tids = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
    (tree.top / "lxc/129/ns/t/cgroup.threads").write_text(str(max(tids)))
    return child.pid


@root
def test_processes_of_a_threaded_cgroup_are_found_through_its_domain_root(tree: Tree) -> None:
    pid = threaded(tree)
    with pytest.raises(OSError) as caught:
        (tree.top / "lxc/129/ns/t/cgroup.procs").read_bytes()
    assert caught.value.errno == errno.EOPNOTSUPP
    with tree.open() as cgroup:
        assert cgroup.pids() == ({pid}, [])


@root
def test_a_threaded_cgroup_looked_at_alone_gives_its_processes(tree: Tree) -> None:
    pid = threaded(tree)
    with tree.open() as cgroup:
        sub = cgroup.sub("ns/t")
        assert sub is not None
        with sub:
            assert sub.pids() == ({pid}, [])


@root
def test_kill_of_a_threaded_cgroup_climbs_only_when_asked(tree: Tree) -> None:
    pid = threaded(tree)
    with tree.open() as cgroup:
        sub = cgroup.sub("ns/t")
        assert sub is not None
        with sub:
            with pytest.raises(OSError) as caught:
                sub.kill()
            assert caught.value.errno == errno.EOPNOTSUPP
            assert tree.children[0].poll() is None
            assert sub.kill(climb=True)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9


@root
def test_a_member_of_a_namespace_that_we_cannot_see_is_a_blind_spot(tree: Tree) -> None:
    tree.start("lxc/129/ns")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hostd.system.cgroupfs import Cgroupfs\n"
        "cgroup = Cgroupfs(sys.argv[2]).open(129)\n"
        "pids, blind = cgroup.pids()\n"
        "assert pids == set() and [spot.code for spot in blind] == ['foreign-pidns'], (pids, blind)\n"
    )
    here = str(Path(__file__).resolve().parents[2])
    command = ["unshare", "--pid", "--fork", "python3", "-c", code, here, str(tree.top)]
    subprocess.run(command, check=True, timeout=60)


@root
def test_hostile_names_are_only_names(tree: Tree) -> None:
    mine = {
        tree.start(os.fsdecode(b"lxc/129/ns/" + name)) for name in (b"a b", b"\xff\xfe", b"x (deleted)", b"\x1b[2J")
    }
    with tree.open() as cgroup:
        assert cgroup.pids() == (mine, [])


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
