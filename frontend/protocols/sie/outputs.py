"""The outputs of an encode reply in their output dtype, item by item.

float32 vectors stay views on the worker's memory. Everything else is a private copy, made in a thread when it is large;
once no view is left, the lease ends.

Values and numpy arrays in the msgpack form of the SIE contract.

An array is the msgpack-numpy map with bin keys. Everything but its data is constant for a dtype and shape, so it is
built once and the raw bytes follow from where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Protocol

import msgpack
import numpy as np

from frontend.engine.answer import Answer, Quantized, quantize, shorten, to_half
from frontend.http.rendering import Steps, at_once, in_steps, off_loop
from frontend.protocols.sie import muvera
from frontend.protocols.sie.convert import EncodePlan
from frontend.resources.sending import Buffer

_packer = msgpack.Packer()
INLINE_NBYTES = 1 << 20
"""Results up to this size are converted and rendered on the event loop, larger ones in a thread."""


def packed(value: Any) -> bytes:
    """One value without arrays."""
    done: bytes = _packer.pack(value)
    return done


@lru_cache(maxsize=4096)
def array_prefix(dtype: str, shape: tuple[int, ...]) -> bytes:
    """All bytes of the msgpack-numpy map before its data, the bin header included."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(5)
    for key, value in (
        (b"nd", True),
        (b"type", np.dtype(dtype).str),
        (b"kind", b""),
        (b"shape", list(shape)),
    ):
        packer.pack(key)
        packer.pack(value)
    packer.pack(b"data")
    head: bytes = packer.bytes()
    return head + _bin_header(int(np.prod(shape)) * np.dtype(dtype).itemsize)


def _bin_header(nbytes: int) -> bytes:
    if nbytes < 1 << 8:
        return b"\xc4" + nbytes.to_bytes(1, "big")
    if nbytes < 1 << 16:
        return b"\xc5" + nbytes.to_bytes(2, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


def map_header(entries: int) -> bytes:
    """The bytes in front of a map of that many entries."""
    header: bytes = _packer.pack_map_header(entries)
    return header


def array_header(entries: int) -> bytes:
    """The bytes in front of an array of that many entries."""
    header: bytes = _packer.pack_array_header(entries)
    return header


@lru_cache(maxsize=256)
def _name(text: str) -> bytes:
    return packed(text)


def append_map(
    parts: list[Buffer], open_bytes: bytearray, values: Mapping[str, Any], copied_nbytes: int
) -> bytearray:
    """Write a map whose values may be arrays and maps.

    Bytes go into `open_bytes`; an array larger than `copied_nbytes` closes them and goes into `parts` as a view.
    Returns the open bytes.
    """
    open_bytes += map_header(len(values))
    for name, value in values.items():
        open_bytes = append_pair(parts, open_bytes, name, value, copied_nbytes)
    return open_bytes


def append_pair(
    parts: list[Buffer], open_bytes: bytearray, name: str, value: Any, copied_nbytes: int
) -> bytearray:
    """Write one entry of such a map; arguments and result as in `append_map`."""
    open_bytes += _name(name)
    if isinstance(value, np.ndarray):
        return _append_array(parts, open_bytes, value, copied_nbytes)
    if isinstance(value, dict):
        return append_map(parts, open_bytes, value, copied_nbytes)
    open_bytes += packed(value)
    return open_bytes


def _append_array(
    parts: list[Buffer], open_bytes: bytearray, values: np.ndarray, copied_nbytes: int
) -> bytearray:
    open_bytes += array_prefix(values.dtype.str, values.shape)
    if values.nbytes <= copied_nbytes:
        open_bytes += values.tobytes()
        return open_bytes
    parts.append(bytes(open_bytes))
    parts.append(memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))
    return bytearray()


