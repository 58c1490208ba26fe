"""Families that read query and document together: their base, and pairs of texts tokenized from several threads.

A pair shares its first text with others more often than not (one premise with many hypotheses, one query with many
documents), so both halves are tokenized alone, each distinct one once, and then joined by the tokenizer's own
post-processor, which also cuts the pair to its length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, InputItem
from workers.adapters.base import Adapter, Excess
from workers.adapters.shared.long_texts import (
    CHARACTERS_PER_TOKEN,
    LONG,
    encode_side,
    goes_word_by_word,
)
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.tokenizing import as_ids

Strategy = Literal["only_first", "only_second", "longest_first"]


class Pair(NamedTuple):
    """Two texts as one sequence, whether something of them was cut, and the tokens that both have uncut."""

    sequence: TokenSequence
    truncated: bool
    tokens: int


class PairTokenizer:
    """The tokenizer of one model for pairs of at most `limit` tokens.  Thread-safe."""

    def __init__(self, tokenizer: Any, limit: int, strategy: Strategy) -> None:
        """Copy the Rust object of a transformers tokenizer. Raises ValueError when it has none."""
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer of this model is not a fast one; pairs need it")
        text = tokenizer.backend_tokenizer.to_str()
        self._halves, self._cut, self._cut_left = (Tokenizer.from_str(text) for _ in range(3))
        for backend in (self._halves, self._cut, self._cut_left):
            backend.no_padding()
            backend.no_truncation()
        self._word_by_word = goes_word_by_word(self._halves)
        self._cut.enable_truncation(limit, strategy=strategy)
        self._cut_left.enable_truncation(limit, strategy=strategy, direction="left")
        self._uses_types = "token_type_ids" in tokenizer.model_input_names
        self.limit = limit
        self.special = int(self._cut.num_special_tokens_to_add(is_pair=True))
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self.pad_id = int(tokenizer.pad_token_id or 0)

    def halves(self, texts: Sequence[str]) -> list[Any]:
        """Each text alone, whole and without special tokens, for `join`; `.ids` are its tokens."""
        return list(self._halves.encode_batch(list(texts), add_special_tokens=False))

    def sides(self, texts: Sequence[str], overflow: str) -> list[Any]:
        """As `halves`, but of long texts no more than what `join` keeps.

        For halves that only are cut, or whose other halves have at most `limit` tokens. What `join` says of the tokens
        of such a pair is not all of them; with `error` every text is whole.
        """
        longest = max(map(len, texts), default=0)
        if (
            overflow == "error"
            or not self._word_by_word
            or longest < LONG * CHARACTERS_PER_TOKEN * self.limit
        ):
            return self.halves(texts)
        left = overflow != "truncate_left"
        return [encode_side(self._halves, text, self.limit, left=left) for text in texts]

    def join(self, first: Any, second: Any, overflow: str = "truncate") -> Pair:
        """Two halves as the model reads them; with `truncate_left` they lose their beginnings.

        The strategy must be able to cut enough: with "only_first" the second half and the special tokens have to leave
        room for a token of the first.
        """
        whole = len(first.ids) + len(second.ids) + self.special
        cutting = self._cut_left if overflow == "truncate_left" else self._cut
        joined = cutting.post_process(first, second)
        types = as_ids(joined.type_ids) if self._uses_types and any(joined.type_ids) else None
        return Pair(TokenSequence(as_ids(joined.ids), types), whole > self.limit, whole)


class ScoreAdapter(Adapter):
    """A model without vectors.

    `overflows` is what may be done with pairs that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`).
    """

    overflows: ClassVar[Collection[str]] = ("truncate", "error")

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse LoRA, and overflow policies that cannot cut a pair."""
        super().refuse_unsupported(call)
        OptionReader(call).refuse_overflow(self.overflows)


def pair_excess(query: int, pair: int, limit: int) -> Excess:
    """How much of a pair was cut, from the tokens of query and pair with everything around them."""
    if query >= limit:
        return Excess(query, limit, in_query=True)
    return Excess(pair, limit, "with the query")


def texts_of(items: Sequence[InputItem], where: str) -> list[str]:
    """The texts of `items`. Raises `InvalidInput` for one without text; `where` is its JSON path with {}."""
    for index, item in enumerate(items):
        if item.text is None:
            raise InvalidInput(f"{where.format(index)}: missing")
    return [item.text for item in items if item.text is not None]


def activation(name: str) -> nn.Module:
    """Sigmoid or identity by the catalog's name. Raises ValueError for another word."""
    known: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "identity": nn.Identity}
    if name not in known:
        raise ValueError(f"unknown activation {name!r}: use {', '.join(known)}")
    return known[name]()


def activated(logits: torch.Tensor, function: nn.Module) -> torch.Tensor:
    """fp32 scores of fp32 logits."""
    scores: torch.Tensor = function(logits.float())
    return scores
