"""Requests of tensors to catalog models: named tensors to a call of encode, score or extract, and its reply back.

1. `call` reads texts and images out of BYTES tensors, and the options out of the parameters, and runs the call.
2. `outputs` makes the outputs of the configuration (`catalog_models`) of its reply. One item that failed fails the
   request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.options import Resolved, resolve, typed
from frontend.engine.planning import cost_of
from frontend.http.media import check_all
from frontend.http.texts import check_count, check_shared, check_texts
from frontend.protocols.sie.quantize import quantize, shorten
from frontend.status.labels import check_label_count, check_labels, check_schema
from frontend.tensors.catalog_parameters import options_of
from frontend.tensors.job import Called, Job
from frontend.tensors.models import TensorModel
from frontend.tensors.request import InputTensor, TensorRequest
from frontend.tensors.result import OutputTensor
from ipc.catalog.entries import Catalog
from ipc.errors import InvalidInput, of_items
from ipc.memory import bytes_elements
from ipc.memory.datatypes import BYTES
from ipc.settings import Limits
from ipc.wire import extraction
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall

BEFORE = "parameters."
_DATATYPES = {"float32": "FP32", "float16": "FP16", "binary": "UINT8", "ubinary": "UINT8"}
"""Datatypes of dense vectors by `output_dtype`; those with a scale of their own for each row have no tensor form."""


@dataclass(slots=True, frozen=True)
class CatalogPlan:
    """What to run, and how to make tensors of it: `outputs` in the order in which they are wanted.

    `images` are the encoded images among the inputs by their place, whose headers are to be checked.
    """

    call: Call
    outputs: list[str]
    output_dtype: str = "float32"
    dimensions: int | None = None
    images: Sequence[tuple[str, bytes]] = ()


async def call(job: Job) -> Called:
    """Run the operation that the request stands for. Raises `InvalidInput` as `plan`, and what the engine raises."""
    services, status = job.services, job.served.status
    made = plan(job.served, job.request, services.catalog, services.settings.limits)
    await check_all(made.images, services.settings.limits)
    call = made.call
    reply = await job.run(call, cost_of(call, status, services.settings.limits))
    return reply, partial(outputs, made, reply)


def plan(served: TensorModel, request: TensorRequest, catalog: Catalog, limits: Limits) -> CatalogPlan:
    """The call of a checked request. Raises `InvalidInput` that names the tensor and element, or the parameter."""
    for tensor in (*request.inputs, *(request.outputs or ())):
        if tensor.region is not None:
            raise InvalidInput(
                f"tensor '{tensor.name}': model '{served.name}' takes and gives no shared memory regions"
            )
    inputs = {tensor.name: tensor for tensor in request.inputs}
    outputs = list(served.outputs) if request.outputs is None else [w.name for w in request.outputs]
    options = options_of(served.kind, request.parameters)
    asked = _Asked(served, inputs, outputs, options, catalog, limits)
    return replace(_PLANS[served.kind](asked), images=asked.found)


@dataclass(slots=True, frozen=True)
class _Asked:
    """One request, taken apart."""

    served: TensorModel
    inputs: dict[str, InputTensor]
    outputs: list[str]
    options: dict[str, Any]
    catalog: Catalog
    limits: Limits
    found: list[tuple[str, bytes]] = field(default_factory=list)
    """Images that were read, by their place."""

    def texts(self, name: str) -> list[str] | None:
        """The elements of an input as texts."""
        elements = self.elements(name)
        if elements is None:
            return None
        texts = []
        for index, element in enumerate(elements):
            try:
                texts.append(str(element, "utf-8"))
            except UnicodeDecodeError as error:
                raise InvalidInput(f"input '{name}' element {index}: no UTF-8: {error.reason}") from error
        check_texts(texts, f"input '{name}' element {{}}", self.limits)
        return texts

    def images(self, name: str) -> list[bytes] | None:
        """The elements of an input as encoded images."""
        elements = self.elements(name)
        if elements is None:
            return None
        images = [bytes(element) for element in elements]
        self.found.extend((f"input '{name}' element {index}", image) for index, image in enumerate(images))
        return images

    def elements(self, name: str) -> list[memoryview] | None:
        """The elements of a BYTES input, None when the request has none of that name."""
        tensor = self.inputs.get(name)
        if tensor is None or tensor.data is None:
            return None
        count = math.prod(tensor.shape)
        if name == "labels":
            check_label_count(count, self.limits, f"input '{name}'")
        elif name != "query":
            check_count(count, f"input '{name}'", self.limits)
        return bytes_elements.split(tensor.data, count, f"input '{name}'")

    def items(self, text: str, image: str) -> list[InputItem]:
        """One item of each element, of texts, images or both."""
        texts, images = self.texts(text), self.images(image)
        if texts is None and images is None:
            named = " or ".join(f"'{name}'" for name in (text, image) if name in self.served.inputs)
            raise InvalidInput(f"model '{self.served.name}' needs the input {named}")
        if texts is not None and images is not None and len(texts) != len(images):
            raise InvalidInput(
                f"input '{image}' has {len(images)} elements, but input '{text}' has {len(texts)}"
            )
        count = len(texts if texts is not None else images or ())
        return [
            InputItem(texts[at] if texts is not None else None, None, [images[at]] if images else [])
            for at in range(count)
        ]

    @property
    def names(self) -> FieldNames:
        """What messages call the parts of a request."""
        item = next(
            (name for name in ("text", "documents", "image", "images") if name in self.inputs), "text"
        )
        element = f"input '{item}' element {{}}"
        return FieldNames(element, element, "input 'query' element 0", BEFORE)

    def resolved(self, items: int) -> Resolved:
        """The options that hold for a request over so many items."""
        entry = self.served.entry
        return resolve(entry, self.options, None, self.catalog, items, self.limits, self.names)


def _encode(asked: _Asked) -> CatalogPlan:
    items = asked.items("text", "image")
    if "multivector" in asked.outputs and len(items) > 1:
        raise InvalidInput(
            f"output 'multivector' of model '{asked.served.name}' has rows of its own for each item: send one item a "
            f"request (got {len(items)}), or name the outputs you want without it"
        )
    found = asked.resolved(len(items))
    dtype = typed(found.options, "output_dtype", str, "str", BEFORE) or "float32"
    if dtype not in _DATATYPES:
        raise InvalidInput(f"{BEFORE}output_dtype: {dtype[:64]!a} is not one of {', '.join(_DATATYPES)}")
    dimensions = typed(found.options, "dimensions", int, "int", BEFORE)
    _check_dimensions(asked.served, dimensions)
    call = EncodeCall(
        items,
        asked.outputs,
        found.instruction,
        bool(found.options.get("is_query")),
        found.options,
        found.overflow,
        found.lora,
        asked.names,
    )
    return CatalogPlan(call, asked.outputs, dtype, dimensions)


def _check_dimensions(served: TensorModel, value: int | None) -> None:
    dense = served.outputs.get("dense")
    if value is None:
        return
    width = dense.dims[0] if dense is not None else 0
    if not 1 <= value <= width:
        raise InvalidInput(f"{BEFORE}dimensions: {value} is outside 1..{width}")
    if served.entry.dimensions and value not in served.entry.dimensions:
        known = ", ".join(map(str, served.entry.dimensions))
        raise InvalidInput(f"{BEFORE}dimensions: {value} is not one of {known}")


def _score(asked: _Asked) -> CatalogPlan:
    query = (asked.texts("query") or [""])[0]
    items = asked.items("documents", "images")
    check_shared(query, "input 'query' element 0", len(items), asked.limits)
    found = asked.resolved(len(items))
    call = ScoreCall(
        items,
        InputItem(query),
        found.instruction,
        found.options,
        found.overflow,
        found.lora,
        asked.names,
    )
    return CatalogPlan(call, asked.outputs)


def _extract(asked: _Asked) -> CatalogPlan:
    items, options = asked.items("text", "image"), asked.options
    labels, metadata = options.pop("labels", None), options.pop("metadata", None)
    schema = check_schema(options.pop("output_schema", None))
    if "labels" in asked.inputs:
        if labels is not None:
            raise InvalidInput("labels: given as input 'labels' and as a parameter; use one of them")
        labels = asked.texts("labels")
    field = "input 'labels'" if "labels" in asked.inputs else f"{BEFORE}labels"
    if not all(isinstance(label, str) for label in labels or ()):
        raise InvalidInput(f"{field}: expected texts only")
    if metadata is not None:
        items = [msgspec.structs.replace(item, metadata=metadata) for item in items]
    found = asked.resolved(len(items))
    call = ExtractCall(
        items,
        check_labels(labels, asked.limits, field),
        schema,
        found.instruction,
        found.options,
        found.overflow,
        found.lora,
        asked.names,
    )
    return CatalogPlan(call, asked.outputs)


_PLANS: dict[str, Callable[[_Asked], CatalogPlan]] = {
    "encode": _encode,
    "score": _score,
    "extract": _extract,
}


def outputs(plan: CatalogPlan, reply: Answer) -> list[OutputTensor]:
    """The wanted outputs, in order; float32 vectors are views of the reply. Raises the error of an item that failed."""
    if reply.errors:
        raise of_items(reply.errors)
    tensors = reply.tensors()
    return [_MADE[name](plan, reply, tensors) for name in plan.outputs]


_Tensors = dict[str, np.ndarray]


def _dense(plan: CatalogPlan, reply: Answer, tensors: _Tensors) -> OutputTensor:
    values = tensors["dense"]
    cut = values if plan.dimensions is None else shorten(values, plan.dimensions)
    made = quantize(cut, plan.output_dtype).values
    return _fixed("dense", _DATATYPES[plan.output_dtype], made, list(made.shape))


def _multivector(plan: CatalogPlan, reply: Answer, tensors: _Tensors) -> OutputTensor:
    made = quantize(tensors["multivector"], plan.output_dtype).values
    return _fixed("multivector", _DATATYPES[plan.output_dtype], made, [1, *made.shape])


def _score_output(plan: CatalogPlan, reply: Answer, tensors: _Tensors) -> OutputTensor:
    values = tensors["score"]
    return _fixed("score", "FP32", values, [len(values)])


def _fixed(name: str, datatype: str, values: np.ndarray, shape: list[int]) -> OutputTensor:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return OutputTensor(name, datatype, shape, data, data.nbytes)


def _sparse(plan: CatalogPlan, reply: Answer, tensors: _Tensors) -> OutputTensor:
    indices, values = tensors["sparse.indices"], tensors["sparse.values"]
    starts = accumulate(reply.rows("sparse.indices"), initial=0)
    return _json("sparse", [{"indices": indices[a:b], "values": values[a:b]} for a, b in pairwise(starts)])


def _extraction(plan: CatalogPlan, reply: Answer, tensors: _Tensors) -> OutputTensor:
    packed = tensors["extraction"].data
    starts = accumulate(reply.rows("extraction"), initial=0)
    found = (extraction.unpack(packed[a:b]) for a, b in pairwise(starts))
    return _elements("extraction", [msgspec.json.encode(one) for one in found])


def _json(name: str, objects: Sequence[dict[str, Any]]) -> OutputTensor:
    return _elements(name, [orjson.dumps(one, option=orjson.OPT_SERIALIZE_NUMPY) for one in objects])


def _elements(name: str, elements: Sequence[bytes]) -> OutputTensor:
    data = memoryview(bytes_elements.join(elements))
    return OutputTensor(name, BYTES, [len(elements)], data, data.nbytes)


_MADE: dict[str, Callable[[CatalogPlan, Answer, _Tensors], OutputTensor]] = {
    "dense": _dense,
    "multivector": _multivector,
    "sparse": _sparse,
    "score": _score_output,
    "extraction": _extraction,
}
