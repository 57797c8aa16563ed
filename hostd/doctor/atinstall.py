"""What the package says when it has been installed: which Python modules are missing here, each with its command.

The same check as `doctor` makes. Run by the package's postinst; nothing of it may fail an installation.
"""

from __future__ import annotations

from hostd.doctor.facts import Facts
from hostd.doctor.runner import CHECKS, run_check


def lines(facts: Facts) -> list[str]:
    """Empty when nothing is missing."""
    check = next(check for check in CHECKS if check.name == "modules")
    said = []
    for finding in run_check(facts, check).findings:
        said += [f"pve-gpu-release: still missing: {finding.what}", f"  mend it: {finding.mend}"]
    if not facts.driver.present:
        said.append("pve-gpu-release: no NVIDIA driver is loaded; once there is: pve-gpu-release doctor")
    return said


def main() -> None:
    for line in lines(Facts()):
        print(line)
