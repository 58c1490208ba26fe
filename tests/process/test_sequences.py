"""Sequences through a server of two frontends and two workers: every protocol, mixed within one sequence."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from ipc.protos import kserve_v2_pb2 as v2
from ipc.protos import trtis_v1_pb2 as v1
from tests.conformance import trtis
from tests.fakes.holding import holding
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import PATIENCE_S, Server, serving, wait_until
from tests.tiny import onnx_files
from tests.tiny.programs import BATCH, SLOTS, tensor, write_repository

WORKERS = 2
TRITON = "onnx_sequence_bool"
"""A model in the form of Triton's own: (INPUT + START) * READY."""
_names = itertools.count(1)
Ask = Callable[[Server, str, int, int, bool, bool], int]
"""One request (server, model, sequence, number, start, end), over a connection of its own; the total."""


def write_triton_sequence(repository: Path) -> None:
    """Controls of BOOL, which are cast in the program, and inputs of four values."""
    place = repository / TRITON / "1"
    place.mkdir(parents=True)
    program = onnx_files.sequence(onnx_files.INT32, onnx_files.BOOL, ["batch"], [4])
    (place / "model.onnx").write_bytes(program)
    controls = ", ".join(
        f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} bool_false_true: [ false, true ] }} ] }}'
        for name in ("START", "READY")
    )
    (place.parent / "config.pbtxt").write_text(
        f'name: "{TRITON}" platform: "onnxruntime_onnx" max_batch_size: 8\n'
        f"sequence_batching {{ max_sequence_idle_microseconds: 5000000 control_input [ {controls} ] }}\n"
        + tensor("input", "INPUT", "INT32", [4])
        + tensor("output", "OUTPUT", "INT32", [4])
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("sequences")
    models = ["accumulator", "accumulator_by_id", "accumulator_exported", "accumulator_script", "slow"]
    repository = write_repository(place / "models", models)
    write_triton_sequence(repository)
    models.append(TRITON)
    settings = grpc_settings(
        **{
            "repository.dirs": repository,
            "repository.allow_python": "true",
            "server.frontends": 2,
            "worker.count": WORKERS,
        }
    )
    with serving(place, ("fake/echo",), settings, supervised=False) as running:
        for model in models:
            loaded = {"model": f"{model}@1", "state": "loaded"}
            wait_until(
                lambda labels=loaded: running.metric("penstock_model_state", **labels) == WORKERS,
                what=f"{model} on both workers",
            )
        yield running


def over_v2_http(server: Server, model: str, name: int, number: int, start: bool, end: bool) -> int:
    given = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    step = {"sequence_id": name, "sequence_start": start, "sequence_end": end}
    answer = server.post(f"/v2/models/{model}/infer", {"inputs": [given], "parameters": step})
    assert answer.status == 200, answer.json()["error"]
    return int(answer.json()["outputs"][0]["data"][0])


def over_v1_http(server: Server, model: str, name: int, number: int, start: bool, end: bool) -> int:
    header = (
        f'batch_size: 1 correlation_id: {name} flags: {start + 2 * end} input {{ name: "INPUT" dims: 1 }} '
        'output { name: "OUTPUT" }'
    )
    found = trtis.infer(server, model, header, np.int32(number).tobytes())
    assert found.answer.status == 200, found.status
    return int(found.array("OUTPUT", "<i4")[0, 0])


def over_v1_grpc(server: Server, model: str, name: int, number: int, start: bool, end: bool) -> int:
    made = v1.InferRequest(model_name=model, model_version=-1, raw_input=[np.int32(number).tobytes()])
    made.meta_data.batch_size, made.meta_data.correlation_id = 1, name
    made.meta_data.flags = start + 2 * end
    made.meta_data.input.add(name="INPUT", dims=[1])
    made.meta_data.output.add(name="OUTPUT")
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address_of(server), options=options) as channel:
        rpc = channel.unary_unary(
            "/nvidia.inferenceserver.GRPCService/Infer",
            v1.InferRequest.SerializeToString,
            v1.InferResponse.FromString,
        )
        found = rpc(made, timeout=PATIENCE_S)
    assert found.request_status.code == v1.SUCCESS, found.request_status.msg
    return int(np.frombuffer(found.raw_output[0], "<i4")[0])


def message(model: str, name: int | str, number: int, start: bool, end: bool) -> v2.ModelInferRequest:
    """A request of KServe."""
    made = v2.ModelInferRequest(model_name=model, raw_input_contents=[np.int32(number).tobytes()])
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    if isinstance(name, str):
        made.parameters["sequence_id"].string_param = name
    else:
        made.parameters["sequence_id"].int64_param = name
    made.parameters["sequence_start"].bool_param = start
    made.parameters["sequence_end"].bool_param = end
    return made


def over_v2_grpc(server: Server, model: str, name: int, number: int, start: bool, end: bool) -> int:
    with Rpc(address_of(server)) as rpc:
        found = rpc.call("ModelInfer", message(model, name, number, start, end))
    return int(np.frombuffer(found.raw_output_contents[0], "<i4")[0])


PROTOCOLS: list[Ask] = [over_v2_http, over_v1_http, over_v1_grpc, over_v2_grpc]


