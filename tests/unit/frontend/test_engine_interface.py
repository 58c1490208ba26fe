"""The protocols over another engine than that of the workers: encode, infer and a stream, without any socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import falcon.asgi
import numpy as np
import orjson
import pytest
from falcon.testing import TestClient

from frontend.app import DeadlineMiddleware, ErrorRenderer, RequestMiddleware
from frontend.engine.answer import CopyBudget
from frontend.protocols.kserve_v2 import KserveProtocol
from frontend.protocols.registry import Protocols
from frontend.protocols.sie import SieProtocol
from frontend.protocols.trtis_v1 import TrtisProtocol
from frontend.services import Services
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModels
from ipc.catalog.model_config import ModelConfig
from ipc.errors import PenstockError
from ipc.wire.messages import EncodeCall, ModelStatus, Work
from tests.fakes.engine import Arrays, InProcessDirectory, InProcessEngine
from tests.fakes.tensors import entry, services_of, tensor

PAIR = (tensor("INPUT0", "INT32", 4), tensor("INPUT1", "INT32", 4))
ADD_SUB = ModelConfig(
    name="add_sub",
    max_batch_size=8,
    inputs=PAIR,
    outputs=(tensor("OUTPUT0", "INT32", 4), tensor("OUTPUT1", "INT32", 4)),
)
COUNT = ModelConfig(
    name="count",
    decoupled=True,
    inputs=(tensor("INPUT0", "INT32", 1),),
    outputs=(tensor("OUTPUT0", "INT32", 1),),
)


def add_sub(work: Work, given: Arrays) -> Arrays:
    """Sum and difference."""
    first, second = given["INPUT0"], given["INPUT1"]
    return {"OUTPUT0": first + second, "OUTPUT1": first - second}


def count(work: Work, given: Arrays) -> Iterator[Arrays]:
    """As many parts as the input says."""
    for number in range(int(given["INPUT0"][0])):
        yield {"OUTPUT0": np.array([number], np.int32)}


def lengths(work: Work, given: Arrays) -> Arrays:
    """A vector of each text's length."""
    assert isinstance(work.call, EncodeCall)
    return {"dense": np.array([[len(item.text or ""), 1.0] for item in work.call.items], np.float32)}


MODELS = {"org/dense": lengths, "add_sub@1": add_sub, "count@1": count}


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """Services of a frontend whose engine runs in this process, and in which nothing is loaded yet."""
    made = services_of(tmp_path, [entry(name) for name in MODELS], [])
    made.engine.client.inputs.close()  # type: ignore[attr-defined]
    statuses = [
        ModelStatus("org/dense", "loaded", max_sequence_length=64, dims={"dense": 2}),
        ModelStatus("add_sub@1", "loaded", config=ADD_SUB),
        ModelStatus("count@1", "loaded", config=COUNT),
    ]
    directory = InProcessDirectory(made.catalog, statuses)
    engine = InProcessEngine(directory, MODELS)  # type: ignore[arg-type]
    made.engine, made.directory, made.copies = engine, directory, CopyBudget(1 << 20)
    made.tensor_models = TensorModels(directory, made.settings, lambda model: None)
    regions: Any = made.extensions.regions
    made.tensor_inference = TensorInference(
        engine, made.tensor_models, made.tensor_inference.inputs, regions, made.settings
    )
    yield made
    assert all(lease.releases == 1 for lease in engine.leases), "an answer was kept, or given back twice"


@pytest.fixture
def client(services: Services) -> TestClient:
    """The routes of the protocols over these services."""
    protocols = Protocols([KserveProtocol(), TrtisProtocol(), SieProtocol()])
    renderer = ErrorRenderer(protocols)
    app = falcon.asgi.App(middleware=[RequestMiddleware(services, protocols), DeadlineMiddleware(services)])
    app.add_error_handler(PenstockError, renderer.penstock)
    protocols.mount(app, services)
    return TestClient(app)


def test_sie_encode(client: TestClient, services: Services) -> None:
    json = {"Content-Type": "application/json", "Accept": "application/json"}
    body = orjson.dumps({"items": [{"text": "abc"}, {"text": "abcdef"}]})
    found = client.simulate_post("/v1/encode/org/dense", headers=json, body=body)
    assert found.status_code == 200, found.text
    assert [item["dense"]["values"] for item in found.json["items"]] == [[3.0, 1.0], [6.0, 1.0]]
    assert found.headers["x-inference-time"] == "0.00"
    engine: Any = services.engine
    assert [work.call.items[1].text for work in engine.works] == ["abcdef"]
    assert engine.works[0].request_id == found.headers["x-request-id"]


def test_kserve_infer(client: TestClient, services: Services) -> None:
    services.directory.loaded.add("add_sub@1")  # type: ignore[attr-defined]
    inputs = [
        {"name": each.name, "datatype": "INT32", "shape": [1, 4], "data": data}
        for each, data in zip(PAIR, ([1, 2, 3, 4], [1, 1, 1, 1]), strict=True)
    ]
    found = client.simulate_post("/v2/models/add_sub/infer", body=orjson.dumps({"inputs": inputs}))
    assert found.status_code == 200, found.text
    outputs = {output["name"]: output["data"] for output in found.json["outputs"]}
    assert outputs == {"OUTPUT0": [2, 3, 4, 5], "OUTPUT1": [0, 1, 2, 3]}


def test_a_decoupled_stream(client: TestClient) -> None:
    found = client.simulate_post("/v2/models/count/generate_stream", body=b'{"INPUT0": 3}')
    assert found.status_code == 200, found.text
    events = [orjson.loads(line.removeprefix("data: ")) for line in found.text.split("\n\n") if line]
    assert [event["OUTPUT0"] for event in events] == [0, 1, 2]


def test_what_the_engine_refuses_is_told_in_the_form_of_each_protocol(
    client: TestClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Any, model: str, wait: bool, deadline_ns: int) -> str:
        raise self.why_unavailable(model)

    monkeypatch.setattr(InProcessDirectory, "load", never)
    json = {"Content-Type": "application/json"}
    encode = client.simulate_post("/v1/encode/org/dense", headers=json, body=b'{"items": [{"text": "a"}]}')
    assert encode.status_code == 503 and encode.json["detail"]["code"] == "MODEL_NOT_LOADED"
    infer = client.simulate_post("/v2/models/add_sub/infer", body=b'{"inputs": []}')
    assert infer.status_code == 503 and infer.json["code"] == "MODEL_NOT_LOADED"


def test_a_load_is_seen_by_what_was_looked_up_before(client: TestClient, services: Services) -> None:
    directory: Any = services.directory
    before = directory.version
    assert client.simulate_get("/v2/models/add_sub/ready").status_code == 400
    directory._set("add_sub@1", loaded=True)
    assert directory.version > before
    assert client.simulate_get("/v2/models/add_sub/ready").status_code == 200
    directory._set("add_sub@1", loaded=False)
    assert client.simulate_get("/v2/models/add_sub/ready").status_code == 400
