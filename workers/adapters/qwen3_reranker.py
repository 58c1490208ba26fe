"""Rerankers that are language models: the model answers with yes or no whether a document answers a query.

The score is the probability of "yes" against "no" as the next token, in the form of the Qwen3-Reranker model cards.
Templates and both words are options, for similar models with other words.

1. `prepare` fills the template. The prefix and suffix around the template are never cut. A pair that is too long loses
   the end of the document; a query of more than half of the room loses its own end first.
2. `score` runs the pairs as one packed row and multiplies the last token's vector with the two words' rows of the
   output matrix. No other logits are computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ipc.wire.messages import Call
from workers.adapters.base import AdapterSpec, Excess, LoadContext, Prepared
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import build_model, stored_limit, text_limit, tokenizer_of
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.heads import answer_rows
from workers.adapters.shared.known_ids import KnownIds, embedding_rows
from workers.adapters.shared.linears import lay_out_linears
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import Int64Array, PackedBatch, TokenSequence
from workers.adapters.shared.pairs import (
    PairTokenizer,
    ScoreAdapter,
    activation,
    pair_excess,
    query_of,
)
from workers.adapters.shared.tokenizing import apart_ids, as_ids

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
_FIELDS = re.compile(r"(\{instruction\}|\{query\}|\{text\})")


@dataclass(frozen=True, slots=True)
class Wording:
    """The text around query and document. Raises ValueError for a template without {query} or without {text}."""

    template: str = TEMPLATE
    prefix: str = PREFIX
    suffix: str = SUFFIX

    def __post_init__(self) -> None:
        for field in ("{query}", "{text}"):
            if self.template.count(field) != 1:
                raise ValueError(f"pair_template needs {field} once: {self.template!r}")

    def fill(self, instruction: str, query: str, text: str) -> str:
        """The pair as text. Braces inside of the values are plain characters."""
        values = {"{instruction}": instruction, "{query}": query, "{text}": text}
        return "".join(values.get(part, part) for part in _FIELDS.split(self.template))


class Qwen3RerankerAdapter(ScoreAdapter):
    """A causal language model of which two output rows are used."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="qwen3_reranker",
        operations=("score",),
        inputs=("text",),
        outputs=("score",),
    )
    uses = ScoreAdapter.uses | {"default_instruction"}
    _model: TextEncoder

    def __init__(
        self,
        encoder: TextEncoder,
        pairs: PairTokenizer,
        answers: nn.Linear,
        wording: Wording,
        function: nn.Module,
    ) -> None:
        """Put the parts together; `answers`, fp32 [2, width], holds the rows of the positive and the negative word.

        Raises ValueError when prefix and suffix leave no room for a pair.
        """
        super().__init__(encoder, pairs, function)
        self._answers, self._wording = answers, wording
        prefix, suffix = (as_ids(half.ids) for half in pairs.halves([wording.prefix, wording.suffix]))
        self._prefix, self._suffix = prefix, suffix
        self._room = pairs.limit - len(prefix) - len(suffix)
        if self._room < 2:
            raise ValueError(
                f"prefix and suffix take {len(prefix) + len(suffix)} tokens of the {pairs.limit} of this model"
            )

    @classmethod
    def load(cls, context: LoadContext) -> Qwen3RerankerAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError for templates or answers that do not fit the model.
        """
        options = context.options
        tokenizer = tokenizer_of(context)
        model = build_model(context, AutoModelForCausalLM)
        answers = answer_rows(model, tokenizer, options)
        backbone = model.base_model
        del model
        if context.device.type == "cpu":
            lay_out_linears(backbone, findings=context.findings)
        encoder = TextEncoder(backbone, **apart_ids(tokenizer))
        limit = text_limit(backbone, context.max_sequence_length, stored_limit(tokenizer))
        adapter = cls(
            encoder,
            PairTokenizer(tokenizer, limit, "longest_first"),
            answers,
            _wording(options),
            activation(str(options.get("activation", "sigmoid"))),
        )
        adapter.tokenizer = tokenizer
        adapter.known_ids = KnownIds(embedding_rows(backbone), tokenizer)
        return adapter

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model.model, self._answers)

    def joined(self, texts: Sequence[str], call: Call) -> list[Prepared]:
        """Fill the template for each document, tokenize, and cut to the model's length."""
        query = query_of(call)
        default = OptionReader(call).text("default_instruction", INSTRUCTION)
        instruction = call.instruction or default
        filled = [self._wording.fill(instruction, query, text) for text in texts]
        sequences = [half.ids for half in self._pairs.halves(filled)]
        long = {at: len(ids) for at, ids in enumerate(sequences) if len(ids) > self._room}
        if long:
            query_part = self._kept(query)
            if len(query_part) < len(query):
                shorter = [self._wording.fill(instruction, query_part, texts[at]) for at in long]
                for at, half in zip(long, self._pairs.halves(shorter), strict=True):
                    sequences[at] = half.ids
        excesses = self._excesses(query, long) if long else {}
        return [self._prepared(ids, excesses.get(at)) for at, ids in enumerate(sequences)]

    def _prepared(self, ids: list[int], excess: Excess | None) -> Prepared:
        whole: Int64Array = np.concatenate((self._prefix, as_ids(ids[: self._room]), self._suffix))
        return Prepared(TokenSequence(whole), len(whole), excess is not None, excess=excess)

    def _excesses(self, query: str, long: Mapping[int, int]) -> dict[int, Excess]:
        """How much is cut of each pair that is too long. `long` holds the tokens of these pairs by place."""
        around, limit = self._pairs.limit - self._room, self._pairs.limit
        [alone] = self._pairs.halves([query])
        taken = len(alone.ids) + around
        return {at: pair_excess(taken, tokens + around, limit) for at, tokens in long.items()}

    def _kept(self, query: str) -> str:
        """The beginning of a query that fits into half of the room; kept in pairs that are too long."""
        [half] = self._pairs.halves([query])
        most = self._room // 2
        return query if len(half.ids) <= most else query[: half.offsets[most - 1][1]]

    @torch.inference_mode()
    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """The positive word's logit above that of the negative word."""
        batch = batch.to(self._model.device)
        rows = self._model.token_rows(batch)
        last = rows.index_select(0, batch.layout.last.index_select(0, batch.restore))
        logits = self._answers(last.float())
        return logits[:, 0] - logits[:, 1]


def _wording(options: Mapping[str, Any]) -> Wording:
    """The catalog's templates over the model card's."""
    return Wording(
        str(options.get("pair_template", TEMPLATE)),
        str(options.get("prefix", PREFIX)),
        str(options.get("suffix", SUFFIX)),
    )
