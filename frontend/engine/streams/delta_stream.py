"""One run of a request for generated text: entries of `Deltas` become neutral events.

1. Events wait here until the reader asks. The reader gets all of them at once.
2. The text of a list is taken when the next list is asked for. The worker learns of taken text in pieces of
   `TELL_AFTER` bytes, and pauses a stream with more untaken text than `WINDOW_NBYTES`.
3. The pace of the request (`Pace`) learns of all entries when they arrive, and ends a stream that is late. An entry
   HELD says that tokens come whose text waits. The client sees nothing of such an entry.
4. The `Result` of the job ends the stream. The sums of all choices stand in the last event.
5. A run that is lost is followed by another (`frontend.engine.streams.carrying`).

A stream begins when its prompt is tokenized (QUEUED), and waits for the engine from then on. A stream that the engine
has begun (STARTED) is in no queue of the worker and costs nothing (`Outstanding`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

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
    TextRelay,
)
from frontend.engine.streams.incoming import TEXT_KINDS, Delivery, Incoming, TextSource
from frontend.engine.streams.progress import Gap, Progress
from ipc.errors import PenstockError, WorkerLost
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    FINISHED,
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

TELL_AFTER = WINDOW_NBYTES // 2
"""So many bytes of text are taken before the worker is told."""
_CALLS = frozenset((CALLED, ARGUMENTS, CALL_ENDED, CALL_CUT))


class DeltaStream(Incoming[Event], Generation):
    """One run of a request at one worker."""

    channel: TextSource
    relay: TextRelay | None = None
    """See `Generation.pass_to`."""

    def __init__(
        self,
        channel: TextSource,
        request: int,
        final: asyncio.Future[Delivery],
        pace: Pace,
        progress: Progress,
        on_suspect: Callable[[WorkerLost], None] = lambda error: None,
        why_move: Callable[[], PenstockError | None] = lambda: None,
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
        nbytes = nbytes_of(text, logprobs)
        if (relay := self._open_relay) is not None:
            relay.pass_on(kind, choice, text, tokens, progress.fresh(choice), logprobs, nbytes)
            self._untold_nbytes += nbytes
            if self._untold_nbytes >= TELL_AFTER:
                self._tell_taken()
            return
        self._waiting.append((Text if kind == TEXT else Reasoning)(choice, text, tokens, logprobs))
        self._waiting_nbytes += nbytes
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
            return
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
        if (relay := self._open_relay) is not None:
            relay.pass_on(FINISHED, choice, "", 0, self._progress.fresh(choice), logprobs, 0, finish)
            return
        self._waiting.append(
            Finished(choice, finish.reason, finish.stop, finish.tokens, finish.reasoning_tokens, logprobs)
        )
        self._wake()

    def look(self, now_ns: int) -> None:
        """End a stream whose next entry takes too long, or that is to go on elsewhere."""
        if self._failure is not None or self._final.done():
            return
        late = self._pace.lateness(now_ns, self._waits_since_ns if self._is_awaited else 0)
        if (reason := late or self._why_move()) is not None:
            self._fail(reason)

    @property
    def _open_relay(self) -> TextRelay | None:
        """Who sends on what comes now: the reader waits, and has had all before. The end of a gap is for the reader."""
        relay = self.relay
        if relay is None or self._waiting or self._progress.gap is not None or not self._is_awaited:
            return None
        return relay if relay.has_room else None

    def _let_go(self) -> None:
        """The text that was handed out is taken."""
        self._untold_nbytes += self._held_nbytes
        self._held_nbytes = 0
        if self._untold_nbytes >= TELL_AFTER:
            self._tell_taken()

    def _tell_taken(self) -> None:
        if not self._final.done():
            self.channel.streams.text_taken(self._request, self._untold_nbytes)
            self._untold_nbytes = 0

    def close(self) -> None:
        """End the work unless the work has ended. Idempotent."""
        self.channel.streams.texts.pop(self._request, None)
        self._stop()
