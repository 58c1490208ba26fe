"""Requests with a head that was seen run the kept plan, and are sent and answered as the first of them was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from falcon.asgi import Response

from frontend.http.bodies import BODY_KEY
from frontend.protocols.kserve_v2.infer import LENGTH_HEADER, InferResource
from frontend.services import Services
from frontend.tensors import program_calls
from frontend.tensors.models import TensorModel
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput, WorkerLost
from ipc.wire.messages import Work
from tests.fakes.tensors import InferReply, elements, entry, loaded, services_of, tensor
from tests.unit.frontend.protocols.kserve_v2.test_kserve_infer import OPEN, TARGET, request

CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    inputs=(tensor("A", "FP16", 3), tensor("S", "BYTES", 1)),
    outputs=(tensor("O", "FP32", 2),),
)
TEXTS = elements("x", "yz")


def answer(work: Work) -> InferReply:
    """Two rows."""
    return InferReply.of(O=np.arange(4, dtype=np.float32).reshape(2, 2))


def services(root: Path, made: Any = answer, config: ModelConfig = CONFIG) -> Services:
    """Services with one model."""
    return services_of(root, [entry("m@3")], [loaded("m@3", config)], made)


def head_of(**more: Any) -> bytes:
    """A head of two inputs behind it."""
    inputs = [
        {"name": "A", "datatype": "FP16", "shape": [2, 3]},
        {
            "name": "S",
            "datatype": "BYTES",
            "shape": [2, 1],
            "parameters": {"binary_data_size": len(TEXTS)},
        },
    ]
    outputs = [{"name": "O", "parameters": {"binary_data": True}}]
    return orjson.dumps({"inputs": inputs, "outputs": outputs, **more})


def ask(made: Services, head: bytes, data: bytes, **headers: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of the answer to a request that came in one piece."""
    req = request(head + data, **{LENGTH_HEADER.replace("-", "_"): str(len(head)), **headers})
    req.scope[BODY_KEY] = head + data
    resp = Response()

    async def run() -> None:
        await InferResource(made, OPEN).on_post(req, resp, TARGET)

    asyncio.run(run())
    assert made.bodies.held_nbytes == 0
    made.finisher.count_inference(req.context.penstock)
    assert isinstance(resp.data, bytes)
    return resp.headers, resp.data.replace(req.context.penstock.request_id.encode(), b"ID")


def model_of(made: Services) -> TensorModel:
    """The model as it is found now."""
    return made.tensor_models.find("m")


def test_an_equal_head_is_sent_and_answered_as_the_first_was_with_its_own_bytes(tmp_path: Path) -> None:
    made = services(tmp_path)
    head, first, second = head_of(parameters={"k": 2}), bytes(range(12)) + TEXTS, bytes(12) + TEXTS
    answers = [ask(made, head, data) for data in (first, first, second)]
    assert answers[0] == answers[1] == answers[2]
    client: Any = made.engine.client  # type: ignore[attr-defined]
    works = client.requests
    assert len(model_of(made).plans) == 1
    assert works[0].call == works[1].call == works[2].call
    assert {(work.model, work.cost, work.lane) for work in works} == {("m@3", works[0].cost, works[0].lane)}
    assert client.payloads[0] == client.payloads[1]
    assert client.payloads[2] == bytes(16) + TEXTS + bytes(-len(TEXTS) % 8)
    assert made.extensions.counters.booked == [("m", 3, 2)] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("cut", [-1, 1])
def test_other_bytes_behind_a_known_head_are_refused_as_before(cut: int, tmp_path: Path) -> None:
    made = services(tmp_path)
    head, data = head_of(), bytes(12) + TEXTS
    ask(made, head, data)
    wrong = data[:cut] if cut < 0 else data + b"\0"
    with pytest.raises(InvalidInput, match="bytes after the JSON, got"):
        ask(made, head, wrong)


def test_a_length_of_too_many_digits_is_refused_before_a_known_head_as_before(tmp_path: Path) -> None:
    made = services(tmp_path)
    head, data = head_of(), bytes(12) + TEXTS
    ask(made, head, data)
    with pytest.raises(InvalidInput, match="expected a number of bytes"):
        ask(made, head, data, **{LENGTH_HEADER.replace("-", "_"): f"{len(head):018}7"})


def test_an_error_of_a_known_head_is_named_and_counted_as_before(tmp_path: Path) -> None:
    replies: list[Any] = [
        answer,
        lambda work: InvalidInput("the program refused"),
        lambda work: WorkerLost("died"),
    ]
    made = services(tmp_path, lambda work: replies.pop(0)(work))
    head, data = head_of(), bytes(12) + TEXTS
    ask(made, head, data)
    with pytest.raises(InvalidInput) as refused:
        ask(made, head, data)
    assert refused.value.message == "[request id: <id_unknown>] the program refused"
    with pytest.raises(WorkerLost):
        ask(made, head, data)
    assert len(made.engine.client.requests) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "more",
    [
        {"id": "mine"},
        {"parameters": {"timeout": 10_000_000}},
        {"outputs": [{"name": "O", "parameters": {"binary_data": True, "classification": 1}}]},
        {"parameters": {"long": "x" * program_calls.MOST_HEAD_NBYTES}},
    ],
)
def test_what_is_not_plain_takes_the_long_way_every_time(more: dict[str, Any], tmp_path: Path) -> None:
    made = services(tmp_path)
    for _ in range(2):
        ask(made, head_of(**more), bytes(12) + TEXTS)
    assert not model_of(made).plans


def test_elements_within_the_head_take_the_long_way(tmp_path: Path) -> None:
    """Otherwise a body with as many bytes behind its head as both inputs have would be taken for the same request."""
    made = services(tmp_path)
    texts = {"name": "S", "datatype": "BYTES", "shape": [2, 1], "data": ["x", "yz"]}
    head = orjson.dumps({"inputs": [{"name": "A", "datatype": "FP16", "shape": [2, 3]}, texts]})
    ask(made, head, bytes(12))
    assert not model_of(made).plans


def test_a_packed_body_is_not_taken_for_a_known_head(tmp_path: Path) -> None:
    made = services(tmp_path)
    head, data = head_of(), bytes(12) + TEXTS
    ask(made, head, data)
    with pytest.raises(InvalidInput, match="not valid gzip"):
        ask(made, head, data, Content_Encoding="gzip")


def test_a_model_keeps_a_bounded_number_of_plans(tmp_path: Path) -> None:
    made = services(tmp_path)
    for number in range(program_calls.MOST_HEADS + 3):
        ask(made, head_of(parameters={"k": number}), bytes(12) + TEXTS)
    kept = model_of(made).plans
    assert len(kept) == program_calls.MOST_HEADS
    assert head_of(parameters={"k": 0}) not in kept and head_of(parameters={"k": number}) in kept


def test_plans_end_with_the_state_of_the_model_that_they_were_made_for(tmp_path: Path) -> None:
    made = services(tmp_path)
    head, data = head_of(), bytes(12) + TEXTS
    ask(made, head, data)
    narrow = ModelConfig(name="m", max_batch_size=1, inputs=CONFIG.inputs, outputs=CONFIG.outputs)
    client: Any = made.engine.client  # type: ignore[attr-defined]
    client.channels[0].models = {"m@3": loaded("m@3", narrow)}
    with pytest.raises(InvalidInput, match="batch-size must be <= 1"):
        ask(made, head, data)
