"""What `hostd/doctor/product.py` can find: our own state."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
LISTEN = "systemctl reset-failed pve-gpu-hostd.socket; systemctl restart pve-gpu-hostd.socket"
"""Also when systemd has given the socket up: it starts one five times in ten seconds."""
MAKE_RUN_DIR = f"systemd-tmpfiles --create pve-gpu-release.conf && {LISTEN}"
"""Makes the directory; the socket in it is systemd's, and only a restart makes it anew."""

ROWS = (
    Kind(
        "socket-not-enabled", W, "daemon",
        "pve-gpu-hostd.socket is {state}",
        "{mend}",
        "Without the daemon releases are done by the command line and the hook: no stop watchdog, no work in the "
        "background.",
        "unit files of systemd",
    ),
    Kind(
        "socket-not-active", W, "daemon",
        "nobody listens for pve-gpu-hostd ({state})",
        LISTEN,
        "Without the daemon the stop watchdog cannot be armed.",
        "systemctl show; /run/pve-gpu-release/io.pve.GpuRelease",
    ),
    Kind(
        "daemon-masked", W, "daemon",
        "pve-gpu-hostd.service is masked: the socket gives up at the first connection",
        f"systemctl unmask pve-gpu-hostd.service; {LISTEN}",
        "Without the daemon the stop watchdog cannot be armed.",
        "unit files of systemd",
    ),
    Kind(
        "daemon-silent", W, "daemon",
        "pve-gpu-hostd does not answer on its socket",
        f"{LISTEN} pve-gpu-hostd.service  # why: journalctl -u pve-gpu-hostd",
        "Releases are then done by the command line and the hook themselves.",
        "org.varlink.service.GetInfo",
    ),
    Kind(
        "config-broken", E, "configuration",
        "the configuration is broken: {problem}",
        "pve-gpu-release check-config {file}  # names line and key; when it is mended: systemctl reload pve-gpu-hostd",
        "A running daemon keeps its last good one, a fresh start refuses, the hook uses the built-in defaults.",
        "/etc/pve-gpu-release/config.yaml",
    ),
    Kind(
        "config-ignored", W, "configuration",
        "{problem}",
        "pve-gpu-release check-config {file}",
        "What the file says is not in force.",
        "/etc/pve-gpu-release/config.yaml",
    ),
    Kind(
        "start-refused", W, "records",
        "the last start of container {vmid} was refused (on_dirty: block): {reason}",
        "pve-gpu-release {vmid}; pct start {vmid}  # why: {why}",
        "A reboot inside the container that is refused leaves it down without a message to anyone.",
        "/run/pve-gpu-release/starts",
    ),
    Kind(
        "stop-hangs", W, "records",
        "the stop of container {vmid} that began {since} does not end",
        "pve-gpu-release {vmid}; pve-gpu-release status  # {advice}",
        "pct stop waits for ever, without a word, for a task that cannot die.",
        "/run/pve-gpu-release/watch, written by the daemon's stop watchdog",
    ),
    Kind(
        "release-cut-off", W, "records",
        "a release of container {vmid} was cut off (at {step}; pid {pid} is gone)",
        "pve-gpu-release {vmid}",
        "Whoever did it was killed; what it had signalled is in the record. The next whole release of the container answers it.",
        "/run/pve-gpu-release/releases",
    ),
    Kind(
        "run-dir", E, "run-dir",
        "/run/pve-gpu-release is not as it must be: {why}",
        "{mend}",
        "It holds the locks and the daemon's socket: nobody but root may write or read there.",
        "lstat of /run/pve-gpu-release",
    ),
    Kind(
        "run-dir-full", W, "run-dir",
        "nothing can be written to /run/pve-gpu-release: {why}",
        "{mend}",
        "Releases go on, but leave no snapshot and no record: a release that is cut off cannot be finished.",
        "statvfs of /run/pve-gpu-release",
    ),
    Kind(
        "run-dir-missing", N, "run-dir",
        "/run/pve-gpu-release does not exist yet",
        MAKE_RUN_DIR,
        "The first release makes it.",
        "lstat of /run/pve-gpu-release",
    ),
)  # fmt: skip
