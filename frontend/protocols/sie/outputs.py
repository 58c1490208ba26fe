"""The outputs of an encode reply in their output dtype, item by item.

float32 vectors stay views on the worker's memory. Everything else is a private copy, made in a thread when it is large;
once no view is left, the lease ends.

Values and numpy arrays in the msgpack form of the SIE contract.

An array is the msgpack-numpy map with bin keys. Everything but its data is constant for a dtype and shape, so it is
built once and the raw bytes follow from where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Annotated, Any, Literal, Protocol

import msgpack
import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from frontend.engine.answer import Answer, Quantized, quantize, shorten, to_half
from frontend.http.threads import Steps, at_once, in_steps, off_loop
from frontend.protocols.sie import muvera
from frontend.protocols.sie.plans import EncodePlan
from frontend.sending import Buffer

Dtype = Literal["float32", "float16", "int8", "uint8", "binary"]
Number = int | float
_packer = msgpack.Packer()
INLINE_NBYTES = 1 << 20
"""Results up to this size are converted and rendered on the event loop, larger ones in a thread."""


packed = msgspec.msgpack.Encoder().encode
"""msgpack of a value or struct without arrays."""


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


def pairs_of(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    """Names and values of the fields that a struct has."""
    names = struct.__struct_fields__
    return [(name, value) for name in names if (value := getattr(struct, name)) is not UNSET]


def append_struct(
    parts: list[Buffer], open_bytes: bytearray, struct: msgspec.Struct, copied_nbytes: int
) -> bytearray:
    """Write a struct whose values may be arrays.

    Bytes go into `open_bytes`; an array larger than `copied_nbytes` closes them and goes into `parts` as a view.
    Returns the open bytes.
    """
    pairs = pairs_of(struct)
    open_bytes += map_header(len(pairs))
    for name, value in pairs:
        open_bytes = append_pair(parts, open_bytes, name, value, copied_nbytes)
    return open_bytes


def append_pair(
    parts: list[Buffer], open_bytes: bytearray, name: str, value: Any, copied_nbytes: int
) -> bytearray:
    """Write one field of such a struct; arguments and result as in `append_struct`."""
    open_bytes += _name(name)
    if isinstance(value, np.ndarray):
        return _append_array(parts, open_bytes, value, copied_nbytes)
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


class DenseVector(msgspec.Struct):
    """One vector; `scale` and `offset` come with int8 and uint8."""

    dims: Annotated[int, Meta(description="Length of a vector.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    values: Annotated[list[Number], Meta(description="The numbers.")]
    scale: Annotated[
        float | UnsetType,
        Meta(
            description="Scale of integers: the largest magnitude for int8, the range of the values for uint8."
        ),
    ] = UNSET
    offset: Annotated[float | UnsetType, Meta(description="The least value, for uint8.")] = UNSET


class SparseVector(msgspec.Struct):
    """Values at some of `dims` indices."""

    dims: Annotated[int | None, Meta(description="Length of a vector.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    indices: Annotated[list[int], Meta(description="Ids of the terms, ascending.")]
    values: Annotated[list[Number], Meta(description="The numbers.")]


class MultiVector(msgspec.Struct):
    """One vector per token; `scale` and `offset` hold one number per token."""

    token_dims: Annotated[int, Meta(description="Length of a token's vector.")]
    num_tokens: Annotated[int, Meta(description="Number of vectors.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    values: Annotated[list[list[Number]], Meta(description="The numbers.")]
    scale: Annotated[
        list[float] | UnsetType,
        Meta(
            description="Scale of integers: the largest magnitude for int8, the range of the values for uint8."
        ),
    ] = UNSET
    offset: Annotated[list[float] | UnsetType, Meta(description="The least value, for uint8.")] = UNSET


class ChunkVectors(msgspec.Struct):
    """One vector per chunk of a document; `spans` are the characters of the chunks, from and up to."""

    dims: Annotated[int, Meta(description="Length of a vector.")]
    num_chunks: Annotated[int, Meta(description="Number of chunks.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    spans: Annotated[
        list[tuple[int, int]],
        Meta(description="First character of each chunk, and the character behind its last one."),
    ]
    values: Annotated[list[list[Number]], Meta(description="The numbers.")]
    scale: Annotated[
        list[float] | UnsetType,
        Meta(
            description="Scale of integers: the largest magnitude for int8, the range of the values for uint8."
        ),
    ] = UNSET
    offset: Annotated[list[float] | UnsetType, Meta(description="The least value, for uint8.")] = UNSET


class Output(Protocol):
    """One output of all items; `name` is its key in an item."""

    name: str
    nbytes: int

    def entry(self, index: int) -> msgspec.Struct:
        """The fields of one item; arrays as numpy arrays."""

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The same as msgpack; see `append_struct`."""


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
        self._dims = dims
        self._dtype: Any = quantized.dtype
        self._scales = _scales(quantized)

    @cached_property
    def _prefix(self) -> bytes:
        return _prefix(self.entry(0))

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

    def entry(self, index: int) -> DenseVector:
        """Values [d], and scale and offset as floats where the dtype has them."""
        scales = {name: float(values[index]) for name, values in self._scales}
        values: Any = self.quantized.values[index]
        return DenseVector(self._dims, self._dtype, values, **scales)


