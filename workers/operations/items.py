"""The operations on texts and images: encode, score, extract and tokenize answer each item, generate one prompt.

`ItemOperation` has what most of them share; each class below says what is special.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tokenizers
from msgspec.structs import replace

from ipc.errors import InvalidInput
from ipc.wire import extraction, tokens
from ipc.wire.extraction import Extraction
from ipc.wire.messages import EncodeCall, ExtractCall, GenerateCall, InputItem, ScoreCall, TokenizeCall
from ipc.wire.tokens import TextTokens
from workers.adapters.base import Adapter, ItemFailure, ItemRefused, Prepared, SparseRows
from workers.generation.request import GenerationRequest
from workers.inputs import Payload
from workers.operations.results import Part, Results


class ItemOperation:
    """An operation (`workers.operations.Operation`) whose items the adapter prepares, and whose results come loose."""

    name = ""
    itemized = True
    refuses = False
    on_device = True

    def check(self, adapter: Adapter, call: Any) -> None:
        """Nothing beyond what the adapter checks."""

    def group(self, call: Any) -> Hashable:
        """All calls to a model share batches, unless the adapter separates them."""
        return None

    def instant(self, call: Any) -> bool:
        """Tokenizing and rendering take their time."""
        return False

    def needs_prepared(self, call: Any) -> bool:
        """The layout does not depend on the contents of items."""
        return False

    def layout(self, adapter: Adapter, call: Any, prepared: Sequence[Prepared]) -> list[Part]:
        """No tensor has a size known beforehand."""
        return []

    def prepare(
        self, adapter: Adapter, call: Any, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Tokens, words, pixels: what the family reads."""
        return adapter.prepare(call.items[start:stop], call)


class Encode(ItemOperation):
    """Dense vectors have a fixed width, token vectors as many rows as the item has tokens, sparse ones come loose."""

    name = "encode"

    def check(self, adapter: Adapter, call: EncodeCall) -> None:
        """Raise `InvalidInput` when an output is not one of the adapter's, or it makes no chunks."""
        if call.chunking is not None and adapter.chunk_refusal:
            raise InvalidInput(f"{call.names.options}late_chunking: {adapter.chunk_refusal}")
        for output in call.outputs:
            if output not in adapter.dims and not (output == "chunks" and call.chunking is not None):
                raise InvalidInput(
                    f"params.output_types: this model has no {output!r} output, only {sorted(adapter.dims)}"
                )

    def group(self, call: EncodeCall) -> Hashable:
        """Same outputs, same forward pass; instruction and query mode only change the text."""
        return tuple(sorted(call.outputs))

    def needs_prepared(self, call: EncodeCall) -> bool:
        """How many token vectors or chunks there will be is known once the items are tokens."""
        return "multivector" in call.outputs or call.chunking is not None

    def layout(self, adapter: Adapter, call: EncodeCall, prepared: Sequence[Prepared]) -> list[Part]:
        """float32 rows: one per item, or as many as it has tokens or chunks."""
        items, parts = len(call.items), []
        if "dense" in call.outputs:
            parts.append(Part("dense", "float32", (items, adapter.dims["dense"])))
        for name, width in (("multivector", "multivector"), ("chunks", "dense")):
            if name in call.outputs:
                rows = [item.rows for item in prepared]
                parts.append(Part(name, "float32", (sum(rows), adapter.dims[width]), rows))
        return parts

    def run(self, adapter: Adapter, batch: Any, call: EncodeCall) -> Results:
        """One forward pass with the heads of all outputs."""
        results = Results()
        if call.chunking is not None:
            chunks = adapter.encode_chunks(batch)
            results.ragged["chunks"], results.loose["chunks.spans"] = chunks.vectors, chunks.spans
            return results
        for name, values in adapter.encode(batch, frozenset(call.outputs)).items():
            if isinstance(values, SparseRows):
                results.loose["sparse.indices"] = values.indices
                results.loose["sparse.values"] = values.values
            elif name == "multivector":
                results.ragged[name] = values
            else:
                results.rows[name] = values
        return results


class Score(ItemOperation):
    """One float32 per item."""

    name = "score"

    def layout(self, adapter: Adapter, call: ScoreCall, prepared: Sequence[Prepared]) -> list[Part]:
        """float32 [items]."""
        return [Part("score", "float32", (len(call.items),))]

    def prepare(
        self, adapter: Adapter, call: ScoreCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Pairs of the query and each item; items with a text of their own before them have that text as query."""
        prepared: list[Prepared | ItemFailure] = []
        for first, group in groupby(call.items[start:stop], key=lambda item: item.first):
            items = list(group)
            if first is None:
                prepared += adapter.prepare(items, call)
                continue
            place = start + len(prepared)
            names = replace(call.names, query=call.names.query.format(place))
            prepared += adapter.prepare(items, replace(call, query=InputItem(first), names=names))
        return prepared

    def run(self, adapter: Adapter, batch: Any, call: ScoreCall) -> Results:
        """One forward pass over pairs."""
        return Results(rows={"score": adapter.scored(batch, call)})


class Extract(ItemOperation):
    """Structured findings, written as msgpack per item."""

    name = "extract"

    def run(self, adapter: Adapter, batch: Any, call: ExtractCall) -> Results:
        """One forward pass and the reading of what it says."""
        results = Results()
        packed: list[np.ndarray] = []
        for at, found in enumerate(adapter.extract(batch)):
            if isinstance(found, ItemFailure):
                results.failures[at] = found
                found = Extraction()
            packed.append(np.frombuffer(extraction.pack(found), dtype=np.uint8))
        results.loose["extraction"] = packed
        return results


class Generate(ItemOperation):
    """Text leaves by messages of its own (`workers.strategies.generation`); the result that ends it has no tensors."""

    name = "generate"
    itemized = False

    def prepare(
        self, adapter: Adapter, call: GenerateCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Render and tokenize the prompt, compile the grammar."""
        return adapter.prepare(call.items, call)

    def run(self, adapter: Adapter, batch: Any, call: GenerateCall) -> Results:
        """Generate for one request alone, from its begin to its end: float32 log probabilities of its tokens."""
        [request] = batch
        engine = adapter.engine
        assert isinstance(request, GenerationRequest)
        assert engine is not None
        found: list[float] = []
        engine.add(request)
        while engine.has_work:
            for emission in engine.step():
                found += [each.logprob for each in emission.logprobs or ()]
        return Results(loose={"logprobs": [np.array(found, dtype=np.float32)]})


class TokenReader:
    """The tokenizer of one model without a limit.  Thread-safe; its copy is made when somebody asks."""

    def __init__(self, tokenizer: Any) -> None:
        """Keep a transformers tokenizer."""
        self._tokenizer = tokenizer

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
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


class Tokenize(ItemOperation):
    """The payload of a prepared item is the item's result: uint8, msgpack of tokens or the UTF-8 of a text."""

    name = "tokenize"
    on_device = False

    def __init__(self) -> None:
        self._readers: WeakKeyDictionary[Adapter, TokenReader] = WeakKeyDictionary()

    def check(self, adapter: Adapter, call: TokenizeCall) -> None:
        """Raise `InvalidInput` for a model without a tokenizer for texts."""
        if adapter.tokenizer is None:
            raise InvalidInput("this model has no tokenizer that callers may use")

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
