"""Several generations as one, for requests with several prompts.

1. Each generation is read by a task of its own, which waits until its events have been taken.
2. Choices are numbered through: those of the second prompt follow those of the first.
3. Token counts are summed, and `Started` and `Ended` are told once. The first error ends all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from frontend.engine.events import Ended, Event, Generation, Started


class Together(Generation):
    """An async context over `generations`, each with `choices` choices."""

    def __init__(self, generations: Sequence[Generation], choices: int) -> None:
        self._generations, self._choices = generations, choices
        self._queue: asyncio.Queue[list[Event] | BaseException] = asyncio.Queue(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._starts: list[Started] = []
        self._ends: list[Ended] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.ensure_future(self._read(generation, number * self._choices))
            for number, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __anext__(self) -> list[Event]:
        if len(self._ends) == len(self._generations):
            raise StopAsyncIteration
        while True:
            found = await self._queue.get()
            if isinstance(found, BaseException):
                raise found
            if events := self._merged(found):
                return events

    async def _read(self, generation: Generation, first: int) -> None:
        try:
            async for events in generation:
                await self._queue.put([_renumbered(event, first) for event in events])
        except Exception as error:
            await self._queue.put(error)

    def _merged(self, events: list[Event]) -> list[Event]:
        """`events` without what is told once for all; that is added when it is complete."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, Started):
                self._starts.append(event)
                if len(self._starts) == len(self._generations):
                    told.append(_sum_of_starts(self._starts))
            elif isinstance(event, Ended):
                self._ends.append(event)
                if len(self._ends) == len(self._generations):
                    told.append(_sum_of_ends(self._ends))
            else:
                told.append(event)
        return told


async def entered(stack: AsyncExitStack, generations: Sequence[Generation], choices: int) -> Generation:
    """One generation for all of `generations`; `stack` ends what joins them."""
    if len(generations) == 1:
        return generations[0]
    return await stack.enter_async_context(Together(generations, choices))


def _renumbered(event: Event, first: int) -> Event:
    return event if isinstance(event, Started | Ended) else replace(event, choice=event.choice + first)


def _sum_of_starts(starts: Sequence[Started]) -> Started:
    return Started(sum(each.prompt_tokens for each in starts), sum(each.cached_tokens for each in starts))


def _sum_of_ends(ends: Sequence[Ended]) -> Ended:
    """Sums of tokens; the times are those of the longest, since the generations run side by side."""
    return Ended(
        sum(each.prompt_tokens for each in ends),
        sum(each.completion_tokens for each in ends),
        sum(each.reasoning_tokens for each in ends),
        sum(each.cached_tokens for each in ends),
        max(each.prompt_s for each in ends),
        max(each.completion_s for each in ends),
    )
