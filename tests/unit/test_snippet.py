"""The snippet: which storage, which file, what is set, and what is never overwritten."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hostd.errors import NoSuchContainerError, RefusedError, UnreadableError
from hostd.snippet import (
    MARK,
    Snippets,
    Storage,
    chained_volume,
    choose_storage,
    install,
    is_ours,
    parse_storage,
    split_volume,
    with_chain,
)

SCRIPT = Path(__file__).resolve().parents[2] / "hookscripts/pve-gpu-release"
LOCAL, NFS = Storage("local", "/var/lib/vz/snippets", False), Storage("nfs", "/mnt/pve/nfs/snippets", True)


# --- pure --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "storage"),
    [
        ({"storage": "local", "type": "dir", "path": "/var/lib/vz", "content": "iso,snippets"}, LOCAL),
        ({"storage": "nfs", "type": "nfs", "content": "snippets"}, NFS),
        (
            {"storage": "x", "type": "dir", "path": "/x", "content": "snippets", "content-dirs": "iso=i,snippets=/s"},
            Storage("x", "/x/s", False),
        ),
        ({"storage": "local", "type": "dir", "path": "/var/lib/vz", "content": "iso"}, None),
        ({"storage": "off", "type": "dir", "path": "/x", "content": "snippets", "disable": 1}, None),
        ({"storage": "lvm", "type": "lvmthin", "content": "snippets"}, None),
    ],
    ids=["local", "nfs", "directory of its own", "no snippets", "disabled", "no files"],
)  # fmt: skip
def test_storages_that_keep_snippets(entry: dict[str, Any], storage: Storage | None) -> None:
    assert parse_storage(entry) == storage


def test_alone_local_is_chosen_in_a_cluster_a_shared_one() -> None:
    assert choose_storage([NFS, LOCAL], None, 1) == LOCAL
    assert choose_storage([LOCAL, NFS], None, 3) == NFS
    assert choose_storage([LOCAL], None, 3) == LOCAL
    assert choose_storage([LOCAL, NFS], "nfs", 1) == NFS


def test_without_a_storage_it_is_refused_with_the_way_to_one() -> None:
    with pytest.raises(RefusedError) as caught:
        choose_storage([], None, 1)
    assert "pvesm set local" in caught.value.next_step
    with pytest.raises(RefusedError, match="storage gone"):
        choose_storage([LOCAL], "gone", 1)


@pytest.mark.parametrize(
    "volume", ["", "local", "local:iso/x", "local:snippets/", "local:snippets/a/b", "local:snippets"]
)
def test_what_is_no_snippet_volume(volume: str) -> None:
    assert split_volume(volume) == ("", "")


@pytest.mark.parametrize("name", ["own.sh", "it's.sh", "own it's # hard.sh", "a # b", "#", "$(x) # y"])
def test_the_volume_that_is_called_reads_as_it_was_written(name: str) -> None:
    text = with_chain(SCRIPT.read_text(), f"/var/lib/vz/snippets/{name}", f"local:snippets/{name}", 5)
    assert chained_volume(text) == f"local:snippets/{name}"


def test_the_script_is_ours_and_can_be_chained() -> None:
    text = SCRIPT.read_text()
    assert is_ours(text) and MARK in text and chained_volume(text) == ""
    chained = with_chain(text, "/var/lib/vz/snippets/it's.sh", "local:snippets/it's.sh", 5)
    assert chained_volume(chained) == "local:snippets/it's.sh" and "chain_limit=5" in chained
    assert not is_ours("#!/bin/sh\n/usr/bin/pve-gpu-release-like\n")
    assert os.system(f"printf '%s' '{chained.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}' | sh -n") == 0


# --- doing -------------------------------------------------------------------------------------------------------------


class FakeApi:
    """Proxmox's API as far as it is used; `configs` are the containers' configurations, written to files as well."""

    def __init__(self, folder: Path) -> None:
        self.configs: dict[int, dict[str, Any]] = {129: {}}
        self.active = 1
        self.folder = folder
        self.deaf = False
        self.warns = False

    def get(self, path: str, **_: object) -> Any:
        if path == "/storage":
            return [{"storage": "local", "type": "dir", "path": str(self.folder), "content": "snippets"}]
        if path == "/nodes/localhost/storage":
            return [{"storage": "local", "active": self.active}]
        if path == "/cluster/status":
            return [{"type": "node"}]
        vmid = int(path.split("/")[4])
        if vmid not in self.configs:
            raise UnreadableError(f"cannot get {path}: Configuration file 'nodes/pve/lxc/{vmid}.conf' does not exist")
        return {**self.configs[vmid], "digest": "d"}

    def set(self, path: str, **options: object) -> None:
        config = self.configs[int(path.split("/")[4])]
        assert options.pop("digest") == "d"
        if not self.deaf:
            if options.pop("delete", None):
                config.pop("hookscript")
            config.update(options)
        self.save()
        if self.warns:
            raise UnreadableError("a warning")

    def save(self) -> None:
        for vmid, config in self.configs.items():
            (self.folder / f"{vmid}.conf").write_text("".join(f"{key}: {value}\n" for key, value in config.items()))


@pytest.fixture
def api(tmp_path: Path) -> FakeApi:
    (tmp_path / "snippets").mkdir()
    return FakeApi(tmp_path)


def snippets(api: FakeApi) -> Snippets:
    return Snippets(api, source=str(SCRIPT), configurations=f"{api.folder}/*.conf")


def test_enable_installs_sets_and_reads_back(api: FakeApi) -> None:
    change = snippets(api).enable(129, chain=False)
    assert change.outcome == "enabled" and api.configs[129]["hookscript"] == "local:snippets/pve-gpu-release"
    copy = api.folder / "snippets/pve-gpu-release"
    assert copy.read_text() == SCRIPT.read_text() and copy.stat().st_mode & 0o777 == 0o755
    assert snippets(api).enable(129, chain=False).outcome == "unchanged"
    copy.write_text("old " + MARK)
    assert snippets(api).enable(129, chain=False).outcome == "refreshed"


def test_a_change_that_does_not_read_back_is_an_error(api: FakeApi) -> None:
    api.deaf = True
    with pytest.raises(UnreadableError, match="it reads none"):
        snippets(api).enable(129, chain=False)


def test_a_warning_of_pvesh_is_no_failure(api: FakeApi) -> None:
    api.warns = True
    assert snippets(api).enable(129, chain=False).outcome == "enabled"


def test_a_foreign_one_is_refused_or_chained_and_comes_back(api: FakeApi) -> None:
    other = api.folder / "snippets/other"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    api.configs[129]["hookscript"] = "local:snippets/other"
    with pytest.raises(RefusedError, match="another hookscript"):
        snippets(api).enable(129, chain=False)
    snippets(api).enable(129, chain=True, limit_s=9)
    assert api.configs[129]["hookscript"] == "local:snippets/pve-gpu-release-129"
    assert "chain_limit=9" in (api.folder / "snippets/pve-gpu-release-129").read_text()
    assert snippets(api).enable(129, chain=False).outcome in ("unchanged", "refreshed")
    assert api.configs[129]["hookscript"] == "local:snippets/pve-gpu-release-129"
    assert "chain_limit=9" in (api.folder / "snippets/pve-gpu-release-129").read_text()
    assert snippets(api).disable(129).outcome == "disabled"
    assert api.configs[129]["hookscript"] == "local:snippets/other"
    assert not (api.folder / "snippets/pve-gpu-release-129").exists()


def chain(api: FakeApi) -> Path:
    """Container 129 with a hookscript of its own that ours calls; where our snippet for it is."""
    other = api.folder / "snippets/other"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    api.configs[129]["hookscript"] = "local:snippets/other"
    snippets(api).enable(129, chain=True)
    return api.folder / "snippets/pve-gpu-release-129"


@pytest.mark.parametrize("where", ["a clone", "a snapshot", "unreadable"])
def test_a_chained_snippet_stays_while_anybody_has_it(api: FakeApi, where: str) -> None:
    """Without the file such a container does not start (a clone, a restored backup, a snapshot rolled back)."""
    file = chain(api)
    if where == "a clone":
        api.configs[132] = {"hookscript": "local:snippets/pve-gpu-release-129"}
    elif where == "a snapshot":
        (api.folder / "133.conf").write_text("cores: 1\n\n[before]\nhookscript: local:snippets/pve-gpu-release-129\n")
    else:
        (api.folder / "134.conf").mkdir()
    assert snippets(api).disable(129).outcome == "disabled" and api.configs[129]["hookscript"] == "local:snippets/other"
    assert file.exists()


def test_a_clone_is_not_given_another_script_to_call(api: FakeApi) -> None:
    """It has its origin's snippet: what that calls stays, until the clone has one of its own."""
    file = chain(api)
    api.configs[132] = {"hookscript": "local:snippets/pve-gpu-release-129"}
    snippets(api).disable(129)
    third = api.folder / "snippets/third"
    third.write_text("#!/bin/sh\n")
    third.chmod(0o755)
    api.configs[129]["hookscript"] = "local:snippets/third"
    with pytest.raises(RefusedError, match="container 132 has it too") as caught:
        snippets(api).enable(129, chain=True)
    assert "hook enable 132" in caught.value.next_step and chained_volume(file.read_text()) == "local:snippets/other"
    (api.folder / "134.conf").mkdir()
    with pytest.raises(UnreadableError, match="who else has it"):
        snippets(api).enable(129, chain=True)
    (api.folder / "134.conf").rmdir()
    snippets(api).enable(132, chain=False)
    snippets(api).enable(129, chain=True)
    called = {n: chained_volume((api.folder / f"snippets/pve-gpu-release-{n}").read_text()) for n in (129, 132)}
    assert called == {129: "local:snippets/third", 132: "local:snippets/other"}


