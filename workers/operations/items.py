"""The operations on texts and images: encode, score, extract and tokenize answer each item, generate one prompt.

`ItemOperation` has what most of them share; each class below says what is special.
An operation gives `Results`: tensors with a place known beforehand, and loose values of any size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import tokenizers
import torch
from msgspec.structs import replace

from ipc.errors import InvalidInput, UnexpectedOutput
from ipc.wire import extraction, tokens
from ipc.wire.extraction import Extraction
from ipc.wire.messages import EncodeCall, ExtractCall, GenerateCall, InputItem, ScoreCall, TokenizeCall
from ipc.wire.tokens import TextTokens
from workers.adapters.base import Adapter, ItemFailure, ItemRefused, Prepared, SparseRows
from workers.adapters.shared.named_tensors import TensorFacts, host_array
from workers.generation.request import GenerationRequest
from workers.inputs import Payload

_ALONE_NUMEL = 1 << 20
"""Host tensors up to this size are summed by one thread."""


@dataclass(slots=True)
class NamedOutput:
    """One output of all requests: `values` [rows, ...] if `batches`, with `rest` as the shape that requests see.

    Values on the host are an array, those on a device a tensor.
    """

    facts: TensorFacts
    values: np.ndarray | torch.Tensor
    rest: list[int]
    batches: bool


def checked(
    facts: TensorFacts, found: Mapping[str, np.ndarray | torch.Tensor], rows: int | None
) -> NamedOutput:
    """The output as the configuration promises it, of `rows` rows (None: the model does not batch).

    Raises `UnexpectedOutput` when it is missing or has another datatype or shape.
    """
    values = found.get(facts.name)
    if not isinstance(values, (np.ndarray, torch.Tensor)):
        raise UnexpectedOutput(f"the model gave no tensor for output {facts.name!a}")
    if not _is_of(facts, values):
        raise UnexpectedOutput(
            f"output {facts.name!a}: the model gave {values.dtype}, its configuration says {facts.datatype}"
        )
    shape = list(values.shape)
    rest = facts.from_program(shape if rows is None else shape[1:])
    if rest is None or (rows is not None and shape[:1] != [rows]):
        expected = list(facts.program) if rows is None else [rows, *facts.program]
        raise UnexpectedOutput(
            f"output {facts.name!a}: the model gave shape {shape}, its configuration says {expected}"
        )
    if isinstance(values, torch.Tensor) and not values.is_cuda:
        values = host_array(values)
    return NamedOutput(facts, values, rest, rows is not None)


def _is_of(facts: TensorFacts, values: np.ndarray | torch.Tensor) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype == facts.dtype
    return values.dtype == facts.tensor_dtype


class ResultTensor(NamedTuple):
    """A tensor of a result: name, dtype, shape, and its rows per item (None: one each)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Sequence[int] | None = None


