"""Tokenize pairs of texts from several threads at once.

A pair shares its first text with others more often than not (one premise with many hypotheses, one query with many
documents), so both halves are tokenized alone, each distinct one once, and then joined by the tokenizer's own
post-processor, which also cuts the pair to its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.tokenizing import as_ids

Strategy = Literal["only_first", "only_second", "longest_first"]


class Pair(NamedTuple):
    """Two texts as one sequence, and whether something of them was cut."""

    sequence: TokenSequence
    truncated: bool


class PairTokenizer:
    """The tokenizer of one model for pairs of at most `limit` tokens.  Thread-safe."""

    def __init__(self, tokenizer: Any, limit: int, strategy: Strategy) -> None:
        """Copy the Rust object of a transformers tokenizer. Raises ValueError when it has none."""
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer of this model is not a fast one; pairs need it")
        text = tokenizer.backend_tokenizer.to_str()
        self._halves, self._joined = Tokenizer.from_str(text), Tokenizer.from_str(text)
        for backend in (self._halves, self._joined):
            backend.no_padding()
            backend.no_truncation()
        self._joined.enable_truncation(limit, strategy=strategy)
        self._uses_types = "token_type_ids" in tokenizer.model_input_names
        self.limit = limit
        self.special = int(self._joined.num_special_tokens_to_add(is_pair=True))
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self.pad_id = int(tokenizer.pad_token_id or 0)

    def halves(self, texts: Sequence[str]) -> list[Any]:
        """Each text alone, whole and without special tokens, for `join`; `.ids` are its tokens."""
        return list(self._halves.encode_batch(list(texts), add_special_tokens=False))

    def join(self, first: Any, second: Any) -> Pair:
        """Two halves as the model reads them.

        The strategy must be able to cut enough: with "only_first" the second half and the special tokens have to leave
        room for a token of the first.
        """
        whole = len(first.ids) + len(second.ids) + self.special
        joined = self._joined.post_process(first, second)
        types = as_ids(joined.type_ids) if self._uses_types and any(joined.type_ids) else None
        return Pair(TokenSequence(as_ids(joined.ids), types), whole > self.limit)