class Output(Protocol):
    """One output of all items; `name` is its key in an item."""

    name: str
    nbytes: int

    def entry(self, index: int) -> dict[str, Any]:
        """The fields of one item, in the contract's order; arrays as numpy arrays."""

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The same as msgpack; see `append_map`."""


class _Rows:
    """The vectors of all items as bytes."""

    def __init__(self, values: np.ndarray) -> None:
        self._flat = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        self._row_nbytes = values[:1].nbytes

    def write(
        self, parts: list[Buffer], written: bytearray, start: int, stop: int, copied_nbytes: int
    ) -> bytearray:
        """Rows `start` to `stop` into the open bytes, or as a view behind them; returns the open bytes."""
        rows = self._flat[start * self._row_nbytes : stop * self._row_nbytes]
        if len(rows) <= copied_nbytes:
            written += rows
            return written
        parts += (bytes(written), rows)
        return bytearray()


class Dense:
    """One vector per item."""

    name = "dense"

    def __init__(self, quantized: Quantized, dims: int) -> None:
        values = quantized.values
        self.quantized, self.nbytes = quantized, values.nbytes
        self._head = {"dims": dims, "dtype": quantized.dtype}
        self._scales = list(_scales(quantized))

    @cached_property
    def _prefix(self) -> bytes:
        values = self.quantized.values
        return _prefix(self._head, values.dtype.str, values.shape[1:], len(self._scales))

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self.quantized.values)

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        # PERF: all rows have the same bytes before their values, and many items have little else.
        written += self._prefix
        written = self._rows.write(parts, written, index, index + 1, copied_nbytes)
        for name, values in self._scales:
            written += packed(name) + packed(float(values[index]))
        return written

    def entry(self, index: int) -> dict[str, Any]:
        """dims, dtype, values [d], and scale and offset as floats where the dtype has them."""
        found = {**self._head, "values": self.quantized.values[index]}
        for name, values in self._scales:
            found[name] = float(values[index])
        return found


class Multivector:
    """A vector for each token of an item."""

    name = "multivector"

    def __init__(self, quantized: Quantized, dims: int, rows: Sequence[int]) -> None:
        self.quantized, self.nbytes = quantized, quantized.values.nbytes
        self._dims, self._starts = dims, [0, *accumulate(rows)]
        self._scales = list(_scales(quantized))
        self._prefixes: dict[int, bytes] = {}

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self.quantized.values)

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        start, stop = self._starts[index], self._starts[index + 1]
        prefix = self._prefixes.get(stop - start)
        if prefix is None:
            values = self.quantized.values
            shape = (stop - start, *values.shape[1:])
            prefix = _prefix(self._head(stop - start), values.dtype.str, shape, len(self._scales))
            self._prefixes[stop - start] = prefix
        written += prefix
        written = self._rows.write(parts, written, start, stop, copied_nbytes)
        for name, values in self._scales:
            written = append_pair(parts, written, name, values[start:stop], copied_nbytes)
        return written

    def _head(self, count: int) -> dict[str, Any]:
        return {"token_dims": self._dims, "num_tokens": count, "dtype": self.quantized.dtype}

    def entry(self, index: int) -> dict[str, Any]:
        """token_dims, num_tokens, dtype, values [n, d], and scale and offset [n] where the dtype has them."""
        start, stop = self._starts[index], self._starts[index + 1]
        found = {**self._head(stop - start), "values": self.quantized.values[start:stop]}
        for name, values in self._scales:
            found[name] = values[start:stop]
        return found


class Chunks:
    """A vector for each chunk of an item, and the characters of the chunks."""

    name = "chunks"

    def __init__(self, quantized: Quantized, dims: int, spans: np.ndarray, rows: Sequence[int]) -> None:
        self.quantized, self.nbytes = quantized, quantized.values.nbytes + spans.nbytes
        self._dims, self._spans, self._starts = dims, spans, [0, *accumulate(rows)]
        self._scales = list(_scales(quantized))

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        return append_map(parts, written, self.entry(index), copied_nbytes)

    def entry(self, index: int) -> dict[str, Any]:
        """dims, num_chunks, dtype, spans int32 [n, 2], values [n, d], and scale and offset [n] as in `Multivector`."""
        own = slice(self._starts[index], self._starts[index + 1])
        found = {"dims": self._dims, "num_chunks": own.stop - own.start, "dtype": self.quantized.dtype}
        found |= {"spans": self._spans[own], "values": self.quantized.values[own]}
        return found | {name: values[own] for name, values in self._scales}


class Sparse:
    """Terms and their weights; `dims` is the size of the vocabulary, as far as it is known."""

    name = "sparse"

    def __init__(
        self, indices: np.ndarray, values: np.ndarray, rows: Sequence[int], dims: int | None
    ) -> None:
        self._indices, self._values = indices, values
        self._starts, self.nbytes = [0, *accumulate(rows)], indices.nbytes + values.nbytes
        self._head = {"dims": dims, "dtype": values.dtype.name}

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        return append_map(parts, written, self.entry(index), copied_nbytes)

    def entry(self, index: int) -> dict[str, Any]:
        """dims, dtype, indices int32 [k], values [k]."""
        terms = slice(self._starts[index], self._starts[index + 1])
        return {**self._head, "indices": self._indices[terms], "values": self._values[terms]}


def _prefix(head: dict[str, Any], dtype: str, shape: tuple[int, ...], scales: int) -> bytes:
    """The bytes of one item before the data of its `values`; `scales` pairs follow these."""
    pairs = b"".join(packed(part) for pair in head.items() for part in pair)
    return map_header(len(head) + 1 + scales) + pairs + packed("values") + array_prefix(dtype, shape)


def _scales(quantized: Quantized) -> Iterable[tuple[str, np.ndarray]]:
    found = (("scale", quantized.scale), ("offset", quantized.offset))
    return ((name, values) for name, values in found if values is not None)


async def dense_of(reply: Answer, dtype: str, dimensions: int | None, name: str = "dense") -> Dense:
    """The vectors of that output, cut to `dimensions` and in `dtype`; when that made copies, the lease has ended."""
    values = reply.tensors()[name]
    converts = dtype != "float32" or dimensions is not None
    if converts and values.nbytes > INLINE_NBYTES:
        dense = await off_loop(_dense, values, dtype, dimensions)
    else:
        dense = _dense(values, dtype, dimensions)
    if dense.quantized.values is not values:
        reply.close()
    return dense


async def outputs_of(reply: Answer, plan: EncodePlan) -> list[Output]:
    """The outputs that `plan` wants, in the contract's order; the lease ends unless an output is a view on its memory.

    Raises `DeadlineExceeded` when MUVERA takes longer than the request may.
    """
    tensors = reply.tensors()
    nbytes = sum(values.nbytes for values in tensors.values())
    converts = plan.muvera is not None or plan.output_dtype != "float32" or plan.dimensions is not None
    if converts and (nbytes > INLINE_NBYTES or plan.muvera is not None):
        found = await in_steps(_convert(tensors, reply, plan))
    else:
        found = at_once(_convert(tensors, reply, plan))
    originals = {id(values) for values in tensors.values()}
    if not any(
        isinstance(one, Dense | Multivector | Chunks) and id(one.quantized.values) in originals
        for one in found
    ):
        reply.close()
    return found


def _convert(tensors: dict[str, np.ndarray], reply: Answer, plan: EncodePlan) -> Steps[list[Output]]:
    found: list[Output] = []
    if "dense" in plan.outputs:
        dense = tensors["dense"] if plan.muvera is None else (yield from _fixed_width(tensors, reply, plan))
        found.append(_dense(dense, plan.output_dtype, plan.dimensions))
    if "sparse" in plan.outputs:
        values = tensors["sparse.values"]
        if plan.output_dtype == "float16":
            values = to_half(values)
        rows = reply.rows("sparse.indices")
        found.append(Sparse(tensors["sparse.indices"], values, rows, plan.sparse_dims))
    if "multivector" in plan.outputs:
        values = tensors["multivector"]
        quantized = quantize(values, plan.output_dtype)
        found.append(Multivector(quantized, values.shape[1], reply.rows("multivector")))
    if "chunks" in plan.outputs:
        values = tensors["chunks"]
        cut = values if plan.dimensions is None else shorten(values, plan.dimensions)
        quantized = quantize(cut, plan.output_dtype)
        found.append(Chunks(quantized, cut.shape[1], tensors["chunks.spans"], reply.rows("chunks")))
    return found


def _dense(values: np.ndarray, dtype: str, dimensions: int | None) -> Dense:
    cut = values if dimensions is None else shorten(values, dimensions)
    return Dense(quantize(cut, dtype), cut.shape[1])


def _fixed_width(tensors: dict[str, np.ndarray], reply: Answer, plan: EncodePlan) -> Steps[np.ndarray]:
    """One vector per item from its token vectors."""
    assert plan.muvera is not None
    spans, values = reply.spans("multivector"), tensors["multivector"]
    vectors = np.empty((len(spans), plan.muvera.width(values.shape[1])), np.float32)
    for vector, span in zip(vectors, spans, strict=True):
        yield
        vector[:] = muvera.vector_of(values[span], plan.muvera, is_query=bool(plan.call.is_query))
    return vectors
