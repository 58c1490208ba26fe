"""Generates with a model's own cache, one sequence at a time, for models that packed steps do not suit.

transformers' `generate()` runs in a greenlet. The run stops at every step with the logits of the next token, and goes
on with the token that the engine's sampler has chosen. Another sequence, and tokens that a grammar forces, begin a new
run over all tokens so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from workers import foreign
from workers.generation.blocks import BlockPool
from workers.generation.engine import Engine, Masks, Sampler
from workers.generation.request import GenerationRequest
from workers.generation.sequence import Output, Span
from workers.generation.sequence import Sequence as Choice

log = logging.getLogger(__name__)

_BLOCK_TOKENS = 16


class PlainEngine(Engine):
    """An `Engine` whose forward pass is the model's own. Its blocks only count tokens."""

    def __init__(
        self,
        model: Any,
        capacity: int,
        sampler: Sampler,
        masks: Masks,
        make_output: Callable[[GenerationRequest, int], Output],
    ) -> None:
        """`capacity` is the longest sequence in tokens."""
        pool = BlockPool(-(-capacity // _BLOCK_TOKENS), _BLOCK_TOKENS, keeps_prefixes=False)
        super().__init__(
            model, None, pool, sampler, masks, make_output, max_sequences=1, prefill_tokens=pool.total * 16
        )
        self._run: Run | None = None

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [1, vocabulary] of the one sequence."""
        [span] = spans
        run = self._run
        if run is None or not run.continues(span):
            if run is not None:
                run.close()
            run = self._run = Run(self.model, span.sequence)
        try:
            return run.logits(span.sequence.tokens)
        except BaseException:
            self._run = None
            raise


class Run:
    """One call of `generate()`, which is asked for logits step by step."""

    def __init__(self, model: Any, sequence: Choice) -> None:
        self._model, self._sequence = model, sequence
        self._greenlet = greenlet.greenlet(self._generate)
        self._computed = 0

    def continues(self, span: Span) -> bool:
        """Whether the run can compute a span: the next single token of its sequence."""
        return span.sequence is self._sequence and span.stop == self._computed + 1 and not self._greenlet.dead

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [1, vocabulary] after `tokens`, of which the run has computed all or all but the last."""
        # NOTE: the turn of the device thread that asks may be another one than the turn before.
        self._greenlet.parent = greenlet.getcurrent()
        # NOTE: `generate()` computes without gradients, a mode of the thread and not of the greenlet.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            found: torch.Tensor = self._greenlet.switch(list(tokens) if not self._computed else tokens[-1])
        self._computed = len(tokens)
        return found

    def close(self) -> None:
        """End `generate()` where it is."""
        if self._greenlet.dead:
            return
        self._greenlet.parent = greenlet.getcurrent()
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                self._greenlet.throw()
        except BaseException as raised:
            # NOTE: another request begins now, of which the error says nothing.
            log.error("a model failed when its run was ended", exc_info=foreign.error_of(raised))

    def _generate(self, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], device=self._model.device)
        endless = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_length=1 << 30)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=endless,
            logits_processor=LogitsProcessorList([_Chosen()]),
        )


class _Chosen(LogitsProcessor):
    """Hands the logits of a step to the engine, and leaves the token that the engine chooses as the only one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = greenlet.getcurrent().parent.switch(scores)
        torch.set_grad_enabled(False)
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, token] = 0
        return chosen