@pytest.mark.parametrize("how", ["gone", "storage off"])
@pytest.mark.parametrize("verb", ["enable", "disable"])
def test_whom_a_lost_snippet_called_is_not_guessed(api: FakeApi, how: str, verb: str) -> None:
    file = chain(api)
    if how == "gone":
        file.unlink()
    else:
        api.active = 0
    before = dict(api.configs[129])
    with pytest.raises(RefusedError, match="calls another one") as caught:
        snippets(api).enable(129, chain=False) if verb == "enable" else snippets(api).disable(129)
    assert "pct set 129 --hookscript" in caught.value.next_step and api.configs[129] == before


def test_a_chained_one_that_is_gone_is_said_and_has_a_way_out(api: FakeApi) -> None:
    """With Proxmox such a container does not start."""
    chain(api)
    (api.folder / "snippets/other").unlink()
    assert snippets(api).state(*snippets(api).current(129)[:2]) == "chained-missing"
    with pytest.raises(RefusedError) as caught:
        snippets(api).enable(129, chain=False)
    assert "hook disable 129 && pve-gpu-release hook enable 129" in caught.value.next_step
    done = snippets(api).disable(129)
    assert "local:snippets/other is not set again" in done.message and api.configs[129] == {}
    assert not (api.folder / "snippets/pve-gpu-release-129").exists()


