"""Responses in the background over sockets: frontends that share a store, following, cancelling, ends of all kinds."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate, Grant
from frontend.engine.events import Arguments, CallEnded, Finished, Mark, Past, Started, Text
from frontend.generation.pictures import Picture, Standing
from frontend.protocols.responses.event_bytes import encode
from frontend.protocols.responses.runs import Movable, unpacked
from frontend.protocols.responses.store import FILE
from frontend.server.drain import Drain
from frontend.services import Background
from ipc import deadline
from ipc.errors import InferenceFailed, InputTooLong, WorkerLost
from ipc.wire.messages import GenerateCall
from tests.fakes.generation import Step
from tests.fakes.generation_server import ENDED, RecordedServer
from tests.harness.server import dead_process, eventually, wait_until

_ASK = {"input": "hi", "background": True}
DAMAGED = {
    "no MessagePack": b"\xc1",
    "no list": b"\xa0",
    "no such kind": bytes.fromhex("9192cc6380"),
    "a kind below all": bytes.fromhex("9192ff81a26964a178"),
    "no event": bytes.fromhex("9192000a"),
    "no UTF-8": encode([Text(0, "Hello")]).replace(b"ello", b"\xffllo"),
    "arguments of no call": encode([Arguments(0, "x")]),
    "an end of no call": encode([CallEnded(0, True)]),
}
"""Entries behind the last ones of a response."""
_REST: list[Step] = [[Text(0, " you"), Finished(0, "stop"), ENDED]]


class Frontend:
    """One frontend on a socket, whose engine tells "Hello", waits at `gate`, and tells the rest."""

    def __init__(self, stack: ExitStack, root: Path, gate: Gate | None = None, **settings: Any) -> None:
        """`root` has the state that frontends share."""
        place = root / str(len(list(root.iterdir())))
        place.mkdir()
        self.server = RecordedServer(place, gate, run__state_dir=str(root / "state"), **settings)
        self.gate = threading.Event()
        self.server.script([[Started(4)], [Text(0, "Hello")], self.gate, *_REST])
        self.http = stack.enter_context(
            httpx.Client(base_url=stack.enter_context(self.server.listening()), timeout=60)
        )

    def start(self, **fields: Any) -> str:
        """The id of a new response in the background."""
        answer = self.http.post("/v1/responses", json=_ASK | fields).json()
        assert answer["status"] == "queued" and answer["background"] is True
        return str(answer["id"])

    def get(self, id_: str, query: str = "") -> Any:
        """The answer to a GET of a response."""
        return self.http.get(f"/v1/responses/{id_}{query}")

    def told(self, id_: str) -> tuple[str, str]:
        """Status and text of a response."""
        answer = self.get(id_).json()
        return answer["status"], answer.get("output_text", "")

    def wait(self, id_: str, status: str) -> None:
        """Wait until a response has a status."""
        wait_until(lambda: self.told(id_)[0] == status, what=status)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends the frontends of a test."""
    with ExitStack() as made:
        yield made


@pytest.fixture
def pair(stack: ExitStack, tmp_path: Path) -> tuple[Frontend, Frontend]:
    """Two frontends with one store."""
    return Frontend(stack, tmp_path), Frontend(stack, tmp_path)


def _data(text: str) -> list[Any]:
    return [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_run_goes_on_without_its_client_and_is_seen_from_everywhere(
    pair: tuple[Frontend, Frontend],
) -> None:
    here, there = pair
    id_ = here.start(stream=True)
    there.wait(id_, "in_progress")
    refused = there.http.post("/v1/responses", json={"input": "x", "previous_response_id": id_})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "previous_response_id")
    here.gate.set()
    there.wait(id_, "completed")
    assert here.told(id_) == there.told(id_) == ("completed", "Hello you")
    there.server.script([[Finished(0, "stop"), ENDED]])
    assert there.http.post("/v1/responses", json={"input": "x", "previous_response_id": id_}).is_success
    assert there.server.engine.calls[-1].messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello you"},
        {"role": "user", "content": "x"},
    ]
    assert here.server.engine.ended == 1


