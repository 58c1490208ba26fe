"""Parts around the generation engine: a greedy sampler, outputs that keep tokens, masks that are only noted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch

from ipc.wire.messages import GenerateCall, Sampling
from ipc.wire.streams import FINISHED, TEXT, Finish, TokenLogprob
from workers.generation.attention import PagedAttention, attend_with
from workers.generation.blocks import BlockPool
from workers.generation.captured import CapturedPrompts, CapturedSteps
from workers.generation.device_token_draw import DeviceDrawer
from workers.generation.engine import Engine
from workers.generation.flights import Reading
from workers.generation.pictures.family import Picture
from workers.generation.request import Emission, GenerationRequest, Matcher
from workers.generation.rope import length_rope
from workers.generation.scheduler import Sequence as Choice
from workers.generation.tower import Tower

BLOCK_TOKENS = 8
LIKELIEST = Sampling(logprobs=0)
"""The likeliest tokens, with their log probabilities."""


def request_of(
    key: Hashable,
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    n: int = 1,
    stop_ids: frozenset[int] = frozenset(),
    make_matcher: Callable[[], Matcher] | None = None,
    sampling: Sampling = LIKELIEST,
    space: str = "",
    lora: str = "",
    pictures: Sequence[Picture] = (),
) -> GenerationRequest:
    """A request for token ids as they are."""
    call = GenerateCall(n=n, sampling=sampling, space=space, lora=lora)
    return GenerationRequest(
        key, list(prompt), call, max_tokens, stop_ids, _no_parser, make_matcher, pictures=list(pictures)
    )


def _no_parser() -> Any:
    raise AssertionError("these outputs make no text")


class Modes:
    """How engines of tests run where a test says nothing."""

    ahead = False


class Greedy:
    """Takes the likeliest token, with its log probability. `allowed` are the tokens that a sequence may get next."""

    def __init__(self, allowed: Callable[[Choice], set[int] | None] = lambda sequence: None) -> None:
        self.rows: list[int] = []
        """Sequences of each call."""
        self.allowed = allowed

    def sample(
        self, logits: torch.Tensor, sequences: Sequence[Choice]
    ) -> list[tuple[int, TokenLogprob | None]]:
        assert len(logits) == len(sequences)
        self.rows.append(len(sequences))
        scores = torch.log_softmax(logits.float(), dim=-1)
        chosen = []
        for row, sequence in zip(scores, sequences, strict=True):
            allowed = self.allowed(sequence)
            order = row.argsort(descending=True).tolist()
            token = next(token for token in order if allowed is None or token in allowed)
            chosen.append((token, TokenLogprob(token, b"", float(row[token]))))
        return chosen


class GreedyDrawer:
    """Takes the likeliest token before the host knows it, as `sampler` does where nothing else is allowed."""

    def __init__(self, sampler: Greedy) -> None:
        self._sampler = sampler

    def waits(self, sequence: Choice) -> bool:
        return self._sampler.allowed(sequence) is not None

    def draw(self, logits: torch.Tensor, sequences: Sequence[Choice]) -> GreedyTokens:
        return GreedyTokens(self._sampler, logits.clone(), sequences)


class GreedyTokens:
    """The likeliest tokens; the sampler is asked when the step lands."""

    def __init__(self, sampler: Greedy, logits: torch.Tensor, sequences: Sequence[Choice]) -> None:
        self.tokens = logits.float().argmax(-1)
        self._sampler, self._logits, self._sequences = sampler, logits, sequences

    def read(self, wanted: Collection[Choice]) -> Reading:
        chosen = dict(zip(self._sequences, self._sampler.sample(self._logits, self._sequences), strict=True))
        for token, (sequence, found) in zip(self.tokens.tolist(), chosen.items(), strict=True):
            assert token == found[0], sequence.request.key
        return Reading({sequence: found for sequence, found in chosen.items() if sequence in wanted}, ())


class KeptOutput:
    """Tells every token as one entry without text; ends a choice by its stop ids and its length."""

    def __init__(self, request: GenerationRequest, choice: int) -> None:
        self.ended: str | None = None
        self._request, self._choice, self._count = request, choice, 0

    def push(self, token: int, logprob: TokenLogprob | None) -> list[Emission]:
        self._count += 1
        if token in self._request.stop_ids:
            self.ended = "stop"
        elif self._count >= self._request.max_tokens:
            self.ended = "length"
        told = logprob or TokenLogprob(token, b"", float("nan"))
        return [Emission(self._request.key, self._choice, TEXT, tokens=1, logprobs=[told])]

    def finish(self, reason: str) -> list[Emission]:
        ended = Finish(reason, tokens=self._count)
        return [Emission(self._request.key, self._choice, FINISHED, finish=ended)]


class NotedMasks:
    """Notes which sequences have their masks filled during a step."""

    def __init__(self) -> None:
        self.begun: list[list[Choice]] = []
        self.filling = False

    def begin(self, sequences: Sequence[Choice]) -> None:
        assert not self.filling
        self.begun.append(list(sequences))
        self.filling = True

    def wait(self) -> None:
        assert self.filling
        self.filling = False


def engine_of(
    model: Any,
    *,
    blocks: int = 200,
    prefill_tokens: int = 512,
    scored_tokens: int = 512,
    max_sequences: int = 32,
    keeps_prefixes: bool = True,
    sampler: Any = None,
    attention: PagedAttention | None = None,
    captures: type[CapturedSteps] | None = None,
    prompts: type[CapturedPrompts] | None = None,
    tower: Tower | None = None,
    ahead: bool | None = None,
) -> Engine:
    """An engine over a small model, made as a load makes one. The model keeps the attention of this engine.

    `captures` are the captured steps of single tokens, `prompts` those with prompts, where the test wants some. `ahead`
    launches a step before the one before has landed; None: as `Modes.ahead` says.
    """
    sampler = sampler or Greedy()
    drawer: Any = None
    if Modes.ahead if ahead is None else ahead:
        drawer = GreedyDrawer(sampler) if isinstance(sampler, Greedy) else DeviceDrawer(sampler)
    attention = attention or PagedAttention(BLOCK_TOKENS)
    attention.rope = length_rope(model)
    attend_with(model, attention.name)
    with torch.inference_mode():
        model(
            input_ids=torch.arange(5, 9, device=model.device)[None],
            position_ids=torch.arange(4, device=model.device)[None],
            attention_mask=torch.ones(1, 4, dtype=torch.long, device=model.device),
            use_cache=False,
        )
    attention.allocate(blocks, spare=prompts is not None)
    assert not prompts or attention.prepare_tiles()
    assert not captures or attention.prepare_decoding()
    return Engine(
        model,
        attention,
        BlockPool(blocks, attention.block_tokens, keeps_prefixes=keeps_prefixes),
        sampler,
        NotedMasks(),
        KeptOutput,
        max_sequences=max_sequences,
        prefill_tokens=prefill_tokens,
        scored_tokens=scored_tokens,
        captured=captures(model, attention, max_sequences, blocks) if captures else None,
        prompts=prompts(model, attention, prefill_tokens, max_sequences, blocks) if prompts else None,
        tower=tower,
        drawer=drawer,
    )


class Answers:
    """What an engine has told, by request and choice."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[Hashable, int], list[int]] = {}
        self.logprobs: dict[tuple[Hashable, int], list[float]] = {}
        self.finishes: dict[tuple[Hashable, int], Finish] = {}
        self.cached: dict[Hashable, int] = {}

    def take(self, emitted: Sequence[Emission]) -> None:
        """Keep what a step has told, and look at the order: a start, tokens, one end."""
        for one in emitted:
            place = one.key, one.choice
            assert place not in self.finishes, "nothing may follow an end"
            if one.start is not None:
                assert one.key not in self.cached
                self.cached[one.key] = one.start.cached_tokens
            assert one.key in self.cached, "a start comes first"
            for logprob in one.logprobs or ():
                self.tokens.setdefault(place, []).append(logprob.id)
                self.logprobs.setdefault(place, []).append(logprob.logprob)
            if one.finish is not None:
                self.finishes[place] = one.finish

    def run(self, engine: Engine, steps: int = 10_000) -> Answers:
        """Step until nothing is left to do."""
        while engine.has_work and steps:
            self.take(engine.step())
            steps -= 1
        assert not engine.has_work, "the engine does not come to an end"
        return self
