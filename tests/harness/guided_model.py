"""A model of random preferences that keeps to the grammar of a request, for tests of grammars."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np

from ipc.wire.messages import GenerateCall, ToolUse
from ipc.wire.streams import REASONING, TEXT
from tests.harness.called import calls_in
from tests.tiny import chat_tokenizers
from workers.generation.formats.table import Format, detect
from workers.generation.grammar import Grammars, Guide
from workers.generation.request import Emission, GenerationRequest
from workers.generation.templates import ChatTemplate
from workers.generation.text import PARTS, ChoiceOutput, Vocabulary

MESSAGES = [{"role": "user", "content": "Hi"}]


class Answer(NamedTuple):
    """The visible text and all segments that a random model's tokens have become; `ended` by an end token or a rule."""

    text: str
    segments: list[Emission]
    ended: bool

    def said(self, kind: int) -> str:
        """All text of a kind."""
        return "".join(segment.text for segment in self.segments if segment.kind == kind)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names and arguments of the calls that are whole."""
        return [(call.name, json.loads(call.arguments)) for call in calls_in(self.segments) if call.is_whole]


class Model:
    """A tokenizer with its format, and a model with random preferences."""

    def __init__(self, kind: str, tool_format: str = "", tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or chat_tokenizers.build(kind)
        self.size = -(-len(self.tokenizer) // 64) * 64
        self.end_ids = chat_tokenizers.end_ids(kind, self.tokenizer)
        template = ChatTemplate(self.tokenizer)
        self.form: Format = detect(self.tokenizer, template.text, tool_format)
        self.grammars = Grammars(self.tokenizer, self.size, self.end_ids, self.form)
        self.vocabulary = Vocabulary(self.tokenizer, self.form.marks)
        self._template = template
        pieces = [self.vocabulary.raw(token) for token in range(self.size)]
        closes = np.array([bool(re.search(rb'["}\]>]', piece)) for piece in pieces])
        self._weights = np.where(closes, 20.0, 1.0)
        self._weights[self.end_ids] = 40.0

    def prompt(self, tools: ToolUse | None, **variables: Any) -> str:
        """The text of a prompt."""
        return self._template.prompt(MESSAGES, tools.functions if tools else None, variables).text

    def guide(self, call: GenerateCall, prompt: str, max_tokens: int = 64, said: str | None = None) -> Guide:
        """The grammar of one choice."""
        make = self.grammars.factory(call, prompt, max_tokens, said)
        assert make is not None
        guide = make()
        assert isinstance(guide, Guide)
        return guide

    def answer(
        self,
        call: GenerateCall,
        seed: int,
        prompt: str | None = None,
        most: int = 1500,
        said: str | None = None,
    ) -> Answer:
        """Draw tokens by random weights among the allowed ones until the answer ends."""
        prompt = self.prompt(call.tools) if prompt is None else prompt
        guide = self.guide(call, prompt, said=said)
        chance = np.random.default_rng(seed)
        weights = self._weights * chance.exponential(size=self.size)
        bits = np.zeros(self.grammars.words, dtype=np.int32)
        request = GenerationRequest("key", [1], call, most, frozenset(self.end_ids))
        held = call.grammar is not None
        request.make_parser = lambda: self.form.parser(prompt, call.tools, call.splits, said, held=held)
        output, told = ChoiceOutput(self.vocabulary, request, 0), list[Emission]()
        while output.ended is None:
            guide.fill_mask(bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.size].astype(bool)
            assert allowed[self.end_ids].all() == guide.is_accepting
            assert allowed[self.end_ids].any() == guide.is_accepting
            odds = np.where(allowed, weights, 0.0)
            token = int(chance.choice(self.size, p=odds / odds.sum()))
            for taken in [token, *self.consumed(guide, token)]:
                if output.ended is None:
                    told += output.push(taken, None)
        assert not guide.error
        told += output.finish(output.ended)
        segments = [each for each in told if each.kind in (TEXT, REASONING, *PARTS)]
        return Answer("".join(each.text for each in segments), segments, output.ended == "stop")

    @staticmethod
    def consumed(guide: Guide, token: int) -> list[int]:
        """Take a token; returns the tokens that the grammar forces next, which are taken too."""
        assert guide.consume(token)
        forced = guide.forced()
        assert all(guide.consume(taken) for taken in forced)
        return forced
