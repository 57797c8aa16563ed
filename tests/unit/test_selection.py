"""What --gpu and --pid name, and what they refuse to guess."""

from __future__ import annotations

import pytest

from hostd.errors import UsageError
from hostd.model import GpuInfo, Process
from hostd.selection import resolve_gpu, resolve_pid

from .makers import INFOS, look, process

GPUS = tuple(INFOS.values())
CROSSED = (
    GpuInfo(1, "GPU-aaaaaaaa-0001", "0000:18:00.0", "H200", 0),
    GpuInfo(0, "GPU-aaaaaaaa-0000", "0000:3b:00.0", "H200", 1),
)
UNKNOWN_INDEX = tuple(GpuInfo(g.minor, g.uuid, g.pci_bus_id, g.name) for g in GPUS)


@pytest.mark.parametrize(
    ("selector", "minor"),
    [
        ("0", 50),
        ("1", 51),
        ("50", 50),
        ("51", 51),
        (" 1 ", 51),
        ("GPU-bbbbbbbb-0001", 51),
        ("gpu-bbbbbbbb-0001", 51),
        ("GPU-bbbb", 51),
        ("0000:3b:00.0", 51),
        ("00000000:3B:00.0", 51),
        ("3b:00", 51),
    ],
)
def test_a_gpu_by_index_minor_uuid_or_address(selector: str, minor: int) -> None:
    assert resolve_gpu(selector, GPUS, driver_silent=False).minor == minor


@pytest.mark.parametrize(
    "selector", ["2", "", "GPU-", "GPU-c", "4f:00", "nonsense", "-1", "²", "0x1", "GPU-bbbbbbbb-0002"]
)
def test_what_matches_nothing_is_refused_with_the_choices(selector: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_gpu(selector, GPUS, driver_silent=False)
    assert "GPU-aaaaaaaa-0000" in caught.value.next_step and caught.value.reason == "usage"


def test_a_number_whose_index_and_minor_are_different_gpus_is_asked_back() -> None:
    with pytest.raises(UsageError, match="more than one"):
        resolve_gpu("0", CROSSED, driver_silent=False)
    assert resolve_gpu("GPU-aaaaaaaa-0000", CROSSED, driver_silent=False).minor == 0


def test_a_beginning_of_two_uuids_is_asked_back() -> None:
    with pytest.raises(UsageError, match="more than one"):
        resolve_gpu("GPU-aaaaaaaa", CROSSED, driver_silent=False)


@pytest.mark.parametrize("selector", ["0", "50"])
def test_while_the_driver_is_silent_a_number_may_mean_either(selector: str) -> None:
    with pytest.raises(UsageError, match="does not answer"):
        resolve_gpu(selector, UNKNOWN_INDEX, driver_silent=True)
    assert resolve_gpu("3b:00", UNKNOWN_INDEX, driver_silent=True).minor == 51
    assert resolve_gpu("GPU-bbbb", UNKNOWN_INDEX, driver_silent=True).minor == 51


def test_no_gpu_at_all() -> None:
    with pytest.raises(UsageError, match="no such GPU"):
        resolve_gpu("0", (), driver_silent=False)


PROCESSES = {(17, False): [process(117)], (4711, True): [process(4711)], (9, False): [process(109), process(209)]}


def find(number: int, host: bool) -> list[Process]:
    return PROCESSES.get((number, host), [])


def test_a_pid_is_the_containers_and_becomes_an_identity() -> None:
    assert resolve_pid("17", look(), find) == {process(117).ref}
    assert resolve_pid("host:4711", look(), find) == {process(4711).ref}


def test_several_pids_are_selected_together_each_in_its_own_form() -> None:
    both = {process(117).ref, process(4711).ref}
    assert resolve_pid("17,host:4711", look(), find) == resolve_pid("host:4711,17,17", look(), find) == both
    with pytest.raises(UsageError, match=r"cannot select pid 18: .* no such process"):
        resolve_pid("17,18", look(), find)


LISTS = ["17,", ",17", "17,,18", "17, 18", "host:17,x", "17;18", ",", "17," * 2000 + "17"]


@pytest.mark.parametrize("selector", ["0", "-1", "", "host:", "host:x", "x", "1.5", "²", "host:0", " 17", "9" * 40, *LISTS])
def test_what_is_no_pid_is_refused(selector: str) -> None:
    with pytest.raises(UsageError, match="expected a number"):
        resolve_pid(selector, look(), find)


@pytest.mark.parametrize("selector", ["18", "host:17"])
def test_a_number_that_nobody_has(selector: str) -> None:
    with pytest.raises(UsageError, match="no such process"):
        resolve_pid(selector, look(), find)


def test_a_number_that_two_have_is_asked_back() -> None:
    with pytest.raises(UsageError, match="2 processes") as caught:
        resolve_pid("9", look(), find)
    assert "--pid host:109, --pid host:209" in caught.value.next_step
