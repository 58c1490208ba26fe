"""Requests of tensors to catalog models: a call of encode, score or extract, and the tensors of its answer.

1. `plan` reads texts and images out of BYTES tensors (`models` says which a model has), once there are not too many of
   them, and decodes those in base64.
2. Options are the parameters of the request, by their names in the SIE routes. A value that is a list or a map there is
   JSON text here, since parameters are texts, numbers and truth values. A parameter that no model of the kind knows is
   refused here; the worker refuses one that the family does not know. `frontend.engine.planning` does the rest, as for
   the SIE routes.
3. `CatalogCalls.run` runs the call, and `outputs` makes the outputs of the model's configuration of the answer.

A request may name codecs of MLServer with the parameter `content_type`. Of an input, `str` and `np` say that the
elements are texts or files as they stand, and `base64` that each element is base64 of its bytes. Of a request, `str`,
`np` and `pd` say no more than its inputs do. Of a wanted output, the codec that gives its datatype anyway is known.
Every other name is refused: the codec would change elements in a way that no catalog model means.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from frontend.engine.answer import Answer, quantize, shorten
from frontend.engine.interface import Engine
from frontend.engine.planning import Resolved, check_dimensions, cost_of, resolve, typed
from frontend.engine.planning import plan as plan_work
from frontend.http.fields import (
    check_count,
    check_label_count,
    check_labels,
    check_schema,
    check_shared,
    check_texts,
)
from frontend.http.image_headers import check_all
from frontend.http.threads import off_loop_if
from frontend.tensors.checking import CheckedRequest
from frontend.tensors.models import TensorModel
from frontend.tensors.request import CONTENT_TYPE, InputTensor, Parameter, TensorRequest
from frontend.tensors.result import OutputTensor
from ipc.catalog.entries import Catalog
from ipc.catalog.option_names import EXTRACT_OPTIONS, SCORE_OPTIONS
from ipc.errors import InvalidInput, of_items
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES
from ipc.settings import Limits, Settings
from ipc.wire import extraction
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import Call, InputItem

LONG_NBYTES = 64 << 10
"""More bytes of base64 than that are decoded in a thread."""
BEFORE = "parameters."
DATATYPES = {"float32": "FP32", "float16": "FP16", "binary": "UINT8", "ubinary": "UINT8"}
"""Datatypes of dense vectors by `output_dtype`; those with a scale of their own for each row have no tensor form."""
_SHARED = frozenset({"instruction", "lora", "lora_id", "overflow_policy"})
_KNOWN: dict[str, frozenset[str]] = {
    "encode": _SHARED
    | {
        "dimensions",
        "document_template",
        "is_query",
        "max_terms",
        "output_dtype",
        "query_template",
        "text_template",
    },
    "score": _SHARED | SCORE_OPTIONS,
    "extract": _SHARED | EXTRACT_OPTIONS | {"labels", "metadata", "output_schema"},
}
_JSON: dict[str, tuple[type, str]] = {
    "labels": (list, "array"),
    "metadata": (dict, "object"),
    "output_schema": (dict, "object"),
    "relations": (list, "array"),
    "score_weights": (dict, "object"),
}


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


def plan(model: TensorModel, request: TensorRequest, catalog: Catalog, limits: Limits) -> CatalogPlan:
    """The call of a checked request. Raises `InvalidInput` that names the tensor and element, or the parameter.

    Any thread may call this.
    """
    parameters = without_codec(model, request)
    for tensor in (*request.inputs, *(request.outputs or ())):
        if tensor.region is not None:
            raise InvalidInput(
                f"tensor '{tensor.name}': model '{model.name}' takes and gives no shared memory regions"
            )
    inputs = {tensor.name: tensor for tensor in request.inputs}
    outputs = list(model.outputs) if request.outputs is None else [w.name for w in request.outputs]
    options = options_of(model.kind, parameters)
    asked = _Asked(model, inputs, outputs, options, catalog, limits)
    return replace(_PLANS[model.kind](asked), images=asked.found)


@dataclass(slots=True, frozen=True)
class _Asked:
    """One request, taken apart."""

    model: TensorModel
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

    def elements(self, name: str) -> Sequence[memoryview | bytes] | None:
        """The elements of a BYTES input as they are meant, None when the request has none of that name."""
        tensor = self.inputs.get(name)
        if tensor is None or tensor.data is None:
            return None
        count = math.prod(tensor.shape)
        if name == "labels":
            check_label_count(count, self.limits, f"input '{name}'")
        elif name != "query":
            check_count(count, f"input '{name}'", self.limits)
        elements = datatypes.split(tensor.data, count, f"input '{name}'")
        return unpacked(elements, f"input '{name}'") if tensor.content_type == BASE64 else elements

    def items(self, text: str, image: str) -> list[InputItem]:
        """One item of each element, of texts, images or both."""
        texts, images = self.texts(text), self.images(image)
        if texts is None and images is None:
            named = " or ".join(f"'{name}'" for name in (text, image) if name in self.model.inputs)
            raise InvalidInput(f"model '{self.model.name}' needs the input {named}")
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
        entry = self.model.entry
        return resolve(entry, self.options, None, self.catalog, items, self.limits, self.names)


def _encode(asked: _Asked) -> CatalogPlan:
    items = asked.items("text", "image")
    if "multivector" in asked.outputs and len(items) > 1:
        raise InvalidInput(
            f"output 'multivector' of model '{asked.model.name}' has rows of its own for each item: send one item a "
            f"request (got {len(items)}), or name the outputs you want without it"
        )
    resolved = asked.resolved(len(items))
    dtype = typed(resolved.options, "output_dtype", str, "str", BEFORE) or "float32"
    if dtype not in DATATYPES:
        raise InvalidInput(f"{BEFORE}output_dtype: {dtype[:64]!a} is not one of {', '.join(DATATYPES)}")
    dimensions = typed(resolved.options, "dimensions", int, "int", BEFORE)
    dense = asked.model.outputs.get("dense")
    width = dense.dims[0] if dense is not None else 0
    check_dimensions(dimensions, asked.model.entry, width, f"{BEFORE}dimensions")
    return CatalogPlan(
        resolved.encode(items, asked.outputs, None, asked.names), asked.outputs, dtype, dimensions
    )


def _score(asked: _Asked) -> CatalogPlan:
    query = (asked.texts("query") or [""])[0]
    items = asked.items("documents", "images")
    check_shared(query, "input 'query' element 0", len(items), asked.limits)
    call = asked.resolved(len(items)).score(items, InputItem(query), asked.names)
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
    resolved = asked.resolved(len(items))
    call = resolved.extract(items, check_labels(labels, asked.limits, field), schema, asked.names)
    return CatalogPlan(call, asked.outputs)


_PLANS: dict[str, Callable[[_Asked], CatalogPlan]] = {
    "encode": _encode,
    "score": _score,
    "extract": _extract,
}


def options_of(kind: str, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """The options that these parameters mean for a `kind` of model. Raises `InvalidInput` that names the parameter."""
    known = _KNOWN[kind]
    options: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in known:
            raise InvalidInput(
                f"parameters.{name[:64]!a}: unknown to {kind} models, which know {', '.join(sorted(known))}"
            )
        options[name] = _structured(name, value, *_JSON[name]) if name in _JSON else value
    return options


def _structured(name: str, value: Parameter, kind: type, text: str) -> Any:
    """A list or map from JSON text; plain `labels` are separated by commas."""
    if isinstance(value, str) and name == "labels" and not value.lstrip().startswith("["):
        return [label.strip() for label in value.split(",")]
    try:
        decoded = msgspec.json.decode(value) if isinstance(value, str) else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"parameters.{name}: no JSON text: {error}") from error
    if not isinstance(decoded, kind):
        raise InvalidInput(f"parameters.{name}: expected the JSON text of an {text}")
    return decoded


class CatalogCalls:
    """Runs requests to catalog models."""

    def __init__(self, engine: Engine, catalog: Catalog, settings: Settings) -> None:
        self._engine, self._catalog, self._settings = engine, catalog, settings

    async def run(self, checked: CheckedRequest) -> tuple[Answer, Callable[[], list[OutputTensor]]]:
        """Run the operation that the request stands for: the answer, and the reader of its wanted outputs.

        Raises `InvalidInput` as `plan`, and the errors of the engine.
        """
        scope, model, request, settings = checked.scope, checked.model, checked.request, self._settings
        is_long = packed_nbytes(request) > LONG_NBYTES
        planned = await off_loop_if(is_long, plan, model, request, self._catalog, settings.limits)
        await check_all(planned.images, settings.limits)
        cost = cost_of(planned.call, model.status, settings.limits)
        work = plan_work(scope, settings, model.id, planned.call, cost, lane=request.lane, tensors=True)
        if scope.inference is not None:
            # The rows of a run are items, also of score and extract models, which have no batch dimension.
            scope.inference.rows = len(planned.call.items)
        answer = await self._engine.run(scope, work)
        return answer, partial(outputs, planned, answer)


def outputs(plan: CatalogPlan, answer: Answer) -> list[OutputTensor]:
    """The wanted outputs, in order; float32 vectors are views of the answer. Raises the error of a failed item."""
    if answer.errors:
        raise of_items(answer.errors)
    tensors = answer.tensors()
    return [_MADE[name](plan, answer, tensors) for name in plan.outputs]


_Tensors = dict[str, np.ndarray]


def _dense(plan: CatalogPlan, answer: Answer, tensors: _Tensors) -> OutputTensor:
    values = tensors["dense"]
    cut = values if plan.dimensions is None else shorten(values, plan.dimensions)
    quantized = quantize(cut, plan.output_dtype).values
    return _fixed("dense", DATATYPES[plan.output_dtype], quantized, list(quantized.shape))


def _multivector(plan: CatalogPlan, answer: Answer, tensors: _Tensors) -> OutputTensor:
    quantized = quantize(tensors["multivector"], plan.output_dtype).values
    return _fixed("multivector", DATATYPES[plan.output_dtype], quantized, [1, *quantized.shape])


def _score_output(plan: CatalogPlan, answer: Answer, tensors: _Tensors) -> OutputTensor:
    values = tensors["score"]
    return _fixed("score", "FP32", values, [len(values)])


def _fixed(name: str, datatype: str, values: np.ndarray, shape: list[int]) -> OutputTensor:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return OutputTensor(name, datatype, shape, data, data.nbytes)


def _sparse(plan: CatalogPlan, answer: Answer, tensors: _Tensors) -> OutputTensor:
    indices, values = tensors["sparse.indices"], tensors["sparse.values"]
    spans = answer.spans("sparse.indices")
    return _json("sparse", [{"indices": indices[terms], "values": values[terms]} for terms in spans])


def _extraction(plan: CatalogPlan, answer: Answer, tensors: _Tensors) -> OutputTensor:
    packed = tensors["extraction"].data
    findings = (extraction.unpack(packed[span]) for span in answer.spans("extraction"))
    return _elements("extraction", [msgspec.json.encode(each) for each in findings])


def _json(name: str, objects: Sequence[dict[str, Any]]) -> OutputTensor:
    return _elements(name, [orjson.dumps(one, option=orjson.OPT_SERIALIZE_NUMPY) for one in objects])


def _elements(name: str, elements: Sequence[bytes]) -> OutputTensor:
    data = memoryview(datatypes.join(elements))
    return OutputTensor(name, BYTES, [len(elements)], data, data.nbytes)


_MADE: dict[str, Callable[[CatalogPlan, Answer, _Tensors], OutputTensor]] = {
    "dense": _dense,
    "multivector": _multivector,
    "sparse": _sparse,
    "score": _score_output,
    "extraction": _extraction,
}


BASE64 = "base64"
_OF_REQUESTS = ("str", "np", "pd")
_OF_INPUTS = ("str", "np", BASE64)
_OF_TEXT_OUTPUTS = ("str", "np")
_OF_NUMBER_OUTPUTS = ("np",)


def without_codec(model: TensorModel, request: TensorRequest) -> dict[str, Parameter]:
    """The parameters of a checked request but the codec. Raises `InvalidInput` for a codec the model does not take."""
    for tensor in request.inputs:
        if tensor.content_type:
            _check(tensor.content_type, _OF_INPUTS, f"input '{tensor.name}': {CONTENT_TYPE}", model)
    for output in request.outputs or ():
        if output.content_type:
            known = _OF_TEXT_OUTPUTS if model.outputs[output.name].datatype == BYTES else _OF_NUMBER_OUTPUTS
            _check(output.content_type, known, f"output '{output.name}': {CONTENT_TYPE}", model)
    if CONTENT_TYPE not in request.parameters:
        return request.parameters
    parameters = dict(request.parameters)
    codec = parameters.pop(CONTENT_TYPE)
    if codec:
        _check(codec, _OF_REQUESTS, f"parameters.{CONTENT_TYPE}", model)
    return parameters


def _check(codec: Parameter, known: Sequence[str], where: str, model: TensorModel) -> None:
    if codec not in known:
        raise InvalidInput(
            f"{where}: {str(codec)[:64]!a} is not one of {', '.join(known)}, "
            f"the codecs that model '{model.name}' takes here"
        )


def packed_nbytes(request: TensorRequest) -> int:
    """Bytes of the inputs in base64."""
    return sum([len(tensor.data or b"") for tensor in request.inputs if tensor.content_type == BASE64])


def unpacked(elements: Sequence[memoryview], where: str) -> list[bytes]:
    """The bytes that each element states in base64. Raises `InvalidInput` that names the element."""
    texts = []
    for index, element in enumerate(elements):
        try:
            texts.append(base64.b64decode(element, validate=True))
        except ValueError as error:
            raise InvalidInput(
                f"{where} element {index}: no {BASE64}, which {CONTENT_TYPE} states"
            ) from error
    return texts
