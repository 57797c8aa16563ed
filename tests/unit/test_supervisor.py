"""A cgroup path below a container is the container's word: whatever it says, the answer stays in bounds.

The table of paths and supervisors is in test_stopunit.py, beside what may be done about them.
"""

from __future__ import annotations

import shlex

from hypothesis import example, given
from hypothesis import strategies as st

from hostd.model import Supervisor
from hostd.supervisor import how_to_stop, supervisor_of, user_of

HEX = "0123456789abcdef" * 4
part = st.one_of(
    st.sampled_from(["ns", "system.slice", "vllm.service", "user@1000.service", "docker", HEX, f"docker-{HEX}.scope"]),
    st.sampled_from(
        ["session-3.scope", "init.scope", ".service", "openrc.x", "kubepods.slice", f"libpod-{HEX}.scope", ".lxc"]
    ),
    st.text(st.characters(exclude_characters="/\n\0", exclude_categories=()), min_size=1, max_size=12),
)
paths = st.lists(part, max_size=8).map(lambda parts: "/lxc/129/" + "/".join(parts))


@given(paths)
@example("/lxc/129/ns/system.slice/\x1b[2J.service")
@example("/lxc/129//")
def test_the_supervisors_cgroup_encloses_the_process_and_lies_in_the_container(path: str) -> None:
    found = supervisor_of(path, 129)
    if found is not None:
        assert f"{path}/".startswith(f"{found.cgroup}/") and found.cgroup.startswith("/lxc/129/")
        assert found.kind and isinstance(found.name, str)


@given(paths)
def test_it_is_nobodys_for_another_container(path: str) -> None:
    assert supervisor_of(path, 12) is None and supervisor_of(path, 1290) is None


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
def test_a_name_in_a_command_for_people_is_one_word(name: str) -> None:
    text = how_to_stop(129, [Supervisor("systemd", name, f"/lxc/129/ns/{name}")], ())
    assert shlex.split(text)[-1] == name


@given(st.text(max_size=30))
def test_a_user_is_a_number_or_none(path: str) -> None:
    assert user_of(path) >= -1
