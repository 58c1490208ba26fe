"""A language model that says its next word without computing: what generated text costs beside a model.

Weights, tokenizer, template, scheduler, blocks, text and transport are real. A forward pass gives no logits, and the
sampler takes letters in turn.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from ipc.wire.streams import TokenLogprob
from workers.adapters.base import LoadContext
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared.checkpoint import tokenizer_of
from workers.generation.engine import Engine
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span


class TalkingEngine(Engine):
    """An engine without forward passes."""

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        # NOTE: a row for each span, as a model gives; fewer rows would cost a view that no real step makes.
        return torch.empty(len(spans), 0)


class Letters:
    """Takes the tokens of letters in turn."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def sample(
        self, logits: torch.Tensor, sequences: Sequence[Choice]
    ) -> list[tuple[int, TokenLogprob | None]]:
        """The letter of each sequence's length."""
        tokens, count = self._tokens, len(self._tokens)
        return [(tokens[len(sequence.tokens) % count], None) for sequence in sequences]


class TalkingAdapter(CausalAdapter):
    """A causal language model whose engine computes nothing."""

    @classmethod
    def load(cls, context: LoadContext) -> CausalAdapter:
        """Load the model of the directory, then take its engine away."""
        adapter = super().load(context)
        real: Any = adapter.engine
        letters = tokenizer_of(context).convert_tokens_to_ids(list(string.ascii_uppercase))
        adapter.engine = TalkingEngine(
            real.model,
            None,
            real.pool,
            Letters(letters),
            real._masks,
            real._make_output,
            max_sequences=context.generation.max_sequences,
            prefill_tokens=context.generation.prefill_tokens,
        )
        return adapter