@dataclass(slots=True)
class Results:
    """One batch's results.

    rows      float tensors [items, ...]
    ragged    float tensors [rows of all items, ...], item after item, `Prepared.rows` of each
    loose     per item a host array of any length
    named     outputs of a batch of named tensors; they may have any values
    failures  items that failed alone, by place in the batch
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    ragged: dict[str, torch.Tensor] = field(default_factory=dict)
    loose: dict[str, list[np.ndarray]] = field(default_factory=dict)
    named: dict[str, NamedOutput] = field(default_factory=dict)
    failures: dict[int, ItemFailure] = field(default_factory=dict)

    def finite(self, rows: Sequence[int]) -> list[bool]:
        """For each item of the batch, whether all its values are finite; `rows` are its rows in ragged tensors."""
        if not (self.rows or self.ragged or self.loose):
            return [True] * len(rows)
        flags = np.ones(len(rows), dtype=bool)
        for tensor in self.rows.values():
            if not _all_finite(tensor):
                flags &= torch.isfinite(tensor).flatten(1).all(dim=1).cpu().numpy()
        ends = np.fromiter(accumulate(rows), dtype=np.int64, count=len(rows))
        for tensor in self.ragged.values():
            if not _all_finite(tensor):
                bad = torch.nonzero(~torch.isfinite(tensor).flatten(1).all(dim=1)).flatten().cpu().numpy()
                flags[np.unique(np.searchsorted(ends, bad, side="right"))] = False
        for arrays in self.loose.values():
            for at, array in enumerate(arrays):
                flags[at] &= bool(np.isfinite(array).all()) if array.dtype.kind == "f" else True
        return list(map(bool, flags))


def _all_finite(tensor: torch.Tensor) -> bool:
    # PERF: one pass without a tensor of flags; a sum that overflows only sends the rows to the exact check.
    if tensor.is_cuda or tensor.numel() > _ALONE_NUMEL:
        return bool(torch.isfinite(tensor.sum()))
    # PERF: torch would wake its team for this, and on busy cores waiting for that takes longer than the sum.
    with np.errstate(all="ignore"):
        return math.isfinite(tensor.numpy().sum())


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
        """False: tokenizing and rendering take longer than a change of threads."""
        return False

    def needs_prepared(self, call: Any) -> bool:
        """The layout does not depend on the contents of items."""
        return False

    def layout(self, adapter: Adapter, call: Any, prepared: Sequence[Prepared]) -> list[ResultTensor]:
        """An empty list: no tensor has a size that is known beforehand."""
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

    def layout(self, adapter: Adapter, call: EncodeCall, prepared: Sequence[Prepared]) -> list[ResultTensor]:
        """float32 rows: one per item, or as many as it has tokens or chunks."""
        items, parts = len(call.items), []
        if "dense" in call.outputs:
            parts.append(ResultTensor("dense", "float32", (items, adapter.dims["dense"])))
        for name, width in (("multivector", "multivector"), ("chunks", "dense")):
            if name in call.outputs:
                rows = [item.rows for item in prepared]
                parts.append(ResultTensor(name, "float32", (sum(rows), adapter.dims[width]), rows))
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
    """Scores of pairs of the query and an item: one float32 per item."""

    name = "score"

    def layout(self, adapter: Adapter, call: ScoreCall, prepared: Sequence[Prepared]) -> list[ResultTensor]:
        """float32 [items]."""
        return [ResultTensor("score", "float32", (len(call.items),))]

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
        for at, finding in enumerate(adapter.extract(batch)):
            if isinstance(finding, ItemFailure):
                results.failures[at] = finding
                finding = Extraction()
            packed.append(np.frombuffer(extraction.pack(finding), dtype=np.uint8))
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
        """Prove the model with one request alone, from its begin to its end: float32 log probabilities of tokens."""
        return self.told(*self.steps(adapter, batch))

    def steps(self, adapter: Adapter, batch: Any) -> Iterator[list[float]]:
        """`run` in steps of the engine: the log probabilities of each step. Between two steps the device is free."""
        [request] = batch
        engine = adapter.engine
        assert isinstance(request, GenerationRequest)
        assert engine is not None
        with engine.alone(), engine.uncounted():
            try:
                engine.add(request)
                while engine.has_work:
                    emissions = engine.step()
                    yield [each.logprob for emission in emissions for each in emission.logprobs or ()]
            finally:
                engine.cancel(request.key)

    @staticmethod
    def told(*steps: list[float]) -> Results:
        """What `steps` gave, as the results of `run`."""
        return Results(loose={"logprobs": [np.array([*chain(*steps)], dtype=np.float32)]})


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
        """The results of the items. Raises `ItemRefused` for an unknown id of a token, and as `Adapter.prompt_ids`."""
        reader = self._readers.get(adapter)
        if reader is None:
            # NOTE: two threads may make one each; the copy of a tokenizer is made at the first use.
            reader = self._readers.setdefault(adapter, TokenReader(adapter.tokenizer))
        if call.prompt is not None:
            named = reader.named(adapter.prompt_ids(call.prompt))
            return [Prepared(_bytes(tokens.pack(named)), len(named.ids))]
        return [_prepared(reader, item, call.special) for item in call.items[start:stop]]

    def run(self, adapter: Adapter, batch: Any, call: TokenizeCall) -> Results:
        """The results of prepared items."""
        return Results(loose={"tokens": [item.payload for item in batch]})


def _prepared(reader: TokenReader, item: InputItem, special: bool) -> Prepared:
    if item.text is None:
        text = reader.text_of(item, keep_special=special)
        return Prepared(_bytes(text.encode()), len(item.ids or ()))
    [sequence] = reader.read([item.text], add_special=special)
    return Prepared(_bytes(tokens.pack(sequence)), len(sequence.ids))


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)
