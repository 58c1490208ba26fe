"""Requests that repeat: the head of a request is read, checked and planned once per model.

A client that asks the same question of other numbers sends the same head each time: names, datatypes, shapes and
sizes of its tensors. Only the bytes behind the head differ. So the model keeps the plan of a request by its head, and
a request with an equal head and as many bytes runs that plan.

A plan is kept for plain requests to programs only: small inputs that lie behind the head. Regions, encoded images,
sequences, timeouts, classes, and elements within the head take the long way (`TensorInference.run`). The plans of a
model go with its `TensorModel`, and so with every change of the model's state, configuration or version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from frontend.engine.planning import plan
from frontend.scope import RequestScope
from frontend.tensors.checking import check
from frontend.tensors.models import TensorModel
from frontend.tensors.program_calls import ALIGNMENT, laid_out
from frontend.tensors.request import TensorRequest
from ipc.catalog.model_config import ROW_COST
from ipc.errors import InvalidInput
from ipc.settings import Settings
from ipc.wire.messages import InferCall, TensorInput, TensorOutput, Work

MOST_HEADS = 64
"""Plans that a model keeps. The oldest goes for a new one."""
MOST_HEAD_NBYTES = 4096
"""Longer heads are not kept: they cost more to compare, and more memory, than most plans are worth."""


@dataclass(slots=True, frozen=True)
class HeadPlan:
    """The plan of all requests with one head. `wanted` is what the protocol renders the answer with.

    The inputs take `nbytes` bytes behind the head, one after another; `cuts` has begin, end and padding of each, or is
    empty where the bytes are the payload as they stand.
    """

    version: int | None
    call: InferCall
    lane: str
    nbytes: int
    cuts: Sequence[tuple[int, int, bytes]]
    wanted: Any

    def work(self, scope: RequestScope, settings: Settings, model: TensorModel) -> Work:
        """The work of the next request."""
        cost = ROW_COST * self.call.rows
        return plan(scope, settings, model.id, self.call, cost, lane=self.lane, tensors=True)

    def payload(self, data: memoryview) -> bytes | memoryview:
        """The bytes behind the head as `program_calls.laid_out` places the inputs."""
        if not self.cuts:
            return data
        return b"".join([piece for begin, end, padding in self.cuts for piece in (data[begin:end], padding)])


def keep(
    model: TensorModel, head: bytes | str, behind_nbytes: int, request: TensorRequest, wanted: Any
) -> None:
    """Keep the plan of a request that has run, if the request is plain; so many bytes lay behind `head`."""
    if len(head) > MOST_HEAD_NBYTES or not _is_plain(model, request):
        return
    sizes = [len(tensor.data or b"") for tensor in request.inputs]
    if sum(sizes) != behind_nbytes:
        # Elements of other inputs lay within the head.
        return
    try:
        rows = check(model, request)
    except InvalidInput:
        # The model changed while the request ran.
        return
    starts, _ = laid_out(request.inputs)
    outputs = model.every_output
    if request.outputs is not None:
        outputs = [TensorOutput(output.name, None) for output in request.outputs]
    inputs = [
        TensorInput(tensor.name, tensor.datatype, list(tensor.shape), start, size)
        for tensor, start, size in zip(request.inputs, starts, sizes, strict=True)
    ]
    call = InferCall(inputs, outputs, rows, dict(request.parameters), None, request.priority)
    plans = model.plans
    if len(plans) >= MOST_HEADS:
        del plans[next(iter(plans))]
    plans[head] = HeadPlan(request.version, call, request.lane, sum(sizes), _cuts(sizes), wanted)


def _is_plain(model: TensorModel, request: TensorRequest) -> bool:
    config = model.config
    if (
        model.kind != "infer"
        or config.decoupled
        or config.sequence_batching is not None
        or request.timeout_us
    ):
        return False
    given = all(
        tensor.data is not None and tensor.region is None and tensor.recipe is None
        for tensor in request.inputs
    )
    return given and all(output.region is None and output.classes is None for output in request.outputs or ())


def _cuts(sizes: Sequence[int]) -> list[tuple[int, int, bytes]]:
    if len(sizes) == 1 or all(size % ALIGNMENT == 0 for size in sizes):
        return []
    ends = list(accumulate(sizes))
    return [(end - size, end, bytes(-size % ALIGNMENT)) for size, end in zip(sizes, ends, strict=True)]
