"""One request for generated text, as a frontend reads it: entries of `Deltas` become neutral events.

1. Events wait here until the reader asks. The reader gets all of them at once.
2. The text of a list is taken when the next list is asked for. The worker learns of taken text in pieces of
   `TELL_AFTER` bytes, and pauses a stream with more untaken text than `WINDOW_NBYTES`.
3. The pace of the request (`Pace`) learns of all entries when they arrive, and ends a stream that is late. An entry
   HELD says that tokens come whose text waits. The client sees nothing of such an entry.
4. The `Result` of the job ends the stream. The sums of all choices stand in the last event.
5. A run that is lost before its answer has begun is followed by another, by the rule of retries. The client sees one
   `Started`, and each piece of the prompt once. A run that is lost later ends the request with one error.

A stream begins when its prompt is tokenized (QUEUED), and waits for the engine from then on. A stream that the engine
has begun (STARTED) is in no queue of the worker and costs nothing (`Outstanding`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Self
from uuid import uuid4

from frontend.engine.answer import Answer
from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Event,
    Finished,
    Generation,
    Pace,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client
from frontend.engine.local.delivery import Delivery
from frontend.engine.local.part_stream import Incoming
from frontend.engine.local.retry import Attempts
from ipc.errors import PenstockError, WorkerLost
from ipc.wire.messages import Work
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    HELD,
    PROMPT,
    QUEUED,
    REASONING,
    STARTED,
    TEXT,
    WINDOW_NBYTES,
    Deltas,
    Finish,
    PromptToken,
    TokenLogprob,
    nbytes_of,
)

TELL_AFTER = WINDOW_NBYTES // 2
"""So many bytes of text are taken before the worker is told."""
_PIECES: dict[int, type[Text] | type[Reasoning]] = {TEXT: Text, REASONING: Reasoning}
_CALLS = frozenset((CALLED, ARGUMENTS, CALL_ENDED, CALL_CUT))


class DeltaStream(Incoming[Event], Generation):
    """One run of a request at one worker."""

    def __init__(
        self,
        channel: Channel,
        request: int,
        final: asyncio.Future[Delivery],
        pace: Pace,
        on_suspect: Callable[[WorkerLost], None] = lambda error: None,
    ) -> None:
        """For the arguments see `Incoming`."""
        super().__init__(channel, request, final, on_suspect)
        self._pace = pace
        pace.begin()
        self._calls: Counter[int] = Counter()
        self._waits_since_ns = 0
        self._waiting_nbytes = self._held_nbytes = self._untold_nbytes = 0
        self._prompt_characters = self._prompt_tokens = 0
        channel.streams.texts[request] = self

    async def __anext__(self) -> list[Event]:
        """All events since the last list. Raises the error of the request, once."""
        self._let_go()
        if self._over:
            raise StopAsyncIteration
        self._waits_since_ns = time.monotonic_ns()
        await self._something()
        if not self._waiting or self._has_ended:
            self._end()
            self._waiting.append(self._pace.ended())
        events = list(self._waiting)
        self._waiting.clear()
        self._held_nbytes, self._waiting_nbytes = self._waiting_nbytes, 0
        return events

    @property
    def _has_begun(self) -> bool:
        return self.prompt_tokens is not None or super()._has_begun

    @property
    def _has_ended(self) -> bool:
        """Whether the worker has answered without an error."""
        return self._failure is None and self._final.done() and self._final.exception() is None

    def take(self, deltas: Deltas, at: int, now_ns: int) -> None:
        """Entry `at` of `deltas` has arrived."""
        kind, choice = deltas.kinds[at], deltas.choices[at]
        if kind == QUEUED:
            self.prompt_tokens = deltas.starts[at].prompt_tokens
        elif kind == STARTED:
            start = deltas.starts[at]
            self._pace.started(start)
            self._waiting.append(Started(start.prompt_tokens, start.cached_tokens))
            self.channel.rest(self._request)
        elif kind == PROMPT:
            self._take_prompt(deltas.texts[at], deltas.prompts.get(at, []))
            self._pace.heard(now_ns)
        elif make := _PIECES.get(kind):
            text, tokens = deltas.texts[at], deltas.tokens[at]
            self.answering = True
            self._pace.step(choice, tokens, now_ns)
            logprobs = deltas.logprobs.get(at)
            self._waiting.append(make(choice, text, tokens, logprobs))
            self._waiting_nbytes += nbytes_of(text, logprobs)
        elif kind == HELD:
            self._pace.held(now_ns)
            return
        elif kind in _CALLS:
            self._take_call(deltas, at, now_ns)
        else:
            self._finish(choice, deltas.finishes[at], deltas.logprobs.get(at), now_ns)
        self._wake()

    def _take_call(self, deltas: Deltas, at: int, now_ns: int) -> None:
        """A call begins, goes on, or ends."""
        kind, choice, text, logprobs = (
            deltas.kinds[at],
            deltas.choices[at],
            deltas.texts[at],
            deltas.logprobs.get(at),
        )
        self.answering = True
        self._pace.step(choice, deltas.tokens[at], now_ns)
        self._waiting_nbytes += nbytes_of(text, logprobs)
        if kind == CALLED:
            call, index = deltas.calls[at], self._calls[choice]
            self._calls[choice] += 1
            self._waiting.append(CallBegun(choice, index, f"{call.prefix}{uuid4()}", call.name, logprobs))
        elif kind == ARGUMENTS:
            self._waiting.append(Arguments(choice, text, logprobs))
        else:
            self._waiting.append(CallEnded(choice, kind == CALL_ENDED, logprobs))

    def _take_prompt(self, text: str, tokens: list[PromptToken]) -> None:
        """A piece of the prompt, which a later run would tell again: the answer has not begun with the piece."""
        self._waiting.append(Prompted(0, text, tokens, self._prompt_characters, self._prompt_tokens))
        self._prompt_characters += len(text)
        self._prompt_tokens += len(tokens)
        self._waiting_nbytes += nbytes_of(text, tokens)

    def _finish(self, choice: int, finish: Finish, logprobs: list[TokenLogprob] | None, now_ns: int) -> None:
        """A choice has ended; its tokens without text, such as an end token, are known now."""
        self.answering = True
        self._pace.finished(choice, finish, now_ns)
        self._waiting.append(
            Finished(choice, finish.reason, finish.stop, finish.tokens, finish.reasoning_tokens, logprobs)
        )

    def look(self, now_ns: int) -> None:
        """End a stream whose next entry takes too long."""
        if self._failure is not None or self._final.done():
            return
        late = self._pace.lateness(now_ns, self._waits_since_ns if self._is_awaited else 0)
        if late is not None:
            self._fail(late)

    def _let_go(self) -> None:
        """The text that was handed out is taken."""
        self._untold_nbytes += self._held_nbytes
        self._held_nbytes = 0
        if self._untold_nbytes >= TELL_AFTER and not self._final.done():
            self.channel.streams.text_taken(self._request, self._untold_nbytes)
            self._untold_nbytes = 0

    def close(self) -> None:
        """End the work unless the work has ended. Idempotent."""
        self.channel.streams.texts.pop(self._request, None)
        self._stop()


class LocalGeneration(Generation):
    """A context manager whose exit ends unfinished work."""

    def __init__(self, client: Client, work: Work, pace: Pace) -> None:
        """`begun` must follow."""
        self._client, self._attempts, self._pace = client, client.begin(work), pace
        self._is_told = False
        self._characters = self._tokens = 0
        """Of the prompt, as the client has them."""

    async def begun(self) -> Self:
        """Wait until a worker has tokenized the prompt. Raises a `PenstockError` as `Client.call` does."""
        self._run = await self._client.run(self._attempts, self._open)
        self.prompt_tokens = self._run.prompt_tokens
        return self

    async def _open(self, channel: Channel, attempts: Attempts) -> DeltaStream:
        number, final = channel.submit(attempts.work, solo=attempts.solo, apart=attempts.accused)
        return await DeltaStream(channel, number, final, self._pace, self._suspect).begun()

    def _suspect(self, error: WorkerLost) -> None:
        self._client.retries.suspect(self._attempts, alone=error.alone)

    @property
    def result(self) -> Answer | None:
        """The end of the answer, once the iteration has ended without an error."""
        return self._run.result

    async def __anext__(self) -> list[Event]:
        """The next events. Raises the error of the request, once."""
        while True:
            try:
                events = await anext(self._run)
            except PenstockError as error:
                if self._run.answering:
                    raise
                self._run.close()
                if not await self._client.retries.again(self._attempts, self._run.channel, error):
                    raise
                await self.begun()
                continue
            if fresh := self._untold(events):
                return fresh

    def _untold(self, events: list[Event]) -> list[Event]:
        """`events` without what an earlier run has told."""
        fresh: list[Event] = []
        for event in events:
            if isinstance(event, Prompted):
                event = event.behind(self._characters, self._tokens)
                self._characters = event.start + len(event.text)
                self._tokens = event.first + len(event.tokens)
                if not event.text and not event.tokens:
                    continue
            elif isinstance(event, Started):
                told, self._is_told = self._is_told, True
                if told:
                    continue
            fresh.append(event)
        return fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()
