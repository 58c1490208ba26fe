"""ColBERT: one normalised vector per token, compared by late interaction (arXiv 2004.12832, 2112.01488).

1. A marker token (or text) after the first special token marks a query or a document.
2. Queries are filled up to a fixed length with mask tokens, which get vectors but are usually not attended to.
3. Documents give no vectors for punctuation, or other tokens that the model states.
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
from workers.adapters.shared.heads import build_head
from workers.adapters.shared.late_interaction import LateInteraction, PairBatch
from workers.adapters.shared.long_texts import Tokens
from workers.adapters.shared.packing import Int64Array
from workers.adapters.shared.sentence_transformers_layout import (
    Expansion,
    LateLayout,
    read_late_layout,
    stanford_projection,
)
from workers.adapters.shared.text_model import (
    SIDES,
    TextAdapter,
    TextBatch,
    TextModel,
    TextPayload,
    TokenVectors,
    is_query,
    most_tokens,
    sequence_of,
)
from workers.adapters.shared.transformer_settings import UnsupportedLayoutError


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
        self._kept = None if layout.kept_ids is None else np.array(layout.kept_ids, dtype=np.int64)
        self._filler = _filler(text, layout.expansion)
        self._fills_left = _fills_left(text, layout.expansion)
        self._width = self._proof_width()

    @classmethod
    def load(cls, context: LoadContext) -> ColbertAdapter:
        """Load layout, transformer and projection; progress phases are "tokenizer", "weights" and "proof"."""
        layout = read_late_layout(context.directory, context.options)
        expanded = layout.expansion.length if layout.expansion else 0
        longest = max(layout.document_length or 0, layout.query_length or 0, expanded)
        stored = layout.model.max_sequence_length or 0
        text = TextModel.build(
            context, replace(layout.model, max_sequence_length=max(longest, stored) or None)
        )
        if layout.heads:
            parts = [build_head(head.kind, head.directory, head.config) for head in layout.heads]
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
        payloads = self.late_payloads(items, call)
        return [payload.prepared(truncated) for payload, truncated in payloads]

    def late_payloads(self, items: Sequence[InputItem], call: Call) -> Iterator[tuple[TextPayload, bool]]:
        """Each query or document as a payload, and whether the text was cut."""
        tokenizer = self._text.tokenizer
        as_query, expansion = is_query(call), self._layout.expansion
        marker, prefix = self._markers[as_query]
        before = prefix + self._text.affixes(call).before
        length = self._length(as_query)
        most = most_tokens(call, length)
        # NOTE: a model that cuts at the left loses the marker first, which is text to its library.
        loses_marker = tokenizer.cuts_left and call.overflow in ("truncate", "error")
        room = most - (marker is not None and not loses_marker)
        for (windows, truncated, tokens), frame in tokenizer.fitted(items, (before, ""), call.overflow, room):
            excess = Excess(tokens + most - room, most) if truncated and tokens else None
            marked = [
                window
                if marker is None or len(window.ids) >= most
                else self._marked(window, marker, frame.before)
                for window in windows
            ]
            if as_query and expansion is not None and (expansion.attend or expansion.scored):
                yield replace(self._expanded(marked[0], expansion), excess=excess), truncated
                continue
            picks = tuple(self._scored(window.ids, as_query) for window in marked)
            yield TextPayload(tuple(map(sequence_of, marked)), picks, excess=excess), truncated

    def _length(self, is_query: bool) -> int:
        """Longest query or document in tokens."""
        layout = self._layout
        stored = layout.query_length if is_query else layout.document_length
        if is_query and layout.expansion is not None:
            floor = layout.expansion.length
            stored = floor if layout.expansion.cuts else stored and max(stored, floor)
        return min(stored or self._text.limit, self._text.limit)

    def _marked(self, window: Tokens, marker: int, at: int) -> Tokens:
        """The window with the marker behind the first special tokens, of which there are `at`."""
        types = window.types and [*window.types[:at], 0, *window.types[at:]]
        return Tokens([*window.ids[:at], marker, *window.ids[at:]], types)

    def _expanded(self, window: Tokens, expansion: Expansion) -> TextPayload:
        """A query filled up to the length of the expansion. Each token of the filling gives a vector."""
        missing = max(0, min(expansion.length, self._text.limit) - len(window.ids))
        filling = [self._filler] * missing
        ids = [*filling, *window.ids] if self._fills_left else [*window.ids, *filling]
        types = window.types and [*window.types, *([0] * missing)]
        seen = None if expansion.attend or not missing else len(window.ids)
        sequence = replace(sequence_of(Tokens(ids, types)), seen=seen)
        return TextPayload((sequence,), (self._scored(ids, as_query=True),))

    def _scored(self, ids: Sequence[int], as_query: bool) -> Int64Array:
        """Places of the tokens that give vectors."""
        scored = np.ones(len(ids), dtype=bool)
        if SIDES[not as_query] in self._layout.skip_sides:
            scored &= ~np.isin(ids, self._skipped)
        if not as_query and self._kept is not None:
            scored &= np.isin(ids, self._kept)
        return np.flatnonzero(scored)

    def encode(self, batch: TextBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"multivector": fp32 [R, dims]}."""
        return {"multivector": self.token_vectors(batch)}

    @torch.inference_mode()
    def token_vectors(self, batch: TextBatch) -> torch.Tensor:
        """fp32 [R, dims]: the normalised token vectors of a batch, item after item."""
        collected = TokenVectors(batch)
        for row, _, rows in self._text.run(batch):
            vectors = self._projection(self._text.picked(row, rows).float())
            collected.add(F.normalize(vectors, dim=-1) if self._layout.normalized else vectors)
        return collected.whole()

    def score(self, batch: PairBatch) -> torch.Tensor:
        """fp32 [pairs] on the device; for a model of MeanMaxSim divided by the number of query vectors."""
        scores = super().score(batch)
        if not self._layout.mean:
            return scores
        counts = torch.from_numpy(batch.query_rows[batch.owners]).to(scores.device)
        return scores / batch.given_order(counts).clamp(min=1)

    def _proof_width(self) -> int:
        """The width of the vectors of an empty query. Raises RuntimeError for values that are not finite."""
        [(payload, _)] = self.late_payloads([InputItem("")], EncodeCall([], [], is_query=True))
        vectors = self.token_vectors(self._text.collate([payload]))
        if not bool(torch.isfinite(vectors).all()):
            raise RuntimeError("the model's first vectors are not finite")
        return vectors.shape[1]


