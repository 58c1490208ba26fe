"""One run of a request for generated text: entries of `Deltas` become neutral events; what is kept to carry a text on.

1. Events wait here until the reader asks. The reader gets all of them at once.
2. The text of a list is taken when the next list is asked for. The worker learns of taken text in pieces of
   `TELL_AFTER` bytes, and pauses a stream with more untaken text than `WINDOW_NBYTES`.
3. The pace of the request (`Pace`) learns of all entries when they arrive, and ends a stream that is late. An entry
   HELD says that tokens come whose text waits. The client sees nothing of such an entry.
4. The `Result` of the job ends the stream. The sums of all choices stand in the last event.
5. A run that is lost is followed by another (`frontend.engine.streams.carrying`).

A stream begins when its prompt is tokenized (QUEUED), and waits for the engine from then on. A stream that the engine
has begun (STARTED) is in no queue of the worker and costs nothing (`Outstanding`).

So that another worker can carry a text on:

1. Each stream has a `Progress`: the ids of the tokens of each choice, in the order of their arrival, and what has been
   told of calls. Ids come with the text that they stand for, so both are there or neither is.
2. A worker that is sent the request and the ids reads both as one prompt, and goes on behind the last token.
3. The frontend itself may die. So a `Mark` tells what has come since the mark before, and the `Progress` of another
   frontend begins where all marks end.
4. `KeptIds` counts the ids of all streams of the frontend. Beyond `generation.continuation_bytes` a stream loses its
   ids, and ends with an error if its worker is lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from uuid import uuid4

from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEnded,
    CallEvent,
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
    TextRelay,
)
from frontend.engine.streams.incoming import TEXT_KINDS, Delivery, Incoming, TextSource
from ipc.errors import PenstockError, WorkerLost
from ipc.wire.messages import GenerateCall, Written
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


TRIAL_TOKENS = 16
"""So many tokens behind a death a choice has passed the place at which the worker died.

A frontend lacks a few tokens that the dead worker had: of text that was held back, and of the last steps."""


class KeptIds:
    """The bytes of ids that the streams of one frontend keep."""

    def __init__(
        self, most: int, limit_nbytes: int, on_change: Callable[[int], None] = lambda change: None
    ) -> None:
        """A request is carried on `most` times; `on_change` is told of every change in bytes."""
        self.most, self._limit_nbytes, self._on_change = most, limit_nbytes, on_change
        self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Count more bytes; false without room."""
        if self.nbytes + nbytes > self._limit_nbytes:
            return False
        self.nbytes += nbytes
        self._on_change(nbytes)
        return True

    def give(self, nbytes: int) -> None:
        """Bytes are kept no more."""
        self.nbytes -= nbytes
        self._on_change(-nbytes)


class Gap:
    """What the client of a text waits for between two workers. Instants are CLOCK_MONOTONIC nanoseconds."""

    def __init__(self, now_ns: int) -> None:
        """The loss of the earlier worker is known now."""
        self._lost_ns = self._sent_ns = self._prepared_ns = now_ns
        self._waited_ns = 0
        self.over_ns = 0
        """When the first token of the later worker arrived; 0: not yet."""

    def sent(self, now_ns: int) -> None:
        """The request has left for another worker."""
        self._sent_ns = now_ns

    def prepared(self, now_ns: int) -> None:
        """The worker has the tokens of the prompt."""
        self._prepared_ns = now_ns

    def started(self, waited_ns: int) -> None:
        """The worker has begun with the prompt, behind so much other work."""
        self._waited_ns = waited_ns

    def ended(self, now_ns: int) -> None:
        """A token has come. Idempotent."""
        self.over_ns = self.over_ns or now_ns

    def __str__(self) -> str:
        """The parts in milliseconds."""
        prefill_ns = max(0, self.over_ns - self._prepared_ns - self._waited_ns)
        parts = {
            "resend": self._sent_ns - self._lost_ns,
            "prepare": self._prepared_ns - self._sent_ns,
            "wait": self._waited_ns,
            "prefill": prefill_ns,
        }
        return ", ".join(f"{name} {part_ns / 1e6:.1f} ms" for name, part_ns in parts.items())


