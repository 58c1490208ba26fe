"""Answers in parts between a gateway and boxes: order, credit, large parts, gaps, cancels, deaths, forged parts.

A test plays the engines of the boxes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.cluster.transfers import Room
from frontend.engine.answer import Answer, AnswerStream, CopyBudget
from frontend.engine.streams.part_stream import TELL_AFTER
from frontend.sending import LeasedBody
from ipc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    NoReplica,
    PenstockError,
    ProtocolError,
    ShmExhausted,
    WorkerCrashed,
    WorkerLost,
)
from ipc.memory.tensors import layout
from ipc.settings import Arena
from ipc.wire.cluster import VERSION, Offer, Taken, encode, read_to_box
from ipc.wire.cluster_answers import PartBody, PartsTold, read_parts
from ipc.wire.cluster_names import parts as parts_of
from ipc.wire.messages import InferCall, Result, Step, TensorRef, Timing, Work
from ipc.wire.streams import WINDOW
from tests.fakes.joined_cluster import MODEL, Joined, PlayedParts, play, turn
from tests.harness.server import eventually

WORK = Work(MODEL, InferCall([], [], 1), 0, 3, "req_1", parts=WINDOW)


class Reader:
    """The client of one answer, which reads all the time while `reads` is set."""

    def __init__(self, parts: AnswerStream) -> None:
        self.parts, self.had, self.error = parts, list[bytes](), None
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for part in self.parts:
                tensors = part.tensors()
                assert tensors["LOOSE"].tobytes() == tensors["OUTPUT"].tobytes()[:1]
                self.had.append(tensors["OUTPUT"].tobytes())
                del tensors
                await self.reads.wait()
        except PenstockError as error:
            self.error: PenstockError | None = error


@asynccontextmanager
async def reading(
    joined: Joined,
    first: Callable[[PlayedParts], None],
    which: Callable[[Joined], PlayedParts] | None = None,
) -> AsyncIterator[Reader]:
    """An answer that has begun at a box, by what `first` has the box say, and its reader; `which` finds the answer."""

    async def begin() -> None:
        await turn()
        first((which or played)(joined))

    began = asyncio.ensure_future(begin())
    async with joined.engine.stream(joined.scope(), WORK, b"input") as parts:
        await began
        reader = Reader(parts)
        try:
            yield reader
        finally:
            reader.task.cancel()


def played(joined: Joined) -> PlayedParts:
    """The answer that goes on at a box which can be reached."""
    [found] = [
        parts
        for name, engine in joined.engines.items()
        for parts in engine.parts
        if not parts.has_ended and joined.bridges[name].broker.up
    ]
    return found


def second(joined: Joined) -> PlayedParts:
    """The answer that has begun behind another one."""
    return joined.engines["a"].parts[1]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""

    async def holds() -> bool:
        return condition()

    await eventually(holds, "the condition")


def holder(joined: Joined) -> str:
    """The box whose answer goes on."""
    return next(name for name, engine in joined.engines.items() if played(joined) in engine.parts)


def taken(joined: Joined) -> list[Taken]:
    """What boxes have heard."""
    return [
        word
        for subject, data in joined.sent
        if subject.endswith(".word") and isinstance(word := read_to_box(data), Taken)
    ]


async def settled(seconds: float = 0.0) -> None:
    """Let words leave that wait for the end of a turn."""
    await asyncio.sleep(seconds)
    await turn()


def test_parts_arrive_in_order_and_then_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a", b"bb")) as reader:
            parts = played(joined)
            assert parts.work.parts == WINDOW
            for at in range(20):
                parts.say(b"%d" % at)
                await settled()
            parts.end()
            await reader.task
        assert reader.had == [b"a", b"bb", *(b"%d" % at for at in range(20))]
        assert reader.parts.result is not None and reader.parts.result.timing.device_ns == 3
        assert reader.parts.result.worker == "a/worker-0" and parts.has_ended

    play(monkeypatch, scene, "a")


def test_an_answer_without_a_part_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.end()) as reader:
            await reader.task
        assert reader.had == [] and reader.error is None

    play(monkeypatch, scene, "a")


@pytest.mark.parametrize("error", [InferenceFailed("broken"), ShmExhausted("slow"), NoReplica("none")])
def test_an_error_behind_parts_comes_behind_them(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError
) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            played(joined).end(error)
            await reader.task
        assert reader.had == [b"a"]
        assert type(reader.error) is type(error) and reader.error.message == error.message
        assert len(joined.engines["a"].parts) + len(joined.engines["b"].parts) == 1

    play(monkeypatch, scene, "a", "b")


def test_a_box_sends_a_window_ahead_of_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            parts = played(joined)
            reader.reads.clear()
            parts.say(*(b"%d" % at for at in range(30)))
            await settled()
            assert parts.read == WINDOW, "the rest waits at the box"
            reader.reads.set()
            for _ in range(40):
                await settled()
            assert parts.read == 31
            parts.end()
            await reader.task
        assert reader.had == [b"a", *(b"%d" % at for at in range(30))]
        assert taken(joined)[-1].amounts[0] >= 31 - TELL_AFTER

    play(monkeypatch, scene, "a")


def test_parts_of_a_turn_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            before = len(joined.messages("parts"))
            played(joined).say(*(b"%d" % at for at in range(5)))
            await settled()
            assert len(joined.messages("parts")) <= before + 2
            played(joined).end()
            await reader.task
        assert len(reader.had) == 6

    play(monkeypatch, scene, "a")


def test_a_large_part_goes_beside_messages_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(range(256)) * 8192

    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(large, b"b", b"c")) as reader:
            parts = played(joined)
            reader.reads.clear()
            await settled()
            bridge = joined.bridges["a"]
            assert parts.read == 1 and len(reader.had) == 1, "nothing is sent behind a large part"
            assert bridge.transfers.offered == 0, "the bytes that have come are kept no more"
            reader.reads.set()
            for _ in range(20):
                await settled()
            parts.say(large)
            parts.end()
            await asyncio.wait_for(reader.task, 20)
        assert reader.had == [large, b"b", b"c", large]
        assert max(len(data) for data in joined.messages("parts")) < 10_000

    play(monkeypatch, scene, "a")


def test_large_parts_for_slow_clients_take_bounded_memory_of_a_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second answer rests while the first client does not read, and neither loses a part."""
    large = bytes(range(256)) * 4096

    async def scene(joined: Joined) -> None:
        room = joined.gateway.transfers.room = Room(len(large) + 10_000)
        async with reading(joined, lambda parts: parts.say(large)) as slow:
            slow.reads.clear()
            async with reading(joined, lambda parts: parts.say(b"b"), second) as quick:
                await until(lambda: len(slow.had) == 1)
                joined.engines["a"].parts[1].say(large, b"c")
                await until(lambda: room.waiting == 1)
                assert quick.had == [b"b"] and room.nbytes < 2 * len(large)
                slow.reads.set()
                for parts in joined.engines["a"].parts:
                    parts.end()
                await asyncio.wait_for(slow.task, 20)
                await asyncio.wait_for(quick.task, 20)
                assert (slow.had, quick.had) == ([large], [b"b", large, b"c"])
        await until(lambda: not room.nbytes)

    play(monkeypatch, scene, "a")


