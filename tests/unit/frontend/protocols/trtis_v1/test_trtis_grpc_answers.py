"""v1 without a server: failures of what is no message, and long classifications over both transports."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import falcon.asgi
import numpy as np
import pytest

from frontend.protocols.trtis_v1 import requests, routes
from frontend.protocols.trtis_v1.grpc import TrtisService
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.scope import plain_scope
from frontend.services import Services
from frontend.tensors.result import INLINE_CLASSES, OutputTensor, TensorResult, TopClass
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb
from ipc.wire.messages import Work
from tests.fakes.tensors import InferReply, entry, loaded, services_of, tensor

WIDTH = INLINE_CLASSES + 1
RANKER = ModelConfig(
    name="ranker",
    max_batch_size=2,
    inputs=(tensor("A", "FP32", WIDTH),),
    outputs=(tensor("O", "FP32", WIDTH),),
)


def services(root: Path) -> Services:
    """A model whose output is its input."""

    def answer(request: Work) -> InferReply:
        return InferReply.of(O=np.arange(WIDTH, dtype=np.float32)[np.newaxis])

    return services_of(root, [entry("ranker@1")], [loaded("ranker@1", RANKER)], answer)


@pytest.mark.parametrize(
    ("method", "response"), [("Infer", pb.InferResponse), ("StreamInfer", pb.InferResponse)]
)
def test_what_is_no_message_is_an_invalid_argument_within_an_answer(
    tmp_path: Path, method: str, response: Any
) -> None:
    failed = TrtisService(services(tmp_path)).methods[method].failed
    assert failed is not None
    call: Any = SimpleNamespace(scheduled=False)
    told: Any = failed(call, None, InvalidInput("the request is not a message of this method"))
    assert isinstance(told, response)
    assert told.request_status.code == pb.INVALID_ARG and "not a message" in told.request_status.msg
    assert told.request_status.request_id == 0


@pytest.mark.parametrize("method", ["Health", "Status", "ModelControl", "SharedMemoryControl", "Repository"])
def test_other_methods_answer_so_too(tmp_path: Path, method: str) -> None:
    failed = TrtisService(services(tmp_path)).methods[method].failed
    assert failed is not None
    told: Any = failed(SimpleNamespace(), None, InvalidInput("no message"))  # type: ignore[arg-type]
    assert told.request_status.code == pb.INVALID_ARG


@pytest.mark.parametrize(("count", "rendering"), [(WIDTH, True), (3, False)])
def test_many_classes_are_rendered_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, rendering: bool
) -> None:
    threads, header_of = [], requests.header_of

    def noting(*given: Any) -> pb.InferResponseHeader:
        threads.append(threading.current_thread().name)
        return header_of(*given)

    monkeypatch.setattr(requests, "header_of", noting)
    made = services(tmp_path)
    request = pb.InferRequest(model_name="ranker", model_version=-1)
    request.meta_data.batch_size, request.meta_data.id = 1, 5
    request.meta_data.input.add(name="A")
    request.meta_data.output.add(name="O").cls.count = count
    call = call_of(made, np.zeros(WIDTH, np.float32).tobytes())
    answer = asyncio.run(TrtisService(made).methods["Infer"].answer(call, request))
    made.engine.client.inputs.close()
    assert isinstance(answer, bytes)
    found = pb.InferResponse.FromString(answer)
    assert found.request_status.code == pb.SUCCESS and found.meta_data.id == 5
    [row] = found.meta_data.output[0].batch_classes
    assert [one.idx for one in row.cls] == list(range(WIDTH))[::-1][:count]
    assert [name.startswith("render") for name in threads] == [rendering]


@pytest.mark.parametrize(("entries", "rendering"), [(WIDTH, True), (3, False)])
def test_many_classes_are_rendered_in_a_thread_over_http_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int, rendering: bool
) -> None:
    threads, sent, rendered = [], [], routes._rendered

    def noting(*given: Any) -> tuple[str, bytes]:
        threads.append(threading.current_thread().name)
        return rendered(*given)

    monkeypatch.setattr(routes, "_rendered", noting)
    monkeypatch.setattr(routes, "send_parts", lambda resp, parts, *_: sent.extend(parts))
    made = services(tmp_path)
    row = [TopClass(float(index), index, "") for index in range(entries)]
    result = TensorResult(
        "ranker", 1, [OutputTensor("O", "FP32", [1, WIDTH], None, 0, [row])], InferReply([], {}), 1, True
    )  # type: ignore[arg-type]
    req: Any = SimpleNamespace(get_param=lambda name: "binary")
    resource = routes.InferResource(made, Statuses(made.settings))
    asyncio.run(resource._render(req, falcon.asgi.Response(), result, 5))
    made.engine.client.inputs.close()
    found = pb.InferResponseHeader.FromString(sent[0])
    assert found.id == 5 and len(found.output[0].batch_classes[0].cls) == entries
    assert [name.startswith("render") for name in threads] == [rendering]


def call_of(made: Services, *raw: bytes) -> Any:
    """A call with these raw inputs."""
    asked = plain_scope()
    asked.deadline_ns = deadline.after(20)
    return SimpleNamespace(services=made, context=asked, raw=raw, metadata={}, scheduled=False, rpc=object())