def test_a_model_in_the_form_of_triton_answers_over_both_contracts_as_it_does_there(server: Server) -> None:
    numbers = np.array([10, 20, 30, 40], np.int32)
    for start, expected in ((True, [11, 21, 31, 41]), (False, [10, 20, 30, 40])):
        header = (
            f'batch_size: 1 correlation_id: 9000 flags: {int(start)} input {{ name: "INPUT" dims: 4 }} '
            'output { name: "OUTPUT" }'
        )
        found = trtis.infer(server, TRITON, header, numbers.tobytes())
        assert found.array("OUTPUT", "<i4").tolist() == [expected]
        given = {"name": "INPUT", "shape": [1, 4], "datatype": "INT32", "data": numbers.tolist()}
        step = {"sequence_id": 9001, "sequence_start": start}
        answer = server.post(f"/v2/models/{TRITON}/infer", {"inputs": [given], "parameters": step})
        assert answer.json()["outputs"][0]["data"] == expected


@pytest.mark.parametrize(
    "model",
    [
        "accumulator",
        "accumulator_by_id",
        pytest.param("accumulator_exported", marks=pytest.mark.long),
        "accumulator_script",
    ],
)
def test_more_sequences_than_slots_go_on_over_every_protocol_and_frontend(server: Server, model: str) -> None:
    count = 2 * WORKERS * SLOTS
    together = threading.Barrier(count)

    def sequence(seed: int) -> tuple[list[int], list[int]]:
        name = next(_names)
        numbers = [int(number) for number in np.random.default_rng(seed).integers(-1000, 1000, 6)]
        together.wait(60)
        found = [
            PROTOCOLS[(seed + at) % 4](server, model, name, number, at == 0, at == 5)
            for at, number in enumerate(numbers)
        ]
        return found, list(itertools.accumulate(numbers))

    with ThreadPoolExecutor(count) as threads:
        for found, expected in threads.map(sequence, range(count)):
            assert found == expected


def test_a_stream_of_two_sequences_that_waits_for_no_answer(server: Server) -> None:
    names = (f"left-{next(_names)}", f"right-{next(_names)}")
    numbers = list(range(1, 21))
    sent = [
        message("accumulator", name, sign * number, number == 1, number == 20)
        for number in numbers
        for name, sign in zip(names, (1, -1), strict=True)
    ]
    with Rpc(address_of(server)) as rpc:
        found = list(rpc.stream(sent))
    assert not any(answer.error_message for answer in found)
    values = [int(np.frombuffer(one.infer_response.raw_output_contents[0], "<i4")[0]) for one in found]
    totals = list(itertools.accumulate(numbers))
    assert sorted(values) == sorted([*totals, *(-total for total in totals)])
    assert [value for value in values if value > 0] == totals


def test_what_is_wrong_with_a_sequence_is_said_by_every_protocol(server: Server) -> None:
    name = next(_names)
    for ask in PROTOCOLS:
        with pytest.raises(
            Exception, match=f"for sequence {name} to model .*accumulator.* must specify the START flag"
        ):
            ask(server, "accumulator", name, 1, False, False)
        with pytest.raises(Exception, match="must specify a non-zero correlation ID"):
            ask(server, "accumulator", 0, 1, True, False)
    found = trtis.infer(
        server,
        "accumulator",
        f'batch_size: 2 correlation_id: {name} flags: 1 input {{ name: "INPUT" dims: 1 }} output {{ name: "OUTPUT" }}',
        bytes(8),
    )
    assert found.status.code == v1.INVALID_ARG
    assert found.status.msg.startswith("inference request to model 'accumulator' must specify batch-size 1")


@pytest.mark.long
def test_sequences_are_counted_and_expire(server: Server) -> None:
    def active() -> float:
        return server.metric("penstock_sequences", model="accumulator@1", state="active")

    wait_until(lambda: active() == 0, what="no sequence")
    name, before = next(_names), server.metric("penstock_sequences_expired_total", model="accumulator@1")
    over_v2_http(server, "accumulator", name, 1, True, False)

    def goes_on() -> bool:
        over_v2_http(server, "accumulator", name, 1, False, False)
        return active() == 1

    wait_until(goes_on, what="the sequence in the metrics")
    wait_until(
        lambda: server.metric("penstock_sequences_expired_total", model="accumulator@1") == before + 1,
        what="its expiry",
    )
    with pytest.raises(AssertionError, match="of the sequence: it expired after 5000000 microseconds"):
        over_v2_http(server, "accumulator", name, 1, False, False)


def test_a_timeout_that_passes_in_the_queue_is_503(server: Server, tmp_path: Path) -> None:
    """Every worker holds one batch at most, so that the requests of a third batch wait for longer than they may."""
    rows = {"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    count = (WORKERS + 1) * BATCH
    with ThreadPoolExecutor(count) as threads, holding(tmp_path) as hold:
        body = {"inputs": [rows], "parameters": {"hold": str(hold), "timeout": 100_000}}
        asked = [threads.submit(server.post, "/v2/models/slow/infer", body) for _ in range(count)]
        wait_until(lambda: sum(one.done() for one in asked) >= BATCH, what="the requests of a batch")
        hold.unlink()
        refused = [one.result() for one in asked if one.result().status != 200]
    assert len(refused) >= BATCH and {answer.status for answer in refused} == {503}
    assert all(b"Request timeout expired" in answer.body for answer in refused)
