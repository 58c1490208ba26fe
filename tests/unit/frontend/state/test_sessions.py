"""Sessions as two frontends see them: owners, bounds, age, and the conversations that go on with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from frontend.state import sessions as module
from frontend.state.errors import StateUnavailable
from frontend.state.sessions import Session, SessionStore
from ipc import settings
from ipc.errors import StateFull
from tests.fakes.places import in_both_places, place_at

T = TypeVar("T")
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "shell", "arguments": {"n": 1 << 70}}}],
}
RESULT = {"role": "tool", "name": "shell", "content": "ok"}


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _made(root: Path, **bounds: Any) -> SessionStore:
    return SessionStore(place_at(root), settings.State(**bounds))


def _said(*texts: str) -> list[dict[str, Any]]:
    """A conversation of user and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


@in_both_places
def test_a_session_is_seen_by_all_frontends_and_by_its_owner_only(tmp_path: Path) -> None:
    async def act() -> None:
        messages = [*_said("hi"), CALL, RESULT, {"role": "assistant", "content": "done"}]
        await _made(tmp_path).save("a", "s/1\x00", messages, ["file_1"])
        other = _made(tmp_path)
        found = await other.get("a", "s/1\x00")
        assert found is not None and found.files == ["file_1"]
        assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
        assert await other.get("b", "s/1\x00") is None
        await other.delete("b", "s/1\x00")
        assert await other.get("a", "s/1\x00") is not None
        await other.save("a", "s/1\x00", _said("new"), [])
        assert await other.get("a", "s/1\x00") == Session(_said("new"), [])
        await other.delete("a", "s/1\x00")
        assert await other.get("a", "s/1\x00") is None

    _run(act())


@in_both_places
def test_a_session_is_forgotten_after_a_time_without_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        kept, began = _made(tmp_path), time.time()
        await kept.save("a", "old", _said("a", "b"), [])
        monkeypatch.setattr(module.time, "time", lambda: began + 1_000)
        await kept.save("", "new", _said("c", "d"), [])
        monkeypatch.setattr(module.time, "time", lambda: began + 1_900)
        assert await kept.get("a", "old") is None
        assert await kept.match("a", _said("a", "b", "more")) is None
        assert await kept.get("", "new") is not None
        monkeypatch.setattr(module.time, "time", lambda: began - 86_400)
        await kept.sweep()
        monkeypatch.setattr(module.time, "time", lambda: began - 86_400 + 1_900)
        assert await kept.get("", "new") is None
        await kept.sweep()
        count = await kept._rows.read(lambda each: each.execute("SELECT count(*) FROM sessions").fetchone())
        assert count == (0,)

    _run(act())


@in_both_places
def test_too_many_sessions_of_a_key_push_out_the_one_used_longest_ago(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path, max_sessions=2)
        await kept.save("b", "theirs", _said("x"), [])
        for id_ in ("one", "two", "one", "three"):
            await kept.save("a", id_, _said(id_), [])
        found = [
            await kept.get(*key) for key in (("a", "one"), ("a", "two"), ("a", "three"), ("b", "theirs"))
        ]
        assert [session is not None for session in found] == [True, False, True, True]

    _run(act())


@in_both_places
def test_too_many_bytes_push_out_sessions_of_the_key_with_the_most(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path, max_sessions_bytes=20_000)
        await kept.save("small", "s", _said("x"), [])
        for id_ in ("one", "two", "three"):
            await kept.save("large", id_, _said("x" * 8_000), [])
        assert await kept.get("large", "one") is None
        assert await kept.get("large", "three") is not None
        assert await kept.get("small", "s") is not None
        with pytest.raises(StateFull, match=r"all sessions may have 20000 \(state.max_sessions_bytes\)"):
            await kept.save("large", "four", _said("x" * 20_000), [])

    _run(act())


@in_both_places
def test_a_conversation_goes_on_with_the_longest_then_newest_session_that_begins_it(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        long = _said("hi", "hello", "list files")
        await kept.save("key", "short", _said("hi", "hello"), [])
        await kept.save("key", "long", [*long, CALL, RESULT, {"role": "assistant", "content": "two"}], [])
        await kept.save("key", "newer", [*long, CALL, RESULT, {"role": "assistant", "content": "two"}], [])
        await kept.save("key", "other", _said("hi", "hello", "list files", "three"), [])
        assert await kept.match("key", _said("hi", "hello", "list files", "two", "thanks")) == "newer"
        assert await kept.match("key", _said("hi", "hello", "and now?")) == "short"
        assert await kept.match("key", _said("hi", "good day", "x")) is None
        assert await kept.match("key", _said("hi")) is None
        assert await kept.match("else", _said("hi", "hello", "x")) is None

    _run(act())


@pytest.mark.parametrize(
    ("searched", "keyed", "keyless"), [("keys", "s", None), ("all", "s", "t"), ("none", None, None)]
)
@in_both_places
def test_callers_without_a_key_meet_in_a_session_by_the_word_of_the_operator_only(
    tmp_path: Path, searched: str, keyed: str | None, keyless: str | None
) -> None:
    async def act() -> None:
        kept = _made(tmp_path, match_sessions=searched)
        await kept.save("key", "s", _said("hi", "hello"), [])
        await kept.save("", "t", _said("hi", "hello"), [])
        found = [await kept.match(owner, _said("hi", "hello", "x")) for owner in ("key", "")]
        assert found == [keyed, keyless]

    _run(act())
    assert settings.State().match_sessions == "keys"


@in_both_places
def test_a_session_of_one_visible_message_is_matched_by_no_conversation(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        await kept.save("key", "one", [*_said("hi"), CALL, RESULT], [])
        await kept.save("key", "none", [CALL, RESULT], [])
        assert await kept.match("key", _said("hi", "hello", "x")) is None

    _run(act())


@in_both_places
def test_a_state_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no directory")

    async def act() -> None:
        with pytest.raises(StateUnavailable):
            await _made(tmp_path / "state").save("", "s", [], [])

    _run(act())
