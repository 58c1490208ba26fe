"""Texts of a bridge: the local engine writes, gateways get the text in pieces, and each piece is kept until it came.

1. `Texts.run` runs the work with the local engine, whose rule of retries and continuations holds. What the engine tells
   becomes entries of `Deltas` again, with ids of tokens, so that a gateway reads a box as a frontend reads a worker.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

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
ENTRY_NBYTES = 48
"""Of an entry in a message beside its text; about as much again in memory."""
UUID_NCHARS = 36
"""At the end of the id of a call; a gateway makes another one."""


class Entry(NamedTuple):
    """One entry of `Deltas`; `about` is what the maps there hold of the entry, but log probabilities."""

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


class Piece(NamedTuple):
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
    """The pace of a text whose reader is at a gateway: notes what the gateway's pace has to know beside the events.

    `fresh` are tokens of each choice since somebody cleared the counts.
    """

    def __init__(self, scope: RequestScope, idle_s: float, on_held: Callable[[], None]) -> None:
        """`on_held` is told that tokens were computed whose text waits."""
        self.fresh: Counter[int] = Counter()
        self._on_held = on_held
        first_by_ns = min(scope.waits_until_ns, scope.deadline_ns)
        super().__init__(time.monotonic_ns(), first_by_ns, idle_s, _METER)

    def begin(self) -> None:
        """See `Pace.begin`."""
        super().begin()
        self.fresh.clear()

    def step(self, choice: int, tokens: int, now_ns: int) -> None:
        """See `Pace.step`."""
        super().step(choice, tokens, now_ns)
        self.fresh[choice] += tokens

    def held(self, now_ns: int) -> None:
        """See `Pace.held`."""
        super().held(now_ns)
        self._on_held()


class TextStream(Relay[Piece]):
    """One text on its way to a gateway."""

    def __init__(self, name: str, router: str, on_news: Callable[[TextStream], None]) -> None:
        """`on_news` is told when something waits, until `cut` takes what waits."""
        super().__init__(name, router, Flow(WINDOW_NBYTES))
        self._on_news = on_news
        self._waiting: list[Entry] = []
        self._wholes: list[int] = []
        """How much of what waits had come after each call of `_put`: up to there ids and text are whole."""
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

    def tell(self, events: Sequence[Event], mark: Mark | None, fresh: Counter[int]) -> None:
        """Events have come, with their mark and the tokens of each choice since the events before."""
        entries = _usual(events, mark)
        if entries is None:
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
            self._origin = Origin("", 0, "", is_kept=False) if told is None else Origin(*told)
        self._put(entries)

    def _put(self, entries: list[Entry]) -> None:
        if not self._waiting:
            self._on_news(self)
        self._waiting += entries
        self._wholes.append(len(self._waiting))
        self._flow.sent(sum(_window_nbytes(entry) for entry in entries))

    def cut(self) -> list[Piece]:
        """What waits, as pieces, which are kept."""
        pieces: list[Piece] = []
        waiting, self._waiting = self._waiting, []
        wholes, self._wholes = self._wholes, []
        end = 0
        for some, nbytes in _parted(waiting):
            end += len(some)
            origin, self._origin = self._origin, None
            piece = Piece(self.number + 1, some, origin, nbytes, end not in wholes)
            pieces.append(self._keep(piece))
        return pieces


def _window_nbytes(entry: Entry) -> int:
    """What a reader takes with an entry (`DeltaStream`)."""
    if entry.kind == TEXT and entry.logprobs is None:
        return nbytes_of(entry.text, None)
    tokens = entry.about if isinstance(entry.about, list) else entry.logprobs
    return 0 if entry.kind == FINISHED else nbytes_of(entry.text, tokens)


def _parted(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], int]]:
    """Entries in pieces of about `PIECE_NBYTES`, with the bytes of each piece."""
    if len(entries) == 1:
        yield entries, entries[0].nbytes
        return
    some, nbytes = list[Entry](), 0
    for entry in entries:
        if some and nbytes + entry.nbytes > PIECE_NBYTES:
            yield some, nbytes
            some, nbytes = [], 0
        some.append(entry)
        nbytes += entry.nbytes
    if some:
        yield some, nbytes


def _usual(events: Sequence[Event], mark: Mark | None) -> list[Entry] | None:
    """The entry of a single piece of text of a request with one choice; None for anything else."""
    # PERF: most tokens of most texts, for which the rest of `TextStream.tell` takes three times as long.
    event = events[0]
    if len(events) > 1 or not isinstance(event, Text) or len(event.text) > MOST_NCHARS:
        return None
    ids = () if mark is None else mark.ids
    if len(ids) > 1:
        return None
    own = ids[0] if ids else b""
    return [Entry(event.choice, TEXT, event.text, event.tokens, own, event.logprobs)]


def _attach(entries: list[Entry], choice: int, ids: bytes) -> None:
    """Have the last entry of a choice bring the ids of its tokens."""
    for at in range(len(entries) - 1, -1, -1):
        if entries[at].choice == choice and entries[at].kind not in (STARTED, PROMPT):
            entries[at] = entries[at]._replace(ids=ids)
            return
    entries.append(Entry(choice, HELD, ids=ids))


def _entries(event: Event, fresh: Counter[int]) -> Iterator[Entry]:
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
    yield entry._replace(text=entry.text[:MOST_NCHARS]) if len(entry.text) > MOST_NCHARS else entry
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
        pace = RelayedPace(scope, self._idle_s, stream.hold)
        async with self._engine.generate(scope, work, pace, past) as generation:
            stream.begin(generation.prompt_tokens)
            async for events in generation:
                stream.tell(events, generation.mark(), pace.fresh)
                if not stream.has_room:
                    await stream.room()
            assert generation.result is not None
            return generation.result

    def _message(self, router: str, pieces: Sequence[tuple[str, Piece]]) -> tuple[str, bytes]:
        places = [place for place, (_, piece) in enumerate(pieces) for _ in piece.entries]
        entries = [entry for _, piece in pieces for entry in piece.entries]
        deltas = Deltas(
            places,
            [entry.choice for entry in entries],
            [entry.kind for entry in entries],
            [entry.text for entry in entries],
            [entry.tokens for entry in entries],
            {at: entry.logprobs for at, entry in enumerate(entries) if entry.logprobs is not None},
            written=[entry.ids for entry in entries] if any(entry.ids for entry in entries) else [],
        )
        for at, entry in enumerate(entries):
            if isinstance(entry.about, CalledFunction):
                deltas.calls[at] = entry.about
            elif isinstance(entry.about, Start):
                deltas.starts[at] = entry.about
            elif isinstance(entry.about, Finish):
                deltas.finishes[at] = entry.about
            elif entry.about:
                deltas.prompts[at] = entry.about
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
