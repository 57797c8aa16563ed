"""Checks of the machine: namespaces, cgroups, kernel, systemd, the journal, Python's modules."""

from __future__ import annotations

import os
import re
import socket

from hostd.doctor import origin
from hostd.doctor.facts import Facts
from hostd.doctor.finding import Results
from hostd.doctor.kinds import found
from hostd.doctor.shell import Shell, word
from hostd.errors import UnreadableError
from hostd.system import journal
from hostd.system.cgroupfs import find_mount
from hostd.system.pidns import FIRST_INODE, own_inode

FULL_SPEED_KERNEL = (6, 11)
JOURNALD_CONF = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")
PERSISTENT_CONF = "99-persistent.conf"
VAR_LOG_JOURNAL = "/var/log/journal"
MODULES = {
    "pynvml-missing": ("pynvml",),
    "yaml-missing": ("yaml",),
    "systemd-python-missing": ("systemd.journal", "systemd.daemon"),
    "psutil-missing": ("psutil",),
    "proxmoxer-missing": ("proxmoxer",),
}


def pid_namespace(_facts: Facts) -> Results:
    inode = own_inode()
    if inode != FIRST_INODE:
        yield found("pid-namespace", f"/proc/self/ns/pid is {inode}, the first one is {FIRST_INODE}")


def cgroup_v2(_facts: Facts) -> Results:
    try:
        mount = find_mount()
    except UnreadableError as exc:
        yield found("cgroup-v2-missing", exc.message)
        return
    if mount != "/sys/fs/cgroup":
        yield found("cgroup-hybrid", f"cgroup2 is mounted at {mount}", mount=mount)


def kernel(_facts: Facts) -> Results:
    yield from check_release(os.uname().release)


def check_release(release: str) -> Results:
    """Pure."""
    if parse_release(release) < FULL_SPEED_KERNEL:
        yield found("kernel-old", f"uname -r: {release}", release=release)


def parse_release(release: str) -> tuple[int, int]:
    """`6.8.12-4-pve` -> (6, 8)."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def systemd(facts: Facts) -> Results:
    if not facts.booted:
        yield found("no-systemd", "/run/systemd/system does not exist")


def modules(facts: Facts) -> Results:
    """Runs in a helper process: a module that hangs or ends the process harms nobody."""
    from importlib import import_module

    for code, names in MODULES.items():
        for name in names:
            try:
                import_module(name)
            except Exception as exc:  # noqa: BLE001 - missing or broken, in whatever way
                evidence = f"import {name}: {type(exc).__name__}: {exc}"
                if code != "pynvml-missing":
                    yield found(code, evidence)
                elif facts.driver.present:  # nothing can be asked without a driver
                    yield found(code, evidence, command=Shell(origin.pynvml_advice(origin.read_origin())))
                break


def journal_state(_facts: Facts) -> Results:
    if not journal.reachable():
        yield found("journal-unreachable", f"{journal.SOCKET} is no socket")
    else:
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            probe.connect(journal.SOCKET)
        except OSError as exc:
            yield found("journal-unreachable", f"{journal.SOCKET}: {exc.strerror}")
        finally:
            probe.close()
    storage, path = read_journal_storage()
    where = f"Storage={storage} in {path}" if path else "Storage= is not set, the default is auto"
    if storage in ("volatile", "none"):
        setting = persistent_setting(path)
        yield found("journal-not-persistent", where, why=f"Storage={storage}", setting=setting)
    elif storage != "persistent" and not os.path.isdir(VAR_LOG_JOURNAL):
        why = f"no {VAR_LOG_JOURNAL}"
        yield found("journal-not-persistent", f"{where}; {VAR_LOG_JOURNAL} does not exist", why=why, setting=Shell(""))


def persistent_setting(said_by: str) -> Shell:
    """A drop-in of the administrator's that is read after the file that says otherwise."""
    name = os.path.basename(said_by)
    if not os.path.dirname(said_by).endswith(".d") or name < PERSISTENT_CONF:
        name = PERSISTENT_CONF
    else:
        name = f"{name.removesuffix('.conf')}~.conf"
    folder = f"{JOURNALD_CONF[0]}/journald.conf.d"
    text = word("[Journal]\\nStorage=persistent\\n")
    return Shell(f"mkdir -p {folder} && printf {text} > {word(f'{folder}/{name}')} && ")


def pve(facts: Facts) -> Results:
    if facts.pve_missing:
        yield found("pve-missing", f"{facts.pve_root}/local does not exist")


def read_journal_storage(directories: tuple[str, ...] = JOURNALD_CONF) -> tuple[str, str]:
    """(value, file that says so) of journald's Storage=; ("auto", "") when none does. Raises OSError.

    The main file first, then the drop-ins by name; of one name the first directory counts (journald.conf(5)).
    """
    files = [f"{d}/journald.conf" for d in directories if os.path.isfile(f"{d}/journald.conf")][:1]
    chosen: dict[str, str] = {}
    for directory in directories:
        folder = f"{directory}/journald.conf.d"
        if os.path.isdir(folder):
            for name in os.listdir(folder):
                if name.endswith(".conf"):
                    chosen.setdefault(name, f"{folder}/{name}")
    value, said = "auto", ""
    for path in [*files, *(chosen[name] for name in sorted(chosen))]:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, equals, given = line.strip().partition("=")
                if equals and key.strip() == "Storage":
                    value, said = given.strip().lower() or "auto", path
    return value, said
