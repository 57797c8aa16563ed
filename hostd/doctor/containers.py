"""Checks of containers as they run, of the host's own processes on GPUs, and of VMs that want the same GPU."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from hostd.case import DETAIL_ONLY
from hostd.doctor.commands import FUSER, installed, run_tool
from hostd.doctor.driver import gpu_name
from hostd.doctor.facts import Facts, Look, Runtime
from hostd.doctor.finding import Blind, Results, Skipped
from hostd.doctor.kinds import found
from hostd.model import GpuInfo, Holder
from hostd.system.cgroupfs import MONITOR, PAYLOAD
from hostd.system.devices import canonical_pci

MPS = "nvidia-cuda-mps-control"[:15]
"""As the kernel cuts names; the server's begins alike."""
SHOWN = 10
FUSER_DEADLINE_S = 8.0
PCI_DEVICES = "/sys/bus/pci/devices"
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def frozen(facts: Facts) -> Results:
    for vmid, config in _running(facts):
        if config and facts.get("runtime")[vmid].frozen:
            yield found("frozen", f"cgroup.events of /lxc/{vmid} or /lxc/{vmid}/ns: frozen 1", vmid=vmid)


def _running(facts: Facts) -> list[tuple[int, bool]]:
    """(vmid, is it given a GPU) of every container with a process."""
    wanting = facts.get("gpu_containers")
    return [(vmid, vmid in wanting) for vmid, now in facts.get("runtime").items() if now.processes]


def leftovers(facts: Facts) -> Results:
    """What lives in the cgroups of containers that do not run."""
    mount = facts.cgroups.mount
    for vmid, now in facts.get("runtime").items():
        payload, monitor = f"{mount}/{PAYLOAD}/{vmid}", f"{mount}/{MONITOR}/{vmid}"
        init = f"init {now.init_pid or 'none'}"
        seen = f"/lxc/{vmid}: {_count(now.processes)}, {init}; /lxc.monitor/{vmid}: {_count(now.monitors)}"
        if now.processes and not now.monitors and now.init_pid:
            yield found("monitor-gone", seen, vmid=vmid, cgroup=payload)
        elif now.processes and not now.monitors:
            yield found("leftovers", seen, vmid=vmid, count=_count(now.processes), cgroup=payload)
        elif now.monitors and not now.processes:
            yield found("monitor-leftovers", seen, vmid=vmid, count=_count(now.monitors), cgroup=monitor)


