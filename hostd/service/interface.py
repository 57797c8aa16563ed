"""The interface `io.pve.GpuRelease`: its description in Varlink's own language, and its typed errors.

`varlinkctl introspect` prints this text, so it is written for people. Keys are those of `--json` (DESIGN 5).
Values with a hyphen in them (steps, reasons, phases) are strings: Varlink's enumerations allow none.
"""

from __future__ import annotations

from hostd import errors

INTERFACE = "io.pve.GpuRelease"
SERVICE = "org.varlink.service"
SOCKET_PATH = "/run/pve-gpu-release/io.pve.GpuRelease"

DESCRIPTION = """\
# Frees the NVIDIA GPU memory that Proxmox LXC containers hold, from the host, and proves it.
# For root only. "null" and an absent field are the same everywhere.
interface io.pve.GpuRelease

# The three answers; "unknown" means that not everything could be looked at.
type Verdict (released, held, unknown)

# How we know that a process holds a GPU: descriptor, mapping, the driver's own client list.
type Evidence (fd, map, nvml)

# What became of a holder by the end of a release.
type Fate (exited, survived, unkillable, respawned, spared)

# What to do with a release whose caller went away: stop before the next rung, or go on.
type OnDisconnect (cancel, continue)

# Why a task does not die.
type Stuck (
  # Thread id, in the host's PID namespace
  tid: int,
  # One letter as in proc_pid_stat(5)
  state: string,
  # Kernel function that it waits in
  wchan: string,
  # Kernel stack, one frame a line
  stack: string,
  kill_pending: bool,
  # When it was first seen like this, ISO 8601
  since: string
)

# A process of the released container that held a GPU.
type Holder (
  # In the host's PID namespace
  pid: int,
  # In the nested namespaces, outermost first, without "pid"
  ns_pids: []int,
  # Clock ticks since boot: with the pid the identity of the process
  start_time: int,
  comm: string,
  cmdline: string,
  user: string,
  # Path in the v2 hierarchy
  cgroup: string,
  # Unit or nested container that would start it again, or empty
  unit: string,
  # One letter as in proc_pid_stat(5)
  state: string,
  evidence: []Evidence,
  # Minors of the GPUs that it holds or may hold
  gpus: []int,
  # Null when the driver does not say
  memory_mib: ?int,
  fate: Fate,
  # Pid of the dead opener that the driver still lists for it
  inherited_from: ?int,
  # Only with fate "unkillable"
  stuck: ?Stuck
)

# A process that holds a GPU, as seen now; nothing was done to it.
type SeenHolder (
  # Owning container, null for the host's own
  vmid: ?int,
  pid: int,
  ns_pids: []int,
  start_time: int,
  comm: string,
  cmdline: string,
  user: string,
  cgroup: string,
  unit: string,
  state: string,
  evidence: []Evidence,
  gpus: []int,
  memory_mib: ?int,
  inherited_from: ?int
)

# A GPU of the release, before and after. Figures are null where the driver gives none.
type Gpu (
  # NVML index, null when the driver is silent
  index: ?int,
  minor: int,
  uuid: string,
  pci_bus_id: string,
  name: string,
  used_mib_before: ?int,
  used_mib_after: ?int,
  # The driver's own reserve, not part of "used"
  reserved_mib: ?int,
  # In use with no live client to account for it
  ghost_mib: ?int,
  bar1_used_mib_after: ?int,
  # What the driver recommends: 0 nothing, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset; null: it does not say
  recovery_action: ?int,
  # Processes of the host or of other containers on it: never touched
  other_holders: []SeenHolder
)

# A pid in the driver's list of a GPU that no live holder has: a dead opener, or a recycled number.
type DeadClient (
  pid: int,
  used_mib: ?int,
  # Who keeps its memory: own, foreign, none
  heir: string
)

# A GPU as seen now.
type SeenGpu (
  index: ?int,
  minor: int,
  uuid: string,
  pci_bus_id: string,
  name: string,
  total_mib: ?int,
  used_mib: ?int,
  reserved_mib: ?int,
  ghost_mib: ?int,
  bar1_used_mib: ?int,
  # Pids that the driver lists and that are dead or another process by now
  dead_clients: []DeadClient,
  # Why it could not be asked, or empty
  error: string
)

# One step of the escalation as it happened. Sent, gone and waited are three separate facts.
type Rung (
  # stop-unit, term, kill, cgroup-kill, reset
  step: string,
  # Since the release began
  at_ms: int,
  # Host pids
  targets: []int,
  # Signals that the kernel accepted
  sent: int,
  # Processes that ended
  gone: int,
  waited_ms: int,
  # What else is worth knowing, or empty
  note: string
)

# Something that could not be read, for another reason than that it is gone.
type BlindSpot (
  source: string,
  what: string,
  error: string
)

# Everything that one release saw, did and decided: the same object as "pve-gpu-release --json".
type Report (
  # 1
  schema: int,
  # UUID; "pve-gpu-release explain" tells its story
  release_id: string,
  vmid: int,
  # cli, hook, api, ...
  trigger: string,
  # Null when it came to none (refused, interrupted)
  verdict: ?Verdict,
  # Stable kebab-case code
  reason: string,
  # The sentence for people
  message: string,
  was_held: bool,
  dry_run: bool,
  # ISO 8601, UTC
  started: string,
  duration_ms: int,
  holders: []Holder,
  gpus: []Gpu,
  rungs: []Rung,
  blind_spots: []BlindSpot,
  # What else is worth knowing of a failure: sentences
  details: []string,
  next_step: string
)

# What a release in flight is doing. Messages may be left out when the reader is slow.
type Progress (
  # observed, rung_begun, rung_done, waiting; for "Event" first of all accepted, "since_s" being the budget of the phase
  event: string,
  vmid: int,
  # With "observed"
  holders: ?[]SeenHolder,
  gpus: ?[]SeenGpu,
  blind_spots: ?[]BlindSpot,
  # With "rung_begun" and "rung_done"
  rung: ?Rung,
  # With "waiting": what for, and how long already
  what: ?string,
  since_s: ?float
)

# As the options of the same names on the command line; what is left out is as configured.
type ReleaseOptions (
  now: ?bool,
  dry_run: ?bool,
  stop: ?bool,
  stop_units: ?bool,
  reset: ?bool,
  verify_memory: ?bool,
  # False: fail with Busy instead of waiting for a release in flight
  wait: ?bool,
  # NVML index, minor, UUID or PCI address
  gpu: ?string,
  # "17" in the container's PID namespace, or "host:4711"; several with commas between: "17,host:4711"
  pid: ?string,
  # Seconds without progress after SIGTERM
  grace_s: ?float,
  # Seconds for the whole release, more than 0
  timeout_s: ?float,
  # For the audit trail: cli, hook, ...
  trigger: ?string
)

# A process of a container by every number that it has.
type MappedProcess (
  # In the host's PID namespace
  pid: int,
  # In the nested namespaces, outermost first
  ns_pids: []int,
  start_time: int,
  comm: string,
  cgroup: string
)

# A release that ended, or that is in flight (verdict null, reason "in-flight"; "interrupted" when nobody is at it).
type ReleaseSummary (
  release_id: string,
  vmid: ?int,
  trigger: string,
  verdict: ?Verdict,
  reason: string,
  message: string,
  started: string,
  duration_ms: int
)

# A stop that takes long, as the stop watchdog saw it last.
type SlowStop (
  vmid: int,
  # Since it was announced
  since_s: float,
  message: string,
  next_step: string,
  # SIGKILL was sent to holders by the watchdog
  signalled: bool
)

# A container whose last start was refused by the gate ("hook.on_dirty: block").
type RefusedStart (
  vmid: int,
  since_s: float,
  release_id: string,
  message: string
)

type DaemonStatus (
  version: string,
  pid: int,
  # ISO 8601, UTC
  since: string,
  # False in a PID namespace that is not the machine's first: the driver's lists may be shortened there
  first_pid_namespace: bool,
  # Path, and the error that keeps the last good one in force, or empty
  config: string,
  config_error: string,
  connections: int,
  workers: int,
  # Requests that wait for a worker
  queued: int,
  # Clients that were closed for misbehaviour
  refused: int,
  # Calls into the driver that did not come back, since the daemon began
  driver_hangs: int
)

# A call into the driver that does not come back. Nobody adds to it; it is over when that process ends.
type Wedged (
  pid: int,
  # ISO 8601, UTC
  since: string,
  call: string,
  age_s: float
)

type DriverStatus (
  present: bool,
  version: string,
  # ok, none (no driver), missing, mismatch, silent, wedged
  nvml: string,
  # What does not answer and for how long, or empty
  detail: string,
  # With "wedged"
  wedged: ?Wedged
)

# Free the GPUs that a container holds, verify, report.
# With "more", any number of replies with "progress" comes first; the last one has "report".
# With on_disconnect "cancel" given, shutting down the sending side of the connection cancels too, and the report still
# comes. The default is "cancel".
method Release(
  vmid: int,
  options: ?ReleaseOptions,
  # To finish a release that was cut off, under its own id
  release_id: ?string,
  on_disconnect: ?OnDisconnect
) -> (
  progress: ?Progress,
  report: ?Report
)

# Who holds what: all containers and the host (null or empty), or these containers only. The same object as "ps --json".
method Observe(vmids: ?[]int) -> (
  schema: int,
  holders: []SeenHolder,
  gpus: []SeenGpu,
  blind_spots: []BlindSpot
)

# Judge only, no action. The report has no rungs; fates are "spared". Streams as "Release" does. "gpu" and "pid" as in
# ReleaseOptions.
method Verify(
  vmid: int,
  gpu: ?string,
  pid: ?string,
  verify_memory: ?bool,
  on_disconnect: ?OnDisconnect
) -> (
  progress: ?Progress,
  report: ?Report
)

# The processes that a container calls "pid", at whatever level of PID namespaces, the shallowest first.
method Map(vmid: int, pid: int) -> (
  vmid: int,
  ns_pid: int,
  matches: []MappedProcess
)

# Daemon, driver, GPUs, holders per container, releases in flight and the last ones.
method Status() -> (
  schema: int,
  # False: not looked at from the machine's first PID namespace, where alone the driver's lists are sure to be whole
  first_pid_namespace: bool,
  daemon: DaemonStatus,
  driver: DriverStatus,
  gpus: []SeenGpu,
  holders: []SeenHolder,
  releases: []ReleaseSummary,
  stops: []SlowStop,
  refused: []RefusedStart,
  blind_spots: []BlindSpot
)

# A lifecycle event of a container, as the hookscript or the systemd drop-in saw it.
# "phase": pre-start, post-start, pre-stop, post-stop, exec-start-pre, exec-stop-post (watchdog: the daemon itself looks
# after a stop that takes long). "source": hookscript, drop-in, daemon.
# "context": what the source knows, such as SERVICE_RESULT or INVOCATION_ID. "message" has one line per thing to say;
# it is empty for a container that has nothing to do with GPUs. The default of "on_disconnect" is "continue".
# With "more", any number of replies with "progress" comes first. "allow" false refuses a start (configured: block).
method Event(
  vmid: int,
  phase: string,
  source: string,
  context: ?[string]string,
  on_disconnect: ?OnDisconnect
) -> (
  progress: ?Progress,
  allow: bool,
  message: string,
  next_step: string,
  report: ?Report
)

# Every error has the stable "reason" of the verdict table (docs/verdicts.md), the sentence for people and, where there
# is one, what to do.

# Neither configuration nor cgroup of such a container on this node.
error NoSuchContainer (reason: string, message: string, next_step: string, vmid: ?int)

# The caller is not root.
error NotPermitted (reason: string, message: string, next_step: string, vmid: ?int)

# Another release of this container is in flight.
error Busy (reason: string, message: string, next_step: string, vmid: ?int)

# Possible, but policy says no.
error Refused (reason: string, message: string, next_step: string, vmid: ?int)

# The request makes no sense or matches nothing.
error Usage (reason: string, message: string, next_step: string, vmid: ?int)

# The configuration file is wrong.
error Configuration (reason: string, message: string, next_step: string, vmid: ?int)

# A source that decides could not be read.
error Unreadable (reason: string, message: string, next_step: string, vmid: ?int)

# Cancelled by the caller.
error Interrupted (reason: string, message: string, next_step: string, vmid: ?int)

# The daemon is being stopped and did not finish this; the same work can be done without it. Reason "stopping".
error Stopping (reason: string, message: string, next_step: string, vmid: ?int)

# The process that does the work was killed in the middle, or could not be started; the same work can be done without
# the daemon. Reason "worker-lost".
error Lost (reason: string, message: string, next_step: string, vmid: ?int)

# A bug; the journal has the traceback.
error Internal (reason: string, message: string, next_step: string, vmid: ?int)
"""

