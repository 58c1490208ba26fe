"""One request for generated text, as a frontend reads it: entries of `Deltas` become neutral events.

1. Events wait here until the reader asks. The reader gets all of them at once.
2. The text of a list is taken when the next list is asked for. The worker learns of taken text in pieces of
   `TELL_AFTER` bytes, and pauses a stream with more untaken text than `WINDOW_NBYTES`.
3. The pace of the request (`Pace`) learns of all entries when they arrive, and ends a stream that is late. An entry
   HELD says that tokens come whose text waits. The client sees nothing of such an entry.
4. The `Result` of the job ends the stream. The sums of all choices stand in the last event.
5. A run that is lost is followed by another, by the rule of retries. Before its answer has begun the other begins anew:
   the client sees one `Started`, and each piece of the prompt once. Later the other goes on behind the tokens whose ids
   have arrived (`frontend.engine.local.progress`).
6. A text whose frontend has died is begun by `Past`: this frontend has the request sent with the ids of all marks.
7. A worker that leaves, or unloads the model, loses its streams to a worker that has the model. Without one the streams
   stay.

A stream begins when its prompt is tokenized (QUEUED), and waits for the engine from then on. A stream that the engine
has begun (STARTED) is in no queue of the worker and costs nothing (`Outstanding`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from functools import cached_property
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
    Mark,
    Pace,
    Past,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from frontend.engine.local import routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client
from frontend.engine.local.delivery import TEXT_KINDS, Delivery
from frontend.engine.local.part_stream import Incoming, cut_off
from frontend.engine.local.progress import Gap, Progress
from frontend.engine.local.retry import Attempts
from frontend.engine.local.workers import PASSING
from ipc.errors import (
    Draining,
    InputRefused,
    InvalidInput,
    LoraLoading,
    ModelNotLoaded,
    PenstockError,
    QueueFull,
    WorkerLost,
)
from ipc.wire.messages import GenerateCall, Work
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    HELD,
    PROMPT,
    QUEUED,
    STARTED,
    TEXT,
    WINDOW_NBYTES,
    Deltas,
    Finish,
    PromptToken,
    Start,
    TokenLogprob,
    nbytes_of,
)

log = logging.getLogger(__name__)

TELL_AFTER = WINDOW_NBYTES // 2
"""So many bytes of text are taken before the worker is told."""
_LEAVING = (Draining, ModelNotLoaded)
"""A worker stops, or has unloaded the model."""
_NOWHERE = (*PASSING, LoraLoading, InvalidInput)
"""No worker has the model, or the LoRA adapter, which may have been unloaded since the text began."""
_FIRST = (Started, Prompted)
"""Events that a run tells before those of its choices."""
_CALLS = frozenset((CALLED, ARGUMENTS, CALL_ENDED, CALL_CUT))


class DeltaStream(Incoming[Event], Generation):
    """One run of a request at one worker."""

    def __init__(
        self,
        channel: Channel,
        request: int,
        final: asyncio.Future[Delivery],
        pace: Pace,
        progress: Progress,
        on_suspect: Callable[[WorkerLost], None] = lambda error: None,
        why_move: Callable[[Channel], PenstockError | None] = lambda channel: None,
    ) -> None:
        """`progress` is that of all runs of the request; for the other arguments see `Incoming`.

        `why_move` is asked now and then whether the rest is to be written elsewhere.
        """
        super().__init__(channel, request, final, on_suspect)
        self._pace, self._progress, self._why_move = pace, progress, why_move
        self._has_started = progress.has_begun
        if progress.has_begun:
            self.answering = True
            pace.go_on(time.monotonic_ns())
        else:
            pace.begin()
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

    def take_text(
        self,
        kind: int,
        choice: int,
        text: str,
        tokens: int,
        ids: bytes,
        now_ns: int,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """A piece of text has arrived, with the `ids` that its entry brings."""
        if self._failure is not None:
            # NOTE: another run tells the same again.
            return
        progress = self._progress
        if progress.gap is not None:
            progress.gap.ended(now_ns)
        if ids:
            progress.take(choice, ids)
        self.answering = progress.has_text = True
        self._pace.step(choice, tokens, now_ns)
        self._waiting.append((Text if kind == TEXT else Reasoning)(choice, text, tokens, logprobs))
        self._waiting_nbytes += nbytes_of(text, logprobs)
        self._wake()

    def take(self, deltas: Deltas, at: int, now_ns: int) -> None:
        """Entry `at` of `deltas` has arrived."""
        kind, choice = deltas.kinds[at], deltas.choices[at]
        ids = deltas.written[at] if deltas.written else b""
        if kind in TEXT_KINDS:
            text, tokens, logprobs = deltas.texts[at], deltas.tokens[at], deltas.logprobs.get(at)
            self.take_text(kind, choice, text, tokens, ids, now_ns, logprobs)
            return
        if self._failure is not None:
            return
        if (gap := self._progress.gap) is not None:
            self._time(gap, kind, deltas.starts.get(at), now_ns)
        if ids:
            self._progress.take(choice, ids)
        if kind == QUEUED:
            start = deltas.starts[at]
            self.prompt_tokens = start.prompt_tokens
            if not self._has_started:
                self._progress.weights = start.weights
        elif kind == STARTED:
            start = deltas.starts[at]
            if not self._has_started:
                self._pace.started(start)
            self._waiting.append(Started(start.prompt_tokens, start.cached_tokens))
            self.channel.rest(self._request)
        elif kind == PROMPT:
            self._take_prompt(deltas.texts[at], deltas.prompts.get(at, []))
            self._pace.heard(now_ns)
        elif kind == HELD:
            self._pace.held(now_ns)
            return
        elif kind in _CALLS:
            self._take_call(deltas, at, now_ns)
        else:
            self._finish(choice, deltas.finishes[at], deltas.logprobs.get(at), now_ns)
        self._wake()

    @staticmethod
    def _time(gap: Gap, kind: int, start: Start | None, now_ns: int) -> None:
        """An entry of a run that goes on with a text has arrived."""
        if kind == QUEUED:
            gap.prepared(now_ns)
        elif start is not None:
            gap.started(start.waited_ns)
        else:
            gap.ended(now_ns)

    def _take_call(self, deltas: Deltas, at: int, now_ns: int) -> None:
        """A call begins, goes on, or ends."""
        kind, choice, text, logprobs = (
            deltas.kinds[at],
            deltas.choices[at],
            deltas.texts[at],
            deltas.logprobs.get(at),
        )
        self.answering = self._progress.has_text = True
        self._pace.step(choice, deltas.tokens[at], now_ns)
        self._waiting_nbytes += nbytes_of(text, logprobs)
        if kind == CALLED:
            call, index = deltas.calls[at], self._progress.calls[choice]
            self._progress.calls[choice] += 1
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
        self._progress.end(choice)
        self._pace.finished(choice, finish, now_ns)
        self._waiting.append(
            Finished(choice, finish.reason, finish.stop, finish.tokens, finish.reasoning_tokens, logprobs)
        )

    def look(self, now_ns: int) -> None:
        """End a stream whose next entry takes too long, or that is to go on elsewhere."""
        if self._failure is not None or self._final.done():
            return
        late = self._pace.lateness(now_ns, self._waits_since_ns if self._is_awaited else 0)
        if (reason := late or self._why_move(self.channel)) is not None:
            self._fail(reason)

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

    def __init__(self, client: Client, work: Work, pace: Pace, past: Past | None = None) -> None:
        """`begun` must follow. `past`: another frontend has begun the text."""
        self._client, self._attempts, self._pace = client, client.begin(work), pace
        assert isinstance(work.call, GenerateCall)
        self._progress, self._past = Progress(work.call, client.kept_ids, past), past
        self._identity = ""
        self._moves = 0
        """Frontends that have lost the text, which count like workers that died."""
        self._unjudged: WorkerLost | None = None
        """The death on this input that no other run has followed yet."""
        self._followed: PenstockError | None = None
        """The error after which the present run has begun."""
        self._is_told = self._over = False
        self._characters = self._tokens = 0
        """Of the prompt, as the client has them."""

    async def begun(self) -> Self:
        """Wait until a worker has tokenized the prompt. Raises a `PenstockError` as `Client.call` does.

        Raises `InputRefused`, `InvalidInput` and `QueueFull` for a text of another frontend that cannot go on here.
        """
        try:
            if self._past is not None:
                self._take_up(self._past)
            self._run = await self._client.run(self._attempts, self._open)
        except BaseException:
            # NOTE: tokens may have arrived with the word that the prompt is tokenized.
            self._progress.drop()
            raise
        self.prompt_tokens = self._run.prompt_tokens
        return self

    def _take_up(self, past: Past) -> None:
        attempts, mark, most = self._attempts, past.mark, self._client.kept_ids.most
        if attempts.suspect:
            raise InputRefused("workers have died on this input, so nobody goes on with its text")
        if mark.pictures != self._pictures:
            raise InvalidInput("a picture of the input is another one now, so nobody goes on with its text")
        self._past = None
        self._is_told = any(isinstance(event, Started) for event in past.events)
        if not self._progress.has_begun:
            return
        if not self._progress.can_go_on:
            text = "this server has no room for the tokens of another text (generation.continuation_bytes)"
            raise QueueFull(text, retry_after_s=1)
        self._identity, self._moves = mark.identity, past.moves
        attempts.take_up(mark.identity, most, mark.deaths + past.moves)
        self._pace.take_up(past, time.monotonic_ns())

    @cached_property
    def _pictures(self) -> str:
        """A hash of the pictures of the prompt, empty without any."""
        call = self._attempts.work.call
        assert isinstance(call, GenerateCall)
        if not call.images:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for picture in call.images:
            digest.update(len(picture).to_bytes(8, "little"))
            digest.update(picture)
        return digest.hexdigest()

    def mark(self) -> Mark | None:
        """See `Generation.mark`."""
        deaths = self._attempts.continued - self._moves
        return self._progress.mark(self._identity, deaths, self._pictures)

    async def _open(self, channel: Channel, attempts: Attempts) -> DeltaStream:
        written = self._progress.written()
        if attempts.identity is None:
            self._identity = _identity_of(channel, attempts.work.model)
        number, final = channel.submit(
            attempts.work, solo=attempts.solo, apart=attempts.accused, written=written
        )
        if self._progress.gap is not None:
            self._progress.gap.sent(time.monotonic_ns())
        stream = DeltaStream(
            channel, number, final, self._pace, self._progress, self._suspect, self._why_move
        )
        return await stream.begun()

    def _suspect(self, error: WorkerLost) -> None:
        """A worker has died on the text. The verdict waits for the next run, or for the end without one."""
        if error is self._followed:
            # NOTE: the reader had the error before this callback ran, and the rule of retries has judged the input.
            return
        if self._progress.can_go_on:
            self._unjudged = error
        else:
            self._client.retries.suspect(self._attempts, alone=error.alone)

    def _why_move(self, channel: Channel) -> PenstockError | None:
        """The reason to go on elsewhere: the worker or its model leaves, and another worker has the model."""
        if not self._progress.can_go_on or self._progress.has_ended:
            return None
        model = self._attempts.work.model
        status = channel.models.get(model)
        reason: PenstockError | None = None
        if channel.state == "leaving":
            reason = Draining("this worker is stopping", retry_after_s=1)
        elif status is not None and status.state == "unloading":
            reason = ModelNotLoaded("the model is being unloaded", retry_after_s=1)
        if reason is None:
            return None
        others = routing.having(self._client.channels, model)
        has_other = any(
            each is not channel and _identity_of(each, model) == self._identity for each in others
        )
        return reason if has_other else None

    @property
    def result(self) -> Answer | None:
        """The end of the answer, once the iteration has ended without an error."""
        return self._run.result

    async def __anext__(self) -> list[Event]:
        """The next events. Raises the error of the request, once."""
        while not self._over:
            try:
                events = await anext(self._run)
            except PenstockError as error:
                if isinstance(error, (WorkerLost, *_LEAVING)) and self._progress.has_ended:
                    # Nothing lacks but the word that the job is done.
                    self._over = True
                    return [self._pace.ended()]
                await (self._go_on(error) if self._progress.has_begun else self._begin_anew(error))
                continue
            gap = self._progress.gap
            if gap is not None and gap.over_ns:
                self._progress.gap = None
                log.info("worker %d goes on with a text: %s", self._run.channel.slot, gap)
            if fresh := self._untold(events):
                return fresh
        raise StopAsyncIteration

    async def _begin_anew(self, error: PenstockError) -> None:
        """Follow a run of which the client has nothing. Raises the error of the request if nothing follows."""
        self._run.close()
        if not await self._client.retries.again(self._attempts, self._run.channel, error):
            raise error
        await self.begun()

    async def _go_on(self, error: PenstockError) -> None:
        """Have the rest of a text written by another run. Raises the error of the request if nothing follows."""
        if not isinstance(error, (WorkerLost, *_LEAVING)):
            raise error
        run, progress, client = self._run, self._progress, self._client
        lost = cut_off(error) if isinstance(error, WorkerLost) else error
        outcome: str | None = "refused" if progress.can_go_on else "unkept"
        try:
            if not progress.can_go_on:
                raise lost from error
            run.close()
            progress.gap = Gap(time.monotonic_ns())
            self._attempts.go_on(self._identity, client.kept_ids.most, has_passed=progress.has_passed)
            self._unjudged, self._followed = None, error
            try:
                if not await client.retries.again(self._attempts, run.channel, error):
                    raise lost
                outcome = "failed"
                await self.begun()
            except (WorkerLost, *_NOWHERE) as why:
                raise lost from why
            outcome = "carried" if isinstance(error, WorkerLost) else "moved"
        except asyncio.CancelledError:
            outcome = None
            raise
        finally:
            if outcome is not None:
                client.on_carried(outcome)

    def _untold(self, events: list[Event]) -> list[Event]:
        """`events` without what an earlier run has told."""
        if not isinstance(events[0], _FIRST):
            # PERF: most lists. What comes before all choices is at the begin of the first lists of a run.
            return events
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
        self._progress.drop()
        if self._unjudged is not None:
            self._client.retries.suspect(self._attempts, alone=self._unjudged.alone)


def _identity_of(channel: Channel, model: str) -> str:
    """Stands for all that decides the text of a model at a worker; empty for a model that the worker lacks."""
    status = channel.models.get(model)
    return "" if status is None else status.identity
