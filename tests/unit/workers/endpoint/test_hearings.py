"""What a worker has told is taken in by all frontends before the worker says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ipc.wire.catalogs import Heard, Told
from workers.endpoint.sessions import Hearings


def hearings_of(*keys: bytes) -> tuple[Hearings, list[Any], list[tuple[bytes, Told]]]:
    """Those of an endpoint with these sessions, the sessions, and what is sent to them."""
    sent: list[tuple[bytes, Told]] = []
    sessions: list[Any] = [SimpleNamespace(key=key) for key in keys]
    made: Any = Hearings(sessions, lambda session, told: sent.append((session.key, told)))  # type: ignore[arg-type]
    return made, sessions, sent


def test_the_last_session_to_hear_ends_the_wait() -> None:
    hearings, (first, second), sent = hearings_of(b"a", b"b")
    ended: list[int] = []
    hearings.begin(lambda: ended.append(1))
    hearings.begin(lambda: ended.append(2))
    assert [(key, told.id) for key, told in sent] == [(b"a", 1), (b"b", 1), (b"a", 2), (b"b", 2)]
    for session, number in ((first, 1), (first, 2), (first, 2), (second, 2)):
        hearings.heard(session, Heard(number))
    assert ended == [2]
    hearings.heard(second, Heard(1))
    hearings.heard(second, Heard(1))
    hearings.heard(second, Heard(7))
    assert ended == [2, 1]


def test_a_session_that_ends_is_waited_for_no_longer() -> None:
    hearings, (first, second), _ = hearings_of(b"a", b"b")
    ended: list[int] = []
    hearings.begin(lambda: ended.append(1))
    hearings.drop(second)
    assert not ended
    hearings.heard(first, Heard(1))
    assert ended == [1]