def test_whole_answers_for_slow_clients_take_bounded_memory_of_a_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second large answer rests while the first client does not read; a small one passes."""
    count = 1 << 18

    async def scene(joined: Joined) -> None:
        room = joined.gateway.transfers.room = Room(4 * count + 10_000)
        runs = joined.engines["a"].runs

        def asked(number: int, count: int) -> asyncio.Task[Answer]:
            call = InferCall([], [], 1, step=Step(number, start=True))
            task = asyncio.ensure_future(joined.engine.run(joined.scope(), Work(MODEL, call, 0, 3, "req_1")))

            async def say() -> None:
                await until(lambda: len(runs) == number)
                runs[-1].say(number, count)

            saying.append(asyncio.ensure_future(say()))
            return task

        saying: list[asyncio.Task[None]] = []
        answer = await asked(1, count)
        arena, budget = Arena(slice_bytes=count), CopyBudget(0)
        body = LeasedBody([memoryview(answer.tensors()["OUTPUT"])], answer, arena, budget)
        del answer
        slices = aiter(body)
        had = [bytes(await anext(slices))]
        second = asked(2, count)
        await until(lambda: room.waiting == 1)
        small = await asked(3, 1)
        assert small.tensors()["OUTPUT"].tolist() == [[3]]
        assert not second.done() and room.nbytes < 8 * count
        had += [bytes(each) async for each in slices]
        assert np.frombuffer(b"".join(had), np.int32).tolist() == [1] * count
        del body, slices
        assert (await second).tensors()["OUTPUT"].tolist() == [[2] * count]
        del second
        await asyncio.gather(*saying)
        await until(lambda: not room.nbytes)

    play(monkeypatch, scene, "a")


def test_large_parts_that_gateways_do_not_get_take_bounded_memory_of_a_box(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = bytes(range(256)) * 4096

    async def scene(joined: Joined) -> None:
        room = joined.bridges["a"].intake._parts._room = Room(len(large) + 10_000)
        get, may_get = joined.gateway.transfers.get, asyncio.Event()

        async def get_later(*args: Any) -> memoryview:
            await may_get.wait()
            return await get(*args)

        monkeypatch.setattr(joined.gateway.transfers, "get", get_later)
        async with (
            reading(joined, lambda parts: parts.say(b"a")) as one,
            reading(joined, lambda parts: parts.say(b"b"), second) as other,
        ):
            for parts in joined.engines["a"].parts:
                parts.say(large)
                parts.end()
            await until(lambda: room.waiting == 1)
            assert room.nbytes < 2 * len(large) and joined.bridges["a"].transfers.offered == 1
            may_get.set()
            await asyncio.wait_for(one.task, 20)
            await asyncio.wait_for(other.task, 20)
            assert (one.had, other.had) == ([b"a", large], [b"b", large])
        await until(lambda: not room.nbytes)

    play(monkeypatch, scene, "a")


def test_a_part_that_was_taken_holds_up_no_later_one_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a box nor a gateway has room for two large parts, nor waits for room with a part in hand."""
    large = bytes(range(256)) * 4096

    async def scene(joined: Joined) -> None:
        rooms = Room(len(large) + 10_000), Room(len(large) + 10_000)
        joined.bridges["a"].intake._parts._room, joined.gateway.transfers.room = rooms
        async with reading(joined, lambda parts: parts.say(large, large, large)) as reader:
            played(joined).end()
            await asyncio.wait_for(reader.task, 20)
        assert reader.had == [large] * 3
        await until(lambda: not any(room.nbytes for room in rooms))

    play(monkeypatch, scene, "a")


