"""Stored responses as two frontends see them: owners, bounds, ends that come late, and processes that have died."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Coroutine
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from frontend.engine.events import Ended, Event, Finished, Mark, Past, Started, Text
from frontend.protocols.responses import event_bytes, store
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.store import (
    Piece,
    ResponseNotFound,
    ResponseStore,
    ResponsesUnavailable,
    Stored,
)
from ipc import settings
from ipc.processes import liveness
from ipc.store import lasting
from tests.fakes.places import in_both_places, place_at
from tests.harness.server import dead_process

T = TypeVar("T")

_EVENTS: list[Event] = [Started(4), Text(0, "Hel")]


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _begun(number: int, **fields: Any) -> dict[str, Any]:
    begun = {"id": f"resp_{number}", "status": "queued", "output": [], "tools": [], "background": False}
    return begun | fields


def _whole(begun: dict[str, Any], status: str = "completed", **fields: Any) -> dict[str, Any]:
    return {**begun, "status": status, "output": [{"type": "message", "id": "msg_9"}], **fields}


async def _put_ended(kept: ResponseStore, number: int, owner: str = "", **fields: Any) -> None:
    begun, items = _begun(number), [{"type": "message", "id": f"in_{number}"}]
    await kept.put(begun, owner, [{"type": "old"}], items, _whole(begun, **fields))


async def _put_running(kept: ResponseStore, number: int, request: bytes = b"") -> Stored:
    begun = _begun(number, background=True)
    await kept.put(begun, "", [], [], request=lambda: request)
    return await kept.get(str(begun["id"]), "")


@pytest.fixture
def first(tmp_path: Path) -> ResponseStore:
    """The store of one frontend."""
    return _made(tmp_path)


@pytest.fixture
def second(tmp_path: Path) -> ResponseStore:
    """The store of another frontend of the same server."""
    return _made(tmp_path)


def _made(root: Path, **bounds: Any) -> ResponseStore:
    return ResponseStore(lambda: place_at(root), settings.Responses(**bounds))


def test_a_response_is_seen_by_all_frontends_and_after_a_restart(
    first: ResponseStore, second: ResponseStore, tmp_path: Path
) -> None:
    async def act() -> None:
        await _put_ended(first, 1)
        for each in (second, _made(tmp_path)):
            row = await each.get("resp_1", "", with_items=True)
            assert orjson.loads(row.body)["status"] == row.status == "completed"
            assert [item["type"] for item in row.conversation()] == ["old", "message", "message"]

    _run(act())
    assert (tmp_path / store.FILE).stat().st_mode & 0o777 == 0o600


@in_both_places
def test_a_response_exists_for_its_owner_only(first: ResponseStore) -> None:
    async def act() -> None:
        await _put_ended(first, 1, "anna")
        for stranger in ("", "bert"):
            with pytest.raises(ResponseNotFound):
                await first.get("resp_1", stranger)
            with pytest.raises(ResponseNotFound):
                await first.delete("resp_1", stranger)
        await first.delete("resp_1", "anna")
        with pytest.raises(ResponseNotFound):
            await first.get("resp_1", "anna")

    _run(act())


@in_both_places
def test_what_ends_first_stays(first: ResponseStore, second: ResponseStore) -> None:
    async def act() -> None:
        row = await _put_running(first, 1)
        assert await first.grow({"resp_1": Piece(0, _EVENTS)}) == {"resp_1"}
        assert (await second.get("resp_1", "")).status == "in_progress"
        assert await second.settle(row, resource.cancelled)
        assert await first.grow({"resp_1": Piece(1, [Text(0, "lo")])}) == set()
        assert await first.grow({"resp_1": Piece(1, [])}) == set()
        assert not await first.finish(_whole(_begun(1)), Piece(1, [Text(0, "lo")]))
        assert not await second.settle(row, resource.cancelled)
        body = orjson.loads((await first.get("resp_1", "")).body)
        assert (body["status"], body["output_text"]) == ("cancelled", "Hel")
        assert body["output"][0]["status"] == "incomplete"

    _run(act())


@in_both_places
def test_a_response_is_stored_once(first: ResponseStore) -> None:
    async def act() -> None:
        await _put_ended(first, 1)
        await _put_ended(first, 1, status="cancelled")
        assert (await first.get("resp_1", "")).status == "completed"

    _run(act())


@in_both_places
def test_events_are_followed_from_another_frontend(first: ResponseStore, second: ResponseStore) -> None:
    async def act() -> None:
        await _put_running(first, 1)
        assert (await second.follow("resp_1", "", 0))[1] == []
        await first.grow({"resp_1": Piece(0, _EVENTS)})
        row, pieces = await second.follow("resp_1", "", 0)
        assert (row.status, len(pieces)) == ("in_progress", 1)
        assert await first.finish(_whole(_begun(1)), Piece(1, [Finished(0, "stop"), Ended(4, 1)]))
        row, pieces = await second.follow("resp_1", "", 1)
        assert (row.is_finished, len(pieces)) == (True, 1)

    _run(act())


@in_both_places
def test_a_piece_that_comes_again_with_more_replaces_the_first(first: ResponseStore) -> None:
    async def act() -> None:
        await _put_running(first, 1)
        await first.grow({"resp_1": Piece(0, _EVENTS)})
        assert await first.finish(_whole(_begun(1)), Piece(0, [*_EVENTS, Finished(0, "stop")]))
        _, [piece] = await first.follow("resp_1", "", 0)
        assert event_bytes.decode(piece) == [*_EVENTS, Finished(0, "stop")]

    _run(act())


@in_both_places
def test_a_response_with_too_many_events_keeps_none(
    first: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_EVENTS_NBYTES", 1000)

    async def act() -> None:
        await _put_running(first, 1)
        await first.grow({"resp_1": Piece(0, _EVENTS)})
        assert (await first.follow("resp_1", "", 0))[0].followable
        assert await first.grow({"resp_1": Piece(1, [Text(0, "x" * 1000)])}) == {"resp_1"}
        row, pieces = await first.follow("resp_1", "", 0)
        assert (row.followable, row.status, pieces) == (False, "in_progress", [])
        assert await first.finish(_whole(_begun(1)), Piece(2, [Finished(0, "stop")]))

    _run(act())


@in_both_places
def test_a_response_whose_process_died_has_failed(
    first: ResponseStore, second: ResponseStore, tmp_path: Path
) -> None:
    runner = dead_process()

    async def act() -> None:
        for number in (1, 2):
            await _put_running(first, number)
            await first.grow({f"resp_{number}": Piece(0, _EVENTS)})
        change = "UPDATE responses SET runner = ? WHERE id = 'resp_1'"
        await first._rows.write(lambda connection: connection.execute(change, (runner,)))
        for each in (second, first):
            body = orjson.loads((await each.get("resp_1", "")).body)
            assert (body["status"], body["error"]["type"]) == ("failed", "internal_error")
            assert body["output_text"] == "Hel"
        assert (await second.get("resp_2", "")).status == "in_progress"

    _run(act())


def _fetched(query: str, connection: sqlite3.Connection) -> Any:
    return connection.execute(query).fetchall()


async def _lose(kept: ResponseStore, runner: str, column: str = "runner") -> None:
    """From now on a dead process runs all responses."""
    change = f"UPDATE responses SET {column} = ? WHERE runner != ''"
    await kept._rows.write(lambda connection: connection.execute(change, (runner,)))


@in_both_places
def test_a_response_of_a_dead_process_is_adopted_once(
    first: ResponseStore, second: ResponseStore, tmp_path: Path
) -> None:
    marks = [Mark(7, [b"\1\0\0\0", b""], "w", "i"), Mark(7, [b"", b"\2\0\0\0"], "w", "i", 1)]

    async def act() -> None:
        await _put_running(first, 1, b"request")
        await first.grow({"resp_1": Piece(0, _EVENTS, marks[0])})
        await first.grow({"resp_1": Piece(1, [Text(1, "lo")], marks[1])})
        assert await second.orphans() == []
        await _lose(first, dead_process())
        [orphan] = await second.orphans()
        assert (await first.get("resp_1", "")).status == "in_progress", "another process goes on"
        found = await asyncio.gather(*(each.adopt(orphan) for each in (first, second)))
        [adopted] = [each for each in found if each is not None]
        assert (adopted.request, adopted.number, adopted.moves) == (b"request", 2, 1)
        assert adopted.events == [*_EVENTS, Text(1, "lo")]
        whole = Mark(7, [b"\1\0\0\0", b"\2\0\0\0"], "w", "i", 1)
        assert adopted.past == Past(adopted.events, whole, 1)
        assert await second.orphans() == [] and await second.adopt(orphan) is None
        runner = (first, second)[found.index(adopted)]
        assert await runner.finish(_whole(_begun(1)), Piece(2, [Finished(0, "stop")]))
        assert (await first.get("resp_1", "")).status == "completed"

    _run(act())


@in_both_places
def test_a_process_that_has_lost_its_response_writes_nothing_more(
    first: ResponseStore, tmp_path: Path
) -> None:
    async def act() -> None:
        await _put_running(first, 1, b"request")
        await first.grow({"resp_1": Piece(0, _EVENTS, Mark(7, [b""]))})
        await _lose(first, dead_process())
        assert await first.grow({"resp_1": Piece(1, [Text(0, "x")])}) == set()
        assert await first.grow({"resp_1": Piece(1, [])}) == set()
        assert not await first.finish(_whole(_begun(1)), Piece(1, [Text(0, "x")]))
        [orphan] = await first.orphans()
        adopted = await first.adopt(orphan)
        assert adopted is not None and adopted.events == _EVENTS

    _run(act())


@in_both_places
def test_a_piece_without_a_mark_leaves_no_past(first: ResponseStore, tmp_path: Path) -> None:
    async def act() -> None:
        await _put_running(first, 1, b"request")
        await first.grow({"resp_1": Piece(0, _EVENTS, Mark(7, [b""]))})
        await first.grow({"resp_1": Piece(1, [Text(0, "x")])})
        await _lose(first, dead_process())
        [orphan] = await first.orphans()
        adopted = await first.adopt(orphan)
        assert adopted is not None and adopted.past is None and len(adopted.events) == 3

    _run(act())


@in_both_places
def test_a_response_of_a_dead_server_has_failed_without_a_reader(
    first: ResponseStore, tmp_path: Path
) -> None:
    async def act() -> None:
        await _put_running(first, 1, b"request")
        dead = dead_process()
        await _lose(first, dead, "server")
        assert await first.orphans() == []
        assert (await first.get("resp_1", "")).status == "queued", "its process lives"
        await _lose(first, dead)
        assert await first.orphans() == []
        query = "SELECT status, whole FROM responses"
        [(status, whole)] = await first._rows.read(lambda connection: connection.execute(query).fetchall())
        message = orjson.loads(whole)["error"]["message"]
        assert (status, message) == ("failed", "the server that ran this response has ended")

    _run(act())


def test_a_response_of_another_living_server_is_left_alone(first: ResponseStore, tmp_path: Path) -> None:
    async def act() -> None:
        await _put_running(first, 1, b"request")
        await _lose(first, liveness.own_identity(), "server")
        await _lose(first, dead_process())
        assert await first.orphans() == []
        assert (await first.get("resp_1", "")).status == "queued"

    _run(act())


def test_a_request_is_kept_until_its_end_and_counts(first: ResponseStore, tmp_path: Path) -> None:
    def kept() -> tuple[int, int]:
        with closing(sqlite3.connect(tmp_path / store.FILE)) as connection:
            [found] = connection.execute("SELECT length(request), nbytes FROM responses").fetchall()
        return int(found[0]), int(found[1])

    async def act() -> None:
        await _put_running(first, 1, b"x" * 1000)
        nbytes, before = kept()
        whole = _whole(_begun(1))
        assert await first.finish(whole, Piece(0, []))
        assert (nbytes, *kept()) == (1000, 0, before - 1000 + len(orjson.dumps(whole)))

    _run(act())


def test_looking_for_responses_makes_no_file(first: ResponseStore, tmp_path: Path) -> None:
    assert _run(first.orphans()) == [] and not list(tmp_path.iterdir())


@in_both_places
def test_the_oldest_make_room_but_not_what_runs(tmp_path: Path) -> None:
    kept = _made(tmp_path, max_stored=3)

    async def act() -> None:
        await _put_running(kept, 0)
        for number in range(1, 6):
            await _put_ended(kept, number)
        assert await _there(kept, 6) == [0, 4, 5]

    _run(act())


async def _there(kept: ResponseStore, numbers: int) -> list[int]:
    found = []
    for number in range(numbers):
        try:
            await kept.get(f"resp_{number}", "")
        except ResponseNotFound:
            continue
        found.append(number)
    return found


@in_both_places
def test_bytes_are_bounded_with_events_and_ends(tmp_path: Path) -> None:
    kept = _made(tmp_path, max_stored_bytes=20_000)

    async def act() -> None:
        for number in range(4):
            await _put_ended(kept, number, output_text="x" * 5000)
        assert await _there(kept, 4) == [1, 2, 3]
        await _put_running(kept, 4)
        await kept.grow({"resp_4": Piece(0, [Started(1), Text(0, "y" * 6000)])})
        assert await kept.finish(_whole(_begun(4), output_text="y" * 6000), Piece(1, []))
        await _put_ended(kept, 5)
        assert await _there(kept, 6) == [3, 4, 5]
        for number in (3, 4, 5):
            await kept.delete(f"resp_{number}", "")

        for query, row in (
            ("SELECT count, nbytes FROM totals", (0, 0)),
            ("SELECT count(*) FROM events", (0,)),
        ):
            assert await kept._rows.read(partial(_fetched, query)) == [row]

    _run(act())


@in_both_places
def test_what_is_too_old_is_gone(tmp_path: Path) -> None:
    kept = _made(tmp_path, max_age_s=100.0)

    async def act() -> None:
        await _put_ended(kept, 1)
        change = "UPDATE responses SET created = ?"
        await kept._rows.write(lambda connection: connection.execute(change, (time.time() - 101,)))
        with pytest.raises(ResponseNotFound):
            await kept.get("resp_1", "")
        await _put_ended(kept, 2)
        query = "SELECT id FROM responses"
        rows = await kept._rows.read(lambda connection: connection.execute(query).fetchall())
        assert rows == [("resp_2",)]

    _run(act())


@in_both_places
def test_many_frontends_write_at_once(tmp_path: Path) -> None:
    stores = [_made(tmp_path) for _ in range(4)]

    async def act() -> None:
        await asyncio.gather(
            *(_put_ended(each, 10 * k + j) for k, each in enumerate(stores) for j in range(10))
        )
        assert await _there(stores[0], 40) == list(range(40))

    _run(act())


def test_a_broken_file_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / store.FILE).write_bytes(b"this is no database" * 100)
    (tmp_path / f"{store.FILE}-wal").write_bytes(b"x" * 100)
    kept = _made(tmp_path)

    async def act() -> None:
        await _put_ended(kept, 1)
        assert (await kept.get("resp_1", "")).status == "completed"

    _run(act())
    assert (tmp_path / store.FILE).with_suffix(".broken").read_bytes().startswith(b"this is no database")


def test_a_writer_that_never_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "WAIT_S", 0.05)
    kept = _made(tmp_path)

    async def act() -> None:
        await _put_ended(kept, 1)
        with closing(sqlite3.connect(tmp_path / store.FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ResponsesUnavailable, match="another process is writing"):
                await _put_ended(kept, 2)
            assert (await kept.get("resp_1", "")).status == "completed"
        await _put_ended(kept, 2)

    _run(act())


@in_both_places
def test_the_output_of_kept_events_is_that_of_the_run(first: ResponseStore) -> None:
    output = Output(_begun(1))
    output.take(_EVENTS)

    async def act() -> None:
        row = await _put_running(first, 1)
        await first.grow({"resp_1": Piece(0, _EVENTS[:1])})
        await first.grow({"resp_1": Piece(1, _EVENTS[1:])})
        assert await first.settle(row, resource.cancelled)
        body = orjson.loads((await first.get("resp_1", "")).body)
        assert body["output"] == output.items()

    _run(act())


def test_rows_of_an_older_build_are_not_read(
    first: ResponseStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(first.orphans())  # The store has its file from now on.
    monkeypatch.setattr(store, "FILE", "responses-1.db")
    older = _made(tmp_path)

    async def act() -> None:
        await _put_ended(older, 1)
        with pytest.raises(ResponseNotFound):
            await first.get("resp_1", "")

    _run(act())