class Progress:
    """The answer to one request so far. `calls` counts the calls of each choice.

    `has_text`: the client has something of a choice. `weights` are those that write (`ipc.wire.streams.Start`). `gap`
    is there while a text goes on whose next token has not come.
    """

    def __init__(self, call: GenerateCall, kept: KeptIds, past: Past | None = None) -> None:
        """`past`: another frontend has begun the text."""
        self.calls: defaultdict[int, int] = defaultdict(int)
        self.has_text = False
        self.weights = ""
        self.gap: Gap | None = None
        self._kept = kept
        self._keeps = kept.most > 0 and not call.counts_only
        # NOTE: without a seed every worker draws by this one, or the text would go on as another text.
        self._seed = random.getrandbits(63) if past is None else past.mark.seed
        self._ids = [bytearray() for _ in range(call.n)]
        self._ended = [False] * call.n
        self._before = [0] * call.n
        """Bytes of ids that runs before the present one have brought."""
        self._marked = [0] * call.n
        """Bytes of ids that a mark has told."""
        if past is not None:
            self._take_up(past)

    def _take_up(self, past: Past) -> None:
        self.weights = past.mark.weights
        for event in past.events:
            self.has_text |= isinstance(event, Text | Reasoning | CallEvent | Finished)
            if isinstance(event, CallBegun):
                self.calls[event.choice] += 1
            elif isinstance(event, Finished):
                self._ended[event.choice] = True
        for choice, ids in enumerate(past.mark.ids):
            self.take(choice, ids)
            self._marked[choice] = len(ids)

    @property
    def has_begun(self) -> bool:
        """Whether a run from the beginning would repeat something."""
        return self.has_text or any(self._ids)

    @property
    def has_ended(self) -> bool:
        """Whether the ends of all choices have arrived."""
        return all(self._ended)

    @property
    def can_go_on(self) -> bool:
        """Whether another worker could write the rest."""
        return self._keeps

    @property
    def has_passed(self) -> bool:
        """Whether the present run has gone beyond the place at which the worker before died."""
        fresh = [(len(ids) - before) // 4 for ids, before in zip(self._ids, self._before, strict=True)]
        choices = zip(self._ids, self._ended, fresh, strict=True)
        return any(fresh) and all(ended or count >= TRIAL_TOKENS for ids, ended, count in choices if ids)

    def written(self) -> Written | None:
        """What the next worker is sent; None if nobody could carry on its text."""
        if not self._keeps:
            return None
        self._before = [len(ids) for ids in self._ids]
        if not self.has_begun:
            return Written(self._seed)
        return Written(self._seed, [bytes(ids) for ids in self._ids], list(self._ended), self.weights)

    def mark(self, identity: str, deaths: int, pictures: str) -> Mark | None:
        """What has come since the last mark; None if nobody could carry on the text. For the arguments see `Mark`."""
        if not self._keeps:
            return None
        fresh = [bytes(ids[at:]) for ids, at in zip(self._ids, self._marked, strict=True)]
        self._marked = [len(ids) for ids in self._ids]
        return Mark(self._seed, fresh, self.weights, identity, deaths, pictures)

    def fresh(self, choice: int) -> bytes | None:
        """The ids of a choice since the last mark, which count as told; None if nobody could carry on the text."""
        if not self._keeps:
            return None
        ids, at = self._ids[choice], self._marked[choice]
        self._marked[choice] = len(ids)
        return bytes(ids[at:])

    def take(self, choice: int, ids: bytes) -> None:
        """Ids of further tokens of a choice have arrived, with the text of these."""
        if self._keeps and self._kept.take(len(ids)):
            self._ids[choice] += ids
        else:
            self.drop()

    def end(self, choice: int) -> None:
        """The end of a choice has arrived."""
        self.has_text = self._ended[choice] = True

    def drop(self) -> None:
        """Keep no ids any more. Idempotent."""
        self._keeps = False
        if nbytes := sum(map(len, self._ids)):
            self._kept.give(nbytes)
            self._ids = [bytearray() for _ in self._ids]
