"""What a caller makes of a daemon that stops answering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hostd.cli import interrupt, remote
from hostd.errors import InterruptedRelease


class Gone:
    """A daemon that tells of one rung and is lost; `asked`: somebody pressed Ctrl-C meanwhile."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked

    def __enter__(self) -> Gone:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def call_more(self, *_: Any, **__: Any) -> Iterator[dict[str, object]]:
        yield {"progress": {"event": "rung_begun", "rung": {"step": "term"}}}
        interrupt.came = self.asked
        raise remote.DaemonLost("timed out")


@pytest.mark.parametrize("asked", [True, False])
def test_a_release_that_was_to_stop_is_not_gone_on_with_when_the_daemon_is_lost(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(interrupt, "came", False)
    monkeypatch.setattr(remote, "connect", lambda: Gone(asked))
    with pytest.raises(InterruptedRelease if asked else remote.DaemonLost) as caught:
        remote.release(129, {}, "f00d", lambda event: None)
    assert not asked or "begun with term" in str(caught.value)