def test_a_run_is_followed_live_and_again_from_any_event(pair: tuple[Frontend, Frontend]) -> None:
    here, there = pair
    id_ = here.start()
    with there.http.stream("GET", f"/v1/responses/{id_}?stream=true") as response:
        assert response.headers["content-type"] == "text/event-stream"
        lines = response.iter_lines()
        seen = []
        for line in lines:
            seen.append(line)
            if "output_text.delta" in line and line.startswith("data: "):
                break
        here.gate.set()
        seen += list(lines)
    assert seen[-2:] == ["data: [DONE]", ""]
    events = _data("\n".join(seen))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.get("delta", "") for event in events) == "Hello you"
    assert (events[-1]["type"], events[-1]["response"]) == ("response.completed", there.get(id_).json())
    for frontend in pair:
        assert _data(frontend.get(id_, "?stream=true").text) == events
        for last in (0, 4, len(events) - 1, 1000):
            again = frontend.get(id_, f"?stream=true&starting_after={last}").text
            assert _data(again) == events[last + 1 :]
            assert again.endswith("data: [DONE]\n\n")


@pytest.mark.sample(3)
@pytest.mark.parametrize("entries", DAMAGED.values(), ids=DAMAGED)
def test_a_stream_of_events_that_cannot_be_read_ends_in_one_error(
    pair: tuple[Frontend, Frontend], tmp_path: Path, entries: bytes
) -> None:
    here, there = pair
    here.gate.set()
    id_ = here.start()
    there.wait(id_, "completed")
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as connection, connection:
        connection.execute("INSERT INTO events VALUES (?, 9, ?, NULL)", (id_, entries))
    for frontend in pair:
        text = frontend.get(id_, "?stream=true").text
        events = _data(text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events if "error" in event["type"]] == ["error"]
        assert events[-1]["error"]["type"] == "internal_error"
        assert "kept events of the response cannot be read" in events[-1]["message"]
        assert text.endswith("data: [DONE]\n\n")
        assert frontend.told(id_) == ("completed", "Hello you")


def test_a_silent_run_sends_comments_to_those_who_follow(stack: ExitStack, tmp_path: Path) -> None:
    frontend = Frontend(stack, tmp_path, generation__keep_alive_s="0.02")
    id_ = frontend.start()
    frontend.wait(id_, "in_progress")
    with frontend.http.stream("GET", f"/v1/responses/{id_}?stream=true&starting_after=4") as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == 2 * [": keep-alive", ""]
        frontend.gate.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_run_is_cancelled_from_another_frontend_and_stays_cancelled(
    pair: tuple[Frontend, Frontend],
) -> None:
    here, there = pair
    id_ = here.start()
    there.wait(id_, "in_progress")
    answer = there.http.post(f"/v1/responses/{id_}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert answer.json()["output_text"] == "Hello"
    wait_until(lambda: here.server.engine.ended == 1, what="the end of the work")
    here.gate.set()
    assert here.told(id_) == ("cancelled", "Hello")
    assert there.http.post(f"/v1/responses/{id_}/cancel").status_code == 404
    events = _data(there.get(id_, "?stream=true").text)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    closing = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert [event["type"] for event in events[-4:-1]] == closing
    assert [events[-2]["item"]] == last["response"]["output"]


def test_a_deleted_run_ends(pair: tuple[Frontend, Frontend]) -> None:
    here, there = pair
    id_ = here.start()
    there.wait(id_, "in_progress")
    with there.http.stream("GET", f"/v1/responses/{id_}?stream=true") as response:
        lines = response.iter_lines()
        next(lines)
        assert here.http.delete(f"/v1/responses/{id_}").json()["deleted"] is True
        events = _data("\n".join(lines))
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "validation_error")
    wait_until(lambda: here.server.engine.ended == 1, what="the end of the work")
    assert there.get(id_).status_code == 404


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerLost("the worker died"), "model_error"),
        (InferenceFailed("not finite"), "model_error"),
        (InputTooLong("the prompt has 70 tokens, the limit is 64"), "validation_error"),
    ],
)
def test_a_run_that_fails_says_why(stack: ExitStack, tmp_path: Path, error: Any, kind: str) -> None:
    frontend = Frontend(stack, tmp_path)
    frontend.server.script([[Started(4)], [Text(0, "Hel")], error])
    id_ = frontend.start()
    frontend.wait(id_, "failed")
    answer = frontend.get(id_).json()
    assert (answer["error"]["type"], answer["error"]["message"]) == (kind, error.message)
    assert answer["output_text"] == "Hel"
    assert _data(frontend.get(id_, "?stream=true").text)[-1]["type"] == "response.failed"
    frontend.server.script(error)
    id_ = frontend.start()
    frontend.wait(id_, "failed")


