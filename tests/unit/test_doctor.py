"""`doctor` without a node: text formats, rules, the runner's promise that one check never breaks the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from string import Formatter

import pytest

from hostd.cli.doctor import lines
from hostd.doctor import containers, devices, driver, hooks, node, origin
from hostd.doctor.cluster import Volume, parse_hostpci_keys, parse_pci_mappings, parse_storages, parse_volume
from hostd.doctor.commands import run_tool
from hostd.doctor.facts import Facts, parse_majors
from hostd.doctor.finding import Blind, CannotLookError, Check, Finding, Kind, Outcome, Results, Severity
from hostd.doctor.kinds import KINDS, found
from hostd.doctor.runner import CHECKS, exit_status, run_checks
from hostd.doctor.shell import Shell, sed_literal, word
from hostd.doctor.units import UnitFile, UnitFiles, parse_show, parse_unit
from hostd.model import DeviceId, DriverNumbers
from hostd.system.pve import Pve, parse_container_config
from tests.integration.doctor.advice import objection

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = DriverNumbers({195: frozenset(("nvidia", "nvidiactl")), 508: frozenset(("nvidia-uvm",))})
OWNERS = {1: "mem", 195: "nvidia, nvidiactl", 237: "hidraw", 508: "nvidia-uvm"}


def codes(results: Results) -> list[str]:
    return [r.code for r in results if isinstance(r, Finding)]


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_kind_is_complete_and_belongs_to_a_check() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))
    for kind in KINDS.values():
        assert kind.check in names, kind.code
        assert all((kind.what, kind.mend, kind.meaning, kind.evidence)), kind.code
    assert {kind.check for kind in KINDS.values()} == set(names)


def test_the_page_is_what_the_table_says() -> None:
    code = "import sys; sys.path.insert(0, '.'); import tools.docs as d; print(d.PAGES['docs/doctor.md'](), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == (REPOSITORY / "docs/doctor.md").read_text(), "run tools/docs.py"


# --- what is advised -------------------------------------------------------------------------------------------------

COMPUTED = Shell("cat")
"""In place of a command that a check makes."""
HOSTILE = "a'b; >x #\n`>x`$(>x)\x1b[0m\ud800"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_every_advice_can_be_pasted_whatever_the_finding_is_about(kind: Kind) -> None:
    fields = {name for _, name, _, _ in Formatter().parse(kind.what + kind.mend) if name}
    given = dict.fromkeys(fields - {"vmid"}, HOSTILE)
    given |= {name: COMPUTED for name in ("mend", "make", "enable", "command", "advice", "copy") if name in fields}
    given |= {"setting": Shell(""), "recursive": Shell("-r ")}
    said = objection(found(kind.code, "", vmid=129, **given).mend)
    assert said == ""


def test_what_is_no_command_is_told_from_one() -> None:
    for good in ("rm x && pct reboot 1  # or (not)", "pct set 129 -dev0 '/dev/a b'; cat x", "echo 1 > /x | cat"):
        assert objection(good) == ""
    for bad in ("use devN instead: pct set 1", "pct reboot 1 (or not)", "rm x, then pct reboot 1; look", "# nothing", ""):
        assert objection(bad)


@pytest.mark.parametrize("came_from", origin.Origin)
def test_advice_by_the_driver_s_origin_can_be_pasted(came_from: origin.Origin) -> None:
    for advise in (origin.pynvml_advice, origin.persistenced_advice, origin.library_advice):
        assert objection(advise(came_from)) == ""


def test_advice_for_each_recovery_action_can_be_pasted() -> None:
    for _words, advice in driver.ACTIONS.values():
        assert objection(advice.format(gpu="GPU-1")) == ""


@pytest.mark.parametrize("text", ["plain", "a b", "a'b", "$(x)", HOSTILE, "\udcff\x01f", "\u3164", ""])
def test_a_word_is_one_printable_word_and_bash_reads_it_back(text: str) -> None:
    said = word(text)
    assert said.isprintable() or text == "\u3164"
    read = subprocess.run(["bash", "-c", f"printf %s {said}"], capture_output=True, check=True).stdout
    assert read == text.replace("\ud800", "?").encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("text", ["/dev/nvidia0", "a.b*[c]^$+?(d)|{e}\\f", "c 195:* rwm"])
def test_a_literal_of_sed_matches_itself_and_nothing_else(text: str) -> None:
    command = ["sed", "-E", "-n", f"/^{sed_literal(text)}$/p"]
    other = text.replace("/", "x").replace(".", "x").replace("*", "").replace(" ", "x")
    assert subprocess.run(command, input=f"{other}\n{text}\n", text=True, capture_output=True).stdout == f"{text}\n"


def test_keys_of_what_is_passed_through_to_a_vm() -> None:
    text = "name: x\nhostpci0: host=0000:18:00.0;0000:19:00,pcie=1\nhostpci12: mapping=h200\n[snap]\nhostpci1: 3b:00\n"
    keys = {"0000:18:00.0": "hostpci0", "0000:19:00": "hostpci0", "h200": "hostpci12"}
    assert parse_hostpci_keys(text) == keys


# --- where the driver came from --------------------------------------------------------------------------------------

PACKAGED = "installed\tlibnvidia-ml1\tlibnvidia-ml.so.1 (= 535.261.03)\ninstalled\tnvidia-alternative\t\n"
OTHERS = "not-installed\tlibnvidia-ml1\t\nconfig-files\tlibnvidia-tesla-ml1\tlibnvidia-ml.so.1\ninstalled\tnvidia-modprobe\t\n"


def test_a_package_with_the_library_is_told_from_its_name_or_what_it_provides() -> None:
    assert origin.parse_packages(PACKAGED)
    assert origin.parse_packages("installed\tlibnvidia-compute-570\tlibcuda1 (= 570.1), libnvidia-ml.so.1\n")
    assert not origin.parse_packages(OTHERS)
    assert not origin.parse_packages("")


@pytest.mark.parametrize(
    "files, expected",
    [
        ([], origin.Origin.NONE),
        (["usr/bin/nvidia-installer"], origin.Origin.INSTALLER),
        (["usr/bin/nvidia-uninstall"], origin.Origin.INSTALLER),
        (["usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"], origin.Origin.INSTALLER),
        (["usr/lib64/libnvidia-ml.so.1"], origin.Origin.INSTALLER),
    ],
    ids=lambda value: str(value),
)
def test_a_library_that_dpkg_does_not_know_is_the_installer_s(
    tmp_path: Path, files: list[str], expected: origin.Origin
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert origin.read_origin(str(tmp_path)) is expected


def test_nothing_of_debian_s_driver_is_advised_beside_one_of_the_installer() -> None:
    for advise in (origin.pynvml_advice, origin.persistenced_advice, origin.library_advice):
        said = advise(origin.Origin.INSTALLER)
        assert not re.search(r"apt install (?!--no-install-recommends python3-pip)", said), said
    assert origin.pynvml_advice(origin.Origin.PACKAGES).startswith("apt install python3-pynvml")


# --- the runner ------------------------------------------------------------------------------------------------------


def fine(_facts: Facts) -> Results:
    return
    yield


def broken(_facts: Facts) -> Results:
    yield found("kernel-old", "x", release="5")
    raise RuntimeError("a bug")


def hanging(_facts: Facts) -> Results:
    time.sleep(600)
    yield Blind("never", "said")


def dying(_facts: Facts) -> Results:
    os._exit(3)
    yield Blind("never", "said")


def test_a_check_that_fails_hangs_or_dies_never_breaks_the_others() -> None:
    checks = [
        Check("broken", "", broken),
        Check("hanging", "", hanging, deadline_s=0.2),
        Check("dying", "", dying),
        Check("needy", "", fine, ("containers",)),
        Check("fine", "all is well", fine),
    ]
    facts = Facts(Pve("/proc/self/mem"))  # no directory: reading it is an error
    facts.pve = Refusing()
    outcomes = {o.check: o for o in run_checks(facts, checks)}
    assert [f.code for f in outcomes["broken"].findings] == ["kernel-old"]
    assert "a bug" in outcomes["broken"].blind[0].error
    assert "no answer within" in outcomes["hanging"].blind[0].error
    assert outcomes["dying"].failed
    assert outcomes["needy"].blind[0].error == "pmxcfs is ill"
    assert not outcomes["fine"].failed
    assert exit_status(outcomes.values()) == 4
    text = lines(list(outcomes.values()), verbose=True)
    assert text[-1] == "5 checks: 1 note, 4 checks could not look everywhere"
    assert any(line.startswith("ok       fine: all is well") for line in text)


class Refusing(Pve):
    """An /etc/pve that says no."""

    def containers(self) -> list[int]:
        raise CannotLookError("pmxcfs is ill")


def outcome(*findings: Finding, blind: bool = False) -> Outcome:
    return Outcome("x", "", list(findings), [Blind("a", "b")] if blind else [])


def test_exit_status() -> None:
    note, warning, error = (Finding("c", severity, "", "", "") for severity in reversed(Severity))
    assert exit_status([]) == 0
    assert exit_status([outcome(note)]) == 0
    assert exit_status([outcome(warning)]) == 3
    assert exit_status([outcome(error), outcome(blind=True)]) == 3
    assert exit_status([outcome(note, blind=True)]) == 4


def test_tools_are_bounded_and_get_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_X", "from the caller")
    assert "from the caller" not in run_tool(["/usr/bin/env"], 5.0).out
    begun = time.monotonic()
    with pytest.raises(CannotLookError, match="no answer within"):
        run_tool(["/usr/bin/sleep", "60"], 0.2)
    assert time.monotonic() - begun < 30
    with pytest.raises(CannotLookError, match="cannot run /nonexistent"):
        run_tool(["/nonexistent"], 1.0)


# --- node ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "expected"),
    [("6.8.12-4-pve", ["kernel-old"]), ("6.11.0", []), ("6.14.8-2-pve", []), ("7.0", []), ("5.15.1", ["kernel-old"])],
)
def test_kernels(release: str, expected: list[str]) -> None:
    assert codes(node.check_release(release)) == expected


def test_journald_storage_by_main_file_and_drop_ins(tmp_path: Path) -> None:
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    for path in (etc, usr):
        (path / "journald.conf.d").mkdir(parents=True)
    where = (str(etc), str(usr))
    assert node.read_journal_storage(where) == ("auto", "")
    (usr / "journald.conf").write_text("[Journal]\nStorage=none\n")
    assert node.read_journal_storage(where)[0] == "none"
    (etc / "journald.conf").write_text("[Journal]\n#Storage=auto\nStorage = Persistent\n")
    assert node.read_journal_storage(where)[0] == "persistent"
    (usr / "journald.conf.d/20-a.conf").write_text("Storage=volatile\n")
    assert node.read_journal_storage(where)[0] == "volatile"
    (etc / "journald.conf.d/20-a.conf").write_text("")
    assert node.read_journal_storage(where)[0] == "persistent"


def test_kernel_log_of_a_file(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    filler = "6,1,1,-;something else\n" * 2000
    log.write_text(filler + "4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n" + filler)
    assert [x.number for x in driver.read_kernel_log(str(log))] == [79]


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "node", "covered"),
    [
        ("c 195:* rwm", (195, 0), True),
        ("c 195:0 rwm", (195, 1), False),
        ("a", (195, 1), True),
        ("a *:* rwm", (195, 1), True),
        ("c *:* rwm", (508, 0), True),
        ("b 195:* rwm", (195, 0), False),
        ("c 19:* rwm", (195, 0), False),
        ("c 195:* rw", (195, 0), True),
    ],
)
def test_device_rules(text: str, node: tuple[int, int], covered: bool) -> None:
    rule = devices.parse_rule(text)
    assert rule is not None
    assert rule.covers(DeviceId(*node)) is covered


def test_what_is_no_device_rule() -> None:
    assert devices.parse_rule("c 195") is None
    assert devices.parse_rule("; rm -rf /") is None


def check_rules(rules: list[str], nodes: dict[str, tuple[int, int]]) -> list[str]:
    config = parse_container_config("".join(f"lxc.cgroup2.devices.allow: {rule}\n" for rule in rules))
    given = {path: DeviceId(*numbers) for path, numbers in nodes.items()}
    return codes(devices.check_rules(129, config, given, DRIVER, OWNERS))


def test_rules_against_majors() -> None:
    both = {"/dev/nvidia0": (195, 0), "/dev/nvidia-uvm": (508, 0)}
    assert check_rules(["c 195:* rwm", "c 508:* rwm"], both) == []
    assert check_rules(["a"], both) == []
    assert check_rules(["c 195:* rwm"], both) == ["allow-missing-major"]
    assert check_rules(["c 195:* rwm", "c 509:* rwm"], both) == ["allow-missing-major", "allow-stale-major"]
    assert check_rules(["c 195:* rwm", "c 508:* rwm", "c 509:* rwm"], both) == ["allow-stale-major"]
    # Rules for other devices are nobody's business: tun, dri, and a dynamic one while nothing of ours is missing.
    assert check_rules(["c 195:* rwm", "c 508:* rwm", "c 10:200 rwm", "c 226:* rwm", "c 237:* rwm"], both) == []


def test_majors_of_proc_devices() -> None:
    text = "Character devices:\n  4 /dev/vc/0\n  4 tty\n195 nvidia\n\nBlock devices:\n  7 loop\n"
    assert parse_majors(text) == {4: "/dev/vc/0, tty", 195: "nvidia"}


@pytest.mark.parametrize(
    ("written", "same"),
    [("3b:00", True), ("0000:3b:00.0", True), ("0000:3b:00", True), ("3b:00.1", False), ("3c:00", False), ("x", False)],
)
def test_pci_addresses_of_vms(written: str, same: bool) -> None:
    assert containers.same_device(written, "0000:3b:00.0") is same


def test_what_fuser_says() -> None:
    assert containers.parse_fuser(" 4711  4712\n x 12e\n") == {4711, 4712}


# --- storages --------------------------------------------------------------------------------------------------------

STORAGE_CFG = """\
dir: local
	path /var/lib/vz
	content iso,snippets
	content-dirs snippets=own/scripts

