"""The hookscript as a Proxmox snippet: choosing a storage, installing the file, setting it on containers.

Everything that changes Proxmox goes through its API (proxmoxer, by pvesh on this node), which takes the container's lock
and checks what it is given; the file itself has no API. Never called from a hook.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import stat
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hostd import __version__
from hostd.errors import NoSuchContainerError, PgrError, RefusedError, UnreadableError
from hostd.verdicts import say

Json = dict[str, Any]
NAME = "pve-gpu-release"
SOURCE = "/usr/lib/pve-gpu-release/hookscripts/pve-gpu-release"
MARK = "# pve-gpu-release: hookscript of Proxmox containers"
"""In the first lines of every copy of ours."""
CONFIGURATIONS = "/etc/pve/nodes/*/lxc/*.conf"
"""Of every container of the cluster, with its snapshots (pct.conf(5))."""
REINSTALL = f"apt install --reinstall ./pve-gpu-release_{__version__}_all.deb"
"""No archive has the package: it comes back from the file that it was installed from."""
CHAIN_LIMIT_S = 60
API_TIMEOUT_S = 30
"""pvesh waits up to 10 s for a container's lock."""
_MOUNTED = frozenset({"nfs", "cifs", "cephfs", "glusterfs"})


class Api(Protocol):
    """The few calls that are needed. Raises PgrError."""

    def get(self, path: str, **options: object) -> Any: ...

    def set(self, path: str, **options: object) -> None: ...


@dataclass(frozen=True, slots=True)
class _Reply:
    """What proxmoxer reads of a response."""

    status_code: int
    content: str
    exit_code: int

    @property
    def text(self) -> str:
        return self.content


class _Pvesh:
    """A session for proxmoxer that runs pvesh on this node.

    proxmoxer has such a backend (`local`) from 2.0 on, Debian 12 ships 1.2; and it takes every warning on pvesh's error
    stream for a failure, while pvesh's exit status says it plainly.
    """

    def request(
        self,
        method: str,
        url: str,
        data: Mapping[str, object] | None = None,
        params: Mapping[str, object] | None = None,
        **_: object,
    ) -> _Reply:
        verb = {"post": "create", "put": "set"}.get(method.lower(), method.lower())
        words = ["pvesh", verb, url]
        for key, value in [*(data or {}).items(), *(params or {}).items()]:
            words += [f"-{key}", str(value)]
        done = subprocess.run(
            [*words, "--output-format", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=API_TIMEOUT_S,
            check=False,
        )
        text = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).decode("utf-8", "backslashreplace")
        return _Reply(200 if done.returncode == 0 else 500, text, done.returncode)


class _Json:
    """pvesh's answers; nothing at all is None."""

    def loads(self, response: _Reply) -> Any:
        return json.loads(response.content) if response.content.strip() else None

    def loads_errors(self, response: _Reply) -> None:
        return None