SERVICE_DESCRIPTION = """\
# What every Varlink service answers.
interface org.varlink.service

# Who this service is and which interfaces it has.
method GetInfo() -> (
  vendor: string,
  product: string,
  version: string,
  url: string,
  interfaces: []string
)

# The description of an interface.
method GetInterfaceDescription(interface: string) -> (description: string)

error InterfaceNotFound (interface: string)

error MethodNotFound (method: string)

error MethodNotImplemented (method: string)

error InvalidParameter (parameter: string)

error PermissionDenied ()

error ExpectedMore ()
"""

DESCRIPTIONS = {SERVICE: SERVICE_DESCRIPTION, INTERFACE: DESCRIPTION}

ERRORS: dict[str, type[errors.PgrError]] = {
    "NoSuchContainer": errors.NoSuchContainerError,
    "NotPermitted": errors.NotPermittedError,
    "Busy": errors.BusyError,
    "Refused": errors.RefusedError,
    "Usage": errors.UsageError,
    "Configuration": errors.ConfigError,
    "Unreadable": errors.UnreadableError,
    "Interrupted": errors.InterruptedRelease,
    "Internal": errors.PgrError,
}
"""Typed errors and the exceptions that they stand for, both ways. Not `Stopping` and `Lost`: there the caller does
the work itself."""