def test_a_large_part_whose_bytes_do_not_come_runs_elsewhere_or_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = bytes(1 << 20)

    def forge(joined: Joined) -> None:
        """Every box offers other bytes than it has."""
        for bridge in joined.bridges.values():
            original = bridge.transfers.offer

            async def offer(parts: Any, peer: str, original: Any = original) -> Offer:
                return msgspec.structs.replace(await original(parts, peer), digest=bytes(32))

            monkeypatch.setattr(bridge.transfers, "offer", offer)

    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            forge(joined)
            played(joined).say(large)
            await asyncio.wait_for(reader.task, 20)
            assert (
                isinstance(reader.error, WorkerLost) and "in the middle of its answer" in reader.error.message
            )
            assert reader.had == [b"a"]

    async def before_the_first(joined: Joined) -> None:
        forge(joined)

        async def say() -> None:
            said = set[PlayedParts]()
            while len(said) < 2:
                await turn()
                for engine in joined.engines.values():
                    for parts in engine.parts:
                        if parts not in said:
                            said.add(parts)
                            parts.say(large)

        began = asyncio.ensure_future(say())
        with pytest.raises(NoReplica, match="a part of the answer did not come"):
            async with joined.engine.stream(joined.scope(), WORK, b""):
                raise AssertionError("no part has come")
        await began
        assert [len(engine.parts) for engine in joined.engines.values()] == [1, 1]

    play(monkeypatch, scene, "a")
    play(monkeypatch, before_the_first, "a", "b")


def test_a_lost_message_is_asked_for_and_no_part_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            parts = played(joined)
            joined.lose = lambda subject, data: subject.endswith(".parts")
            parts.say(b"b")
            await settled()
            joined.lose = lambda subject, data: False
            parts.say(b"c")
            await settled()
            assert reader.had == [b"a"]
            for _ in range(2):
                joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
                await settled()
            assert reader.had == [b"a", b"b", b"c"]
            joined.lose = lambda subject, data: subject.endswith(".parts")
            parts.say(b"d")
            parts.end()
            await settled()
            assert not reader.task.done(), "the end waits for the part before it"
            joined.lose = lambda subject, data: False
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            await reader.task
        assert reader.had == [b"a", b"b", b"c", b"d"]
        assert joined.gateway.dispatch.counts["resent", "gap"] == 1

    play(monkeypatch, scene, "a")


