"""An engine whose model is a function of the tokens before: random preferences, and a script that it follows.

Two such engines stand for two workers with the same model. `Heard` is what a frontend has of an answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import msgspec
import torch

from ipc.wire.messages import Written
from ipc.wire.streams import HELD, STARTED
from tests.fakes.generating import Modes
from tests.harness.guided_model import Model
from workers.generation.blocks import BlockPool
from workers.generation.device_token_draw import DeviceDrawer
from workers.generation.engine import Engine
from workers.generation.grammar import MaskFiller
from workers.generation.request import Emission, GenerationRequest
from workers.generation.sampling import BatchedSampler
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span
from workers.generation.text import ChoiceOutput

Script = Callable[[int], Sequence[int]]
"""The tokens that the model prefers, for each choice."""
_SURE = 30.0
"""What a token of the script has above the others; no penalty of a test is as high."""


@lru_cache(4096)
def _preferences(size: int, choice: int, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits float32 [size] behind some tokens."""
    seed = random.Random(str((choice, tokens))).getrandbits(62)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


class ScriptedEngine(Engine):
    """An engine of small blocks and chunks."""

    def __init__(self, model: Model, script: Script = lambda choice: ()) -> None:
        super().__init__(
            None,
            None,
            BlockPool(200, 4),
            sampler := BatchedSampler(
                model.vocabulary.raw, partial(model.tokenizer.encode, add_special_tokens=False)
            ),
            MaskFiller(model.grammars.words, model.size),
            partial(ChoiceOutput, model.vocabulary),
            prefill_tokens=8,
            drawer=DeviceDrawer(sampler) if Modes.ahead else None,
        )
        self._size, self._script = model.size, script

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        rows = [self._row(span.sequence, span.stop) for span in spans if span.chooses]
        rows += [self._row(span.sequence, place + 1) for span in spans for place in span.scores]
        return torch.stack(rows) if rows else torch.empty(0, self._size)

    def _row(self, sequence: Choice, stop: int) -> torch.Tensor:
        """The logits behind the first `stop` tokens of a sequence."""
        known = sequence.tokens[:stop]
        if len(known) < stop:
            assert self._flight is not None and self._flight.unread is not None
            unread = self._flight.unread
            known = [*known, int(unread.tokens[unread.places[sequence]])]
        row = _preferences(self._size, sequence.choice, tuple(known)).clone()
        script, place = self._script(sequence.choice), stop - sequence.prompt_length
        if 0 <= place < len(script):
            row[script[place]] += _SURE
        return row


class Heard:
    """What has arrived of one answer: entries by choice, ids of tokens, and which choices have ended."""

    def __init__(self, choices: int, seed: int) -> None:
        self.entries: list[list[Emission]] = [[] for _ in range(choices)]
        self._ids, self._ended, self._seed = [b""] * choices, [False] * choices, seed

    def take(self, emitted: Iterable[Emission]) -> None:
        """One message."""
        for one in emitted:
            self._ids[one.choice] += one.written
            self._ended[one.choice] |= one.finish is not None
            if one.kind not in (HELD, STARTED):
                self.entries[one.choice].append(msgspec.structs.replace(one, key=None, written=b""))

    @property
    def number(self) -> int:
        """Tokens whose ids are known."""
        return sum(map(len, self._ids)) // 4

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended."""
        return all(self._ended)

    def written(self) -> Written:
        """What the next worker gets."""
        has_begun = any(self._ended) or any(self._ids)
        return Written(self._seed, self._ids, self._ended) if has_begun else Written(self._seed)

    def copy(self) -> Heard:
        """The same, which goes on by itself."""
        other = Heard(len(self.entries), self._seed)
        other.entries = [list(each) for each in self.entries]
        other._ids, other._ended = list(self._ids), list(self._ended)
        return other


def steps(engine: ScriptedEngine, request: GenerationRequest) -> Iterable[list[Emission]]:
    """The messages of one run, to its end."""
    engine.add(request)
    while engine.has_work:
        yield engine.step()
