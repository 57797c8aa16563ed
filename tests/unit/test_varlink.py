"""The protocol as pure functions, and the interface description against the code."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from hostd import errors, model, wire
from hostd.config import Config
from hostd.ladder import Limits, Options
from hostd.service import interface, varlink
from hostd.service.api import Api, DaemonFacts
from tests.unit.idl import parse_idl
from tests.unit.varlink_harness import run

API = Api(Config, dict)

# --- frames ---


def test_frames_come_out_the_same_however_they_are_cut() -> None:
    stream = b'{"a":1}\0\0{"b":"\xc3\xa9"}\0tail'
    whole = varlink.Framer().feed(stream)
    assert whole == [b'{"a":1}', b"", b'{"b":"\xc3\xa9"}']
    for size in range(1, len(stream)):
        framer = varlink.Framer()
        pieces = [m for i in range(0, len(stream), size) for m in framer.feed(stream[i : i + size])]
        assert pieces == whole and framer.partial


def test_a_frame_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    framer = varlink.Framer(100)
    assert framer.feed(b"x" * 100 + b"\0") == [b"x" * 100]
    assert framer.feed(b"ok\0" + b"x" * 101) == [b"ok"]
    assert framer.overflow and framer.feed(b"ok\0") == []


def test_what_came_before_an_overlong_frame_is_still_delivered() -> None:
    framer = varlink.Framer(10)
    assert framer.feed(b"a\0b\0" + b"x" * 11 + b"\0c\0") == [b"a", b"b"]
    assert framer.overflow


def test_single_bytes_cost_linear_time() -> None:
    def cost(n: int) -> float:
        framer = varlink.Framer(1 << 24)
        begun = time.process_time()
        for _ in range(n):
            framer.feed(b"x")
        return time.process_time() - begun

    cost(1000)
    assert cost(200_000) < 40 * max(cost(20_000), 0.002)


# --- calls ---


def test_a_call_is_read_with_its_flags_and_unknown_members_are_ignored() -> None:
    call = varlink.parse_call(b'{"method":"a.b.C","parameters":{"x":1},"more":true,"oneway":null,"later":[1]}')
    assert call == varlink.Call("a.b.C", {"x": 1}, more=True)
    assert (call.interface, call.member) == ("a.b", "C")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"method":"a.B"} x', "not JSON"),
        (b"\xff", "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"7", "must be a JSON object"),
        (b"{}", "needs a method"),
        (b'{"method":"noDot"}', "qualified"),
        (b'{"method":"a.\\u0000"}', "qualified"),
        (b'{"method":"a.\\ud800"}', "qualified"),
        (b'{"method":"a.B","parameters":"x"}', "parameters must be"),
        (b'{"method":"a.B","more":"yes"}', "more must be"),
        (b'{"method":"a.B","upgrade":true}', "upgrades no"),
        (b'{"method":"a.B","parameters":{"x":Infinity}}', "Infinity is not JSON"),
        (b'{"method":"a.B","parameters":{"x":' + b"1" * 21 + b"}}", "too many digits"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"method":"a.B","parameters":{"x":' + b"[" * 32 + b"]" * 32 + b"}}", "nested too deeply"),
    ],
)
def test_what_is_no_call_says_why(raw: bytes, word: str) -> None:
    with pytest.raises(varlink.MalformedMessage, match=re.escape(word)):
        varlink.parse_call(raw)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    raw = b'{"method":"a.B","parameters":{"x":[' + b",".join([b"[{}]"] * 1000) + b"]}}"
    assert varlink.parse_call(raw).method == "a.B"


# --- parameters ---


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({}, "vmid"),
        ({"vmid": None}, "vmid"),
        ({"vmid": "129"}, "vmid"),
        ({"vmid": True}, "vmid"),
        ({"vmid": 129.0}, "vmid"),
        ({"vmid": 0}, "vmid"),
        ({"vmid": 10**9}, "vmid"),
        ({"vmid": 129, "extra": 1}, "extra"),
        ({"vmid": 129, "a\nb": 1}, "a\\nb"),
        ({"vmid": 129, "options": []}, "options"),
        ({"vmid": 129, "options": {"now": 1}}, "options.now"),
        ({"vmid": 129, "options": {"graze_s": 1}}, "options.graze_s"),
        ({"vmid": 129, "options": {"grace_s": -1}}, "options.grace_s"),
        ({"vmid": 129, "options": {"grace_s": 1e999}}, "options.grace_s"),
        ({"vmid": 129, "options": {"timeout_s": False}}, "options.timeout_s"),
        ({"vmid": 129, "options": {"timeout_s": 0}}, "options.timeout_s"),
        ({"vmid": 129, "options": {"timeout_s": 0.0, "grace_s": 0}}, "options.timeout_s"),
        ({"vmid": 129, "options": {"pid": "x"}}, "options.pid"),
        ({"vmid": 129, "options": {"pid": "host:"}}, "options.pid"),
        ({"vmid": 129, "options": {"pid": "0"}}, "options.pid"),
        ({"vmid": 129, "options": {"gpu": ""}}, "options.gpu"),
        ({"vmid": 129, "options": {"gpu": "nvidia0"}}, "options.gpu"),
        ({"vmid": 129, "options": {"gpu": "x" * 1025}}, "options.gpu"),
        ({"vmid": 129, "options": {"gpu": "a\x1b[31m"}}, "options.gpu"),
        ({"vmid": 129, "options": {"pid": "\udc80"}}, "options.pid"),
        ({"vmid": 129, "on_disconnect": "explode"}, "on_disconnect"),
    ],
)
def test_a_wrong_parameter_is_named_by_its_full_path(parameters: dict[str, object], path: str) -> None:
    with pytest.raises(varlink.VarlinkError) as caught:
        API.parse_release(varlink.Params(parameters))
    assert caught.value.name == "org.varlink.service.InvalidParameter"
    assert caught.value.parameters == {"parameter": path}


def test_a_wrong_element_is_named_by_its_index() -> None:
    with pytest.raises(varlink.VarlinkError) as caught:
        API.parse_observe(varlink.Params({"vmids": [129, "x"]}))
    assert caught.value.parameters == {"parameter": "vmids[1]"}


def test_a_release_request_survives_the_way_through_the_wire() -> None:
    options = Options(
        limits=Limits(grace_s=1.5, timeout_s=20),
        now=True,
        stop=True,
        gpu="GPU-1",
        pid="host:1",
        trigger="cli",
        wait=False,
    )
    sent = varlink.encode_call("io.pve.GpuRelease.Release", {"vmid": 129, "options": wire.options_dict(options)})
    request = API.parse_release(varlink.Params(varlink.parse_call(sent[:-1]).parameters))
    assert (request.vmid, request.options) == (129, options)


# --- replies ---


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("plain é 🚀", "plain é 🚀"),
        ("a\x1b\n", "a\x1b\n"),
        ("nul\0", "nul\\x00"),
        ("byte\udcff", "byte\\xff"),
        ("utf-8 in bytes \udcc3\udca9", "utf-8 in bytes é"),
        ("lone \ud800", "lone \\xed\\xa0\\x80"),
        ("\\ud800 written out", "\\ud800 written out"),
    ],
)
def test_a_reply_holds_nothing_that_a_strict_parser_refuses(text: str, heard: str) -> None:
    raw = varlink.encode_reply({"x": [text], text: {"y": text}})
    assert raw.endswith(b"\0") and raw.count(b"\0") == 1
    assert varlink.parse_reply(raw) == {"parameters": {"x": [heard], heard: {"y": heard}}}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b"x", object()])
def test_what_json_cannot_say_is_our_error_not_a_broken_frame(value: object) -> None:
    with pytest.raises(varlink.Unencodable):
        varlink.encode_reply({"x": value})


def test_a_circle_is_our_error_too() -> None:
    circle: dict[str, object] = {}
    circle["x"] = circle
    with pytest.raises(varlink.Unencodable):
        varlink.encode_reply(circle)


# --- the interface ---


def test_every_exception_has_an_error_of_its_own_and_comes_back_as_itself() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.PgrError)]
    for kind in kinds:
        exc = kind("cannot x", next_step="do y", vmid=129)
        back = interface.error_from(interface.error_name(exc), interface.error_parameters(exc))
        assert type(back) is kind
        assert (back.message, back.next_step, back.reason, back.vmid) == ("cannot x", "do y", exc.reason, 129)


def test_a_subclass_that_nobody_knows_goes_by_its_base() -> None:
    class SpecialBusy(errors.BusyError):
        pass

    assert interface.error_name(SpecialBusy("x")) == "io.pve.GpuRelease.Busy"


def test_the_errors_of_the_description_are_those_of_the_code() -> None:
    idl = parse_idl(interface.DESCRIPTION)
    assert set(idl.errors) == {*interface.ERRORS, "Stopping", "Lost"}
    shape = interface.error_parameters(errors.PgrError("x")).keys()
    assert all(fields.keys() == shape for fields in idl.errors.values())


def test_every_type_that_the_description_uses_is_described_and_used() -> None:
    idl = parse_idl(interface.DESCRIPTION)
    used = {
        name
        for fields in [*idl.types.values(), *idl.errors.values(), *(m for pair in idl.methods.values() for m in pair)]
        for kind in fields.values()
        for name in re.findall(r"\b[A-Z]\w*", kind)
    }
    assert used == {*idl.types, *idl.enums}


def test_the_options_of_the_description_are_those_that_are_sent() -> None:
    assert parse_idl(interface.DESCRIPTION).types["ReleaseOptions"].keys() == wire.options_dict(Options()).keys()


@pytest.mark.parametrize("method", ["Release", "Verify", "Observe", "Map", "Status"])
def test_a_method_takes_exactly_the_parameters_of_its_description(method: str) -> None:
    described = parse_idl(interface.DESCRIPTION).methods[method][0]
    given: dict[str, object] = {"vmid": 129, "pid": 1 if method == "Map" else "1", "on_disconnect": "cancel"}
    params = varlink.Params({name: given.get(name) for name in described})
    params.choice_or("on_disconnect", "cancel", ("cancel", "continue"))  # the server does
    API.methods()[f"io.pve.GpuRelease.{method}"].parse(params)
    for unknown in ("extra", *({"gpu", "release_id"} - described.keys())):
        with pytest.raises(varlink.VarlinkError):
            API.methods()[f"io.pve.GpuRelease.{method}"].parse(varlink.Params({"vmid": 129, "pid": 1, unknown: "1"}))


INFO = model.GpuInfo(50, "GPU-1", "0000:3b:00.0", "H200")
PROCESS = model.Process(1, 2, (3,), "x", "S", 0, 1, 1, "/lxc/129", 5)
HOLDER = model.Holder(PROCESS, 129, frozenset({model.Evidence.FD}), (50,))
RUNG = model.RungRecord(model.Step.TERM, 1)
STUCK = model.Stuck(PROCESS.ref, 1, "D", "x", "y", True)
SPOT = model.BlindSpot("procfs", "x", "y")
SEEN = model.Observation(129, 0.0, (HOLDER,), gpus=(model.GpuState(INFO, 1, 1, 1),), blind_spots=(SPOT,))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Report", wire.report_dict(model.Report("id", 129, "cli"))),
        ("Holder", wire.holder_report_dict(model.HolderReport(HOLDER, model.Fate.UNKILLABLE, STUCK))),
        ("Holder", wire.holder_report_dict(model.HolderReport(HOLDER, model.Fate.EXITED))),
        ("Stuck", wire.stuck_dict(STUCK)),
        ("SeenHolder", wire.ps_dict([HOLDER], [], [])["holders"][0]),
        ("SeenHolder", wire.observed_event(SEEN, [HOLDER])["holders"][0]),
        ("Gpu", wire.gpu_report_dict(model.GpuReport(INFO))),
        ("SeenHolder", wire.gpu_report_dict(model.GpuReport(INFO, other_holders=[HOLDER]))["other_holders"][0]),
        ("SeenGpu", wire.gpu_state_dict(model.GpuState(INFO, 1, 1, 1))),
        (
            "DeadClient",
            wire.gpu_state_dict(model.GpuState(INFO, 1, 1, 1, dead_clients=(model.DeadClient(1, 2, model.Heir.OWN),)))[
                "dead_clients"
            ][0],
        ),
        ("Rung", wire.rung_dict(RUNG)),
        ("BlindSpot", wire.blind_spot_dict(SPOT)),
        ("MappedProcess", wire.process_dict(PROCESS)),
        ("Progress", wire.observed_event(SEEN, [HOLDER]) | {"vmid": 129}),
        ("Progress", wire.rung_event("rung_done", RUNG) | {"vmid": 129}),
        ("Progress", wire.waiting_event("memory", 1.0) | {"vmid": 129}),
        ("DaemonStatus", DaemonFacts()()),
    ],
)
def test_what_is_sent_has_the_fields_of_its_description(name: str, said: dict[str, object]) -> None:
    described = parse_idl(interface.DESCRIPTION).types[name]
    required = {key for key, kind in described.items() if not kind.startswith("?")}
    assert required <= said.keys() <= described.keys()
    words = {"int": int, "string": str, "bool": bool, "float": (int, float)}
    for key, value in said.items():
        kind = described[key].removeprefix("?")
        assert isinstance(value, words.get(kind, (list, dict, str))) or (value is None and described[key][0] == "?"), (
            key
        )


def test_the_enumerations_are_those_of_the_code() -> None:
    enums = parse_idl(interface.DESCRIPTION).enums
    for kind in (model.Verdict, model.Evidence, model.Fate):
        assert enums[kind.__name__] == [word.value for word in kind]
    assert enums["OnDisconnect"] == ["cancel", "continue"]


def test_names_follow_the_rules_of_the_language() -> None:
    for text in interface.DESCRIPTIONS.values():
        idl = parse_idl(text)
        members = [*idl.types, *idl.enums, *idl.methods, *idl.errors]
        assert all(re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) for name in members)
        fields = [f for t in [*idl.types.values(), *idl.errors.values()] for f in t]
        fields += [f for pair in idl.methods.values() for side in pair for f in side]
        fields += [v for values in idl.enums.values() for v in values]
        assert all(re.fullmatch(r"[A-Za-z](_?[A-Za-z0-9])*", name) for name in fields)


@pytest.mark.parametrize("name", list(interface.DESCRIPTIONS))
def test_systemd_reads_the_description(name: str) -> None:
    if shutil.which("varlinkctl") is None:
        pytest.skip("no varlinkctl here (systemd >= 257)")
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".varlink") as file:
        file.write(interface.DESCRIPTIONS[name])
        file.flush()
        checked = run("varlinkctl", "validate-idl", file.name)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("holders", "cmdline", "told"),
    [
        (1_200, "\x01" * 1500, ["texts are cut at 1024"]),
        (12_000, "x" * 1500, ["texts are cut at 64"]),
        (100_000, "x" * 80, ["95904 of 100000 holders are left out", "texts are cut at 64"]),
    ],
    ids=["control characters", "long", "many"],
)
def test_an_answer_that_would_be_too_long_is_shortened_and_says_so(holders: int, cmdline: str, told: list[str]) -> None:
    """Whatever a container puts into names and however many processes it has: the verdict gets through."""
    holder = {"pid": 1, "cmdline": cmdline, "cgroup": "/lxc/129/ns/" + cmdline, "evidence": ["fd"]}
    ours = {"verdict": "released", "reason": "released", "message": "m" * 200, "next_step": "n" * 200}
    encoded = varlink.encode_reply({"report": ours | {"holders": [holder] * holders, "details": ["before"]}})
    report = json.loads(encoded[:-1])["parameters"]["report"]
    assert len(encoded) <= varlink.MAX_REPLY and report["holders"][0]["cmdline"].endswith("...")
    assert ours.items() <= report.items()
    assert report["details"][0] == "before" and len(report["details"]) == len(told) + 1
    assert all(said.startswith(start) for said, start in zip(report["details"][1:], told, strict=True))


def test_an_answer_about_the_node_says_in_its_blind_spots_whom_it_leaves_out() -> None:
    seen = {"pid": 1, "cmdline": "x" * 80, "cgroup": "x" * 80}
    node = json.loads(varlink.encode_reply({"holders": [seen] * 100_000, "blind_spots": []})[:-1])["parameters"]
    (spot,) = node["blind_spots"]
    assert "of 100000 holders are left out" in spot["error"]
