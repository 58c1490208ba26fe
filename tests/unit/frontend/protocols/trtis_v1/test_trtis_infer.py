"""Infer over HTTP of TRTIS v1, the order of its checks, and figures of models under each of their names."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import falcon
import numpy as np
import pytest
from falcon.asgi import Request, Response

from frontend.http.bodies import BODY_KEY
from frontend.protocols.trtis_v1 import requests, routes
from frontend.protocols.trtis_v1.management import server_status
from frontend.protocols.trtis_v1.routes import InferResource, target_of
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.records.statistics import Duration, ModelStatistics, RequestStatistics, ServerStatistics
from frontend.services import Services
from frontend.tensors.checking import MOST_DIMS, check_shapes
from frontend.tensors.result import OutputTensor, TensorResult
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput
from ipc.processes.paths import prepare_run_dir
from ipc.protos import trtis_v1_pb2 as pb
from tests.fakes.tensors import ArrayReply, InferReply, ending, entry, loaded, services_of, tensor
from tests.unit.frontend.protocols.kserve_v2.test_kserve_infer import request

CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    inputs=(tensor("A", "INT32", 2), tensor("B", "INT32", -1)),
    outputs=(tensor("O", "FP32", 1),),
)


def services(root: Path) -> Services:
    """Services with two versions of a model, and one of the catalog."""
    entries = [entry("m@1"), entry("m@2"), entry("org/dense")]
    statuses = [loaded("m@1", CONFIG), loaded("m@2", CONFIG), loaded("org/dense", dims={"dense": 4})]
    reply = InferReply.of(O=np.zeros((1, 1), np.float32))
    made = services_of(root, entries, statuses, lambda request: reply)
    prepare_run_dir(made.settings.paths)
    return made


def ask(made: Services, req: Request, target: str) -> None:
    """One request, and its end."""
    with ending(made, req.context.penstock):
        asyncio.run(InferResource(made, Statuses(made.settings)).on_post(req, Response(), target))


@pytest.mark.parametrize(("version", "booked"), [(1, 1), (2, 2), (7, None), (-1, None)])
def test_a_failure_before_the_run_is_booked_for_the_version_of_the_path(
    version: int, booked: int | None, tmp_path: Path
) -> None:
    made = services(tmp_path)
    path = "m" if version < 0 else f"m/{version}"
    ask(made, request(b"", **{"NV-InferRequest": "no header {"}), path)
    assert made.extensions.counters.booked == [("m", booked, 0, "INVALID_INPUT")]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sent", "booked"),
    [
        ("batch_size: 3", 3),
        ("batch_size: 4", 4),
        ("batch_size: 5", 0),
        ("batch_size: 0", 0),
        ("", 0),
    ],
)
def test_a_failure_is_booked_under_the_version_and_batch_size_once_they_are_known(
    sent: str, booked: int, tmp_path: Path
) -> None:
    made = services(tmp_path)
    ask(made, request(b"", **{"NV-InferRequest": f"{sent} input {{ }}"}), "m")
    assert made.extensions.counters.booked == [("m", 2, booked, "INVALID_INPUT")]  # type: ignore[attr-defined]


def test_the_timeout_of_a_request_counts_from_its_arrival(tmp_path: Path) -> None:
    made = services(tmp_path)
    header = 'batch_size: 1 input { name: "A" } input { name: "B" dims: 1 } output { name: "O" }'
    asked = request(bytes(12), **{"NV-InferRequest": header})
    arrived = asked.context.penstock.started
    ask(made, asked, "m")
    assert made.extensions.counters.booked == [("m", 2, 1)]  # type: ignore[attr-defined]
    assert asked.context.penstock.started == arrived


def test_a_header_that_was_seen_is_sent_as_before_with_its_own_bytes_and_keeps_the_order_of_checks(
    tmp_path: Path,
) -> None:
    made = services(tmp_path)
    header = 'batch_size: 1 input { name: "A" } input { name: "B" dims: 2 } output { name: "O" }'
    first, second = bytes(range(16)), bytes(16)
    for body in (first, second, second + b"\0"):
        asked = request(body, **{"NV-InferRequest": header})
        asked.scope[BODY_KEY] = body
        ask(made, asked, "m")
    client: Any = made.engine.client  # type: ignore[attr-defined]
    assert [work.call for work in client.requests] == [client.last] * 2
    assert client.payloads == [first, second]
    booked = made.extensions.counters.booked  # type: ignore[attr-defined]
    assert booked == [("m", 2, 1), ("m", 2, 1), ("m", 2, 1, "INVALID_INPUT")]
    assert list(made.tensor_models.find("m").plans) == [header] and made.bodies.held_nbytes == 0


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("count", [1, requests.MOST_OUTPUTS, requests.MOST_OUTPUTS + 1])
def test_remembered_headers_are_those_that_would_be_made(count: int, batches: bool) -> None:
    named = [OutputTensor(f"O{at}", "FP32", [2, *range(at % 3)], None, at) for at in range(count)]
    result = TensorResult("m", 3, named, cast(Any, None), 2, batches)
    for request_id in (7, 8):
        forms, full = requests.forms_of(result, request_id), requests.header_of(result, request_id)
        if count > requests.MOST_OUTPUTS:
            assert forms is None
        else:
            assert forms == (requests.one_line(full), requests.many_lines(full), full.SerializeToString())
    named[0].classes = [[]]
    assert requests.forms_of(result, 7) is None


@pytest.mark.parametrize(
    ("path", "model", "version"),
    [
        ("m", "m", -1),
        ("m/2", "m", 2),
        ("nobody/2", "nobody", 2),
        ("org/dense", "org/dense", -1),
        ("org/dense/1", "org/dense", 1),
        ("dense/1", "dense", 1),
        ("org/nobody", None, 0),
        ("org/nobody/1", None, 0),
        ("m/latest", None, 0),
        ("/1", None, 0),
        ("", None, 0),
    ],
)
def test_a_path_is_a_model_and_perhaps_a_version(
    path: str, model: str | None, version: int, tmp_path: Path
) -> None:
    made = services(tmp_path)
    if model is None:
        with pytest.raises(falcon.HTTPRouteNotFound):
            target_of(made, path)
    else:
        assert target_of(made, path) == (model, version)


def test_a_path_that_names_no_model_is_no_request_that_counts(tmp_path: Path) -> None:
    made, asked = services(tmp_path), request(b"")
    with pytest.raises(falcon.HTTPRouteNotFound):
        ask(made, asked, "m/latest")
    assert (asked.context.penstock.operation, asked.context.penstock.model) == ("", "")


@pytest.mark.parametrize("dims", ["dims: 1", ""])
def test_a_catalog_model_takes_texts_of_dims_1_under_its_full_name(dims: str, tmp_path: Path) -> None:
    made = services(tmp_path)
    made.engine.client.answer = lambda request: ArrayReply({"dense": np.ones((1, 4), np.float32)})  # type: ignore[attr-defined]
    header = f'batch_size: 1 input {{ name: "text" {dims} batch_byte_size: 6 }} output {{ name: "dense" }}'
    resource, resp = InferResource(made, Statuses(made.settings)), Response()
    asked = request(b"\2\0\0\0ab", **{"NV-InferRequest": header})
    asyncio.run(resource.on_post(asked, resp, "org/dense"))
    assert resp.status == falcon.HTTP_200, resp.get_header("NV-Status")
    assert 'model_name: "org/dense"' in str(resp.get_header("NV-InferResponse"))


def test_no_classes_are_an_empty_list_for_every_row_and_no_bytes(tmp_path: Path) -> None:
    made = services(tmp_path)
    header = 'batch_size: 1 input { name: "A" } input { name: "B" dims: 1 } output { name: "O" cls { count: 0 } } id: 3'
    resource, resp = InferResource(made, Statuses(made.settings)), Response()
    asyncio.run(
        resource.on_post(request(bytes(12), "format=binary", **{"NV-InferRequest": header}), resp, "m")
    )
    assert resp.status == falcon.HTTP_200, resp.get_header("NV-Status")
    full = pb.InferResponseHeader.FromString(resp.data or b"")
    [output] = full.output
    assert not output.HasField("raw") and [len(row.cls) for row in output.batch_classes] == [0]


A, B = pb.InferRequestHeader.Input(name="A"), pb.InferRequestHeader.Input(name="B")
X, WRONG = pb.InferRequestHeader.Input(name="X"), pb.InferRequestHeader.Input(name="A", dims=[3])


@pytest.mark.parametrize(
    ("rows", "inputs", "words"),
    [
        (0, [B, A], "batch-size must be >= 1"),
        (9, [B, A], "batch-size must be <= 4"),
        (1, [B], "expected 2 inputs but got 1 inputs"),
        (1, [B, X], "unexpected inference input 'X'"),
        (1, [B, WRONG], "unexpected shape for input 'A'"),
        (1, [B, A], "input 'B' of model 'm' has a variable size"),
    ],
)
def test_missing_dims_are_told_when_all_earlier_checks_have_passed(
    rows: int, inputs: list[pb.InferRequestHeader.Input], words: str, tmp_path: Path
) -> None:
    found, header = (
        services(tmp_path).tensor_models.find("m"),
        pb.InferRequestHeader(batch_size=rows, input=inputs),
    )

    def check() -> None:
        wanted = requests.request_of(found, header)
        check_shapes(found, wanted)
        requests.sizes_of(found, header, wanted)

    with pytest.raises(InvalidInput) as refused:
        check()
    assert words in refused.value.message


def test_an_input_of_far_too_many_dims_is_refused(tmp_path: Path) -> None:
    many = pb.InferRequestHeader.Input(name="B", dims=[1] * (MOST_DIMS + 1))
    found, header = (
        services(tmp_path).tensor_models.find("m"),
        pb.InferRequestHeader(batch_size=1, input=[A, many]),
    )
    with pytest.raises(InvalidInput, match=f"shape has 65 dimensions, the limit is {MOST_DIMS}"):
        requests.request_of(found, header)


@pytest.mark.parametrize(("length", "rendering"), [(requests.CACHED_CHARACTERS + 1, True), (10, False)])
def test_a_long_header_is_read_in_a_thread(
    length: int, rendering: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(sent: str | None) -> pb.InferRequestHeader:
        threads.append(threading.current_thread().name)
        return requests.read_request_header(sent)

    monkeypatch.setattr(routes, "read_request_header", noting)
    made = services(tmp_path)
    header = f"batch_size: 1 # {'x' * length}"
    resource, resp = InferResource(made, Statuses(made.settings)), Response()
    asyncio.run(resource.on_post(request(b"", **{"NV-InferRequest": header}), resp, "m"))
    assert [name.startswith("render") for name in threads] == [rendering]


@pytest.mark.parametrize("name", ["dense", "org/dense"])
def test_figures_of_a_model_are_the_same_under_its_short_name(name: str, tmp_path: Path) -> None:
    made = services(tmp_path)
    failed = ModelStatistics(by_request_size={0: RequestStatistics(fail=Duration(2, 5))})
    counted = ModelStatistics(inference_count=12, execution_count=5)
    figures = ServerStatistics({("org/dense", 1): counted, ("org/dense", -1): failed})

    async def read() -> ServerStatistics:
        return figures

    made.extensions.statistics = SimpleNamespace(read=read)  # type: ignore[assignment]
    versions = asyncio.run(server_status(made, "server", name)).model_status[name].version_status
    assert (versions[1].model_inference_count, versions[1].model_execution_count) == (12, 5)
    assert versions[-1].infer_stats[0].failed.count == 2