def test_another_hookscript_whose_file_is_gone_is_not_offered_to_be_chained(api: FakeApi) -> None:
    api.configs[129]["hookscript"] = "local:snippets/gone"
    for chain_it in (True, False):
        with pytest.raises(RefusedError, match="its file is not there") as caught:
            snippets(api).enable(129, chain=chain_it)
        assert caught.value.next_step.startswith("pct set 129 -delete hookscript && ")


def test_a_foreign_file_under_our_name_is_not_overwritten(api: FakeApi) -> None:
    own = api.folder / "snippets/pve-gpu-release"
    own.write_text("#!/bin/sh\necho mine\n")
    own.chmod(0o755)
    with pytest.raises(RefusedError, match="is not ours") as caught:
        snippets(api).enable(129, chain=False)
    assert "mv " in caught.value.next_step and "mine" in own.read_text()
    api.configs[129]["hookscript"] = "local:snippets/pve-gpu-release"
    with pytest.raises(RefusedError, match="another hookscript"):
        snippets(api).enable(129, chain=False)
    assert snippets(api).disable(129).outcome == "unchanged" and "mine" in own.read_text()


def test_a_storage_that_starts_no_programs_gets_no_snippet(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostd.snippet.is_noexec", lambda folder: folder.startswith(str(api.folder)))
    with pytest.raises(RefusedError, match="no storage"):
        snippets(api).enable(129, chain=False)
    with pytest.raises(RefusedError, match="mounted noexec"):
        Snippets(api, storage="local", source=str(SCRIPT)).enable(129, chain=False)
    assert not list((api.folder / "snippets").iterdir()) and "hookscript" not in api.configs[129]


def test_a_storage_that_is_not_mounted_gets_no_snippet(api: FakeApi) -> None:
    api.active = 0
    with pytest.raises(RefusedError, match="no storage"):
        snippets(api).enable(129, chain=False)
    assert not list((api.folder / "snippets").iterdir())


def test_a_foreign_one_that_cannot_run_is_not_chained(api: FakeApi) -> None:
    api.configs[129]["hookscript"] = "gone:snippets/other"
    with pytest.raises(RefusedError, match="cannot chain"):
        snippets(api).enable(129, chain=True)


def test_disable_leaves_others_alone(api: FakeApi) -> None:
    assert snippets(api).disable(129).outcome == "unchanged"
    api.configs[129]["hookscript"] = "local:snippets/other"
    assert (
        snippets(api).disable(129).outcome == "unchanged" and api.configs[129]["hookscript"] == "local:snippets/other"
    )


def test_ours_whose_file_is_gone_is_installed_again(api: FakeApi) -> None:
    api.configs[129]["hookscript"] = "local:snippets/pve-gpu-release"
    snippets(api).enable(129, chain=False)
    assert (api.folder / "snippets/pve-gpu-release").exists()


def test_no_such_container(api: FakeApi) -> None:
    with pytest.raises(NoSuchContainerError):
        snippets(api).enable(130, chain=False)


def test_a_missing_folder_is_said_not_made(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError) as caught:
        install(str(tmp_path / "no/x"), "text")
    assert "mkdir -p" in caught.value.next_step and not (tmp_path / "no").exists()


def test_an_installation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pve-gpu-release").mkdir()
    with pytest.raises(UnreadableError, match="Is a directory"):
        install(str(tmp_path / "pve-gpu-release"), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["pve-gpu-release"]


@pytest.mark.parametrize("answer", [None, [], "x", 5, [1]])
@pytest.mark.parametrize(
    "path", ["/storage", "/nodes/localhost/storage", "/cluster/status", "/nodes/localhost/lxc/129/config"]
)
def test_an_answer_of_another_shape_is_one_that_cannot_be_read(api: FakeApi, path: str, answer: object) -> None:
    fine = api.get
    api.get = lambda asked, **more: answer if asked == path else fine(asked, **more)  # type: ignore[method-assign]
    try:
        snippets(api).enable(129, chain=False)
    except (UnreadableError, RefusedError) as exc:
        assert "cannot" in exc.message