class LocalApi:
    """Proxmox's API on this node by proxmoxer."""

    def __init__(self) -> None:
        try:
            from proxmoxer.core import ProxmoxResource
        except ImportError as exc:
            raise UnreadableError(
                f"cannot ask Proxmox: {exc}", next_step="apt install python3-proxmoxer", reason="cannot-look"
            ) from exc
        self._root = ProxmoxResource(base_url="", session=_Pvesh(), serializer=_Json())

    def get(self, path: str, **options: object) -> Any:
        return self._call("get", path, options)

    def set(self, path: str, **options: object) -> None:
        self._call("set", path, options)

    def _call(self, verb: str, path: str, options: Mapping[str, object]) -> Any:
        try:
            return getattr(self._root(path.strip("/")), verb)(**options)
        except FileNotFoundError as exc:
            raise UnreadableError(
                "cannot ask Proxmox: there is no pvesh on this machine",
                next_step="run it on a Proxmox VE node, as root (pvesh comes with pve-manager)",
            ) from exc
        except Exception as exc:  # proxmoxer's own, subprocess.TimeoutExpired, JSON errors: all of them say no
            text = " ".join(str(exc).split())[:500]
            raise UnreadableError(f"cannot {verb} {path}: {text or type(exc).__name__}") from exc


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that may keep snippets."""

    name: str
    folder: str
    """Where its snippets are on this node."""
    shared: bool

    def volume(self, name: str) -> str:
        return f"{self.name}:snippets/{name}"

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


@dataclass(frozen=True, slots=True)
class Change:
    """What was done for one container."""

    vmid: int
    outcome: str
    """`enabled`, `refreshed`, `disabled`, `unchanged`."""
    message: str
    volume: str = ""


# --- pure --------------------------------------------------------------------------------------------------------------


def parse_storage(entry: Mapping[str, Any]) -> Storage | None:
    """One storage of `GET /storage`; None when it keeps no snippets as files."""
    name, kind = str(entry.get("storage", "")), str(entry.get("type", ""))
    if "snippets" not in str(entry.get("content", "")).split(",") or str(entry.get("disable", "0")) == "1":
        return None
    path = str(entry.get("path") or (f"/mnt/pve/{name}" if kind in _MOUNTED else ""))
    if not path:
        return None
    folder = os.path.join(path, "snippets")
    for part in str(entry.get("content-dirs") or "").split(","):
        kind_of, _, below = part.partition("=")
        if kind_of == "snippets" and below:
            folder = os.path.join(path, below.strip("/"))
    return Storage(name, folder, str(entry.get("shared", "0")) == "1" or kind in _MOUNTED)


def choose_storage(storages: Iterable[Storage], wanted: str | None, nodes: int) -> Storage:
    """The storage for the snippet. Raises RefusedError: nothing is created and no storage is changed for this.

    In a cluster a shared one is better: a container whose snippet is missing on the other node does not start there.
    """
    found = list(storages)
    if wanted is not None:
        for storage in found:
            if storage.name == wanted:
                return storage
        raise RefusedError(
            f"cannot use storage {wanted}: it does not exist here or does not allow snippets",
            next_step=f"choose from: {', '.join(s.name for s in found) or 'none'}",
        )
    if not found:
        raise RefusedError(
            "cannot install the hookscript: no storage that this node can use now allows snippets",
            next_step="Datacenter > Storage > local > Content: add Snippets, or pvesm set local --content ...,snippets",
        )
    ranked = sorted(found, key=lambda s: (nodes > 1 and not s.shared, s.name != "local", s.name))
    return ranked[0]


def split_volume(volume: str) -> tuple[str, str]:
    """(storage, file name) of `local:snippets/name`; ("", "") for anything else."""
    storage, colon, rest = volume.partition(":")
    kind, slash, name = rest.partition("/")
    if not (colon and slash) or kind != "snippets" or not name or "/" in name:
        return "", ""
    return storage, name


def is_ours(text: str) -> bool:
    return MARK in text[:4096]


def with_chain(text: str, path: str, volume: str, limit_s: float) -> str:
    """The snippet that calls another hookscript after ours."""
    lines = []
    for line in text.split("\n"):
        if line == "chained=":
            line = f"chained={shlex.quote(path)} # {volume}"
        elif line.startswith("chain_limit="):
            line = f"chain_limit={limit_s:g}"
        lines.append(line)
    return "\n".join(lines)


def chained_volume(text: str) -> str:
    """The volume of the hookscript that this snippet calls; empty when it calls none."""
    for line in text.split("\n"):
        if line.startswith("chained="):
            return _after_one_word(line, " # ").strip()
    return ""


def _after_one_word(line: str, mark: str) -> str:
    """What follows the mark that stands after one whole word of the shell; the word may have the mark in itself."""
    at = line.find(mark)
    while at >= 0:
        try:
            if len(shlex.split(line[:at])) == 1:
                return line[at + len(mark) :]
        except ValueError:  # in the middle of a quotation
            pass
        at = line.find(mark, at + 1)
    return ""


def chain_limit(text: str) -> float:
    """The chained hookscript's limit in seconds; the default when it cannot be read."""
    for line in text.split("\n"):
        key, _, value = line.partition("=")
        if key == "chain_limit" and value.isdecimal():
            return float(value)
    return CHAIN_LIMIT_S


# --- doing ---------------------------------------------------------------------------------------------------------------


