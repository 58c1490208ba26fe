"""Runs requests of tensors to catalog models, and makes the outputs of their configuration of the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from frontend.engine.answer import Answer, quantize, shorten
from frontend.engine.interface import Engine
from frontend.engine.planning import cost_of
from frontend.engine.planning import plan as plan_work
from frontend.http.media import check_all
from frontend.http.rendering import off_loop_if
from frontend.tensors.catalog_plans import DATATYPES, CatalogPlan, plan
from frontend.tensors.checking import CheckedRequest
from frontend.tensors.content_types import packed_nbytes
from frontend.tensors.result import OutputTensor
from ipc.catalog.entries import Catalog
from ipc.errors import of_items
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES
from ipc.settings import Settings
from ipc.wire import extraction

LONG_NBYTES = 64 << 10
"""More bytes of base64 than that are decoded in a thread."""


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
    made = quantize(cut, plan.output_dtype).values
    return _fixed("dense", DATATYPES[plan.output_dtype], made, list(made.shape))


def _multivector(plan: CatalogPlan, answer: Answer, tensors: _Tensors) -> OutputTensor:
    made = quantize(tensors["multivector"], plan.output_dtype).values
    return _fixed("multivector", DATATYPES[plan.output_dtype], made, [1, *made.shape])


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
