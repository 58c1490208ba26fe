"""A model whose load fails, or that is unloaded, while a request for it is on its way: what tensor protocols tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grpc import StatusCode

from frontend.grpc.rpc import status_of
from frontend.protocols.kserve_v2.errors import render
from frontend.protocols.trtis_v1 import statuses
from frontend.scope import RequestScope, plain_scope
from frontend.services import Services
from frontend.tensors.request import InputTensor, TensorRequest, UnavailableModel
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import DependencyConflict, ModelLoadFailed, ModelNotFound, PenstockError
from ipc.protos import trtis_v1_pb2 as pb
from tests.fakes.tensors import entry, loaded, results, run, services_of, tensor

WHY = "the program is damaged"
ERRORS = [
    ModelLoadFailed(WHY, error_class="UNKNOWN", attempts=1, permanent=True),
    DependencyConflict(WHY, compatible_bundles=[]),
]


def services(root: Path, error: PenstockError, *, decoupled: bool) -> Services:
    """Services with a model whose calls end with this error."""
    config = ModelConfig(
        name="m", inputs=(tensor("A", "UINT8", 1),), outputs=(tensor("O", "UINT8", 1),), decoupled=decoupled
    )
    made = services_of(root, [entry("m@1")], [loaded("m@1", config)], lambda request: error)

    @asynccontextmanager
    async def stream(*given: Any, **more: Any) -> AsyncIterator[Any]:
        raise error
        yield

    made.engine.stream = stream  # type: ignore[method-assign]
    return made


def asked() -> tuple[RequestScope, TensorRequest]:
    """A request for the model, and its context."""
    made = plain_scope()
    made.deadline_ns = deadline.after(20)
    return made, TensorRequest("m", 1, [InputTensor("A", "UINT8", [1], b"x")], None)


def refusal(made: Services, work: Coroutine[Any, Any, Any]) -> UnavailableModel:
    """What the request is refused with."""
    try:
        with pytest.raises(UnavailableModel) as caught:
            asyncio.run(work)
    finally:
        made.engine.client.inputs.close()
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
@pytest.mark.parametrize("decoupled", [False, True])
def test_it_is_told_as_a_model_that_has_no_available_version(
    tmp_path: Path, error: PenstockError, decoupled: bool
) -> None:
    made = services(tmp_path, error, decoupled=decoupled)
    parts = asked()
    work = anext(results(made, *parts)) if decoupled else run(made, *parts)
    found = refusal(made, work)  # type: ignore[arg-type]
    assert (found.model, found.version, found.reason) == ("m", 1, "failed")
    status, body, headers = render(found, "/v2/models/m/infer")
    assert status == 404 and "Retry-After" not in headers
    assert body["error"] == f"Request for unknown model: 'm' has no available versions (failed: {WHY})"
    assert set(body) == {"error", "code", "request_id", "retryable"}
    assert status_of(found) is StatusCode.NOT_FOUND
    assert statuses.code_of(found) == pb.RequestStatusCode.UNAVAILABLE
    assert statuses.message_of(found) == f"Inference request for unknown model 'm': its load failed: {WHY}"
    assert statuses.http_status_of(found) == 400 and not statuses.retry_after(found)


@pytest.mark.parametrize("state", ["unloading", "loading", "available"])
def test_one_that_is_unloaded_by_name_meanwhile_is_told_as_that(tmp_path: Path, state: str) -> None:
    """Whatever a worker still does with it, such as a load that nobody wants any more."""
    made = services(tmp_path, ModelNotFound("Model 'm@1' not found"), decoupled=False)
    made.extensions.control.wished = lambda model: False  # type: ignore[method-assign]
    found = refusal(made, run(made, *_asked_while(made, state)))
    assert (found.model, found.version, found.reason) == ("m", 1, "unloaded")
    assert not made.tensor_models.version_states.may_be_loaded("m@1")
    made.extensions.control.wished = lambda model: None  # type: ignore[method-assign]
    assert made.tensor_models.version_states.may_be_loaded(
        "m@1"
    ) and not made.tensor_models.version_states.may_be_loaded("m@2")


@pytest.mark.parametrize("state", ["loading", "loaded"])
def test_one_that_is_loaded_again_after_it_was_taken_away_is_told_as_taken_away(
    tmp_path: Path, state: str
) -> None:
    made = services(tmp_path, ModelNotFound("Model 'm@1' not found"), decoupled=False)
    found = refusal(made, run(made, *_asked_while(made, state)))
    assert (found.model, found.version, found.reason) == ("m", 1, "unloaded")


def _asked_while(made: Services, state: str) -> tuple[RequestScope, TensorRequest]:
    """A request for the model, which is in this state once the request is on its way."""
    fail = made.engine.client.answer  # type: ignore[attr-defined]

    def change(request: Any) -> Any:
        status = msgspec.structs.replace(made.engine.client.channels[0].models["m@1"], state=state)
        made.engine.client.channels[0].models = {"m@1": status}
        return fail(request)

    made.engine.client.answer = change  # type: ignore[attr-defined]
    return asked()
