"""Tokenize: texts to tokens, and token ids to texts. The preparing threads answer; nothing goes to the device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ipc.errors import InvalidInput
from ipc.wire import tokens
from ipc.wire.messages import InputItem, TokenizeCall
from workers.adapters.base import Adapter, ItemFailure, Prepared
from workers.adapters.shared.token_reading import TokenReader
from workers.memory.payload import Payload
from workers.operations.results import Part, Results


class Tokenize:
    """The payload of a prepared item is the item's result: uint8, msgpack of tokens or the UTF-8 of a text."""

    name = "tokenize"
    itemized = True
    refuses = False
    on_device = False

    def __init__(self) -> None:
        self._readers: WeakKeyDictionary[Adapter, TokenReader] = WeakKeyDictionary()

    def check(self, adapter: Adapter, call: TokenizeCall) -> None:
        """Raise `InvalidInput` for a model without a tokenizer for texts."""
        if adapter.tokenizer is None:
            raise InvalidInput("this model has no tokenizer that callers may use")

    def group(self, call: TokenizeCall) -> Hashable:
        """No batch is formed."""
        return None

    def instant(self, call: TokenizeCall) -> bool:
        """Tokenizing takes its time."""
        return False

    def needs_prepared(self, call: TokenizeCall) -> bool:
        """Results come loose."""
        return False

    def layout(self, adapter: Adapter, call: TokenizeCall, prepared: Sequence[Prepared]) -> list[Part]:
        """Nothing has a size known beforehand."""
        return []

    def prepare(
        self, adapter: Adapter, call: TokenizeCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """The results. Raises `ItemRefused` for an id that the vocabulary lacks, and as `Adapter.prompt_ids`."""
        reader = self._readers.get(adapter)
        if reader is None:
            # NOTE: two threads may make one each; the copy of a tokenizer is made at the first use.
            reader = self._readers.setdefault(adapter, TokenReader(adapter.tokenizer))
        if call.prompt is not None:
            found = reader.named(adapter.prompt_ids(call.prompt))
            return [Prepared(_bytes(tokens.pack(found)), len(found.ids))]
        return [_prepared(reader, item, call.special) for item in call.items[start:stop]]

    def run(self, adapter: Adapter, batch: Any, call: TokenizeCall) -> Results:
        """The results of prepared items."""
        return Results(loose={"tokens": [item.payload for item in batch]})


def _prepared(reader: TokenReader, item: InputItem, special: bool) -> Prepared:
    if item.text is None:
        text = reader.text_of(item, keep_special=special)
        return Prepared(_bytes(text.encode()), len(item.ids or ()))
    [found] = reader.read([item.text], add_special=special)
    return Prepared(_bytes(tokens.pack(found)), len(found.ids))


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)
