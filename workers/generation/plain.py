"""Generates with a model's own cache, one sequence at a time, for models that packed steps do not suit.

transformers' `generate()` runs in a greenlet. The run stops at every step with the logits of the next token, and goes
on with the token that the engine's sampler has chosen. Another sequence, and tokens that a grammar forces, begin a new
run over all tokens so far. Where the positions of a model depend on the length of the text, a run gets the tokens
behind the prompt one by one. So does a run of a model whose pictures transformers' own processor reads, which knows
the arguments of the prompt alone.

Log probabilities of a prompt come from passes over the whole prompt, each of which computes the logits of some tokens.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
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
from workers.generation.request import GenerationRequest
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
        return spans, whole(spans) if self.loras else None

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [1, vocabulary] of the one sequence, or none."""
        [span] = spans
        if not span.chooses:
            return torch.empty(0, 0)
        run = self._run
        if run is None or not run.continues(span):
            if run is not None:
                run.close()
            run = self._run = Run(
                self._bare,
                span.sequence,
                partial(self._arguments, span.sequence),
                singly=self._reader is not None and not self._reader.in_steps,
            )
        try:
            return run.logits(span.sequence.tokens)
        except BaseException:
            self._run = None
            raise

    def _score(self, spans: Sequence[Span], logits: torch.Tensor) -> dict[Choice, list[PromptToken]]:
        """The tokens of the one prompt, by passes of their own."""
        [span] = spans
        places, found = span.scores, []
        for at in range(0, len(places), self._scored_tokens):
            some = places[at : at + self._scored_tokens]
            found += scored(span.sequence, some, self._logits_at(span.sequence, some))
        return {span.sequence: found}

    @torch.no_grad()
    def _logits_at(self, sequence: Choice, places: Sequence[int]) -> torch.Tensor:
        """Logits [places, vocabulary] of a prompt."""
        forget_lengths(self.model)
        device = self.model.device
        ids = torch.tensor([sequence.tokens[: sequence.prompt_length]], device=device)
        rows = torch.tensor(places, device=device)
        kept = {"logits_to_keep": rows} if self._keeps_some else {}
        logits: torch.Tensor = self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            **kept,
            **self._arguments(sequence, sequence.tokens[: sequence.prompt_length]),
        ).logits[0]
        return logits if self._keeps_some else logits[rows]


def without_settings(model: Any) -> Any:
    """The same model for `generate()` without stored settings, which would end texts and change logits."""
    bare = copy.copy(model)
    bare.generation_config = GenerationConfig()
    return bare


class Run:
    """One call of `generate()`, which is asked for logits step by step."""

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
        self._model, self._sequence, self._seen = model, sequence, seen
        self._greenlet = greenlet.greenlet(self._generate)
        self._computed, self._singly = 0, singly or depends_on_length(model)

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