STOPPING = f"{INTERFACE}.Stopping"
LOST = f"{INTERFACE}.Lost"
ONLY_HERE = {
    "stopping": "error `Stopping`: the daemon is being stopped and did not finish this",
    "worker-lost": "error `Lost`: the process that did the work ended without an answer, or could not be started",
    "in-flight": "`Status`, `releases[]`: somebody is at work on it, there is no verdict yet",
}
"""Reasons that no command ends with: `pve-gpu-release` goes on without the daemon, other callers decide themselves."""


def error_name(exc: errors.PgrError) -> str:
    """The qualified error of an exception, by its nearest class in the table."""
    for kind in type(exc).__mro__:
        for name, known in ERRORS.items():
            if known is kind:
                return f"{INTERFACE}.{name}"
    return f"{INTERFACE}.Internal"


def error_parameters(exc: errors.PgrError) -> dict[str, object]:
    return {"reason": exc.reason, "message": exc.message, "next_step": exc.next_step, "vmid": exc.vmid}


def error_from(name: str, parameters: dict[str, object]) -> errors.PgrError | None:
    """The exception behind one of our own error replies; None for any other name. A reason that this version does not know
    gives way to the one of the error."""
    kind = ERRORS.get(name.removeprefix(f"{INTERFACE}.")) if name.startswith(f"{INTERFACE}.") else None
    if kind is None:
        return None
    from hostd.verdicts import REASONS

    vmid, reason = parameters.get("vmid"), parameters.get("reason")
    return kind(
        str(parameters.get("message") or name),
        next_step=str(parameters.get("next_step") or ""),
        reason=reason if isinstance(reason, str) and reason in REASONS else "",
        vmid=vmid if isinstance(vmid, int) else None,
    )
