"""The token ids that a model can read: those for which the model has embeddings.

A tokenizer may know more tokens than the model has embeddings. `KnownIds` compares both at load. An item with such a
token is refused while the item is prepared, as the index would end the context of a CUDA device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

log = logging.getLogger(__name__)


def embedding_rows(model: Any) -> int:
    """How many token ids a transformers model has embeddings for; ids are less than this."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return int(model.config.get_text_config().vocab_size)


def filler_of(model: Any, pad_id: int) -> int:
    """The id that fills rectangles: the model's own padding id, else the tokenizer's; 0 if these have no embedding."""
    own, rows = getattr(model.config.get_text_config(), "pad_token_id", None), embedding_rows(model)
    return next((one for one in (own, pad_id) if isinstance(one, int) and 0 <= one < rows), 0)


class KnownIds:
    """The ids for which a model has embeddings."""

    def __init__(self, rows: int, tokenizer: Any) -> None:
        """`rows` counts the embeddings; a transformers `tokenizer` with more tokens is logged."""
        self.rows = rows
        self._tokenizer = tokenizer
        largest = max(tokenizer.get_vocab().values(), default=0)
        self.all_known = largest < rows
        """Whether the tokenizer makes no other ids."""
        if not self.all_known:
            log.warning(
                "the tokenizer has token ids up to %d, the model has embeddings for %d: "
                "texts with tokens beyond are refused",
                largest,
                rows,
            )

    def refusal(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> str | None:
        """Why the model cannot read some of these sequences; None if the model reads all."""
        for ids in sequences:
            largest = int(np.max(ids, initial=0))
            if largest >= self.rows:
                token = self._tokenizer.convert_ids_to_tokens(largest)
                return (
                    f"the token {token!r} has the id {largest}, this model has embeddings for {self.rows} ids"
                )
        return None