def test_a_box_that_dies_before_the_first_part_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        lost: list[str] = []

        async def die() -> None:
            await turn()
            lost.append(holder(joined))
            joined.die(lost[0])
            await turn()
            played(joined).say(b"x")

        began = asyncio.ensure_future(die())
        async with joined.engine.stream(joined.scope(), WORK, b"input") as parts:
            await began
            reader = Reader(parts)
            # What the first box says when it is heard again is of no answer.
            joined.bridges[lost[0]].broker.up = True
            joined.beat(lost[0])
            joined.engines[lost[0]].parts[0].say(b"of the dead")
            await settled()
            [own] = joined.engines[next(name for name in joined.engines if name != lost[0])].parts
            own.end()
            await reader.task
        assert reader.had == [b"x"] and reader.error is None

    play(monkeypatch, scene, "a", "b")


@pytest.mark.parametrize("comes", [False, True])
def test_bytes_of_a_box_that_is_lost_are_not_waited_for_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """The box stands still while its large part travels, and another one begins, or the same one anew."""
    old, new = bytes(1 << 20), b"x" * (1 << 20)

    async def scene(joined: Joined) -> None:
        gateway, arriving, get = joined.gateway, asyncio.Event(), joined.gateway.transfers.get
        asked = list[str]()

        async def late(offer: Offer, owner: str, *more: Any) -> memoryview:
            asked.append(offer.secret)
            whole = await get(offer, owner, *more)
            if len(asked) == 1:
                await arriving.wait()
            return whole

        monkeypatch.setattr(gateway.transfers, "get", late)

        async def stand_still() -> None:
            await turn()
            (first := played(joined)).say(old)
            while not asked:
                await turn()
            box = holder(joined)
            gateway.boxes._end(gateway.boxes.by_name[box])
            if comes:
                joined.beat(box)
            second: list[PlayedParts] = []
            while not second:
                joined.tick(gateway.dispatch._ask_ns / 1e9)
                await turn()
                found = [parts for engine in joined.engines.values() for parts in engine.parts]
                second = [parts for parts in found if parts is not first]
            if comes:
                arriving.set()
                await turn()
            second[0].say(new)
            second[0].end()

        began = asyncio.ensure_future(stand_still())
        async with joined.engine.stream(joined.scope(), WORK, b"input") as parts:
            await began
            reader = Reader(parts)
            while not reader.task.done():
                await settled()
        assert reader.had == [new] and reader.error is None
        for name, bridge in joined.bridges.items():
            # The box says again what it has, and hears that nobody waits.
            joined.beat(name)
            bridge.intake._rested_ns = 0
            bridge.intake.tick(connected=True)
        await settled()

    play(monkeypatch, scene, *(("a",) if comes else ("a", "b")))


def test_a_box_that_dies_later_ends_the_answer_with_the_error_of_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            await settled()
            joined.die(holder(joined))
            await reader.task
        assert reader.had == [b"a"] and isinstance(reader.error, WorkerLost)
        assert reader.error.message == (
            "the worker was lost in the middle of its answer, which cannot go on elsewhere"
        )
        assert sum(len(engine.parts) for engine in joined.engines.values()) == 1
        assert joined.gateway.poison.is_suspect(MODEL, WORK.call, b"input")

    play(monkeypatch, scene, "a", "b")


def test_two_boxes_that_die_before_the_first_part_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async def die() -> None:
            for _ in range(2):
                await turn()
                joined.die(holder(joined))

        began = asyncio.ensure_future(die())
        with pytest.raises(WorkerCrashed):
            async with joined.engine.stream(joined.scope(), WORK, b"input"):
                raise AssertionError("no part has come")
        await began
        assert not joined.engines["c"].parts or not joined.engines["a"].parts or not joined.engines["b"].parts

    play(monkeypatch, scene, "a", "b", "c")


def test_a_client_that_leaves_ends_the_work_at_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a", bytes(1 << 20))):
            parts = played(joined)
            await settled()
            assert not parts.has_ended
        await settled()
        assert parts.has_ended

    play(monkeypatch, scene, "a")


