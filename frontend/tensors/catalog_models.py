"""Catalog models as tensor models: which inputs and outputs an encode, score or extract model has.

All inputs are BYTES: texts in UTF-8, or images as encoded files.

- encode: `text` or `image` [n], or both, one element per item of the batch. `dense` FP32 [n, width]; `multivector` FP32
  [1, tokens, width], for a request of one item; `sparse` BYTES [n], each the JSON text `{"indices": [], "values": []}`.
- score: `query` [1], and `documents` or `images` [n]. `score` FP32 [n], in the order of the documents.
- extract: `text` or `image` [n], and `labels` [k] for all items. `extraction` BYTES [n], each the JSON text of what
  `ipc.wire.extraction` describes.

Score and extract models do not batch: their inputs have lengths of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ipc.catalog.entries import ModelEntry
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.settings import Limits

Kind = Literal["infer", "encode", "score", "extract"]

VERSION = 1
"""The version of every catalog model."""


def kind_of(entry: ModelEntry) -> Kind:
    """What a request to a catalog model becomes; one that encodes and scores is asked to encode."""
    if entry.encode_outputs:
        return "encode"
    return "score" if "score" in entry.outputs else "extract"


def config_of(name: str, entry: ModelEntry, dims: Mapping[str, int], limits: Limits) -> ModelConfig:
    """The configuration of a catalog model; `dims` are the widths of its outputs where a worker knows them."""
    kind = kind_of(entry)
    inputs, outputs = _TENSORS[kind](entry, dims)
    return ModelConfig(
        name=name,
        platform=f"penstock_{kind}",
        backend=entry.adapter if entry.adapter.isidentifier() else "",
        max_batch_size=min(limits.max_items, _MOST_ROWS) if kind == "encode" else 0,
        inputs=inputs,
        outputs=outputs,
    )


_MOST_ROWS = (1 << 31) - 1
_Tensors = tuple[tuple[TensorConfig, ...], tuple[TensorConfig, ...]]


def _text(name: str, dims: tuple[int, ...], optional: bool = False) -> TensorConfig:
    return TensorConfig(name=name, datatype="BYTES", dims=dims, optional=optional)


def _items(entry: ModelEntry, dims: tuple[int, ...], image: str = "image") -> tuple[TensorConfig, ...]:
    """Inputs of one element per item; each may be left out where there are two."""
    kinds = {"text": "text", "image": image}
    named = [name for kind, name in kinds.items() if kind in entry.inputs] or ["text"]
    return tuple(_text(name, dims, optional=len(named) > 1) for name in named)


def _encode(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    def width(output: str) -> int:
        return entry.outputs[output].dims or dims.get(output) or -1

    made = {
        "dense": lambda: TensorConfig(name="dense", datatype="FP32", dims=(width("dense"),)),
        "sparse": lambda: TensorConfig(name="sparse", datatype="BYTES", dims=()),
        "multivector": lambda: TensorConfig(
            name="multivector", datatype="FP32", dims=(-1, width("multivector"))
        ),
    }
    return _items(entry, ()), tuple(made[output]() for output in entry.encode_outputs)


def _score(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    documents = [
        TensorConfig(name="documents", datatype="BYTES", dims=(-1,), optional=tensor.optional)
        if tensor.name == "text"
        else tensor
        for tensor in _items(entry, (-1,), image="images")
    ]
    return (_text("query", (1,)), *documents), (TensorConfig(name="score", datatype="FP32", dims=(-1,)),)


def _extract(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    inputs = (*_items(entry, (-1,)), _text("labels", (-1,), optional=True))
    return inputs, (TensorConfig(name="extraction", datatype="BYTES", dims=(-1,)),)


_TENSORS = {"encode": _encode, "score": _score, "extract": _extract}
