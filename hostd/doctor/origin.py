"""How the NVIDIA driver came onto this node, and what may therefore be installed beside it.

Debian's python3-pynvml and nvidia-persistenced depend on packages of Debian's driver. Beside a driver of NVIDIA's `.run`
installer apt brings nvidia-installer-cleanup with them, which offers to run `nvidia-installer --uninstall` and takes Enter
for yes; without a terminal it leaves dpkg with an error (both seen, Debian 12 and 13). So the advice depends on the origin.
"""

from __future__ import annotations

import os
from enum import Enum
from glob import glob

from hostd.doctor.commands import run_tool
from hostd.doctor.finding import CannotLookError
from hostd.system import devices

LIBRARY = "libnvidia-ml.so.1"
PROVIDED = frozenset({"libnvidia-ml1", LIBRARY})
"""What python3-pynvml depends on, besides names of Debian's older drivers, which provide the second."""
INSTALLER = ("usr/bin/nvidia-installer", "usr/bin/nvidia-uninstall")
LIBRARY_PATHS = ("usr/lib/*-linux-gnu/", "usr/lib64/", "usr/lib/", "usr/local/lib/")
DPKG_QUERY = "/usr/bin/dpkg-query"
FORMAT = "${db:Status-Status}\t${Package}\t${Provides}\n"
DPKG_DEADLINE_S = 5.0

PIP = (
    "apt install --no-install-recommends python3-pip && "
    "python3 -m pip install --break-system-packages nvidia-ml-py"
)
PACKAGE = "apt install python3-pynvml"
CONTRIB = "of Debian's component contrib"
DAEMON_UNIT = "systemctl enable --now nvidia-persistenced"


class Origin(Enum):
    PACKAGES = "packages"
    """A Debian package has the library: Debian's or NVIDIA's own."""
    INSTALLER = "installer"
    """NVIDIA's `.run`, or anything else that dpkg knows nothing of."""
    NONE = "none"
    """No library of the driver is on this node."""


def read_origin(root: str = "/") -> Origin:
    """When dpkg does not answer, packages are not seen: what is advised then does no harm beside them either."""
    try:
        said = run_tool([DPKG_QUERY, f"--root={root}", "-W", "-f", FORMAT, "*nvidia*"], DPKG_DEADLINE_S).out
    except CannotLookError:
        said = ""
    if parse_packages(said):
        return Origin.PACKAGES
    if any(os.path.lexists(os.path.join(root, path)) for path in INSTALLER):
        return Origin.INSTALLER
    found = any(glob(os.path.join(root, directory, LIBRARY)) for directory in LIBRARY_PATHS)
    return Origin.INSTALLER if found else Origin.NONE


def parse_packages(text: str) -> bool:
    """Output of dpkg-query in FORMAT: is a package installed that satisfies python3-pynvml's dependency?"""
    for line in text.splitlines():
        status, _, rest = line.partition("\t")
        package, _, provides = rest.partition("\t")
        names = {package, *(part.split()[0] for part in provides.split(",") if part.strip())}
        if status == "installed" and names & PROVIDED:
            return True
    return False


def pynvml_advice(origin: Origin) -> str:
    """The command that brings pynvml and touches nothing of the driver."""
    if origin is Origin.PACKAGES:
        return f"{PACKAGE}  # {CONTRIB}"
    if origin is Origin.INSTALLER:
        return f"{PIP}  # not python3-pynvml: apt would bring Debian's driver, which uninstalls NVIDIA's"
    return f"{library_advice(origin)}; then, driver from packages: {PACKAGE}, {CONTRIB}; driver from NVIDIA's .run: {PIP}"


def library_advice(origin: Origin) -> str:
    """What brings the library itself, in the version of the kernel module. Where nobody knows how the driver came, a
    look at what there is: apt beside a driver of the installer's would take that one off."""
    version = devices.read_driver_version() or "VERSION"
    package = "apt install --reinstall libnvidia-ml1"
    installer = f"sh ./NVIDIA-Linux-{os.uname().machine}-{version}.run"
    if origin is Origin.PACKAGES:
        return package
    if origin is Origin.INSTALLER:
        return f"{installer}  # the file that the driver was installed from"
    return (
        f"dpkg -l '*nvidia*'; cat /proc/driver/nvidia/version  # {LIBRARY} of version {version} is missing: {package} when the "
        f"driver is from packages, else {installer}"
    )


def persistenced_advice(origin: Origin) -> str:
    if origin is Origin.PACKAGES:
        return f"apt install nvidia-persistenced && {DAEMON_UNIT}"
    return (
        "tar -C /root -xf /usr/share/doc/NVIDIA_GLX-1.0/sample*/nvidia-persistenced-init.tar.bz2 && "
        f"cd /root/nvidia-persistenced-init && sh ./install.sh systemd && {DAEMON_UNIT}"
        "  # NVIDIA's installer brought it; not Debian's package beside a .run driver"
    )