nfs: share
	server 10.0.0.1
	export /x
	content snippets
	nodes a,b

lvmthin: thin
	thinpool data
	content rootdir,images

cephfs: off
	content snippets
	disable
"""


def test_storages() -> None:
    storages = parse_storages(STORAGE_CFG)
    assert storages["local"].snippets == "/var/lib/vz/own/scripts"
    assert storages["share"].snippets == "/mnt/pve/share/snippets"
    assert storages["share"].shared
    assert not storages["local"].shared
    assert storages["share"].objection("a") == ""
    assert storages["share"].objection("c") == "storage share is only for a, b"
    assert "does not allow snippets" in storages["thin"].objection("a")
    assert "is disabled" in storages["off"].objection("a")
    assert parse_storages("")["local"].objection("a") == ""


def test_volumes() -> None:
    assert parse_volume("local:snippets/x.sh") == Volume("local", "x.sh")
    for text in ("local:iso/x", "local:snippets/", "local:snippets/../x", "x", "local:snippets/a/b", "local:snippets/.."):
        assert parse_volume(text) is None


def test_pci_mappings() -> None:
    text = "h200\n\tdescription big\n\tmap id=10de:2335,node=a,path=0000:18:00.0\n\tmap node=b,path=0000:19:00.0\nx\n"
    assert parse_pci_mappings(text, "b") == {"h200": ("0000:19:00.0",), "x": ()}


# --- units -----------------------------------------------------------------------------------------------------------


def test_unit_text() -> None:
    text = "# c\n[Unit]\nBefore=a \\\n  b\n; x\n[Service]\nExecStart=\nExecStart=/bin/x --y=z\n"
    assert [tuple(a) for a in parse_unit(text)] == [
        ("Unit", "Before", "a  b"), ("Service", "ExecStart", ""), ("Service", "ExecStart", "/bin/x --y=z"),
    ]  # fmt: skip


def test_show_text() -> None:
    assert parse_show("Id=a\nX=1=2\n\n\nId=b\n\nY=3\n") == {"a": {"Id": "a", "X": "1=2"}, "b": {"Id": "b"}}


def test_unit_files_by_directory_and_drop_ins_by_name(tmp_path: Path) -> None:
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    for path in ("etc/x@.service.d", "usr/x@.service.d", "usr/x@1.service.d", "usr/service.d", "etc/y.wants"):
        (tmp_path / path).mkdir(parents=True)
    files = UnitFiles((str(etc), str(usr)))
    assert files.find("x@.service") is None
    (usr / "x@.service").write_text("[Unit]\n")
    assert files.find("x@.service") == UnitFile(str(usr / "x@.service"), False, "[Unit]\n")
    (etc / "x@.service").symlink_to("/dev/null")
    unit = files.find("x@.service")
    assert unit is not None
    assert unit.masked
    for path in ("usr/x@.service.d/50-a.conf", "etc/x@.service.d/50-a.conf", "usr/service.d/10-b.conf"):
        (tmp_path / path).write_text("[Service]\n")
    (usr / "x@1.service.d/90-c.conf").write_text("")
    shown = [(d.path.removeprefix(f"{tmp_path}/"), d.masked) for d in files.dropins("x@1.service")]
    assert shown == [
        ("usr/service.d/10-b.conf", False), ("etc/x@.service.d/50-a.conf", False), ("usr/x@1.service.d/90-c.conf", True),
    ]  # fmt: skip
    assert not files.enabled("z.service")
    (etc / "y.wants/z.service").symlink_to("/nowhere")
    assert files.enabled("z.service")
    assert files.matching("x@", ".service") == ["x@.service"]


def test_what_the_drop_ins_run_has_to_be_there(tmp_path: Path) -> None:
    assert codes(hooks.check_target(hooks.SHIPPED)) == []
    path = tmp_path / "pve-gpu-release"
    assert codes(hooks.check_target(str(path))) == ["dropin-target"]
    path.touch(0o644)
    assert codes(hooks.check_target(str(path))) == ["dropin-target"]


def test_the_shipped_drop_ins_are_fine() -> None:
    for name in hooks.UNITS:
        path = REPOSITORY / "etc/systemd" / f"{name}.d/50-pve-gpu-release.conf"
        ours = UnitFile(str(path), False, path.read_text())
        unit = UnitFile(f"/usr/lib/systemd/system/{name}", False, "[Service]\n")
        assert codes(hooks.check_unit(name, unit, [ours])) == []
        gutted = UnitFile(str(path), False, "[Service]\nExecStopPost=/bin/true pve-gpu-release\n")
        assert codes(hooks.check_unit(name, unit, [gutted])) == ["dropin-overridden"]