class Snippets:
    """Sets and removes our hookscript. `source` is the script as installed with the package."""

    def __init__(
        self, api: Api, *, storage: str | None = None, source: str = SOURCE, configurations: str = CONFIGURATIONS
    ) -> None:
        self._api = api
        self._source = source
        self._configurations = configurations
        self.storages = {s.name: s for entry in _entries(api, "/storage") if (s := parse_storage(entry)) is not None}
        there = _entries(api, "/nodes/localhost/storage", content="snippets", enabled=1)
        usable = {str(e["storage"]) for e in there if str(e.get("active", "1")) != "0"}  # 0: not mounted
        self.storages = {name: s for name, s in self.storages.items() if name in usable}
        self._wanted = storage

    def nodes(self) -> int:
        """How many nodes the cluster has; 1 where that cannot be said."""
        try:
            found = _entries(self._api, "/cluster/status")
        except PgrError:
            return 1
        return max(1, sum(1 for entry in found if entry.get("type") == "node"))

    def current(self, vmid: int) -> tuple[str, str, str]:
        """(volume, text, digest): the container's hookscript now, what the file says, and the configuration's digest.

        Text is empty for no hookscript or a file that cannot be read. Raises NoSuchContainerError.
        """
        try:
            path = f"/nodes/localhost/lxc/{vmid}/config"
            config = self._api.get(path)
        except UnreadableError as exc:
            if "does not exist" in exc.message or "no such" in exc.message.lower():
                raise _no_container(vmid) from exc
            raise
        if not isinstance(config, dict):
            raise UnreadableError(f"cannot understand Proxmox's answer to get {path}: {config!r:.80}", vmid=vmid)
        volume = str(config.get("hookscript") or "")
        return volume, self.read(volume), str(config.get("digest") or "")

    def read(self, volume: str) -> str:
        path = self.path_of(volume)
        if not path:
            return ""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(1 << 20)
        except OSError:
            return ""

    def path_of(self, volume: str) -> str:
        storage, name = split_volume(volume)
        known = self.storages.get(storage)
        return known.path(name) if known is not None and name else ""

    def state(self, volume: str, text: str) -> str:
        """`ours`, `chained` (ours, and it calls another), `chained-missing` (that one's file is not there: the container
        does not start), `none`, `foreign`, `missing` (the file of the hookscript is not there)."""
        if not volume:
            return "none"
        if not text:
            return "missing"
        if not is_ours(text):
            return "foreign"
        chained = chained_volume(text)
        if not chained:
            return "ours"
        return "chained-missing" if self._is_missing(chained) else "chained"

    def enable(self, vmid: int, *, chain: bool, limit_s: float | None = None) -> Change:
        """Our hookscript on one container. A foreign one stays unless `chain`. Raises PgrError.

        `limit_s`: on the chained one; None: as it is, or the default.
        """
        volume, text, digest = self.current(vmid)
        ours = self._is_our_snippet(volume, text)
        _refuse_lost_chain(vmid, volume, text)
        chained = chained_volume(text) if ours else volume
        if not ours and volume and self._is_missing(volume):
            raise RefusedError(
                f"container {vmid} has another hookscript, and its file is not there: {volume}",
                next_step=f"pct set {vmid} -delete hookscript && pve-gpu-release hook enable {vmid}  # without that one",
                vmid=vmid,
            )
        if not ours and volume and not chain:
            raise RefusedError(
                f"container {vmid} has another hookscript: {volume}",
                next_step=f"pve-gpu-release hook enable --chain {vmid}  # ours runs first and then calls it",
                vmid=vmid,
            )
        storage = self._storage_for(volume if ours else "")
        name = f"{NAME}-{vmid}" if chained else NAME
        target = storage.volume(name)
        wanted = self._script()
        if chained:
            path = self.path_of(chained)
            if not path or not os.access(path, os.X_OK):
                raise RefusedError(
                    f"cannot chain {chained} of container {vmid}: it is no executable file of a storage that is here",
                    next_step=f"pve-gpu-release hook disable {vmid} && pve-gpu-release hook enable {vmid}  # without that one"
                    if ours
                    else "",
                    vmid=vmid,
                )
            self._refuse_shared_chain(vmid, target, chained)
            wanted = with_chain(wanted, path, chained, chain_limit(text) if limit_s is None else limit_s)
        self._refuse_foreign_file(vmid, storage, name)
        changed = install(storage.path(name), wanted)
        if volume == target:
            what = "refreshed" if changed else "unchanged"
            return Change(vmid, what, f"container {vmid} has it already: {target}", target)
        self._set(vmid, target, digest)
        more = f"; it calls {chained} after itself" if chained else ""
        return Change(vmid, "enabled", f"container {vmid}: hookscript is {target}{more}", target)

    def disable(self, vmid: int) -> Change:
        """Takes ours off; a chained one is set again. A foreign hookscript is left alone."""
        volume, text, digest = self.current(vmid)
        if not volume or not self._is_our_snippet(volume, text):
            return Change(vmid, "unchanged", f"container {vmid} has no hookscript of ours", volume)
        _refuse_lost_chain(vmid, volume, text)
        chained = chained_volume(text)
        lost = bool(chained) and self._is_missing(chained)
        before = "" if lost else chained
        self._set(vmid, before, digest)
        if chained and self._named_by(volume) == []:
            try:
                os.unlink(self.path_of(volume))
            except OSError:
                pass  # another node's, or gone
        message = f"container {vmid}: hookscript removed" + (f", {before} is set again" if before else "")
        message += f"; {chained} is not set again: its file is not there" if lost else ""
        return Change(vmid, "disabled", message, before)

    def _is_our_snippet(self, volume: str, text: str) -> bool:
        """By what stands in it; by its name only when it cannot be read."""
        return is_ours(text) if text else is_our_name(volume)

    def _is_missing(self, volume: str) -> bool:
        """The storage is here, and the file is not in it."""
        path = self.path_of(volume)
        return bool(path) and not os.path.lexists(path)

    def _refuse_foreign_file(self, vmid: int, storage: Storage, name: str) -> None:
        """Raises RefusedError when somebody else's file has the name of our snippet."""
        text = self.read(storage.volume(name))
        if text and not is_ours(text):
            raise RefusedError(
                f"cannot install the hookscript for container {vmid}: {storage.path(name)} is there, and is not ours",
                next_step=f"mv {storage.path(name)} {storage.path(name)}.own  # or --storage with another one",
                vmid=vmid,
            )

    def _refuse_shared_chain(self, vmid: int, target: str, chained: str) -> None:
        """Raises RefusedError when others have this container's snippet (clones), and it calls another script for them."""
        if chained_volume(self.read(target)) in ("", chained):
            return
        named = self._named_by(target)
        if named is None:
            raise UnreadableError(
                f"cannot chain {chained} of container {vmid}: {target} calls another script, and who else has it cannot be "
                f"read from {self._configurations}",
                vmid=vmid,
            )
        if others := [number for number in named if number != vmid]:
            raise RefusedError(
                f"cannot chain {chained} of container {vmid}: {target} calls another script, and container "
                f"{', '.join(map(str, others))} has it too",
                next_step=f"pve-gpu-release hook enable {' '.join(map(str, others))}  # that gives a snippet of its own",
                vmid=vmid,
            )

    def _named_by(self, volume: str) -> list[int] | None:
        """The containers of the cluster that have this hookscript, now or in a snapshot (a clone or a restored backup has
        its origin's): without the file they would not start. None when that cannot be said."""
        found = []
        paths = glob.glob(self._configurations)
        for path in paths:
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    lines = file.read(1 << 20).split("\n")
            except OSError:
                return None
            if any(
                key == "hookscript" and value.strip() == volume for key, _, value in (x.partition(":") for x in lines)
            ):
                name = os.path.basename(path).removesuffix(".conf")
                found.append(int(name) if name.isdecimal() else 0)
        return sorted(found) if paths else None

    def _storage_for(self, volume: str) -> Storage:
        """Where it is already, unless another one is asked for."""
        there = self.storages.get(split_volume(volume)[0]) if self._wanted is None else None
        if there is not None and not is_noexec(there.folder):
            return there
        if self._wanted is not None and (asked := self.storages.get(self._wanted)) and is_noexec(asked.folder):
            raise RefusedError(
                f"cannot use storage {self._wanted}: {asked.folder} is mounted noexec, and no container would start with it",
                next_step=f"choose from: {', '.join(sorted(self._startable())) or 'none'}",
            )
        return choose_storage(self._startable().values(), self._wanted, self.nodes())

    def _startable(self) -> dict[str, Storage]:
        """Those from which a program can be started."""
        return {name: storage for name, storage in self.storages.items() if not is_noexec(storage.folder)}

    def _set(self, vmid: int, volume: str, digest: str) -> None:
        """Sets or deletes the hookscript and reads it back."""
        path = f"/nodes/localhost/lxc/{vmid}/config"
        options: dict[str, object] = {"hookscript": volume} if volume else {"delete": "hookscript"}
        if digest:
            options["digest"] = digest  # nobody else's change in between is overwritten
        problem: PgrError | None = None
        try:
            self._api.set(path, **options)
        except PgrError as exc:  # what counts is what it reads afterwards
            problem = exc
        now = self.current(vmid)[0]
        if now != volume:
            if problem is not None:
                raise problem
            raise UnreadableError(f"cannot set the hookscript of container {vmid}: it reads {now or 'none'}", vmid=vmid)

    def _script(self) -> str:
        try:
            with open(self._source, encoding="utf-8") as file:
                return file.read()
        except OSError as exc:
            raise UnreadableError(
                f"cannot read {self._source}: {exc.strerror}",
                next_step=f"{REINSTALL}  # the file that it was installed from",
            ) from exc


