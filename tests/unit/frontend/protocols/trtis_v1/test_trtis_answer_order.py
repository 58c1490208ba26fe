"""Answers of one stream: models that preserve the order have theirs wait for each other, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from frontend.protocols.trtis_v1.grpc import AnswerOrder
from ipc.catalog.model_config import DynamicBatching, ModelConfig

ORDERED = ModelConfig(name="m", max_batch_size=1, dynamic_batching=DynamicBatching(preserve_ordering=True))
FREE = ModelConfig(name="m", max_batch_size=1, dynamic_batching=DynamicBatching())


class Stream:
    """Requests of one rpc, each of which is computed when its gate opens."""

    def __init__(self, turns: AnswerOrder) -> None:
        self.turns, self.rpc = turns, object()
        self.gates: list[asyncio.Event] = []
        self.answered: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, config: ModelConfig | None, model: str = "m") -> None:
        """One more request; without a configuration it fails before the model is known."""
        self.gates.append(asyncio.Event())
        self.tasks.append(asyncio.ensure_future(self._one(len(self.tasks), config, model)))

    async def _one(self, number: int, config: ModelConfig | None, model: str) -> None:
        with self.turns.take(self.rpc, model) as turn:
            try:
                if config is not None:
                    turn.note_model(config)
                await self.gates[number].wait()
            finally:
                await turn.wait()
            self.answered.append(number)

    async def open(self, *numbers: int) -> list[int]:
        """Open gates; the requests answered by then."""
        for number in numbers:
            self.gates[number].set()
            for _ in range(10):
                await asyncio.sleep(0)
        return self.answered


def run(scenario: Callable[[Stream, AnswerOrder], Coroutine[Any, Any, None]]) -> None:
    """A scenario on a fresh stream; at the end no turn is kept."""

    async def main() -> None:
        turns = AnswerOrder()
        stream = Stream(turns)
        async with asyncio.timeout(60):
            await scenario(stream, turns)
            found = await asyncio.gather(*stream.tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in found), found
        assert turns._last == {}

    asyncio.run(main())


def test_answers_wait_for_those_that_were_asked_for_before() -> None:
    async def scenario(stream: Stream, turns: AnswerOrder) -> None:
        for _ in range(4):
            stream.ask(ORDERED)
        assert await stream.open(3, 1) == []
        assert await stream.open(0) == [0, 1]
        assert await stream.open(2) == [0, 1, 2, 3]

    run(scenario)


def test_other_models_and_other_streams_overtake() -> None:
    async def scenario(stream: Stream, turns: AnswerOrder) -> None:
        other = Stream(turns)
        for model in ("m", "n"):
            stream.ask(ORDERED, model)
        stream.ask(FREE, "free")
        stream.ask(FREE, "free")
        other.ask(ORDERED)
        assert await stream.open(3, 1) == [3, 1]
        assert await other.open(0) == [0]
        assert await stream.open(0, 2) == [3, 1, 0, 2]
        await asyncio.gather(*other.tasks)

    run(scenario)


def test_a_stream_that_ends_leaves_nobody_waiting() -> None:
    async def scenario(stream: Stream, turns: AnswerOrder) -> None:
        for _ in range(3):
            stream.ask(ORDERED)
        await stream.open(2)
        for task in stream.tasks:
            task.cancel()

    run(scenario)


def test_a_request_that_fails_early_holds_up_nobody() -> None:
    async def scenario(stream: Stream, turns: AnswerOrder) -> None:
        stream.ask(None)
        stream.ask(ORDERED)
        assert await stream.open(1) == []
        assert await stream.open(0) == [0, 1]

    run(scenario)
