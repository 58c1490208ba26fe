"""Texts of a bridge: the local engine writes, gateways get the text in pieces, and each piece is kept until it came.

1. `Texts.run` runs the work with the local engine, whose rule of retries and continuations holds. What the engine tells
   becomes entries of `Deltas` again, with ids of tokens, so that a gateway reads a box as a frontend reads a worker.
   Plain text goes on at once (`TextRelay`), and the task of a text sleeps through most tokens.
2. What all texts of one gateway tell in a turn of the event loop is one message, with one piece for each text.
3. A text whose client has `WINDOW_NBYTES` not taken rests: the next events are not asked for, and so the worker rests.
4. What the engine tells at once is whole: its ids stand for its text. Of several pieces all but the last are open, and
   the gateway takes them together.
5. A piece is kept until the gateway says that it has the piece (`ipc.wire.cluster.Taken`). Pieces are sent again when
   the gateway asks for the item.
6. A gateway may send the beginning of a text that another box has written: the engine goes on behind it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from frontend.bridge.relays import Relay, Relays
from frontend.engine.answer import Answer
from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEnded,
    CallEvent,
    Event,
    Finished,
    Mark,
    Pace,
    Past,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from frontend.engine.interface import Engine
from frontend.records.finishing import TextMeter
from frontend.scope import RequestScope
from ipc.settings import Settings
from ipc.wire.cluster import VERSION, encode
from ipc.wire.cluster_names import texts as texts_of
from ipc.wire.cluster_text import Before, Origin, Pieces, read_before
from ipc.wire.messages import GenerateCall, Work
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    FINISH_REASONS,
    FINISHED,
    HELD,
    PROMPT,
    QUEUED,
    REASONING,
    STARTED,
    TEXT,
    WINDOW_NBYTES,
    CalledFunction,
    Deltas,
    Finish,
    Flow,
    PromptToken,
    Start,
    TokenLogprob,
    nbytes_of,
)

PIECE_NBYTES = 16 << 10
"""A piece with more than this is cut between its entries."""
MOST_NCHARS, PROMPT_TOKENS = 4096, 64
"""Most text, and most tokens of a prompt, in one entry."""
_UNKEPT = Origin("", 0, "", is_kept=False)
ENTRY_NBYTES = 48
"""Of an entry in a message beside its text; about as much again in memory."""
UUID_NCHARS = 36
"""At the end of the id of a call; a gateway makes another one."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of `Deltas`; `about` is what the maps there hold of the entry, but log probabilities.

    PERF: a struct is made in a third of the time of a tuple with names, and nearly each token is an entry.
    """

    choice: int
    kind: int
    text: str = ""
    tokens: int = 0
    ids: bytes = b""
    logprobs: list[TokenLogprob] | None = None
    about: CalledFunction | Finish | Start | list[PromptToken] | None = None

    @property
    def nbytes(self) -> int:
        """About what the entry takes in a message."""
        nbytes = ENTRY_NBYTES + nbytes_of(self.text, self.logprobs) + len(self.ids)
        if self.logprobs is None and self.about is None:
            return nbytes
        for each in (*(self.logprobs or ()), *(self.about if isinstance(self.about, list) else ())):
            nbytes += (
                ENTRY_NBYTES + len(each.raw) + sum(ENTRY_NBYTES // 2 + len(raw) for _, raw, _ in each.top)
            )
        return nbytes

    def joined(self, other: Entry) -> Entry | None:
        """Both as one entry where both are plain text of one choice, as of two steps that leave together."""
        if (self.choice, self.kind) != (other.choice, other.kind) or self.about is not None:
            return None
        if self.logprobs is not None or other.logprobs is not None or other.about is not None:
            return None
        text = self.text + other.text
        if len(text) > MOST_NCHARS:
            return None
        return Entry(self.choice, self.kind, text, self.tokens + other.tokens, self.ids + other.ids)


class Piece(msgspec.Struct, frozen=True):
    """What a text tells at once, and about what the piece takes in a message.

    `is_open`: ids of tokens whose text is in the piece come later.
    """

    number: int
    entries: Sequence[Entry]
    origin: Origin | None
    nbytes: int
    is_open: bool


class _Uncounted:
    """Stands in for a metric: the gateway counts tokens."""

    def inc(self, amount: float = 1.0) -> None:
        """Count nothing."""

    def observe(self, value: float) -> None:
        """Count nothing."""


_UNCOUNTED: Any = _Uncounted()
_METER = TextMeter(
    _UNCOUNTED,
    _UNCOUNTED,
    _UNCOUNTED,
    _UNCOUNTED,
    _UNCOUNTED,
    dict.fromkeys(FINISH_REASONS, _UNCOUNTED),
)


class RelayedPace(Pace):
    """The pace of a text whose reader is at a gateway: tells what the gateway's pace has to know beside the events."""

    def __init__(self, scope: RequestScope, idle_s: float, stream: TextStream) -> None:
        """`stream` is told of tokens that were computed."""
        self._stream = stream
        first_by_ns = min(scope.waits_until_ns, scope.deadline_ns)
        super().__init__(time.monotonic_ns(), first_by_ns, idle_s, _METER)

    def begin(self) -> None:
        """See `Pace.begin`."""
        super().begin()
        self._stream.fresh.clear()

    def step(self, choice: int, tokens: int, now_ns: int) -> None:
        """See `Pace.step`, without its metrics, which the gateway counts."""
        # PERF: once for each token.
        self._first_ns = self._first_ns or now_ns
        self._last_ns, self._late_ns = now_ns, 0
        self._tokens[choice] += tokens
        self._stream.fresh[choice] += tokens

    def held(self, now_ns: int) -> None:
        """See `Pace.held`."""
        super().held(now_ns)
        self._stream.hold()