def _entries(api: Api, path: str, **options: object) -> list[Json]:
    """A list of objects, as Proxmox answers. Raises UnreadableError for anything else."""
    found = api.get(path, **options)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UnreadableError(f"cannot understand Proxmox's answer to get {path}: {found!r:.80}")
    return found


def _no_container(vmid: int) -> NoSuchContainerError:
    """Names the node of the cluster that has it."""
    from hostd.system.pve import Pve

    node = Pve().find_node(vmid)
    reason = "container-elsewhere" if node else "no-such-container"
    message, step = say(reason, vmid=vmid, node=node)
    step = f"ssh {node} pve-gpu-release hook status {vmid}" if node else step
    return NoSuchContainerError(message, next_step=step, reason=reason, vmid=vmid)


def _refuse_lost_chain(vmid: int, volume: str, text: str) -> None:
    """Raises RefusedError when our snippet calls another one and cannot be read: which one that is stands there only."""
    if is_ours(text) or not is_our_name(volume) or split_volume(volume)[1] == NAME:
        return
    raise RefusedError(
        f"cannot change the hookscript of container {vmid}: {volume} calls another one after ours, and cannot be read to "
        "tell which",
        next_step=f"make its storage available; or pct set {vmid} --hookscript with the container's own one, "
        f"then pve-gpu-release hook enable --chain {vmid}",
        vmid=vmid,
    )


