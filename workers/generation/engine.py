"""Generates for many sequences at once: one packed forward pass a step over the paged key-value cache.

1. `add` makes a sequence of each choice of a request; the sequences wait in the scheduler.
2. `step` takes the scheduler's plan and lays the tokens of all spans into one row without padding. The masks of
   grammars are filled in another thread while the model runs.
3. Tokens of a prompt get their log probabilities where the request asks for these (`scoring`).
4. The sampler chooses the next token of every sequence whose tokens are all computed.
5. Text is made of the tokens, and `Emission`s tell what each choice has got. A sequence that has ended gives its blocks
   back; those with a whole content can be found by later requests with the same beginning.

With a drawer 4 happens on the device, and 5 while the device computes the next step (`flights`).

All methods belong to one thread. A step that raises has changed nothing and may be tried again, but for `Spoiled`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from ipc.wire.stats import GenerationStats
from ipc.wire.streams import HELD, PROMPT, STARTED, PromptToken, Start, TokenLogprob
from workers import foreign
from workers.device.transfer import sent
from workers.generation.attention import PagedAttention, packed_pass
from workers.generation.blocks import BlockPool
from workers.generation.captured import CapturedPrompts, CapturedSteps, replayed
from workers.generation.flights import (
    Chosen,
    Drawer,
    Entry,
    Flight,
    Masks,
    Reading,
    Sampler,
    divided,
    entry_of,
    some_of,
)
from workers.generation.lora_rows import StepLoras, StepRows, rows_of
from workers.generation.pictures.family import Picture
from workers.generation.pictures.reading import PromptReader
from workers.generation.request import Emission, GenerationRequest, Matcher
from workers.generation.scheduler import Output, Scheduler, Span, Spoiled
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scoring import first_token, scored_spans
from workers.generation.step_plan import plan_of
from workers.generation.tower import Tower

_WITHOUT_LORAS = nullcontext()


class Engine:
    """One model that generates."""

    def __init__(
        self,
        model: Any,
        attention: PagedAttention | None,
        pool: BlockPool,
        sampler: Sampler,
        masks: Masks,
        make_output: Callable[[GenerationRequest, int], Output],
        *,
        max_sequences: int = 32,
        prefill_tokens: int = 512,
        scored_tokens: int = 512,
        captured: CapturedSteps | None = None,
        prompts: CapturedPrompts | None = None,
        tower: Tower | None = None,
        drawer: Drawer | None = None,
    ) -> None:
        """`attention` is the one that `model` runs with, its cache as large as `pool`; None with another `_forward`.

        A step computes logits of at most `scored_tokens` tokens of prompts. `captured` computes steps of single tokens,
        `prompts` those with parts of prompts, where CUDA can capture them. A model that sees has a `tower`. With a
        `drawer` a step is launched before the host has read the tokens of the step before.
        `make_output(request, choice)` gives each choice what makes its text.
        """
        self.model, self.attention, self.pool = model, attention, pool
        self._sampler, self._masks, self._make_output = sampler, masks, make_output
        self.max_sequences, self._captured, self._prompts = max_sequences, captured, prompts
        self._rope = None if attention is None else attention.rope
        self.tower = tower
        self._scheduler = Scheduler(pool, max_sequences, prefill_tokens, self._rope, scored_tokens, tower)
        self._orders = itertools.count()
        self._by_key: dict[Hashable, list[Choice]] = {}
        self._emitted: list[Emission] = []
        self._prompt_tokens = self._output_tokens = 0
        self._drawer = drawer
        self._flight: Flight | None = None
        """The step that has not landed."""
        self.loras: StepLoras | None = None
        """The LoRA adapters of the model, where its family has some."""

    @property
    def capacity(self) -> int:
        """Tokens that the whole cache holds: the longest sequence, prompt and answer together."""
        return self.pool.total * self.pool.block_tokens

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the cache, and at most of features of pictures; 0 where the model keeps its own for each request."""
        features = 0 if self.tower is None else self.tower.store.limit_nbytes
        return features + (0 if self.attention is None else self.capacity * self.attention.token_nbytes())

    @property
    def reader(self) -> PromptReader | None:
        """Reads prompts with pictures; None for a model that does not see."""
        return None if self.tower is None else self.tower.reader

    def processed(self, picture: Picture) -> Picture:
        """The picture with its inputs, unless its features are stored or too many inputs wait.

        Any thread. Raises `InvalidInput`.
        """
        assert self.tower is not None
        return picture if picture.digest in self.tower.store else self.tower.reader.ahead(picture)

    @property
    def prefill_tokens(self) -> int:
        """Most tokens of prompts in one step."""
        return self._scheduler.prefill_tokens

    @prefill_tokens.setter
    def prefill_tokens(self, tokens: int) -> None:
        self._scheduler.prefill_tokens = tokens

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        is_under_way = self._flight is not None and bool(self._flight.live)
        return self._scheduler.can_go_on or bool(self._emitted) or is_under_way

    @property
    def keys(self) -> Iterable[Hashable]:
        """The requests that have not ended."""
        return self._by_key.keys()

    def choices_of(self, request: GenerationRequest) -> list[Choice]:
        """The choices of a request that have not ended, for `add`. Any thread.

        What an earlier worker has written is replayed here, which takes some microseconds a token.
        """
        request.max_tokens = min(request.max_tokens, self.capacity - len(request.prompt))
        choices: list[Choice] = []
        for number in range(request.call.n):
            if not request.has_ended(number):
                matcher = None if request.make_matcher is None else request.make_matcher()
                output = self._make_output(request, number)
                choice = Choice(request, number, 0, output, matcher, leads=not choices)
                if request.pictures and self.tower is not None:
                    choice.see(self.tower.sight(request.pictures, self.pool.block_tokens))
                choices.append(choice)
        return choices

    def add(self, request: GenerationRequest, choices: list[Choice] | None = None) -> None:
        """Begin a request. Its prompt must be shorter than `capacity`; an answer ends at the end of the cache.

        `choices` are those of `choices_of`. A text that an earlier worker has begun goes before those that wait. Raises
        KeyError for a LoRA adapter that is not installed. The request keeps its adapter to its end.
        """
        if request.call.lora:
            assert self.loras is not None
            request.lora = self.loras.get(request.call.lora)
        choices = self.choices_of(request) if choices is None else choices
        self._by_key[request.key] = choices
        for sequence in choices:
            sequence.order = next(self._orders)
            if not request.is_carried_on:
                self._scheduler.add(sequence)
        for sequence in reversed(choices if request.is_carried_on else []):
            self._scheduler.add_first(sequence)
        for sequence in list(choices):
            # NOTE: the cache of the earlier worker may have been larger than this one.
            if sequence.output.ended is not None:
                self._end(sequence, sequence.output.ended)

    def cancel(self, key: Hashable) -> None:
        """End a request at once, without a word. Idempotent."""
        for sequence in self._by_key.pop(key, ()):
            if not sequence.done:
                self._scheduler.remove(sequence)
        if self._emitted:
            self._emitted = [emission for emission in self._emitted if emission.key != key]
        self._forget_unwanted()

    def has_chosen(self, key: Hashable) -> bool:
        """Whether some choice of an open request has a token that was not there when the request came."""
        return any(len(each.tokens) > each.given for each in self._by_key.get(key, ()))

    def pause(self, key: Hashable) -> None:
        """Compute no more of a request until `resume`, as its client does not read."""
        for sequence in self._by_key.get(key, ()):
            if not sequence.done:
                self._scheduler.pause(sequence)
        self._forget_unwanted()

    def resume(self, key: Hashable) -> None:
        """Go on with a request that was paused."""
        for sequence in reversed(self._by_key.get(key, ())):
            if sequence.paused:
                self._scheduler.resume(sequence)

    def step(self, ahead: bool = True) -> list[Emission]:
        """One forward pass for all sequences, behind a turn of the tower; returns what the choices have got.

        With a drawer, and unless `ahead` is false, the pass is launched and the one before lands. Raises `Unseen`
        before the pass.
        """
        if self.tower is not None:
            self.tower.turn(self._scheduler.waiting, self.prefill_tokens)
        spans = self._scheduler.plan(self._runs_ahead)
        if not spans and self._flight is not None:
            self._land_all()
            spans = self._scheduler.plan()
        if spans:
            before, self._flight = self._flight, self._launch(spans)
            if before is not None:
                self._land(before)
            if self._flight.guided:
                self._begin_masks(self._flight)
            # NOTE: the tokens of prompts are told by logits whose memory the next step needs.
            if self._drawer is None or not ahead or any(self._flight.told.values()):
                self._land_all()
        self._forget_unwanted()
        emitted, self._emitted = self._emitted, []
        return emitted

    def _forget_unwanted(self) -> None:
        """Let go of a step under way that nobody wants, with its logits and requests, where no step follows soon.

        A step that follows lands the one before, and lets go of it.
        """
        flight = self._flight
        if flight is None or flight.live or self._scheduler.can_go_on:
            return
        if flight.is_masked:
            self._masks.wait()
        self._flight = None

    def _runs_ahead(self, sequence: Choice) -> bool:
        """Whether a sequence goes on behind a token that the host has not read."""
        flight = self._flight
        is_known = flight is not None and flight.unread is not None and sequence in flight.unread.places
        return is_known and sequence.length - sequence.prompt_length < sequence.request.max_tokens

    def _waits(self, sequence: Choice, drawer: Drawer) -> bool:
        """Whether the host chooses the next token of a sequence, or has to look at the token before the next step."""
        computes_anew = self._rope is not None and self._rope.anew
        return sequence.matcher is not None or computes_anew or drawer.waits(sequence)

    def _launch(self, spans: list[Span]) -> Flight:
        """Begin a step. What raises here has changed nothing."""
        spans, rows = self._adapters(spans) if self.loras else (spans, None)
        entries = list(map(entry_of, spans))
        choosing = [entry.span.sequence for entry in entries if entry.chooses]
        guided = [sequence for sequence in choosing if sequence.matcher is not None]
        untold = [span for span in spans if span.sequence.tells_prompt]
        # NOTE: one buffer holds a step's masks, and the step before may not have read its own.
        is_masked = bool(guided) and self._flight is None
        if is_masked:
            self._masks.begin(guided)
        try:
            with self.loras.over(rows) if self.loras else _WITHOUT_LORAS:
                logits = self._forward(spans)
                scores = self._score(untold, logits, len(choosing)) if untold else {}
            early, drawn, late, logits_of_late = divided(choosing, logits, self._drawer, self._waits)
        except BaseException:
            if is_masked:
                self._masks.wait()
            raise
        for span, _, _, chooses in entries:
            self._scheduler.launched(span, chooses)
        return Flight(entries, early, drawn, late, logits_of_late, guided, is_masked, scores)

    def _begin_masks(self, flight: Flight) -> None:
        """Begin to fill the masks of a step, if this was not done at its launch."""
        guided = [sequence for sequence in flight.guided if not sequence.done]
        if guided and not flight.is_masked:
            self._masks.begin(guided)
            flight.is_masked = True

    def _land_all(self) -> None:
        """Take the outcome of the step that is under way."""
        flight = self._flight
        assert flight is not None
        try:
            self._land(flight)
        finally:
            self._flight = None

    def _land(self, flight: Flight) -> None:
        """Take the outcome of a step. What raises here revokes all steps under way; but for `Spoiled` that is all."""
        live = flight.live
        try:
            if flight.guided:
                self._begin_masks(flight)
            if flight.is_masked:
                self._masks.wait()
            choosing = [entry.span.sequence for entry in live if entry.chooses]
            chosen, missed = self._choose(flight, choosing)
        except BaseException:
            for entry in [*flight.live, *(self._flight.live if self._flight is not None else ())]:
                self._scheduler.revoke(entry.span.sequence)
            raise
        self._note(live, flight.told)
        for sequence in missed:
            self._scheduler.revoke(sequence)
        self._take(choosing, chosen)

    def _choose(self, flight: Flight, choosing: list[Choice]) -> tuple[list[Chosen], Collection[Choice]]:
        """The next tokens of `choosing`, which still want theirs, in this order; and who was `missed`."""
        if flight.drawn is None and len(choosing) == len(flight.waiting):
            with flight.beside():
                return self._sampler.sample(flight.logits, choosing) if choosing else [], ()
        wanted = set(choosing)
        read = Reading({}, ()) if flight.drawn is None else flight.drawn.read(wanted)
        chosen = dict(read.chosen)
        if rows := [at for at, sequence in enumerate(flight.waiting) if sequence in wanted]:
            with flight.beside():
                logits = some_of(flight.logits, rows, len(flight.waiting))
                waiting = [flight.waiting[at] for at in rows]
                chosen.update(zip(waiting, self._sampler.sample(logits, waiting), strict=True))
        return [chosen[sequence] for sequence in choosing], read.missed

    def _adapters(self, spans: list[Span]) -> tuple[list[Span], StepRows | None]:
        """The spans in the order in which the step computes these, and which rows have LoRA adapters."""
        return rows_of(spans)

    def _take(self, choosing: Sequence[Choice], chosen: Sequence[Chosen]) -> None:
        """Each sequence takes its token. Raises `Spoiled` for those that could not, once all have had their turn."""
        # PERF: `dict[Choice, Exception]()` would make its type anew in each step.
        failed: dict[Choice, Exception] = {}
        emitted = self._emitted
        for sequence, (token, logprob) in zip(choosing, chosen, strict=True):
            before = len(emitted)
            try:
                self._append(sequence, token, logprob)
                if sequence.matcher is not None and not sequence.done:
                    self._follow(sequence, sequence.matcher, token)
                if sequence.request.written is not None and len(emitted) > before:
                    self._tell_ids(sequence, emitted[-1])
            except BaseException as raised:
                failed[sequence] = foreign.error_of(raised)
        if failed:
            raise Spoiled(list(failed)) from next(iter(failed.values()))

    @staticmethod
    def _tell_ids(sequence: Choice, last: Emission) -> None:
        """The last entry brings the ids of the tokens up to this step, forced ones included.

        A worker that replays these tokens goes on at the beginning of the next step.
        """
        # NOTE: without its ids these tokens are written again, with their log probabilities.
        if last.kind != HELD or sequence.call.sampling.logprobs is None:
            last.written = sequence.untold()

    @torch.inference_mode()
    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [rows, vocabulary] of one packed pass: of the sequences that choose, then of the scored places."""
        assert self.attention is not None
        begins = list(itertools.accumulate((span.stop - span.start for span in spans), initial=0))
        rows = [end - 1 for end, span in zip(begins[1:], spans, strict=True) if span.chooses]
        for begin, span in zip(begins, spans, strict=False):
            if span.sequence.tells_prompt:
                rows += [begin + place - span.start for place in span.scores]
        every = rows == list(range(begins[-1]))
        hooked = self.loras is not None and self.loras.active
        unread = None if self._flight is None else self._flight.unread
        captured = (None, None) if hooked else (self._captured, self._prompts)
        if (logits := replayed(*captured, spans, None if every else rows, unread)) is not None:
            return logits
        plan = plan_of(spans, self.pool.block_tokens, self.model.device, unread)
        keep = 0 if every else sent(np.array(rows or [0], np.int64), self.model.device)
        return packed_pass(self.model, self.attention, plan, keep, hooked=hooked)

    def _score(
        self, spans: Sequence[Span], logits: torch.Tensor, row: int
    ) -> dict[Choice, list[PromptToken]]:
        """The tokens of prompts that the logits [rows, vocabulary] tell from a row on."""
        return scored_spans(spans, logits, row)

    def _note(self, entries: Sequence[Entry], told: Mapping[Choice, Sequence[PromptToken]]) -> None:
        """The tokens of the spans are in the cache, and `told` are those of prompts that are known now."""
        for span, _, completes, chooses in entries:
            sequence, start, stop = span
            if start < sequence.prompt_length:
                self._prompt_tokens += min(stop, sequence.prompt_length) - start
            if sequence.leads and not sequence.started:
                self._begin(sequence)
            if told and (tokens := told.get(sequence)):
                self._tell(sequence, tokens, sequence.scored)
            self._scheduler.landed(span, chooses)
            if completes and not chooses:
                self._end(sequence, "length")

    def _begin(self, sequence: Choice) -> None:
        """Tell once that a request has begun, and what is known of its prompt before the first step."""
        sequence.started = True
        key, text = sequence.request.key, sequence.request.prompt_text
        waited_ns = sequence.request.phases.waited_ns
        start = Start(sequence.prompt_length, sequence.cached_tokens, waited_ns=waited_ns)
        self._emitted.append(Emission(key, 0, STARTED, start=start))
        if sequence.request.is_carried_on:
            return
        if text is not None and sequence.call.prompt_logprobs is not None:
            self._tell(sequence, [first_token(sequence, text)], 0)
        elif text is not None:
            self._emitted.append(Emission(key, 0, PROMPT, text.text))

    def _tell(self, sequence: Choice, tokens: Sequence[PromptToken], first: int) -> None:
        """Tell tokens of the prompt, of which `first` is the number of the first."""
        text = sequence.request.prompt_text
        assert text is not None
        sequence.note_scored(first + len(tokens))
        piece = text.between(first, sequence.scored)
        self._emitted.append(Emission(sequence.request.key, 0, PROMPT, piece, prompt=tokens))

    def _follow(self, sequence: Choice, matcher: Matcher, token: int) -> None:
        """The grammar takes the chosen token; the tokens that the grammar forces behind it are appended."""
        matcher.consume(token)
        # NOTE: log probabilities of forced tokens need a pass each, so a request for them forces nothing.
        if sequence.call.sampling.logprobs is None:
            for forced in matcher.forced():
                if sequence.output.ended is not None or not matcher.consume(forced):
                    return
                self._append(sequence, forced, None)

    def _append(self, sequence: Choice, token: int, logprob: TokenLogprob | None) -> None:
        """A token more, and the text of the token."""
        self._output_tokens += 1
        sequence.append(token)
        output = sequence.output
        self._emitted += output.push(token, logprob)
        if output.ended is not None:
            self._end(sequence, output.ended)
        elif self._rope is not None and self._rope.restarts(sequence):
            self._scheduler.restart(sequence)

    def _end(self, sequence: Choice, reason: str) -> None:
        self._emitted += sequence.output.finish(reason)
        self._scheduler.remove(sequence)
        key = sequence.request.key
        if all(choice.done for choice in self._by_key[key]):
            del self._by_key[key]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Requests that are added in this block run without those of before, which go on afterwards."""
        before = [each for choices in self._by_key.values() for each in choices if not each.done]
        waiting = sorted((each for each in before if not each.paused), key=lambda each: each.order)
        emitted, self._emitted = self._emitted, []
        for sequence in waiting:
            self._scheduler.pause(sequence)
        try:
            yield
        finally:
            for sequence in reversed(waiting):
                self._scheduler.resume(sequence)
            self._emitted = emitted + self._emitted

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Tokens of steps in this block are not counted: those of a proof, which nobody has asked for."""
        counts = self._prompt_tokens, self._output_tokens
        try:
            yield
        finally:
            self._prompt_tokens, self._output_tokens = counts

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts and answers that were computed so far."""
        return self._prompt_tokens + self._output_tokens

    def statistics(self, model: str = "") -> GenerationStats:
        """The numbers of this moment, of the engine of `model`."""
        scheduler, pool = self._scheduler, self.pool
        return GenerationStats(
            model,
            self.max_sequences,
            len(scheduler.running),
            len(scheduler.waiting),
            pool.used,
            pool.total,
            self._prompt_tokens,
            self._output_tokens,
            scheduler.preemptions,
            pool.lookups,
            pool.hits,
            pool.evictions,
            *(() if self.tower is None else self.tower.numbers),
        )
