"""Steps that are launched and have not landed, and the tokens that they chose on the device.

While the device computes a step, the host makes text of the step before. So a step is launched without the tokens that
the step before has chosen: its ids come from a tensor of the device (`Unread`).

1. A sequence runs ahead if its next token is chosen on the device alone. All others wait: the next step leaves them
   out, and they are chosen for when their step lands.
2. An end is noticed when a step lands. The next step is under way then, and what it computes for the sequence is
   thrown away: `Flight.live` leaves out a sequence whose steps were revoked since. The cache entry of the thrown
   token lies behind the sequence's landed tokens, in a block that no other sequence finds, and the block is written
   again only by later steps. Where nobody wants the step under way and none follows, the engine forgets the step.
3. A row whose token the device could not tell for certain is told when its step lands (`Drawn.read`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ipc.wire.streams import PromptToken, TokenLogprob
from workers.device.transfer import sent
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span

_AT_ONCE = nullcontext()
Chosen = tuple[int, TokenLogprob | None]
"""The next token of a sequence."""


class Sampler(Protocol):
    """The sampling stage (`workers.generation.sampling`)."""

    def sample(self, logits: torch.Tensor, sequences: Sequence[Choice]) -> list[Chosen]:
        """The next token of each sequence from its row of logits [rows, vocabulary]."""


class Masks(Protocol):
    """Fills the masks of grammars in another thread (`workers.generation.grammar`)."""

    def begin(self, sequences: Sequence[Choice]) -> None:
        """Begin to fill `mask` of sequences with a matcher."""

    def wait(self) -> None:
        """Return when all masks are filled."""


class Entry(NamedTuple):
    """A span of a launched step, and what held at its launch: the sequence's `turn`, and of the span the rest."""

    span: Span
    turn: int
    completes: bool
    chooses: bool


def entry_of(span: Span) -> Entry:
    """The entry of a span that is about to be launched."""
    # PERF: `Span.chooses` and `Sequence.length` would be two more calls for each token.
    sequence, _, stop = span
    completes = stop == len(sequence.tokens) + sequence.ahead
    return Entry(span, sequence.turn, completes, completes and sequence.request.max_tokens > 0)


class Reading(NamedTuple):
    """What the host has read of `Drawn`; the device went on with another token in the sequences that are `missed`."""

    chosen: Mapping[Choice, Chosen]
    missed: Collection[Choice]


class Drawn(Protocol):
    """Tokens that the device has chosen."""

    tokens: torch.Tensor
    """int64 [sequences], on the device."""

    def read(self, wanted: Collection[Choice]) -> Reading:
        """Wait for the step; the tokens of the `wanted` sequences. Raises `NoNextToken`."""


class Drawer(Protocol):
    """The sampling stage on the device (`workers.generation.device_token_draw`)."""

    def waits(self, sequence: Choice) -> bool:
        """Whether the next token of a sequence needs the host."""

    def draw(self, logits: torch.Tensor, sequences: Sequence[Choice]) -> Drawn:
        """Choose from logits [sequences, vocabulary] for sequences that do not wait; the device need not be done."""


class Unread(NamedTuple):
    """Tokens int64 [n] on the device that the host has not read, and the place of each sequence's."""

    tokens: torch.Tensor
    places: Mapping[Choice, int]

    def lay(self, ids: torch.Tensor, rows: Sequence[int], sequences: Sequence[Choice]) -> None:
        """Write the tokens of sequences to some rows of `ids` int64 [tokens]."""
        index = np.array((rows, [self.places[one] for one in sequences]), np.int64)
        at, places = sent(index, ids.device).unbind()
        ids.index_copy_(0, at, self.tokens.index_select(0, places))


@dataclass(slots=True, eq=False)
class Flight:
    """A launched step. `ahead` run ahead and are `drawn`; `waiting` get tokens by `logits` [waiting, columns].

    `guided` have a grammar; `is_masked` once their masks are being filled. `told` are tokens of prompts.
    """

    entries: list[Entry]
    ahead: list[Choice]
    drawn: Drawn | None
    waiting: list[Choice]
    logits: torch.Tensor
    guided: list[Choice]
    is_masked: bool
    told: dict[Choice, list[PromptToken]]
    unread: Unread | None = field(init=False, default=None)
    _computed: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.drawn is not None:
            self.unread = Unread(self.drawn.tokens, {one: at for at, one in enumerate(self.ahead)})
        if self.waiting and self.logits.is_cuda:
            self._computed = torch.cuda.Event()
            self._computed.record()

    def beside(self) -> AbstractContextManager[object]:
        """Work on the logits beside the next step, which may be under way, and not behind it."""
        if self._computed is None:
            return _AT_ONCE
        stream = _second_stream(self.logits.device)
        stream.wait_event(self._computed)
        beside: AbstractContextManager[object] = torch.cuda.stream(stream)
        return beside

    @property
    def live(self) -> list[Entry]:
        """The entries whose sequences still want the outcome."""
        return [entry for entry in self.entries if entry.turn == entry.span.sequence.turn]


def some_of(logits: torch.Tensor, rows: Sequence[int], count: int) -> torch.Tensor:
    """Logits [rows, columns] of some of the first `count` rows; of all of these without a copy."""
    if not rows or len(rows) == count:
        return _first(logits, len(rows))
    return logits.index_select(0, sent(np.array(rows, np.int64), logits.device))


def divided(
    choosing: list[Choice],
    logits: torch.Tensor,
    drawer: Drawer | None,
    waits: Callable[[Choice, Drawer], bool],
) -> tuple[list[Choice], Drawn | None, list[Choice], torch.Tensor]:
    """The sequences that run ahead and what the device draws for these, then those that wait and their logits."""
    count = len(choosing)
    if drawer is None:
        return [], None, choosing, _first(logits, count)
    waiting = [at for at, sequence in enumerate(choosing) if waits(sequence, drawer)]
    ahead = sorted({*range(count)}.difference(waiting))
    early, late = ([choosing[at] for at in some] for some in (ahead, waiting))
    drawn = drawer.draw(some_of(logits, ahead, count), early) if ahead else None
    rest = some_of(logits, waiting, count)
    # NOTE: the next captured step writes its logits to the same place.
    return early, drawn, late, rest.clone() if rest.data_ptr() == logits.data_ptr() else rest


def _first(logits: torch.Tensor, count: int) -> torch.Tensor:
    # PERF: a view costs as much as all bookkeeping of a token, and most steps have no other rows.
    return logits if logits.shape[0] == count else logits[:count]


@functools.cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
