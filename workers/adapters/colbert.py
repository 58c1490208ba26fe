"""ColBERT: one normalised vector per token, compared by late interaction (arXiv 2004.12832, 2112.01488).

1. A marker token (or text) after the first special token marks a query or a document.
2. Queries are filled up to a fixed length with mask tokens, which get vectors but are usually not attended to.
3. Documents give no vectors for punctuation.
4. The transformer's token vectors go through the projection and are normalised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, EncodeCall, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.heads import load_head
from workers.adapters.shared.late_interaction import LateInteraction
from workers.adapters.shared.long_texts import Tokens
from workers.adapters.shared.packing import Int64Array
from workers.adapters.shared.sentence_transformers_layout import (
    LateLayout,
    read_late_layout,
    stanford_projection,
)
from workers.adapters.shared.text_model import (
    TextAdapter,
    TextBatch,
    TextModel,
    TextPayload,
    TokenVectors,
    is_query,
    most_tokens,
    sequence_of,
)


class ColbertAdapter(LateInteraction, TextAdapter):
    """A transformer, a projection, and the rules about markers, expansion and punctuation."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="colbert",
        operations=("encode", "score"),
        inputs=("text",),
        outputs=("multivector", "score"),
        lora=True,
    )

    def __init__(self, text: TextModel, layout: LateLayout, projection: nn.Module) -> None:
        """Put the parts together; `projection` maps fp32 token vectors to the output's width."""
        super().__init__(text, projection)
        self._layout, self._projection = layout, projection
        tokenizer = text.tokenizer
        unknown = tokenizer.marker_ids("unk")
        skipped = {number for word in layout.skip_words if (number := tokenizer.id_of(word)) is not None}
        self._skipped = np.array(sorted(skipped - unknown), dtype=np.int64)
        self._markers = tuple(
            _marker(text, prefix) for prefix in (layout.document_prefix, layout.query_prefix)
        )
        fillers = tokenizer.marker_ids("mask") or tokenizer.marker_ids("eos")
        self._filler = min(fillers, default=tokenizer.pad_id)
        self._width = self._proof_width()

    @classmethod
    def load(cls, context: LoadContext) -> ColbertAdapter:
        """Load layout, transformer and projection; progress phases are "tokenizer", "weights" and "proof"."""
        layout = read_late_layout(context.directory, context.options)
        longest = max(layout.document_length or 0, layout.query_length or 0)
        stored = layout.model.max_sequence_length or 0
        text = TextModel.load(
            context, replace(layout.model, max_sequence_length=max(longest, stored) or None)
        )
        if layout.heads:
            parts = [load_head(head.kind, head.directory, head.config) for head in layout.heads]
            projection: nn.Module = nn.Sequential(*parts)
        else:
            weight = stanford_projection(context.directory)
            projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            projection.load_state_dict({"weight": weight})
        adapter = cls(text, layout, projection.float().to(context.device).eval().requires_grad_(False))
        context.progress("proof", 1.0)
        return adapter

    @property
    def max_sequence_length(self) -> int:
        """Longest document in tokens, marker and special tokens included."""
        return self._length(is_query=False)

    @property
    def dims(self) -> dict[str, int]:
        """Width of one token's vector."""
        return {"multivector": self._width}

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse to split queries, which have a fixed length."""
        super().refuse_unsupported(call)
        if call.overflow == "chunk" and is_query(call):
            raise InvalidInput(
                f"{call.names.options}overflow_policy: queries of this model cannot be split, only documents"
            )

    def sides(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize as queries or documents."""
        found = self.late_payloads(items, call)
        return [payload.prepared(truncated) for payload, truncated in found]

    def late_payloads(self, items: Sequence[InputItem], call: Call) -> Iterator[tuple[TextPayload, bool]]:
        """Each query or document as a payload, and whether the text was cut."""
        layout, tokenizer = self._layout, self._text.tokenizer
        as_query = is_query(call)
        marker, prefix = self._markers[as_query]
        before = prefix + self._text.affixes(call).before
        texts = [before + tokenizer.text_of(item) for item in items]
        length = self._length(as_query)
        most = most_tokens(call, length)
        room = most - (marker is not None)
        for windows, truncated, tokens in tokenizer.windows(texts, call.overflow, room):
            excess = Excess(tokens + most - room, most) if truncated and tokens else None
            marked = [window if marker is None else self._marked(window, marker) for window in windows]
            if as_query and layout.expansion:
                yield replace(self._expanded(marked[0], length), excess=excess), truncated
                continue
            picks = tuple(np.arange(len(p.ids)) if as_query else self._scored(p) for p in marked)
            yield TextPayload(tuple(map(sequence_of, marked)), picks, excess=excess), truncated

    def _length(self, is_query: bool) -> int:
        """Longest query or document in tokens."""
        stored = self._layout.query_length if is_query else self._layout.document_length
        return min(stored or self._text.limit, self._text.limit)

    def _marked(self, window: Tokens, marker: int) -> Tokens:
        """The window with the marker behind the first special tokens."""
        at = self._text.tokenizer.frame.before
        types = window.types and [*window.types[:at], 0, *window.types[at:]]
        return Tokens([*window.ids[:at], marker, *window.ids[at:]], types)

    def _expanded(self, window: Tokens, length: int) -> TextPayload:
        """A query filled up to `length` tokens, each of which gives a vector."""
        missing = length - len(window.ids)
        types = window.types and [*window.types, *([0] * missing)]
        sequence = sequence_of(Tokens([*window.ids, *([self._filler] * missing)], types))
        seen = None if self._layout.attend_to_expansion or not missing else len(window.ids)
        return TextPayload((replace(sequence, seen=seen),), (np.arange(length),))

    def _scored(self, window: Tokens) -> Int64Array:
        """Places of the tokens of a document that give vectors."""
        return np.flatnonzero(~np.isin(window.ids, self._skipped))

    def encode(self, batch: TextBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"multivector": fp32 [R, dims]}."""
        return {"multivector": self.token_vectors(batch)}

    @torch.inference_mode()
    def token_vectors(self, batch: TextBatch) -> torch.Tensor:
        """fp32 [R, dims]: the normalised token vectors of a batch, item after item."""
        found = TokenVectors(batch)
        for row, _, rows in self._text.run(batch):
            found.add(F.normalize(self._projection(self._text.picked(row, rows).float()), dim=-1))
        return found.whole()

    def _proof_width(self) -> int:
        """The width of the vectors of an empty query. Raises RuntimeError for values that are not finite."""
        [(payload, _)] = self.late_payloads([InputItem("")], EncodeCall([], [], is_query=True))
        vectors = self.token_vectors(self._text.collate([payload]))
        if not bool(torch.isfinite(vectors).all()):
            raise RuntimeError("the model's first vectors are not finite")
        return vectors.shape[1]


def _marker(text: TextModel, prefix: str) -> tuple[int | None, str]:
    """(marker token, text after it): a prefix is one token where the vocabulary has it, else plain text."""
    for token in (prefix, prefix.strip(), f"{prefix.strip()} ", prefix.split(" ", 1)[0]):
        number = text.tokenizer.id_of(token) if token else None
        if number is not None:
            return number, prefix[len(token) :].lstrip() if len(prefix.strip()) > len(token) else ""
    return None, prefix