def test_a_late_answer_ends_at_the_gateway_and_at_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            parts = played(joined)
            [held] = joined.gateway.dispatch.items.values()
            held.deadline_ns = 1
            joined.gateway.dispatch.deadlines.expire()
            await reader.task
            assert isinstance(reader.error, DeadlineExceeded)
        await settled()
        assert parts.has_ended

    play(monkeypatch, scene, "a")


def forged(joined: Joined, sender: str, number: int, body: PartBody, **changes: Any) -> bytes:
    """Parts of the only item under way, as a box would tell them."""
    [name] = joined.gateway.dispatch.items
    told = PartsTold(VERSION, sender, joined.bridges[sender].life, [name], [number], [body])
    return encode(msgspec.structs.replace(told, **changes))


def body_of(data: bytes) -> PartBody:
    """A part with one output."""
    refs, _ = layout([("OUTPUT", "uint8", [len(data)])])
    loose, _ = layout([("LOOSE", "uint8", [1])])
    return PartBody(encode(Result(1, None, refs, [], [], [], Timing(), loose=loose)), data, data[:1])


def test_parts_of_strangers_out_of_order_or_twice_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            await settled()
            mine = holder(joined)
            other = next(name for name in joined.bridges if name != mine)
            subject = parts_of(joined.gateway.router)
            for data in (
                forged(joined, other, 2, body_of(b"x")),
                forged(joined, mine, 2, body_of(b"x"), life="unknown"),
                forged(joined, mine, 2, body_of(b"x"), box=other),
                forged(joined, mine, 2, body_of(b"x"), names=["r.1"]),
                forged(joined, mine, 1, body_of(b"x")),
                forged(joined, mine, 4, body_of(b"x")),
                b"\xc1",
                b"",
                b"\x91" * 10_000,
            ):
                joined.bring(subject, data)
            await settled()
            assert reader.had == [b"a"] and not reader.task.done()
            played(joined).say(b"b")
            played(joined).end()
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            await reader.task
        assert reader.had == [b"a", b"b"]

    play(monkeypatch, scene, "a", "b")


@pytest.mark.parametrize(
    "body",
    [
        PartBody(b"", b"x"),
        PartBody(b"\xc1", b"x"),
        PartBody(encode(Result(1, None, [TensorRef("O", "float32", [9], 0)], [], [], [], Timing())), b"x"),
        PartBody(encode(Result(1, None, [TensorRef("O", "no", [1], 0)], [], [], [], Timing())), b"x"),
    ],
)
def test_a_part_that_is_none_ends_the_answer(monkeypatch: pytest.MonkeyPatch, body: PartBody) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            reader.reads.clear()
            await settled()
            joined.bring(parts_of(joined.gateway.router), forged(joined, "a", 2, body))
            await settled()
            assert not joined.gateway.dispatch.items, "the answer ends before anybody reads the part"
            reader.reads.set()
            await reader.task
            assert reader.had == [b"a"] and isinstance(reader.error, PenstockError)
            parts = joined.engines["a"].parts[0]
        await settled()
        assert parts.has_ended

    play(monkeypatch, scene, "a")


def test_a_box_that_sends_more_than_the_window_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, lambda parts: parts.say(b"a")) as reader:
            reader.reads.clear()
            await settled()
            for number in range(2, WINDOW + 3):
                joined.bring(parts_of(joined.gateway.router), forged(joined, "a", number, body_of(b"x")))
            reader.reads.set()
            await reader.task
            assert isinstance(reader.error, ProtocolError) and "more parts" in reader.error.message

    play(monkeypatch, scene, "a")


@pytest.mark.parametrize(
    "changes",
    [
        {"numbers": []},
        {"numbers": [0]},
        {"numbers": [-1]},
        {"parts": []},
        {"names": []},
        {"parts": [msgspec.structs.replace(body_of(b"x"), result_nbytes=-1)]},
        {"parts": [msgspec.structs.replace(body_of(b"x"), large=Offer("s", -1, b""))]},
        {"v": VERSION + 1},
    ],
)
def test_messages_that_are_no_parts_are_refused(changes: dict[str, Any]) -> None:
    told = PartsTold(VERSION, "a", "life", ["r.1"], [1], [body_of(b"x")])
    assert read_parts(encode(told)) == told
    with pytest.raises(ProtocolError):
        read_parts(encode(msgspec.structs.replace(told, **changes)))
