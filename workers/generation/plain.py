"""Generates with a model's own cache, one sequence at a time, for models that packed steps do not suit.

transformers' `generate()` runs in a greenlet. The run stops at every step with the logits of the next token, and goes
on with the token that the engine's sampler has chosen. Another sequence, and tokens that a grammar forces, begin a new
run over all tokens so far. Where the positions of a model depend on the length of the text, a run gets the tokens
behind the prompt one by one.
"""

from __future__ import annotations

import copy
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
from workers.generation.rope import depends_on_length, forget_lengths
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
        self._bare = without_settings(model)
        self._run: Run | None = None

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [1, vocabulary] of the one sequence."""
        [span] = spans
        run = self._run
        if run is None or not run.continues(span):
            if run is not None:
                run.close()
            run = self._run = Run(self._bare, span.sequence)
        try:
            return run.logits(span.sequence.tokens)
        except BaseException:
            self._run = None
            raise


def without_settings(model: Any) -> Any:
    """The same model for `generate()` without stored settings, which would end texts and change logits."""
    bare = copy.copy(model)
    bare.generation_config = GenerationConfig()
    return bare


class Run:
    """One call of `generate()`, which is asked for logits step by step."""

    def __init__(self, model: Any, sequence: Choice) -> None:
        """`model` has no settings of its own (`without_settings`)."""
        self._model, self._sequence = model, sequence
        self._greenlet = greenlet.greenlet(self._generate)
        self._computed, self._singly = 0, depends_on_length(model)

    def continues(self, span: Span) -> bool:
        """Whether the run can compute a span: the next single token of its sequence."""
        follows = span.stop > self._computed if self._singly else span.stop == self._computed + 1
        return span.sequence is self._sequence and follows and not self._greenlet.dead

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [1, vocabulary] after `tokens`, of which the run has computed the first or none."""
        # NOTE: the turn of the device thread that asks may be another one than the turn before.
        self._greenlet.parent = greenlet.getcurrent()
        # NOTE: `generate()` computes without gradients, a mode of the thread and not of the greenlet.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            found: torch.Tensor
            if not self._computed:
                forget_lengths(self._model)
                self._computed = self._sequence.prompt_length if self._singly else len(tokens)
                found = self._greenlet.switch(tokens[: self._computed])
            for token in tokens[self._computed :]:
                found = self._greenlet.switch(token)
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
