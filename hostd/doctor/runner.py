"""Runs every check, one after the other. Each looks in a helper process with a deadline; one that fails is reported as
what could not be looked at and never breaks the others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hostd import disposable
from hostd.disposable import call_with_deadline
from hostd.doctor import containers, devices, driver, hooks, node, product
from hostd.doctor.facts import Facts
from hostd.doctor.finding import Blind, Check, Finding, Outcome, Severity, Skipped
from hostd.wire import SCHEMA, clean

Json = dict[str, Any]

CHECKS: tuple[Check, ...] = (
    Check("pid-namespace", "in the machine's first PID namespace", node.pid_namespace),
    Check("cgroup-v2", "cgroup v2 at /sys/fs/cgroup", node.cgroup_v2),
    Check("kernel", "the kernel lists a PID namespace's members directly", node.kernel),
    Check("systemd", "systemd runs", node.systemd),
    Check("pve", "pmxcfs is mounted at /etc/pve", node.pve, ("unit_files", "pve_missing")),
    Check("journal", "the journal is reachable and persistent", node.journal_state),
    Check("modules", "every Python module can be used", node.modules, deadline_s=15.0),
    Check("driver", "an NVIDIA driver is loaded", driver.loaded, ("driver", "gpu_containers")),
    Check("nvml", "the driver answers", driver.nvml, ("driver", "look")),
    Check("persistence", "persistence mode is on", driver.persistence, ("driver", "look", "commands")),
    Check("gpu-health", "no GPU is lost, wants recovery or leaks memory", driver.health, ("look",)),
    Check("kernel-log", "no Xid that asks for a reset", driver.kernel_log, ("driver", "look")),
    Check("device-nodes", "every node that a container is given is there and the driver's", devices.host_nodes,
          ("driver", "device_owners", "gpu_containers")),
    Check("nodes-inside", "the nodes inside running containers are the driver's", devices.nodes_inside,
          ("driver", "device_owners", "gpu_containers", "runtime")),
    Check("device-rules", "device rules fit the driver's majors", devices.rules,
          ("driver", "device_owners", "gpu_containers", "look")),
    Check("frozen", "no container with GPUs is frozen", containers.frozen, ("gpu_containers", "runtime")),
    Check("leftovers", "nothing is left of containers that do not run", containers.leftovers, ("cgroups", "runtime")),
    Check("outside-unit", "every running container runs in its unit", containers.outside_unit,
          ("booted", "runtime", "units")),
    Check("host-holders", "no process of the host holds a GPU", containers.host_holders, ("look",)),
    Check("mps", "no MPS on the host", containers.mps, ("commands",)),
    Check("passthrough", "no VM wants a GPU that containers use", containers.passthrough,
          ("driver", "gpu_containers", "gpus", "vms", "pci_mappings")),
    Check("fuser", "fuser sees what we see", containers.fuser, ("look",), deadline_s=10.0),
    Check("hookscripts", "every container with GPUs has our hookscript, and it can run", hooks.hookscripts,
          ("gpu_containers", "storages", "node_name", "other_nodes")),
    Check("container-units", "our drop-in is in both container units", hooks.container_units, ("unit_files",)),
    Check("units-loaded", "systemd has read our drop-ins", hooks.units_loaded, ("booted", "unit_files", "units")),
    Check("boot-unit", "device nodes are made before the guests start", hooks.boot_unit, ("unit_files",)),
    Check("run-dir", "/run/pve-gpu-release is root's alone", product.run_dir),
    Check("daemon", "pve-gpu-hostd can be reached", product.daemon, ("booted", "unit_files", "units")),
    Check("configuration", "the configuration is valid", product.configuration, ("settings",)),
    Check("records", "no release was cut off, no start refused, no stop hangs", product.records),
)  # fmt: skip


def run_checks(facts: Facts, checks: Sequence[Check] = CHECKS) -> list[Outcome]:
    """Every check with what it found, in order."""
    return [run_check(facts, check) for check in checks]


def run_check(facts: Facts, check: Check) -> Outcome:
    outcome = Outcome(check.name, check.title)
    try:
        for name in check.needs:
            facts.get(name)
        answer = call_with_deadline(lambda: _look(facts, check), check.deadline_s)
    except Exception as exc:  # noqa: BLE001 - a fact that cannot be had must not break the other checks
        return _failed(outcome, _why(exc))
    if answer.outcome is not disposable.Outcome.ANSWER:
        return _failed(outcome, answer.error)
    reply = json.loads(answer.data)
    outcome.findings = [Finding(**{**f, "severity": Severity(f["severity"])}) for f in reply["findings"]]
    outcome.blind = [Blind(**b) for b in reply["blind"]]
    outcome.skipped = reply["skipped"]
    if reply["failed"]:
        return _failed(outcome, reply["failed"])
    return outcome


def _failed(outcome: Outcome, error: str) -> Outcome:
    outcome.failed = True
    outcome.blind.append(Blind(outcome.check, error))
    return outcome


def _look(facts: Facts, check: Check) -> bytes:
    """In the helper: what was found until the check ended or failed."""
    findings: list[Json] = []
    blind: list[Json] = []
    failed = skipped = ""
    try:
        for result in check.look(facts):
            if isinstance(result, Skipped):
                skipped = result.why
            elif isinstance(result, Blind):
                blind.append({"what": clean(result.what), "error": clean(result.error)})
            else:
                findings.append(finding_dict(result))
    except Exception as exc:  # noqa: BLE001 - a bug in one check is no reason to say nothing about the rest
        failed = clean(_why(exc))
    return json.dumps({"findings": findings, "blind": blind, "failed": failed, "skipped": skipped}).encode()


def _why(exc: Exception) -> str:
    text = str(exc)
    return text if isinstance(exc, OSError) and text else f"{text}" if hasattr(exc, "message") else repr(exc)


def finding_dict(finding: Finding) -> Json:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "vmid": finding.vmid,
        "what": clean(finding.what),
        "evidence": clean(finding.evidence),
        "mend": clean(finding.mend),
    }


def exit_status(outcomes: Iterable[Outcome]) -> int:
    """3 with an error or a warning (also when something could not be looked at beside it: what was found has to be
    mended), else 4 when something could not be looked at, else 0. Notes change nothing."""
    seen = list(outcomes)
    if any(f.severity is not Severity.NOTE for o in seen for f in o.findings):
        return 3
    return 4 if any(o.blind for o in seen) else 0


def result_dict(outcomes: Iterable[Outcome], started_s: float) -> Json:
    """`doctor --json`, schema 1."""
    seen = list(outcomes)
    return {
        "schema": SCHEMA,
        "findings": [finding_dict(f) for o in seen for f in o.findings],
        "could_not_look": [
            {"check": o.check, "what": clean(b.what), "error": clean(b.error)} for o in seen for b in o.blind
        ],
        "checks": [o.check for o in seen],
        "duration_ms": round((time.monotonic() - started_s) * 1000),
    }
