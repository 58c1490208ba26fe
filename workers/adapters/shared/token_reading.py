"""Tokens of whole texts, and texts of tokens, for callers who ask for them. No model runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem
from ipc.wire.tokens import TextTokens
from workers.adapters.base import ItemRefused


class TokenReader:
    """The tokenizer of one model without a limit.  Thread-safe; its copy is made when somebody asks."""

    def __init__(self, tokenizer: Any) -> None:
        """Keep a transformers tokenizer."""
        self._tokenizer = tokenizer

    @functools.cached_property
    def _backend(self) -> Tokenizer:
        # PERF: this module is loaded with every worker, transformers with the first model that needs it.
        from workers.adapters.shared.tokenizing import rust_copy

        try:
            return rust_copy(self._tokenizer)
        except ValueError as error:
            raise InvalidInput(str(error)) from error

    def read(self, texts: Sequence[str], *, add_special: bool) -> list[TextTokens]:
        """The tokens of each text, with or without the special tokens around a text."""
        return [
            TextTokens(
                one.ids,
                self._strings(one.ids),
                [start for start, _ in one.offsets],
                [end for _, end in one.offsets],
                [bool(flag) for flag in one.special_tokens_mask],
            )
            for one in self._backend.encode_batch(list(texts), add_special_tokens=add_special)
        ]

    def named(self, ids: Sequence[int]) -> TextTokens:
        """Token ids with their strings; they have no places in a text."""
        return TextTokens(list(ids), self._strings(ids), [], [], [])

    def _strings(self, ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(number) or "" for number in ids]

    def text_of(self, item: InputItem, *, keep_special: bool) -> str:
        """The text of token ids. Raises `ItemRefused` for an id that the vocabulary lacks."""
        ids, size = item.ids or [], self._backend.get_vocab_size()
        unknown = next((number for number in ids if not 0 <= number < size), None)
        if unknown is not None:
            raise ItemRefused(item, f"token id {unknown} is outside this model's vocabulary of {size}")
        return str(self._backend.decode(ids, skip_special_tokens=not keep_special))