def _marker(text: TextModel, prefix: str) -> tuple[int | None, str]:
    """(marker token, text after it): a prefix begins with a token where the vocabulary has one, else is plain text.

    A marker may be stored with the blank behind it.
    """
    first = prefix.split(" ", 1)[0]
    for token in (prefix, prefix.strip(), f"{prefix.strip()} ", f"{first} ", first):
        number = text.tokenizer.id_of(token) if token.strip() else None
        if number is not None:
            return number, prefix[len(token) :].lstrip() if len(prefix.strip()) > len(token) else ""
    return None, prefix


def _filler(text: TextModel, expansion: Expansion | None) -> int:
    """The token that fills queries up. Raises UnsupportedLayoutError for a stored one that the vocabulary lacks."""
    tokenizer = text.tokenizer
    if expansion is None or expansion.token is None:
        return min(tokenizer.marker_ids("mask") or tokenizer.marker_ids("eos"), default=tokenizer.pad_id)
    number = tokenizer.id_of(expansion.token)
    if number is None:
        raise UnsupportedLayoutError(
            f"query_expansion: token {expansion.token!r:.64} is not in the vocabulary"
        )
    return number


def _fills_left(text: TextModel, expansion: Expansion | None) -> bool:
    """Whether the filling goes before queries: where it is padding, and the tokenizer pads on the left.

    Raises UnsupportedLayoutError for such a filling that attention does not see, as positions would count the filling.
    """
    if expansion is None or not expansion.cuts or text.tokenizer.wrapped.padding_side != "left":
        return False
    if not expansion.attend:
        raise UnsupportedLayoutError(
            "padding_side left with a query expansion that attention does not see is not served; store padding_side "
            "right, or an expansion that attends"
        )
    return True
