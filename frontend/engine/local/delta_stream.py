"""The generated text of one run of a request, as a frontend reads it: entries of `Deltas` become neutral events.

1. Events wait here until the reader asks. The reader gets all of them at once.
2. The text of a list is taken when the next list is asked for. The worker learns of taken text in pieces of
   `TELL_AFTER` bytes, and pauses a stream with more untaken text than `WINDOW_NBYTES`.
3. The first entry after STARTED must come until `first_by_ns`. From then on a reader waits `idle_s` for an entry. An
   entry HELD says that tokens come whose text waits. The client sees nothing of such an entry.
4. The `Result` of the job ends the stream. The sums of all choices stand in the last event.

A stream begins when its prompt is tokenized (QUEUED), and waits for the engine from then on. A stream that the engine
has begun (STARTED) is in no queue of the worker and costs nothing (`Outstanding`).

Latencies and tokens are counted when entries arrive, whether or not the client reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from frontend.engine.events import (
    Called,
    Ended,
    Event,
    Finished,
    Generation,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from frontend.engine.local.channel import Channel
from frontend.engine.local.delivery import Delivery
from frontend.engine.local.incoming import Incoming
from frontend.records.finishing import TextMeter
from ipc.errors import DeadlineExceeded, WorkerLost
from ipc.wire.streams import (
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
    Start,
    TokenLogprob,
    nbytes_of,
)

TELL_AFTER = WINDOW_NBYTES // 2
"""So many bytes of text are taken before the worker is told."""
_PIECES: dict[int, type[Text] | type[Reasoning]] = {TEXT: Text, REASONING: Reasoning}


@dataclass(slots=True, frozen=True)
class Pace:
    """How fast a request must be answered, and where the tokens are counted.

    `began_ns` and `first_by_ns` are instants of CLOCK_MONOTONIC: of the request, and until when the first token has to
    come. Between two entries `idle_s` seconds may pass.
    """

    began_ns: int
    first_by_ns: int
    idle_s: float
    meter: TextMeter


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
        """For the arguments see `Incoming` and `Pace`."""
        super().__init__(channel, request, final, on_suspect)
        self._pace, self._meter = pace, pace.meter
        self._start = Start(0)
        self._finishes: list[Finish] = []
        self._calls: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        self._arrivals_ns: dict[int, int] = {}
        self._first_ns = self._last_ns = self._waits_since_ns = 0
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
            self._waiting.append(self._ended())
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
            self._start = start = deltas.starts[at]
            self._waiting.append(Started(start.prompt_tokens, start.cached_tokens))
            self.channel.rest(self._request)
        elif kind == PROMPT:
            self._take_prompt(deltas.texts[at], deltas.prompts.get(at, []))
            self._last_ns = now_ns
        elif make := _PIECES.get(kind):
            text, tokens = deltas.texts[at], deltas.tokens[at]
            self._step(choice, tokens, now_ns)
            logprobs = deltas.logprobs.get(at)
            self._waiting.append(make(choice, text, tokens, logprobs))
            self._waiting_nbytes += nbytes_of(text, logprobs)
        elif kind == HELD:
            self._note_first(now_ns)
            self._last_ns = now_ns
            return
        elif kind == CALLED:
            self._step(choice, deltas.tokens[at], now_ns)
            call, index = deltas.calls[at], self._calls[choice]
            self._calls[choice] += 1
            logprobs = deltas.logprobs.get(at)
            name = f"{call.prefix}{uuid4()}"
            self._waiting.append(Called(choice, index, name, call.name, call.arguments, logprobs))
        else:
            self._finish(choice, deltas.finishes[at], deltas.logprobs.get(at), now_ns)
        self._wake()

    def _take_prompt(self, text: str, tokens: list[PromptToken]) -> None:
        """A piece of the prompt, which a later run would tell again: the answer has not begun with the piece."""
        self._waiting.append(Prompted(0, text, tokens, self._prompt_characters, self._prompt_tokens))
        self._prompt_characters += len(text)
        self._prompt_tokens += len(tokens)
        self._waiting_nbytes += nbytes_of(text, tokens)

    def _step(self, choice: int, tokens: int, now_ns: int) -> None:
        """A step has added `tokens` to a choice."""
        before_ns = self._arrivals_ns.get(choice)
        self.answering = True
        self._note_first(now_ns)
        # NOTE: entries of one step arrive together.
        if before_ns is not None and before_ns != now_ns:
            self._meter.between.observe((now_ns - before_ns) / 1e9)
        self._arrivals_ns[choice] = self._last_ns = now_ns
        if tokens:
            self._tokens[choice] += tokens
            self._meter.generated.inc(tokens)

    def _note_first(self, now_ns: int) -> None:
        """Tokens have come; the first time counts."""
        if not self._first_ns:
            self._first_ns = now_ns
            self._meter.first.observe((now_ns - self._pace.began_ns) / 1e9)
            self._meter.prompt.inc(self._start.prompt_tokens)
            self._meter.cached.inc(self._start.cached_tokens)

    def _finish(self, choice: int, finish: Finish, logprobs: list[TokenLogprob] | None, now_ns: int) -> None:
        """A choice has ended; its tokens without text, such as an end token, are known now."""
        self._step(choice, max(0, finish.tokens - self._tokens[choice]), now_ns)
        self._meter.ended[finish.reason].inc()
        self._finishes.append(finish)
        self._waiting.append(
            Finished(choice, finish.reason, finish.stop, finish.tokens, finish.reasoning_tokens, logprobs)
        )

    def _ended(self) -> Ended:
        began_ns, first_ns = self._pace.began_ns, self._first_ns or time.monotonic_ns()
        return Ended(
            self._start.prompt_tokens,
            sum(each.tokens for each in self._finishes),
            sum(each.reasoning_tokens for each in self._finishes),
            self._start.cached_tokens,
            (first_ns - began_ns) / 1e9,
            max(0, self._last_ns - first_ns) / 1e9,
        )

    def look(self, now_ns: int) -> None:
        """End a stream whose next entry takes too long."""
        if self._failure is not None or self._final.done():
            return
        if not self._last_ns:
            if now_ns >= self._pace.first_by_ns:
                self._fail(DeadlineExceeded("the deadline passed before the first token", retry_after_s=1))
        elif self._is_awaited:
            # NOTE: a worker sends nothing while the client has enough, so only the time of a waiting reader counts.
            idle_s = (now_ns - max(self._last_ns, self._waits_since_ns)) / 1e9
            if idle_s >= self._pace.idle_s:
                self._fail(
                    DeadlineExceeded(
                        f"no token came for {self._pace.idle_s:g} s (generation.idle_timeout_s)",
                        retry_after_s=1,
                    )
                )

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