def is_our_name(volume: str) -> bool:
    """A volume that is named as ours is, though its file is not there (any more)."""
    name = split_volume(volume)[1]
    return name == NAME or (name.startswith(f"{NAME}-") and name[len(NAME) + 1 :].isdecimal())


def is_noexec(folder: str) -> bool:
    """It is on a file system that starts no programs (mount(8), noexec). Proxmox looks at the mode of the file alone."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def install(path: str, text: str) -> bool:
    """Writes the file, mode 0755, in one step, and reads it back; False when it was there like that. Raises PgrError.

    The directory is Proxmox's: it must be there already.
    """
    try:
        with open(path, "rb") as file:
            same = file.read() == text.encode()
        if same and stat.S_IMODE(os.stat(path).st_mode) & 0o111:
            return False
    except OSError:
        pass
    temporary = f"{path}.{os.getpid()}.new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o755)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o755)
        os.rename(temporary, path)
        with open(path, encoding="utf-8") as file:
            if file.read() != text:
                raise UnreadableError(f"cannot install {path}: it reads differently")
    except OSError as exc:
        with suppress(OSError):
            os.unlink(temporary)
        step = f"mkdir -p {os.path.dirname(path)}" if isinstance(exc, FileNotFoundError) else ""
        raise UnreadableError(f"cannot install {path}: {exc.strerror}", next_step=step) from exc
    return True