class Multivector:
    """A vector for each token of an item."""

    name = "multivector"

    def __init__(self, quantized: Quantized, dims: int, rows: Sequence[int]) -> None:
        self.quantized, self.nbytes = quantized, quantized.values.nbytes
        self._dims, self._starts = dims, [0, *accumulate(rows)]
        self._dtype: Any = quantized.dtype
        self._scales = _scales(quantized)
        self._prefixes: dict[int, bytes] = {}

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self.quantized.values)

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        start, stop = self._starts[index], self._starts[index + 1]
        prefix = self._prefixes.get(stop - start)
        if prefix is None:
            prefix = self._prefixes[stop - start] = _prefix(self.entry(index))
        written += prefix
        written = self._rows.write(parts, written, start, stop, copied_nbytes)
        for name, values in self._scales:
            written = append_pair(parts, written, name, values[start:stop], copied_nbytes)
        return written

    def entry(self, index: int) -> MultiVector:
        """Values [n, d], and scale and offset [n] where the dtype has them."""
        own = slice(self._starts[index], self._starts[index + 1])
        scales: dict[str, Any] = {name: values[own] for name, values in self._scales}
        values: Any = self.quantized.values[own]
        return MultiVector(self._dims, own.stop - own.start, self._dtype, values, **scales)


class Chunks:
    """A vector for each chunk of an item, and the characters of the chunks."""

    name = "chunks"

    def __init__(self, quantized: Quantized, dims: int, spans: np.ndarray, rows: Sequence[int]) -> None:
        self.quantized, self.nbytes = quantized, quantized.values.nbytes + spans.nbytes
        self._dims, self._starts = dims, [0, *accumulate(rows)]
        self._dtype: Any = quantized.dtype
        self._spans: Any = spans
        self._scales = _scales(quantized)

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        return append_struct(parts, written, self.entry(index), copied_nbytes)

    def entry(self, index: int) -> ChunkVectors:
        """Spans int32 [n, 2], values [n, d], and scale and offset [n] as in `Multivector`."""
        own = slice(self._starts[index], self._starts[index + 1])
        scales: dict[str, Any] = {name: values[own] for name, values in self._scales}
        values: Any = self.quantized.values[own]
        return ChunkVectors(self._dims, own.stop - own.start, self._dtype, self._spans[own], values, **scales)


class Sparse:
    """Terms and their weights; `dims` is the size of the vocabulary, as far as it is known."""

    name = "sparse"

    def __init__(
        self, indices: np.ndarray, values: np.ndarray, rows: Sequence[int], dims: int | None
    ) -> None:
        self._indices: Any = indices
        self._values: Any = values
        self._starts, self.nbytes = [0, *accumulate(rows)], indices.nbytes + values.nbytes
        self._dims = dims
        self._dtype: Any = values.dtype.name

    def write(self, parts: list[Buffer], written: bytearray, index: int, copied_nbytes: int) -> bytearray:
        """The fields of one item as msgpack."""
        return append_struct(parts, written, self.entry(index), copied_nbytes)

    def entry(self, index: int) -> SparseVector:
        """Indices int32 [k], values [k]."""
        terms = slice(self._starts[index], self._starts[index + 1])
        return SparseVector(self._dims, self._dtype, self._indices[terms], self._values[terms])


def _prefix(struct: DenseVector | MultiVector) -> bytes:
    """The bytes of one item before the data of its `values`. Scale and offset follow these."""
    pairs = pairs_of(struct)
    written = bytearray(map_header(len(pairs)))
    for name, value in pairs:
        written += packed(name)
        if isinstance(value, np.ndarray):
            return bytes(written + array_prefix(value.dtype.str, value.shape))
        written += packed(value)
    raise AssertionError("no array")


def _scales(quantized: Quantized) -> list[tuple[str, np.ndarray]]:
    arrays = (("scale", quantized.scale), ("offset", quantized.offset))
    return [(name, values) for name, values in arrays if values is not None]


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
        outputs = await in_steps(_convert(tensors, reply, plan))
    else:
        outputs = at_once(_convert(tensors, reply, plan))
    originals = {id(values) for values in tensors.values()}
    if not any(
        isinstance(one, Dense | Multivector | Chunks) and id(one.quantized.values) in originals
        for one in outputs
    ):
        reply.close()
    return outputs


def _convert(tensors: dict[str, np.ndarray], reply: Answer, plan: EncodePlan) -> Steps[list[Output]]:
    outputs: list[Output] = []
    if "dense" in plan.outputs:
        dense = tensors["dense"] if plan.muvera is None else (yield from _fixed_width(tensors, reply, plan))
        outputs.append(_dense(dense, plan.output_dtype, plan.dimensions))
    if "sparse" in plan.outputs:
        values = tensors["sparse.values"]
        if plan.output_dtype == "float16":
            values = to_half(values)
        rows = reply.rows("sparse.indices")
        outputs.append(Sparse(tensors["sparse.indices"], values, rows, plan.sparse_dims))
    if "multivector" in plan.outputs:
        values = tensors["multivector"]
        quantized = quantize(values, plan.output_dtype)
        outputs.append(Multivector(quantized, values.shape[1], reply.rows("multivector")))
    if "chunks" in plan.outputs:
        values = tensors["chunks"]
        cut = values if plan.dimensions is None else shorten(values, plan.dimensions)
        quantized = quantize(cut, plan.output_dtype)
        outputs.append(Chunks(quantized, cut.shape[1], tensors["chunks.spans"], reply.rows("chunks")))
    return outputs


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