def test_a_bug_in_a_run_tells_nothing(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    frontend = Frontend(stack, tmp_path)
    monkeypatch.setattr(frontend.server.engine, "generate", broken)
    id_ = frontend.start()
    frontend.wait(id_, "failed")
    assert frontend.get(id_).json()["error"] == {
        "type": "internal_error",
        "code": "server_error",
        "message": "internal error",
    }


def test_runs_are_bounded(stack: ExitStack, tmp_path: Path) -> None:
    frontend = Frontend(stack, tmp_path, responses__max_background="1")
    id_ = frontend.start()
    refused = frontend.http.post("/v1/responses", json=_ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    frontend.gate.set()
    frontend.wait(id_, "completed")
    wait_until(lambda: frontend.http.post("/v1/responses", json=_ASK).is_success)


class Orphaned:
    """A response whose frontend has died behind "Hello", and another frontend of the same server."""

    def __init__(self, stack: ExitStack, root: Path, seed: int | None = 7, **fields: Any) -> None:
        first = Frontend(stack, root)
        first.server.engine.seed = seed
        self.id = first.start(**fields)
        first.wait(self.id, "in_progress")
        self.other = RecordedServer(_made(root / "other"), run__state_dir=str(root / "state"))
        self.other.script(_REST)
        self.first, self._file = first, root / "state" / FILE
        self.lose()
        # Both frontends are one process: a late end of the first run would pass for an end of the second.
        wait_until(lambda: not first.server.services.background._tasks, what="the end of the lost run")

    def lose(self) -> None:
        """The frontend of the response dies."""
        with closing(sqlite3.connect(self._file)) as connection, connection:
            connection.execute("UPDATE responses SET runner = ?", (dead_process(),))

    def looked(self, *statuses: str) -> Any:
        """The response, when the other frontend has looked for responses until this one has such a status."""

        async def act() -> None:
            [watch] = self.other.services.lasting
            task = asyncio.ensure_future(watch())

            async def is_there() -> bool:
                return self.first.told(self.id)[0] in statuses

            await eventually(is_there, " or ".join(statuses))
            task.cancel()
            await self.other.services.background.end(Drain())

        asyncio.run(act())
        return self.first.get(self.id).json()


def _made(place: Path) -> Path:
    place.mkdir()
    return place


def test_another_frontend_goes_on_with_a_run_behind_what_is_kept(stack: ExitStack, tmp_path: Path) -> None:
    orphaned = Orphaned(stack, tmp_path, temperature=0.5)
    answer = orphaned.looked("completed")
    assert answer["output_text"] == "Hello you"
    engine, first = orphaned.other.engine, orphaned.first.server.engine
    [past] = engine.pasts
    assert past == Past([Started(4), Text(0, "Hello")], Mark(7, [2 * b"\1\0\0\0"], "weights", "identity"), 1)
    assert engine.calls == first.calls and engine.works[0].request_id == first.works[0].request_id
    wait_until(lambda: first.ended == 1, what="the end of the run that has lost its response")
    events = _data(orphaned.first.get(orphaned.id, "?stream=true").text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["delta"] for event in events if "delta" in event] == ["Hello", " you"]


def test_a_run_that_nobody_can_go_on_with_fails(stack: ExitStack, tmp_path: Path) -> None:
    orphaned = Orphaned(stack, tmp_path, seed=None)
    answer = orphaned.looked("failed")
    assert (answer["error"]["type"], answer["output_text"]) == ("internal_error", "Hello")
    assert "tokens were not kept" in answer["error"]["message"] and not orphaned.other.engine.works


def test_a_run_whose_request_cannot_be_read_fails(stack: ExitStack, tmp_path: Path) -> None:
    orphaned = Orphaned(stack, tmp_path)
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as connection, connection:
        connection.execute("UPDATE responses SET request = x'c1'")
    answer = orphaned.looked("failed")
    assert answer["output_text"] == "Hello" and not orphaned.other.engine.works
    assert "no other goes on" in answer["error"]["message"]


@pytest.mark.parametrize("movable", [True, False])
def test_a_run_whose_events_cannot_be_read_fails_and_stops_no_look_for_others(
    stack: ExitStack, tmp_path: Path, movable: bool
) -> None:
    orphaned = Orphaned(stack, tmp_path)
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as connection, connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM responses").fetchone())
        begun = row["begun"].replace(orphaned.id.encode(), b"resp_0")
        # The look meets the lower row number first.
        row |= {"rowid": 0, "id": "resp_0", "begun": begun, "movable": movable}
        places = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO responses ({', '.join(row)}) VALUES ({places})", (*row.values(),))
        connection.execute("INSERT INTO events SELECT 'resp_0', number, entries, mark FROM events")
        connection.execute("INSERT INTO events VALUES ('resp_0', 9, x'9192cc6380', NULL)")
    assert orphaned.looked("completed")["output_text"] == "Hello you"
    answer = orphaned.first.get("resp_0").json()
    assert (answer["status"], answer["output_text"]) == ("failed", "Hello")


def test_a_run_that_has_moved_too_often_fails(stack: ExitStack, tmp_path: Path) -> None:
    orphaned = Orphaned(stack, tmp_path)
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as connection, connection:
        connection.execute("UPDATE responses SET moves = 2")
    answer = orphaned.looked("failed")
    assert (
        "3 times" in answer["error"]["message"] and "generation.continuations" in answer["error"]["message"]
    )
    assert answer["output_text"] == "Hello" and not orphaned.other.engine.works


def test_a_run_whose_choices_had_ended_needs_no_worker(stack: ExitStack, tmp_path: Path) -> None:
    first = Frontend(stack, tmp_path)
    first.server.engine.seed = 7
    first.server.script(
        [[Started(4, 1)], [Text(0, "Hi"), Finished(0, "length", tokens=3, reasoning_tokens=1)], None]
    )
    made: Any = Orphaned.__new__(Orphaned)
    made.id = first.start(max_output_tokens=3)
    made.other = RecordedServer(_made(tmp_path / "other"), run__state_dir=str(tmp_path / "state"))
    made.first, made._file = first, tmp_path / "state" / FILE
    first.wait(made.id, "in_progress")
    made.lose()
    answer = made.looked("incomplete")
    assert answer["output_text"] == "Hi" and not made.other.engine.works
    assert answer["usage"]["output_tokens"] == 3 and answer["usage"]["input_tokens"] == 4


@pytest.mark.sample(3)
@pytest.mark.parametrize("entries", DAMAGED.values(), ids=DAMAGED)
def test_a_run_whose_events_cannot_be_read_fails_with_what_comes_before(
    stack: ExitStack, tmp_path: Path, entries: bytes
) -> None:
    orphaned = Orphaned(stack, tmp_path)
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as connection, connection:
        [mark] = connection.execute("SELECT mark FROM events LIMIT 1").fetchone()
        connection.execute("INSERT INTO events VALUES (?, 9, ?, ?)", (orphaned.id, entries, mark))
    answer = orphaned.looked("failed")
    assert answer["output_text"] == "Hello" and not orphaned.other.engine.works


def test_an_adopted_run_that_is_cancelled_ends(stack: ExitStack, tmp_path: Path) -> None:
    orphaned = Orphaned(stack, tmp_path)
    gate = threading.Event()
    orphaned.other.script([gate, *_REST])

    async def act() -> None:
        [watch] = orphaned.other.services.lasting
        task = asyncio.ensure_future(watch())
        await eventually(lambda: _later(len(orphaned.other.engine.works) == 1), "the run")
        answer = await asyncio.to_thread(orphaned.first.http.post, f"/v1/responses/{orphaned.id}/cancel")
        assert answer.json()["status"] == "cancelled"
        await eventually(lambda: _later(orphaned.other.engine.ended == 1), "the end of the work")
        task.cancel()
        await orphaned.other.services.background.end(Drain())

    asyncio.run(act())
    assert orphaned.first.told(orphaned.id) == ("cancelled", "Hello")


async def _later(found: bool) -> bool:
    return found


def test_pictures_of_a_request_that_moves_are_pictures_again() -> None:
    picture = Picture("input[0]", b"bytes", standing=Standing(is_past=True))
    url = Picture("input[1]", url="https://a.example/b.png")
    parts = [
        {"type": "text", "text": "what"},
        {"type": "image", "image": picture},
        {"type": "image", "image": url},
    ]
    call = GenerateCall(messages=[{"role": "user", "content": parts}, {"role": "user", "content": "so"}])
    asked = Movable("m", call, "req", "trace", "host", Grant("key", "id", 2.0), 5)
    found = unpacked(asked.packed())
    assert found == asked
    [_, *pictures] = found.call.messages[0]["content"]  # type: ignore[index]
    assert [each["image"].where for each in pictures] == ["input[0]", "input[1]"]
    assert pictures[0]["image"].standing.is_past
    assert (found.scope(60).deadline_ns, found.scope(60).names_deadline) == (5, True)


def test_a_request_without_a_deadline_of_its_own_waits_anew_in_the_next_frontend() -> None:
    scope = Movable("m", GenerateCall(text="a"), "req", "trace", "host", Grant(), 0).scope(60)
    assert 59 < deadline.remaining_s(scope.waits_until_ns) <= 60 and not scope.names_deadline


def test_a_request_that_no_message_can_carry_does_not_move() -> None:
    call = GenerateCall(messages=[{"role": "user", "content": "a", "tool_calls": [1 << 70]}])
    assert Movable("m", call, "req", "trace", "host", Grant(), 0).packed() == b""


_ANNA, _BERT = api_keys.fresh(), api_keys.fresh()


def test_nobody_sees_the_responses_of_others(stack: ExitStack, tmp_path: Path) -> None:
    entries = tuple(KeyEntry(name, api_keys.hashed(key)) for name, key in (("anna", _ANNA), ("bert", _BERT)))
    frontend = Frontend(stack, tmp_path, Gate(entries))
    frontend.http.headers["authorization"] = f"Bearer {_ANNA}"
    id_, never = frontend.start(), f"resp_{'0' * 32}"
    stranger = {"authorization": f"Bearer {_BERT}"}

    def walk(named: str, headers: dict[str, str]) -> list[tuple[int, set[str], str]]:
        """What each route answers of a response, with the id taken out."""
        path, found = f"/v1/responses/{named}", []
        for method, where, body in (
            ("GET", path, None),
            ("GET", f"{path}?stream=true", None),
            ("GET", f"{path}?stream=true&starting_after=0", None),
            ("GET", f"{path}/input_items", None),
            ("GET", f"{path}/input_items?after=msg_1", None),
            ("POST", "/v1/responses", {"input": "x", "previous_response_id": named}),
            ("POST", "/v1/responses", {"input": "x", "previous_response_id": named, "stream": True}),
            ("POST", "/v1/responses", {"input": "x", "previous_response_id": named, "background": True}),
            ("POST", f"{path}/cancel", None),
            ("DELETE", path, None),
        ):
            answer = frontend.http.request(method, where, headers=headers, json=body)
            found.append((answer.status_code, set(answer.headers), answer.text.replace(named, "ID")))
        return found

    unknown = walk(never, stranger)
    assert {status for status, _, _ in unknown} == {404}
    frontend.wait(id_, "in_progress")
    assert walk(id_, stranger) == unknown, "while the response runs"
    assert {status for status, _, _ in walk(id_, {"authorization": ""})} == {401}
    frontend.gate.set()
    frontend.wait(id_, "completed")
    assert walk(id_, stranger) == unknown, "when the response has ended"
    assert [status for status, _, _ in walk(id_, {})] == [200, 200, 200, 200, 422, 200, 200, 200, 404, 200]
    assert walk(id_, stranger) == walk(id_, {}) == unknown, "deleted, for its key as well"


def test_a_stream_whose_client_leaves_is_stored_as_cancelled(pair: tuple[Frontend, Frontend]) -> None:
    here, there = pair
    with here.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as response:
        lines = response.iter_lines()
        first = _data("\n".join(next(lines) for _ in range(2)))[0]
        while "output_text.delta" not in next(lines):
            pass
    id_ = first["response"]["id"]
    wait_until(lambda: there.get(id_).status_code == 200, what="the stored response")
    assert there.told(id_) == ("cancelled", "Hello")
    assert here.server.engine.ended == 1


@pytest.mark.parametrize("patient", [False, True])
def test_a_drain_waits_for_runs_and_ends_what_takes_too_long(tmp_path: Path, patient: bool) -> None:
    async def act() -> Any:
        server = RecordedServer(tmp_path)
        gate = threading.Event()
        server.script([[Started(4)], [Text(0, "Hello")], gate, *_REST])
        server.services.drain = type(server.services.drain)()
        transport = httpx.ASGITransport(app=server.application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            id_ = (await client.post("/v1/responses", json=_ASK)).json()["id"]

            async def told() -> Any:
                return (await client.get(f"/v1/responses/{id_}")).json()

            async def is_at_work() -> bool:
                return bool((await told())["status"] == "in_progress")

            await eventually(is_at_work, "the beginning of the run")
            drain = server.services.drain
            drain.begin()
            ending = asyncio.ensure_future(server.services.background.end(drain))
            await asyncio.sleep(0)
            assert not ending.done()
            if patient:
                gate.set()
            else:
                drain.end()
            await ending
            return await told()

    answer = asyncio.run(act())
    if patient:
        assert (answer["status"], answer["output_text"]) == ("completed", "Hello you")
    else:
        assert (answer["status"], answer["output_text"]) == ("failed", "Hello")
        assert answer["error"]["type"] == "internal_error"
        assert "stopped" in answer["error"]["message"]


def test_the_end_of_work_in_the_background_waits_for_what_that_work_began() -> None:
    async def act() -> list[str]:
        background, done = Background(), []

        async def second() -> None:
            await asyncio.sleep(0)
            done.append("second")

        async def first() -> None:
            done.append("first")
            background.start(second())

        background.start(first())
        await background.end(Drain())
        return done

    assert asyncio.run(act()) == ["first", "second"]