def _count(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"


def outside_unit(facts: Facts) -> Results:
    """A container that runs while neither of its units is active."""
    if not facts.booted:
        yield Skipped("systemd does not run")
        return
    units = facts.get("units")
    for vmid, now in facts.get("runtime").items():
        if not runs(now):
            continue
        names = (f"pve-container@{vmid}.service", f"pve-container-debug@{vmid}.service")
        states = [units.get(name, {}).get("ActiveState", "") for name in names]
        if not any(state in ("active", "activating", "deactivating", "reloading") for state in states):
            state = states[0] or "unknown"
            yield found("outside-unit", f"/lxc/{vmid}: {_count(now.processes)}; unit {state}", vmid=vmid, state=state)


def runs(now: Runtime) -> bool:
    return bool(now.processes and now.monitors)


def host_holders(facts: Facts) -> Results:
    look: Look = facts.get("look")
    names = {state.info.minor: gpu_name(state.info) for state in look.view.gpus}
    holders = [h for h in look.view.holders if h.vmid is None]
    for holder in holders[:SHOWN]:
        gpus = ", ".join(names.get(m, f"GPU minor {m}") for m in holder.gpus) or "control nodes only"
        evidence = f"evidence {'+'.join(sorted(e.value for e in holder.evidence))}, cgroup {holder.process.cgroup}"
        who = f"pid {holder.process.pid} ({holder.process.comm})"
        yield found("host-holder", evidence, who=who, gpus=gpus, pid=holder.process.pid)
    if len(holders) > SHOWN:
        rest = holders[SHOWN:]
        pids = ", ".join(str(h.process.pid) for h in rest[:50])
        more = f"{len(rest)} more processes"
        yield found("host-holder", f"pids {pids}", who=more, gpus="GPUs", pid=rest[0].process.pid)
    for spot in look.view.blind_spots:
        if spot.source != "nvml" and spot.code != DETAIL_ONLY:  # the driver has checks of its own
            yield Blind(spot.what, spot.error)


def mps(facts: Facts) -> Results:
    pids = sorted(pid for pid, comm in facts.get("commands").items() if comm == MPS)
    if pids:
        who = "pid " + ", ".join(map(str, pids[:SHOWN]))
        yield found("mps-on-host", f"{_count(len(pids))} named {MPS}...", who=who)


# --- VMs -------------------------------------------------------------------------------------------------------------


def passthrough(facts: Facts) -> Results:
    mappings = facts.get("pci_mappings")
    users = container_gpus(facts)
    for vm in facts.get("vms"):
        keys = facts.hostpci_keys(vm.vmid)
        ways = [(address, f"hostpci {address}", keys.get(address, "hostpciN")) for address in vm.addresses]
        for name in vm.mappings:
            if name not in mappings:
                yield Blind(f"PCI mapping {name} of VM {vm.vmid}", "not in mapping/pci.cfg")
            key = keys.get(name, "hostpciN")
            ways += [(address, f"mapping {name} = {address}", key) for address in mappings.get(name, ())]
        for address, how, key in ways:
            for gpu, vmids in users:
                if same_device(address, gpu.pci_bus_id):
                    for vmid in vmids:
                        yield found(
                            "vm-uses-gpu",
                            f"VM {vm.vmid} ({vm.name}): {how}; container {vmid}: node of minor {gpu.minor}",
                            vmid=vmid, vm=vm.vmid, gpu=gpu_name(gpu), how=how, key=key,
                        )  # fmt: skip
    yield from _on_vfio()


def container_gpus(facts: Facts) -> list[tuple[GpuInfo, list[int]]]:
    """Each GPU of the driver, and the containers that are given its node."""
    wanting = facts.get("gpu_containers")
    users: dict[int, list[int]] = {}
    for vmid, config in wanting.items():
        for path in config.gpu_paths:
            try:
                info = os.stat(path)
            except (OSError, ValueError):
                continue  # another check's finding
            if stat.S_ISCHR(info.st_mode) and os.major(info.st_rdev) in facts.driver.gpu_majors:
                users.setdefault(os.minor(info.st_rdev), []).append(vmid)
    return [(gpu, users[gpu.minor]) for gpu in facts.get("gpus") if gpu.minor in users]


def same_device(written: str, address: str) -> bool:
    """`3b:00` is every function of that device, `0000:3b:00.0` one."""
    try:
        full = canonical_pci(written)
    except ValueError:
        return False
    return full == address if "." in written else full.partition(".")[0] == address.partition(".")[0]


def _on_vfio(root: str = PCI_DEVICES) -> Results:
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else ():
        try:
            if _read(f"{root}/{name}/vendor") != _NVIDIA or not _read(f"{root}/{name}/class").startswith(_DISPLAY):
                continue
            driver = os.path.basename(os.readlink(f"{root}/{name}/driver"))
        except FileNotFoundError:
            continue  # bound to nobody
        if driver in ("vfio-pci", "pci-stub"):
            yield found("gpu-on-vfio", f"{root}/{name}/driver -> {driver}", pci=name, driver=driver)


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read(64).strip()


# --- fuser -----------------------------------------------------------------------------------------------------------


def fuser(facts: Facts) -> Results:
    """Only where fuser is installed and a container's holder has a node: what fuser says of the host's nodes."""
    look: Look = facts.get("look")
    ours = [h for h in look.view.holders if h.vmid is not None and h.nodes]
    nodes = [f"/dev/{name}" for name in sorted(os.listdir("/dev")) if name.startswith("nvidia")]
    nodes = [path for path in nodes if stat.S_ISCHR(os.stat(path).st_mode)]
    if not ours or not nodes or not installed(FUSER):
        yield Skipped("fuser is not installed, or no container holds a GPU")
        return
    said = parse_fuser(run_tool([FUSER, *nodes], FUSER_DEADLINE_S).out)
    missed = [h for h in ours if h.process.pid not in said and os.path.exists(f"/proc/{h.process.pid}")]
    if missed:
        yield found(
            "fuser-blind",
            f"fuser {' '.join(nodes)}: {_pids(said)}; holders it misses: {_who(missed)}",
            seen=len(ours) - len(missed), total=len(ours), missed=len(missed),
        )  # fmt: skip


def parse_fuser(text: str) -> set[int]:
    """Pids on fuser's standard output (names of files and letters go to the error stream)."""
    return {int(word) for word in text.split() if word.isascii() and word.isdigit()}


def _pids(pids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(pids)[:SHOWN])) or "nobody"


def _who(holders: list[Holder]) -> str:
    shown = ", ".join(f"pid {h.process.pid} ({h.process.comm}) of container {h.vmid}" for h in holders[:SHOWN])
    return shown + (f" and {len(holders) - SHOWN} more" if len(holders) > SHOWN else "")