class TextStream(Relay[Piece]):
    """One text on its way to a gateway.

    `fresh` are tokens of each choice that were computed since something was told last (`RelayedPace`).
    """

    def __init__(self, name: str, router: str, on_news: Callable[[TextStream], None]) -> None:
        """`on_news` is told when something waits, until `cut` takes what waits."""
        super().__init__(name, router, Flow(WINDOW_NBYTES))
        self.fresh: defaultdict[int, int] = defaultdict(int)
        self._on_news = on_news
        self._waiting: list[Entry] = []
        self._breaks: set[int] = set()
        """Places in what waits where ids and text are no whole: amid what was put together."""
        self._told: tuple[str, int, str] | Literal["nothing"] | None = "nothing"
        """What was told of the origin: identity, deaths and weights, or that no ids are kept."""
        self._origin: Origin | None = None
        """What waits to be told."""

    def begin(self, prompt_tokens: int | None) -> None:
        """The prompt is tokenized."""
        if prompt_tokens is not None:
            self._put([Entry(0, QUEUED, about=Start(prompt_tokens))])

    def hold(self) -> None:
        """Tokens were computed whose text waits."""
        if not self._waiting or self._waiting[-1].kind != HELD:
            self._put([Entry(0, HELD)])

    def tell(self, events: Sequence[Event], mark: Mark | None) -> None:
        """Events have come, with their mark."""
        fresh = self.fresh
        for event in events:
            if isinstance(event, Text | Reasoning):
                # The text counts these itself; what is left are tokens of calls.
                fresh[event.choice] -= event.tokens
        entries = [entry for event in events for entry in _entries(event, fresh)]
        for choice, ids in enumerate(mark.ids if mark is not None else ()):
            if ids:
                _attach(entries, choice, ids)
        fresh.clear()
        told = None if mark is None else (mark.identity, mark.deaths, mark.weights)
        if told != self._told:
            self._told = told
            self._origin = _UNKEPT if told is None else Origin(*told)
        self._put(entries)

    def pass_on(
        self,
        kind: int,
        choice: int,
        text: str,
        tokens: int,
        ids: bytes | None,
        logprobs: list[TokenLogprob] | None,
        nbytes: int,
        finish: Finish | None = None,
    ) -> None:
        """See `TextRelay.pass_on`."""
        # PERF: most tokens of most texts, for which `tell` takes three times as long.
        self.fresh[choice] = 0
        if ids is None and self._told is not None:
            self._told, self._origin = None, _UNKEPT
        if len(text) > MOST_NCHARS:
            *some, last = _cut(Entry(choice, kind, text, tokens, b"", logprobs))
            self._put([*some, replace(last, ids=ids or b"")])
            return
        self._flow.sent(nbytes)
        entry, waiting = Entry(choice, kind, text, tokens, ids or b"", logprobs, finish), self._waiting
        if not waiting:
            self._on_news(self)
        elif (joined := waiting[-1].joined(entry)) is not None:
            waiting[-1] = joined
            return
        waiting.append(entry)

    def _put(self, entries: list[Entry]) -> None:
        if not entries:
            return
        if not self._waiting:
            self._on_news(self)
        begin = len(self._waiting)
        self._waiting += entries
        self._breaks.update(range(begin + 1, len(self._waiting)))
        self._flow.sent(sum(_window_nbytes(entry) for entry in entries))

    def cut(self) -> list[Piece]:
        """What waits, as pieces, which are kept."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1:
            # PERF: most pieces of most texts.
            return [self._piece(waiting, waiting[0].nbytes, is_open=False)]
        breaks, self._breaks = self._breaks, set()
        pieces: list[Piece] = []
        end = 0
        for some, nbytes in _parted(waiting):
            end += len(some)
            pieces.append(self._piece(some, nbytes, is_open=end in breaks))
        return pieces

    def _piece(self, entries: Sequence[Entry], nbytes: int, *, is_open: bool) -> Piece:
        origin, self._origin = self._origin, None
        return self._keep(Piece(self.number + 1, entries, origin, nbytes, is_open))


def _window_nbytes(entry: Entry) -> int:
    """What a reader takes with an entry (`DeltaStream`)."""
    if entry.kind == TEXT and entry.logprobs is None:
        return nbytes_of(entry.text, None)
    if entry.kind == FINISHED:
        return 0
    tokens = entry.about if isinstance(entry.about, list) else entry.logprobs
    return nbytes_of(entry.text, tokens)


def _parted(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], int]]:
    """Entries in pieces of about `PIECE_NBYTES`, with the bytes of each piece."""
    some, nbytes = list[Entry](), 0
    for entry in entries:
        if some and nbytes + entry.nbytes > PIECE_NBYTES:
            yield some, nbytes
            some, nbytes = [], 0
        some.append(entry)
        nbytes += entry.nbytes
    if some:
        yield some, nbytes


def _attach(entries: list[Entry], choice: int, ids: bytes) -> None:
    """Have the last entry of a choice bring the ids of its tokens."""
    for at in range(len(entries) - 1, -1, -1):
        if entries[at].choice == choice and entries[at].kind not in (STARTED, PROMPT):
            entries[at] = replace(entries[at], ids=ids)
            return
    entries.append(Entry(choice, HELD, ids=ids))


def _entries(event: Event, fresh: dict[int, int]) -> Iterator[Entry]:
    """The entries of an event. `fresh` has the tokens of each choice that belong to its calls."""
    if isinstance(event, Text | Reasoning):
        kind = TEXT if isinstance(event, Text) else REASONING
        yield from _cut(Entry(event.choice, kind, event.text, event.tokens, logprobs=event.logprobs))
    elif isinstance(event, CallEvent):
        yield from _cut(_call_entry(event, max(0, fresh.pop(event.choice, 0))))
    elif isinstance(event, Started):
        yield Entry(0, STARTED, about=Start(event.prompt_tokens, event.cached_tokens))
    elif isinstance(event, Prompted):
        yield from _prompt_entries(event)
    elif isinstance(event, Finished):
        finish = Finish(event.reason, event.stop, event.tokens, event.reasoning_tokens)
        yield Entry(event.choice, FINISHED, logprobs=event.logprobs, about=finish)


def _cut(entry: Entry) -> Iterator[Entry]:
    """An entry as several that each fit into a piece, where its text is long; the first has all but text."""
    yield replace(entry, text=entry.text[:MOST_NCHARS]) if len(entry.text) > MOST_NCHARS else entry
    for at in range(MOST_NCHARS, len(entry.text), MOST_NCHARS):
        yield Entry(entry.choice, entry.kind, entry.text[at : at + MOST_NCHARS])


def _call_entry(event: CallBegun | Arguments | CallEnded, tokens: int) -> Entry:
    if isinstance(event, CallBegun):
        function = CalledFunction(event.name, event.id[:-UUID_NCHARS])
        return Entry(event.choice, CALLED, "", tokens, logprobs=event.logprobs, about=function)
    if isinstance(event, Arguments):
        return Entry(event.choice, ARGUMENTS, event.text, tokens, logprobs=event.logprobs)
    kind = CALL_ENDED if event.is_whole else CALL_CUT
    return Entry(event.choice, kind, "", tokens, logprobs=event.logprobs)


def _prompt_entries(event: Prompted) -> Iterator[Entry]:
    """A piece of a prompt, cut so that each entry fits into a piece; a token stays with its text."""
    if not event.tokens:
        for at in range(0, len(event.text), MOST_NCHARS):
            yield Entry(0, PROMPT, event.text[at : at + MOST_NCHARS], about=[])
        return
    begin = 0
    for at in range(0, len(event.tokens), PROMPT_TOKENS):
        rest = event.tokens[at + PROMPT_TOKENS :]
        end = rest[0].start - event.start if rest else len(event.text)
        yield Entry(0, PROMPT, event.text[begin:end], about=event.tokens[at : at + PROMPT_TOKENS])
        begin = end


class Texts(Relays[TextStream, Piece]):
    """All texts of one life of a bridge that run, or whose result is kept."""

    def __init__(
        self,
        box: str,
        life: str,
        engine: Engine,
        send: Callable[[str, bytes], bool],
        most_inline: Callable[[], int],
        settings: Settings,
    ) -> None:
        """`most_inline`: bytes that a message may take."""
        super().__init__(send, most_inline)
        self._box, self._life, self._engine = box, life, engine
        self._idle_s = settings.generation.idle_timeout_s

    async def run(
        self, name: str, router: str, scope: RequestScope, work: Work, before: bytes | memoryview
    ) -> Answer:
        """Write the text of an item, behind what `before` tells; returns the end of the answer, without tensors.

        Raises the `PenstockError` of the engine, and `ProtocolError` for a `before` that is none.
        """
        assert isinstance(work.call, GenerateCall)
        past = _past(read_before(before, work.call.n)) if len(before) else None
        stream = self._streams[name] = TextStream(name, router, self._note)
        pace = RelayedPace(scope, self._idle_s, stream)
        async with self._engine.generate(scope, work, pace, past) as generation:
            stream.begin(generation.prompt_tokens)
            async for events in generation:
                stream.tell(events, generation.mark())
                if not stream.has_room:
                    await stream.room()
                generation.pass_to(stream)
            assert generation.result is not None
            return generation.result

    def _message(self, router: str, pieces: Sequence[tuple[str, Piece]]) -> tuple[str, bytes]:
        places = [place for place, (_, piece) in enumerate(pieces) for _ in piece.entries]
        entries = [entry for _, piece in pieces for entry in piece.entries]
        written = [entry.ids for entry in entries]
        deltas = Deltas(
            places,
            [entry.choice for entry in entries],
            [entry.kind for entry in entries],
            [entry.text for entry in entries],
            [entry.tokens for entry in entries],
            {at: entry.logprobs for at, entry in enumerate(entries) if entry.logprobs is not None},
            written=written if any(written) else [],
        )
        for at, about in [(at, entry.about) for at, entry in enumerate(entries) if entry.about is not None]:
            if isinstance(about, CalledFunction):
                deltas.calls[at] = about
            elif isinstance(about, Start):
                deltas.starts[at] = about
            elif isinstance(about, Finish):
                deltas.finishes[at] = about
            elif about:
                deltas.prompts[at] = about
        origins = {place: piece.origin for place, (_, piece) in enumerate(pieces) if piece.origin is not None}
        names, numbers = [name for name, _ in pieces], [piece.number for _, piece in pieces]
        opened = [place for place, (_, piece) in enumerate(pieces) if piece.is_open]
        told = Pieces(VERSION, self._box, self._life, names, numbers, deltas, origins, opened)
        return texts_of(router), encode(told)


def _past(before: Before) -> Past:
    """The text that another box has begun, as far as an engine needs its events."""
    written, events = before.written, list[Event]()
    if before.has_text:
        events.append(Text(0, "", 0))
    for choice, count in enumerate(before.calls):
        events += [CallBegun(choice, index, "", "") for index in range(count)]
    events += [Finished(choice, "stop") for choice, ended in enumerate(written.ended) if ended]
    mark = Mark(
        written.seed, written.choices, written.weights, before.identity, before.deaths, before.pictures
    )
    return Past(events, mark, before.moves)
