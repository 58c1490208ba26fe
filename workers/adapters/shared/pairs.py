"""Families that read query and document together: their base, and pairs of texts tokenized from several threads.

Pairs of one request mostly share a text: one premise has many hypotheses, one query many documents. So each distinct
half is tokenized alone, once. The tokenizer's own post-processor joins two halves and cuts the pair to its length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, InputItem, ScoreCall
from workers.adapters.base import Adapter, Excess, ItemFailure, Prepared
from workers.adapters.shared.classification import SequenceClassifier
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.long_texts import (
    CHARACTERS_PER_TOKEN,
    LONG,
    encode_side,
    goes_word_by_word,
)
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import Int64Array, PackedBatch, TokenSequence
from workers.adapters.shared.tokenizing import as_ids, rust_copy, stand_in

AUTO = "auto"
_ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "identity": nn.Identity}
Strategy = Literal["only_first", "only_second", "longest_first"]


class Pair(NamedTuple):
    """Two texts as one sequence. `tokens` counts both texts before anything was cut."""

    sequence: TokenSequence
    truncated: bool
    tokens: int


class PairTokenizer:
    """The tokenizer of one model for pairs of at most `limit` tokens.  Thread-safe.

    A pair that is too long is cut at the side that is stored with the tokenizer, with `truncate_left` at the left.
    """

    def __init__(self, tokenizer: Any, limit: int, strategy: Strategy) -> None:
        """Copy the Rust object of a transformers tokenizer. Raises ValueError when it has none."""
        self._halves, self._cut, self._cut_left = (rust_copy(tokenizer, "pairs need it") for _ in range(3))
        self._word_by_word = goes_word_by_word(self._halves)
        self._side = str(tokenizer.truncation_side)
        self._cut.enable_truncation(limit, strategy=strategy, direction=self._side)
        self._cut_left.enable_truncation(limit, strategy=strategy, direction="left")
        self._uses_types = "token_type_ids" in tokenizer.model_input_names
        self.limit = limit
        self.special = int(self._cut.num_special_tokens_to_add(is_pair=True))
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._stand_in = stand_in(tokenizer)

    def halves(self, texts: Sequence[str]) -> list[Any]:
        """Each text alone, whole and without special tokens, for `join`; `.ids` are its tokens."""
        return list(self._halves.encode_batch(list(texts), add_special_tokens=False))

    def sides(self, texts: Sequence[str], overflow: str, limit: int | None = None) -> list[Any]:
        """As `halves`, but of a long text only the side that `join` keeps; with `error` every text is whole.

        A side has `limit` tokens or more, by default those of a pair. For halves whose other half has at most as many
        tokens as a pair. `Pair.tokens` then counts only the tokens of that side.
        """
        limit = limit or self.limit
        longest = max(map(len, texts), default=0)
        if overflow == "error" or not self._word_by_word or longest < LONG * CHARACTERS_PER_TOKEN * limit:
            return self.halves(texts)
        left = not self._cuts_left(overflow)
        return [encode_side(self._halves, text, limit, left=left) for text in texts]

    def _cuts_left(self, overflow: str) -> bool:
        """Whether a text that is too long loses its beginning."""
        return overflow == "truncate_left" or self._side == "left"

    def shorten(self, texts: list[str], most: int, overflow: str) -> dict[int, int]:
        """Cut texts in place to `most` tokens, by `overflow` and the stored side at their end or beginning.

        Returns the tokens of each text that was cut, by its place.
        """
        left = self._cuts_left(overflow)
        lengths = {}
        for at, half in enumerate(self.halves(texts) if left else self.sides(texts, overflow, most)):
            tokens = len(half.ids)
            if tokens > most:
                first, last = (tokens - most, tokens) if left else (0, most)
                texts[at] = texts[at][half.offsets[first][0] : half.offsets[last - 1][1]]
                lengths[at] = tokens
        return lengths

    def join(self, first: Any, second: Any, overflow: str = "truncate") -> Pair:
        """Two halves as the model reads them.

        With the strategy "only_first" the second half and the special tokens must leave room for a token of the first.
        """
        whole = len(first.ids) + len(second.ids) + self.special
        cutting = self._cut_left if overflow == "truncate_left" else self._cut
        joined = cutting.post_process(first, second)
        types = as_ids(joined.type_ids) if self._uses_types and any(joined.type_ids) else None
        return Pair(TokenSequence(as_ids(joined.ids or [self._stand_in]), types), whole > self.limit, whole)


class ScoreAdapter(Adapter):
    """Base of these families: pairs run through one model as one packed row.

    `overflows` is what may be done with pairs that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`).
    """

    overflows: ClassVar[Collection[str]] = ("truncate", "error")
    uses = frozenset(("activation", "max_tokens"))

    def __init__(
        self, model: TextEncoder | SequenceClassifier, pairs: PairTokenizer, function: nn.Module
    ) -> None:
        """Put the parts together; `function` turns logits into scores where a call names no other."""
        self._model, self._pairs, self._function = model, pairs, function

    def ids_of(self, payload: TokenSequence) -> list[Int64Array]:
        """The pair."""
        return [payload.ids]

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    @property
    def max_sequence_length(self) -> int:
        """Longest pair in tokens, with all text and special tokens around the pair."""
        return self._pairs.limit

    @property
    def packed(self) -> bool:
        """Whether batches run without padding."""
        return self._model.packed

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse LoRA, overflow policies that cannot cut a pair, and a number of tokens that is none."""
        super().refuse_unsupported(call)
        options = OptionReader(call)
        options.refuse_overflow(self.overflows)
        options.whole("max_tokens", 1, 1)
        _named_activation(call)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Documents cut to the call's `max_tokens`, if there are any, and joined with the query."""
        texts, most = texts_of(items, call.names.text), call.options.get("max_tokens")
        cut = self._pairs.shorten(texts, most, call.overflow) if most else {}
        prepared = self.joined(texts, call)
        for at, tokens in cut.items():
            prepared[at].truncated, prepared[at].excess = True, Excess(tokens, most or 0)
        return list(prepared)

    @abstractmethod
    def joined(self, texts: Sequence[str], call: Call) -> list[Prepared]:
        """The pair of the call's query and each text, tokenized and cut to the model's length."""

    def collate(self, prepared: Sequence[Prepared]) -> PackedBatch:
        """One packed batch of host tensors."""
        return self._model.pack([item.payload for item in prepared])

    def padding_ratio(self, batch: PackedBatch) -> float:
        """Share of padding in the forward passes of the model."""
        return self._model.padding_ratio([batch])

    def group(self, call: Call) -> Hashable:
        """Calls with other functions have other batches."""
        return _named_activation(call)

    @abstractmethod
    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """fp32 [pairs] on the device, before the function."""

    def score(self, batch: PackedBatch) -> torch.Tensor:
        """fp32 [pairs] on the device, by the model's own function."""
        scores: torch.Tensor = self._function(self.logits(batch))
        return scores

    def scored(self, batch: PackedBatch, call: Call) -> torch.Tensor:
        """fp32 [pairs] on the device, by the function that the call names, else by the model's own."""
        name = _named_activation(call)
        scores: torch.Tensor = (activation(name) if name else self._function)(self.logits(batch))
        return scores


def query_of(call: Call) -> str:
    """The query of a score call. Raises `InvalidInput` for a query without text."""
    [query] = texts_of([call.query if isinstance(call, ScoreCall) else InputItem("")], call.names.query)
    return query


def pair_excess(query: int, pair: int, limit: int) -> Excess:
    """How much of a pair was cut. `query` and `pair` count tokens, with all tokens around them."""
    if query >= limit:
        return Excess(query, limit, in_query=True)
    return Excess(pair, limit, "with the query")


def texts_of(items: Sequence[InputItem], where: str) -> list[str]:
    """The texts of `items`. Raises `InvalidInput` for one without text; `where` is its JSON path with {}."""
    for index, item in enumerate(items):
        if item.text is None:
            raise InvalidInput(f"{where.format(index)}: missing")
    return [item.text for item in items if item.text is not None]


def _named_activation(call: Call) -> str:
    """The function that a call names; empty for the model's own. Raises `InvalidInput` for another word."""
    name = OptionReader(call).choice("activation", AUTO, (AUTO, *_ACTIVATIONS))
    return "" if name == AUTO else name


def activation(name: str) -> nn.Module:
    """Sigmoid or identity by the catalog's name. Raises ValueError for another word."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: use {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()
