"""What is told in pieces before the result of an item: texts (`texts`) and answers in parts (`parts`).

1. What all items of one gateway tell in a turn of the event loop is one message, or a few of `MESSAGE_NBYTES`.
2. An item whose client has not taken a window of what was told rests, and so the worker rests. The unit of the window
   is that of `Flow`.
3. A piece is kept until the gateway says that it has the piece (`ipc.wire.cluster.Taken`). Pieces are sent again when
   the gateway asks for the item.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ipc.wire.cluster import MOST_IDS, Taken
from ipc.wire.streams import Flow

MESSAGE_NBYTES = 128 << 10
KEPT_NBYTES = 1 << 20
"""An item with more bytes in pieces that the gateway has not confirmed rests."""


class Numbered(Protocol):
    """What is told of one item at once, and about what that takes in a message."""

    @property
    def number(self) -> int:
        """The place among the pieces of the item, from 1."""

    @property
    def nbytes(self) -> int:
        """About what the piece takes in a message."""


P = TypeVar("P", bound=Numbered)


class Relay(ABC, Generic[P]):
    """One item on its way to a gateway."""

    def __init__(self, name: str, router: str, flow: Flow) -> None:
        self.name, self.router = name, router
        self.number = 0
        """Of the last piece."""
        self.kept: deque[P] = deque()
        self._kept_nbytes = self._taken = 0
        self._flow, self._room = flow, asyncio.Event()
        self.rests = False
        """Whether the item waits for its gateway."""

    @abstractmethod
    def cut(self) -> list[P]:
        """What waits, as pieces, which are kept."""

    def _keep(self, piece: P) -> P:
        self.number = piece.number
        self.kept.append(piece)
        self._kept_nbytes += piece.nbytes
        return piece

    @property
    def has_room(self) -> bool:
        """Whether the gateway takes more."""
        return self._kept_nbytes < KEPT_NBYTES and self._flow.open

    async def room(self) -> None:
        """Wait until the gateway takes more."""
        while not self.has_room:
            self.rests = True
            self._room.clear()
            await self._room.wait()
        self.rests = False

    def taken(self, number: int, amount: int) -> list[P]:
        """The gateway has all pieces up to `number`, and its client has taken so much. Returns what is kept no more."""
        gone: list[P] = []
        while self.kept and self.kept[0].number <= number:
            gone.append(self.kept.popleft())
            self._kept_nbytes -= gone[-1].nbytes
        if amount > self._taken:
            self._flow.taken(amount - self._taken)
            self._taken = amount
        self._room.set()
        return gone


R = TypeVar("R", bound=Relay)  # type: ignore[type-arg]


class Relays(ABC, Generic[R, P]):
    """All items of a kind of one life of a bridge that run, or whose result is kept."""

    def __init__(self, send: Callable[[str, bytes], bool], most_inline: Callable[[], int]) -> None:
        """`most_inline`: bytes that a message may take."""
        self._send, self._most_inline = send, most_inline
        self._streams: dict[str, R] = {}
        self._news: dict[str, list[R]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @abstractmethod
    def _message(self, router: str, pieces: Sequence[tuple[str, P]]) -> tuple[str, bytes]:
        """(subject, message) of pieces with the ids of their items."""

    def _note(self, stream: R) -> None:
        """Something of an item waits."""
        if not self._news:
            asyncio.get_running_loop().call_soon(self.flush)
        self._news.setdefault(stream.router, []).append(stream)

    def flush(self) -> None:
        """Send what waits."""
        news, self._news = self._news, {}
        for router, streams in news.items():
            self._say(router, [(stream.name, piece) for stream in streams for piece in stream.cut()])

    def _say(self, router: str, pieces: Sequence[tuple[str, P]]) -> None:
        most = min(MESSAGE_NBYTES, self._most_inline())
        if len(pieces) <= MOST_IDS and sum([piece.nbytes + len(name) for name, piece in pieces]) <= most:
            # PERF: one message for all pieces is the usual case.
            if pieces:
                self._send(*self._message(router, pieces))
            return
        some, nbytes = list[tuple[str, P]](), 0
        for name, piece in pieces:
            if some and (nbytes + piece.nbytes > most or len(some) == MOST_IDS):
                self._send(*self._message(router, some))
                some, nbytes = [], 0
            some.append((name, piece))
            nbytes += piece.nbytes + len(name)
        if some:
            self._send(*self._message(router, some))

    @property
    def resting(self) -> Iterator[R]:
        """The items that wait for their gateways."""
        return (stream for stream in self._streams.values() if stream.rests)

    def pieces_of(self, name: str) -> int:
        """How many pieces an item has told, all of them sent."""
        if (stream := self._streams.get(name)) is None:
            return 0
        self.flush()
        return stream.number

    def taken(self, word: Taken) -> None:
        """A gateway tells what it has of its items."""
        for name, number, amount in zip(word.ids, word.numbers, word.amounts, strict=True):
            stream = self._streams.get(name)
            if stream is not None and stream.router == word.router:
                self._end(stream.taken(number, amount))

    def _end(self, pieces: Sequence[P]) -> None:
        """Pieces are kept no more."""

    def say_again(self, name: str) -> None:
        """The gateway asks for an item: send the pieces that it has not confirmed."""
        if (stream := self._streams.get(name)) is not None and stream.kept:
            self._say(stream.router, [(name, piece) for piece in stream.kept])

    def forget(self, name: str) -> None:
        """Nobody waits for an item any more."""
        if (stream := self._streams.pop(name, None)) is not None:
            stream.cut()
            self._end(list(stream.kept))
