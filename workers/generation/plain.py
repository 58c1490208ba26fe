"""Generates with a model's own cache, one sequence at a time, for models that packed steps do not suit.

transformers' `generate()` runs in a greenlet. The run stops at every step with the logits of the next token, and goes
on with the token that the engine's sampler has chosen. Another sequence, and tokens that a grammar forces, begin a new
run over all tokens so far. Where the positions of a model depend on the length of the text, a run gets the tokens
behind the prompt one by one. So does a run of a model whose pictures transformers' own processor reads, which knows
the arguments of the prompt alone. Each of these tokens is a step of its own, so that a long text that goes on here
neither keeps the device from others nor counts as hung.

Log probabilities of a prompt come from passes over the whole prompt, each of which computes the logits of some tokens.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import greenlet
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ipc.wire.streams import PromptToken
from workers import foreign
from workers.generation.blocks import BlockPool
from workers.generation.engine import Engine
from workers.generation.flights import Masks, Sampler
from workers.generation.lora_rows import StepRows, whole
from workers.generation.pictures.family import Picture
from workers.generation.pictures.reading import PromptReader
from workers.generation.request import Emission, GenerationRequest
from workers.generation.rope import depends_on_length, forget_lengths
from workers.generation.scheduler import Output, Span
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scoring import scored

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
        *,
        scored_tokens: int = 512,
        reader: PromptReader | None = None,
    ) -> None:
        """`capacity` is the longest sequence in tokens; one pass has logits of `scored_tokens` tokens of a prompt.

        `reader` is there for a model that sees.
        """
        pool = BlockPool(-(-capacity // _BLOCK_TOKENS), _BLOCK_TOKENS, keeps_prefixes=False)
        whole = pool.total * _BLOCK_TOKENS
        super().__init__(
            model,
            None,
            pool,
            sampler,
            masks,
            make_output,
            max_sequences=1,
            prefill_tokens=whole,
            scored_tokens=whole,
        )
        self._bare, self._scored_tokens = without_settings(model), scored_tokens
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._run: Run | None = None
        self._reader = reader
        self._singly = depends_on_length(model) or (reader is not None and not reader.in_steps)
        self._fallen: Choice | None = None

    @property
    def reader(self) -> PromptReader | None:
        """Reads prompts with pictures; None for a model that does not see."""
        return self._reader

    def processed(self, picture: Picture) -> Picture:
        """The picture with its inputs, unless too many inputs wait. Any thread. Raises `InvalidInput`."""
        assert self._reader is not None
        return self._reader.ahead(picture)

    def _arguments(self, sequence: Choice, tokens: list[int]) -> dict[str, Any]:
        """What the model takes for the pictures of a sequence of so many tokens."""
        if self._reader is None or not sequence.request.pictures:
            return {}
        pictures = [
            picture if picture.inputs else self._reader.processed(picture)
            for picture in sequence.request.pictures
        ]
        return self._reader.arguments(self.model, len(tokens), pictures)

    def _adapters(self, spans: list[Span]) -> tuple[list[Span], StepRows | None]:
        """All rows of the model's own passes are of the one sequence."""
        return spans, whole(spans)

    def step(self, ahead: bool = True) -> list[Emission]:
        """As `Engine.step`. A step that only computes an earlier token of a text that goes on returns nothing."""
        return [] if self._catches_up() else super().step(ahead)

    def _catches_up(self) -> bool:
        """Compute the prompt or one token of a text whose run lacks more; false if the next step may choose."""
        sequence = next(iter((*self._scheduler.running, *self._scheduler.waiting)), None)
        # NOTE: what fails here is tried once more in one step, so that a request that fails alone is found.
        if (
            not self._singly
            or sequence is None
            or sequence is self._fallen
            or not sequence.request.max_tokens
        ):
            return False
        text = Span(sequence, 0, len(sequence.tokens))
        computed = self._run.computed if self._run is not None and self._run.continues(text) else 0
        stop = computed + 1 if computed else sequence.prompt_length
        if stop >= text.stop:
            return False
        span = Span(sequence, computed, stop)
        try:
            with self.loras.over(whole([span])) if self.loras else nullcontext():
                self._logits(span)
        except BaseException:
            self._fallen = sequence
            raise
        return True

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [1, vocabulary] of the one sequence, or none."""
        self._fallen = None
        [span] = spans
        return self._logits(span) if span.chooses else torch.empty(0, 0)

    def _logits(self, span: Span) -> torch.Tensor:
        """Logits [1, vocabulary] behind a span, by the run of the sequence or by a new one."""
        run = self._run
        if run is None or not run.continues(span):
            if run is not None:
                run.close()
            run = self._run = Run(
                self._bare, span.sequence, partial(self._arguments, span.sequence), singly=self._singly
            )
        try:
            return run.logits(span.sequence.tokens[: span.stop])
        except BaseException:
            self._run = None
            raise

    def _forget_unwanted(self) -> None:
        """Let go of the run of a sequence that has ended too: keys, values and pictures."""
        super()._forget_unwanted()
        if self._fallen is not None and self._fallen.done:
            self._fallen = None
        if self._run is not None and self._run.sequence.done:
            self._run.close()
            self._run = None

    def _score(
        self, spans: Sequence[Span], logits: torch.Tensor, row: int
    ) -> dict[Choice, list[PromptToken]]:
        """The tokens of the one prompt, by passes of their own."""
        [span] = spans
        places, tokens = span.scores, []
        for at in range(0, len(places), self._scored_tokens):
            some = places[at : at + self._scored_tokens]
            tokens += scored(span.sequence, some, self._logits_at(span.sequence, some))
        return {span.sequence: tokens}

    @torch.no_grad()
    def _logits_at(self, sequence: Choice, places: Sequence[int]) -> torch.Tensor:
        """Logits [places, vocabulary] of a prompt."""
        forget_lengths(self.model)
        device = self.model.device
        ids = torch.tensor([sequence.tokens[: sequence.prompt_length]], device=device)
        rows = torch.tensor(places, device=device)
        options = {"logits_to_keep": rows} if self._keeps_some else {}
        logits: torch.Tensor = self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **options,
            **self._arguments(sequence, sequence.tokens[: sequence.prompt_length]),
        ).logits[0]
        return logits if self._keeps_some else logits[rows]


def without_settings(model: Any) -> Any:
    """The same model for `generate()` without stored settings, which would end texts and change logits."""
    bare = copy.copy(model)
    bare.generation_config = GenerationConfig()
    return bare


class Run:
    """One call of `generate()` for a `sequence`, asked for logits step by step; `computed` tokens are done."""

    def __init__(
        self,
        model: Any,
        sequence: Choice,
        seen: Callable[[list[int]], dict[str, Any]] = lambda tokens: {},
        *,
        singly: bool = False,
    ) -> None:
        """`model` has no settings of its own (`without_settings`); `seen` are its arguments for pictures.

        `singly`: tokens behind the prompt are computed one by one, also where positions do not depend on lengths.
        """
        self.sequence, self.computed = sequence, 0
        self._model, self._seen = model, seen
        self._greenlet = greenlet.greenlet(self._generate)
        self._singly = singly or depends_on_length(model)

    def continues(self, span: Span) -> bool:
        """Whether the run can compute a span: the next single token of its sequence."""
        follows = span.stop > self.computed if self._singly else span.stop == self.computed + 1
        return span.sequence is self.sequence and follows and not self._greenlet.dead

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [1, vocabulary] after `tokens`, of which the run has computed the first or none."""
        # NOTE: the turn of the device thread that asks may be another one than the turn before.
        self._greenlet.parent = greenlet.getcurrent()
        # NOTE: `generate()` computes without gradients, a mode of the thread and not of the greenlet.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            logits: torch.Tensor
            if not self.computed:
                forget_lengths(self._model)
                self.computed = self.sequence.prompt_length if self._singly else len(tokens)
                logits = self._greenlet.switch(tokens[: self.computed])
            for token in tokens[self.computed :]:
                logits = self._greenlet.switch(token)
        self.computed = len(tokens)
        return logits

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
            **self._seen(tokens),
        )


class _Chosen(LogitsProcessor):
    """Hands the logits of a step to the engine, and leaves the token that the engine chooses as the only one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = greenlet.getcurrent().parent.switch(scores)
        torch.set_grad_enabled(False)
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, token] = 0
        return chosen
