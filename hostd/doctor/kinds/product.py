"""What `hostd/doctor/product.py` can find: our own state."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE

ROWS = (
    Kind(
        "socket-not-enabled", W, "daemon",
        "pve-gpu-hostd.socket is {state}",
        "systemctl unmask pve-gpu-hostd.socket; systemctl enable --now pve-gpu-hostd.socket",
        "Without the daemon releases are done by the command line and the hook: no stop watchdog, no work in the "
        "background.",
        "unit files of systemd",
    ),
    Kind(
        "socket-not-active", W, "daemon",
        "nobody listens for pve-gpu-hostd ({state})",
        "systemctl start pve-gpu-hostd.socket",
        "Without the daemon the stop watchdog cannot be armed.",
        "systemctl show; /run/pve-gpu-release/io.pve.GpuRelease",
    ),
    Kind(
        "daemon-silent", W, "daemon",
        "pve-gpu-hostd does not answer on its socket",
        "systemctl restart pve-gpu-hostd; journalctl -u pve-gpu-hostd",
        "Releases are then done by the command line and the hook themselves.",
        "org.varlink.service.GetInfo",
    ),
    Kind(
        "config-broken", E, "configuration",
        "the configuration is broken: {problem}",
        "pve-gpu-release check-config",
        "A running daemon keeps its last good one, a fresh start refuses, the hook uses the built-in defaults.",
        "/etc/pve-gpu-release/config.yaml",
    ),
    Kind(
        "config-ignored", W, "configuration",
        "{problem}",
        "pve-gpu-release check-config",
        "What the file says is not in force.",
        "/etc/pve-gpu-release/config.yaml",
    ),
    Kind(
        "start-refused", W, "records",
        "the last start of container {vmid} was refused (on_dirty: block): {reason}",
        "pve-gpu-release {vmid}; pve-gpu-release explain {release_id} tells why; then pct start {vmid}",
        "A reboot inside the container that is refused leaves it down without a message to anyone.",
        "/run/pve-gpu-release/starts",
    ),
    Kind(
        "stop-hangs", W, "records",
        "the stop of container {vmid} that began {since} does not end",
        "{mend}",
        "pct stop waits for ever, without a word, for a task that cannot die.",
        "/run/pve-gpu-release/watch, written by the daemon's stop watchdog",
    ),
    Kind(
        "release-cut-off", W, "records",
        "a release of container {vmid} was cut off (at {step}; pid {pid} is gone)",
        "systemctl restart pve-gpu-hostd finishes it; or pve-gpu-release {vmid}",
        "Whoever did it was killed; what it had signalled is in the record.",
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
        "run-dir-missing", N, "run-dir",
        "/run/pve-gpu-release does not exist yet",
        "systemd-tmpfiles --create",
        "The first release makes it.",
        "lstat of /run/pve-gpu-release",
    ),
)  # fmt: skip
