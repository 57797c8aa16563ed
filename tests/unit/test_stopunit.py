"""Which cgroups may be stopped as a whole, who starts a job again, and the bytes of the protocols."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.lineage import Lineage
from hostd.model import Evidence, Holder, Process, ProcessRef, Supervisor
from hostd.stopunit import by_unit, why_protected
from hostd.supervisor import how_to_stop, supervisor_of
from hostd.system.managers import kernel_id, split_message, stop_unit_message

ID = "a1b2" * 16
INIT = "/lxc/129/ns/init.scope"


def process(pid: int, cgroup: str = INIT, ppid: int = 2, ns: tuple[int, ...] = (7,), start: int = 100) -> Process:
    return Process(pid, start, ns, "python3", "S", 0, ppid, 1, cgroup, 4026532000)


def holder(pid: int, cgroup: str = INIT, **options: int) -> Holder:
    found = process(pid, cgroup, **options)  # type: ignore[arg-type]
    return Holder(found, 129, frozenset({Evidence.FD}), (0,), supervisor=supervisor_of(cgroup, 129))


@pytest.mark.parametrize(
    ("cgroup", "kind", "name"),
    [
        ("/lxc/129/ns/system.slice/vllm.service", "systemd", "vllm.service"),
        ("/lxc/129/ns/system.slice/_cpu.service", "systemd", "cpu.service"),
        ("/lxc/129/ns/system.slice/system-vllm.slice/vllm@1.service", "systemd", "vllm@1.service"),
        ("/lxc/129/ns/system.slice/run-u17.scope", "systemd", "run-u17.scope"),
        ("/lxc/129/ns/user.slice/user-1000.slice/user@1000.service/app.slice/ml.service", "systemd-user", "ml.service"),
        (f"/lxc/129/ns/docker/{ID}", "docker", ID),
        (f"/lxc/129/ns/system.slice/docker-{ID}.scope", "docker", ID),
        (f"/lxc/129/ns/docker/{ID}/system.slice/in.service", "systemd", "in.service"),
        (f"/lxc/129/ns/machine.slice/libpod-{ID}.scope/container", "podman", ID),
        ("/lxc/129/ns/openrc.vllm", "openrc", "vllm"),
        ("/lxc/129/ns/user.slice/user-0.slice/session-3.scope", "session", "session-3.scope"),
    ],
)
def test_the_supervisor_is_the_innermost_one(cgroup: str, kind: str, name: str) -> None:
    found = supervisor_of(cgroup, 129)
    assert found is not None and (found.kind, found.name) == (kind, name)


@pytest.mark.parametrize(
    "cgroup",
    [INIT, "/lxc/129/ns/.lxc", "/lxc/129", "/lxc/130/ns/a.service", "/system.slice/a.service", "/lxc/12/ns/a.service"],
)
def test_there_is_none_outside_the_containers_units(cgroup: str) -> None:
    assert supervisor_of(cgroup, 129) is None


@pytest.mark.parametrize(
    "path",
    [
        "/lxc/129/ns",
        "/lxc/129/ns/init.scope",
        "/lxc/129/ns/.lxc",
        "/lxc/129/ns/system.slice",
        "/lxc/129/ns/system.slice/docker.service",
        "/lxc/129/ns/system.slice/containerd.service",
        "/lxc/129/ns/system.slice/ssh.service",
        "/lxc/129/ns/system.slice/system-ssh.slice/ssh@3.service",
        "/lxc/129/ns/system.slice/systemd-logind.service",
        "/lxc/129/ns/user.slice/user-0.slice/user@0.service",
        "/lxc/130/ns/system.slice/vllm.service",
        "/system.slice/vllm.service",
        "/lxc/1290/ns/system.slice/vllm.service",
    ],
)
def test_what_serves_more_than_a_job_is_never_stopped_as_a_whole(path: str) -> None:
    assert why_protected(Supervisor("systemd", path.rpartition("/")[2], path), 129, INIT)


def test_a_cgroup_with_the_init_below_it_is_never_stopped_as_a_whole() -> None:
    unit = Supervisor("docker", ID, f"/lxc/129/ns/docker/{ID}")
    assert why_protected(unit, 129, INIT) == ""
    assert "init" in why_protected(unit, 129, unit.cgroup) and "init" in why_protected(
        unit, 129, f"{unit.cgroup}/init.scope"
    )
    assert why_protected(unit, 129, f"{unit.cgroup}0") == "", "whole components count"


@pytest.mark.parametrize("kind", ["session", "", "none"])
def test_a_login_is_no_unit(kind: str) -> None:
    assert why_protected(Supervisor(kind, "x.service", "/lxc/129/ns/x.service"), 129)


def test_holders_are_grouped_by_unit() -> None:
    one = "/lxc/129/ns/system.slice/vllm.service"
    groups = by_unit([holder(10, one), holder(11), holder(12, one), holder(13, f"/lxc/129/ns/docker/{ID}")])
    assert [(s.name, [h.process.pid for h in hs]) for s, hs in groups] == [("vllm.service", [10, 12]), (ID, [13])]


def test_the_command_for_people_is_quoted() -> None:
    evil = Supervisor("systemd", "a;$(reboot) b.service", "/lxc/129/ns/a;$(reboot) b.service")
    assert how_to_stop(129, [evil], []) == "pct exec 129 -- systemctl stop 'a;$(reboot) b.service'"
    assert how_to_stop(129, [], [process(40)]) == "pct exec 129 -- kill 7"


class World:
    """Processes as `Lineage` asks for them: what it needs of the sources and of the view."""

    def __init__(self, *processes: Process) -> None:
        self.known = {p.pid: p for p in processes}
        self.procfs = self

    def read_process(self, pid: int) -> Process | None:
        return self.known.get(pid)

    def owns(self, process: Process) -> bool:
        return process.cgroup.startswith("/lxc/129")


def test_whoever_starts_a_second_holder_is_the_restarter() -> None:
    loop, init, host = process(40, start=50), process(2, start=1), process(60, "/system.slice/x", start=1)
    world = World(loop, init, host)
    lineage = Lineage(world, world)  # type: ignore[arg-type]
    first, again = holder(100, ppid=40), holder(101, ppid=40)
    of_init = [holder(110, ppid=2), holder(111, ppid=2)]
    of_host = [holder(120, ppid=60), holder(121, ppid=60)]
    lineage.note([first, *of_init, *of_host])
    assert lineage.restarters([again], None) == []
    lineage.note([again])
    assert lineage.restarters([again], init.ref) == [loop]
    assert lineage.restarters(of_init, init.ref) == [] and lineage.restarters(of_host, init.ref) == []


def test_a_holder_that_forks_holders_is_no_restarter_but_a_holder() -> None:
    parent = process(40, start=50)
    world = World(parent, process(2, start=1))
    lineage = Lineage(world, world)  # type: ignore[arg-type]
    children = [holder(100, ppid=40), holder(101, ppid=40)]
    lineage.note([replace(holder(40), process=parent), *children])
    assert lineage.restarters(children, ProcessRef(2, 1)) == []


# --- D-Bus -----------------------------------------------------------------------------------------------------------


def test_the_call_is_well_formed() -> None:
    message = stop_unit_message("vllm.service")
    body_length, serial, fields = struct.unpack_from("<III", message, 4)
    assert message[:4] == b"l\1\0\1" and serial == 1
    start = 16 + fields + (-fields % 8)
    assert len(message) == start + body_length and start % 8 == 0
    assert message[start:] == b"\x0c\0\0\0vllm.service\0\0\0\0" + b"\7\0\0\0replace\0"


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "a\udcffb"])
def test_what_is_no_unit_name_is_not_sent(name: str) -> None:
    with pytest.raises(ValueError):
        stop_unit_message(name)


def reply(kind: int, serial: int, error: str = "", text: str = "", order: str = "<") -> bytes:
    fields = b"\5\1u\0" + struct.pack(order + "I", serial)
    if error:
        fields += b"\4\1s\0" + struct.pack(order + "I", len(error)) + error.encode() + b"\0"
        fields += b"\0" * (-len(fields) % 8) + b"\10\1g\0\1s\0"
    body = struct.pack(order + "I", len(text)) + text.encode() + b"\0" if text else b""
    mark = b"l" if order == "<" else b"B"
    head = mark + bytes((kind, 0, 1)) + struct.pack(order + "III", len(body), 9, len(fields)) + fields
    return head + b"\0" * (-len(head) % 8) + body


@pytest.mark.parametrize("order", ["<", ">"])
def test_replies_are_understood_in_pieces(order: str) -> None:
    whole = reply(3, 1, "org.freedesktop.systemd1.NoSuchUnit", "Unit not loaded.", order)
    for cut in range(len(whole)):
        assert split_message(whole[:cut]) == (None, whole[:cut])
    assert split_message(whole + b"next") == ((3, 1, "org.freedesktop.systemd1.NoSuchUnit: Unit not loaded."), b"next")
    assert split_message(reply(2, 1, order=order)) == ((2, 1, ""), b"")


@given(st.binary(max_size=200))
def test_nonsense_ends_in_value_error_or_waits(data: bytes) -> None:
    for text in (data, b"l\2\1\1" + data, reply(3, 1, "e", "t")[: len(data)] + data):
        try:
            split_message(text)
        except (ValueError, struct.error, IndexError) as exc:
            assert isinstance(exc, ValueError), "only what the caller catches"


def test_ids_are_mapped_as_the_kernel_does() -> None:
    shifted = b"         0     100000      65536\n      65536       5000         10\n"
    assert kernel_id(shifted, 0) == 100000 and kernel_id(shifted, 1000) == 101000
    assert kernel_id(shifted, 65540) == 5004 and kernel_id(shifted, 70000) is None
    assert kernel_id(b"         0          0 4294967295\n", 1000) == 1000
