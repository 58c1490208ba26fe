"""ModelInfer without a server: pictures and strings as REST takes them, classifications of models that go away."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image

from frontend.protocols.kserve_v2.grpc import infer
from frontend.protocols.kserve_v2.grpc.infer import STRING_NBYTES, Infer
from frontend.scope import plain_scope
from frontend.services import Services
from frontend.tensors.request import Forwarding, UnavailableModel
from frontend.tensors.result import INLINE_CLASSES
from ipc import deadline
from ipc.catalog.model_config import ModelConfig, SequenceBatching
from ipc.errors import InvalidInput, LeaseRevoked
from ipc.memory import datatypes
from ipc.protos import kserve_v2_pb2 as pb
from ipc.wire.messages import TensorInput, Work
from tests.fakes.tensors import InferReply, elements, ending, entry, loaded, services_of, tensor

WIDTH = INLINE_CLASSES + 1
PICTURES = ModelConfig(
    name="pictures",
    max_batch_size=4,
    inputs=(tensor("P", "FP32", 2, 3, 3),),
    outputs=(tensor("O", "FP32", 1),),
)
STRINGS = ModelConfig(
    name="strings", max_batch_size=4, inputs=(tensor("S", "UINT8", -1),), outputs=(tensor("O", "FP32", 1),)
)
RANKER = ModelConfig(
    name="ranker", max_batch_size=2, inputs=(tensor("A", "INT32", 1),), outputs=(tensor("O", "FP32", WIDTH),)
)
FLOW = ModelConfig(
    name="flow",
    max_batch_size=4,
    inputs=(tensor("S", "UINT8", -1),),
    outputs=(tensor("O", "FP32", 1),),
    sequence_batching=SequenceBatching(),
)
CONFIGS = {f"{config.name}@1": config for config in (PICTURES, STRINGS, RANKER, FLOW)}
PIXELS = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)


def services(root: Path, gone: bool = False) -> Services:
    """Models of pictures, strings and ranks; `gone`: all of them are unloaded when one has answered."""
    unloaded: list[str] = []

    def answer(request: Work) -> InferReply:
        if gone:
            unloaded.extend(("ranker", "ranker@1"))
            made.engine.client.channels[0].models.clear()
        name = request.call.outputs[0].name  # type: ignore[union-attr]
        width = WIDTH if request.model == "ranker@1" else 1
        return InferReply.of(**{name: np.arange(width, dtype=np.float32)[np.newaxis]})

    statuses = [loaded(name, config) for name, config in CONFIGS.items()]
    made = services_of(root, [entry(name) for name in CONFIGS], statuses, answer, unloaded)
    return made


def answered(made: Services, message: pb.ModelInferRequest, *raw: bytes) -> pb.ModelInferResponse:
    """The response to a message with these raw contents."""
    asked = plain_scope()
    asked.deadline_ns = deadline.after(20)
    call: Any = SimpleNamespace(services=made, context=asked, raw=raw, metadata={}, data=b"")
    try:
        with ending(made, asked):
            return pb.ModelInferResponse.FromString(asyncio.run(Infer(Forwarding("")).alone(call, message)))
    finally:
        made.engine.client.inputs.close()


def picture() -> bytes:
    """A PNG file of `PIXELS`, which are in the order of the model: BGR."""
    written = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(PIXELS[:, :, ::-1])).save(written, "PNG")
    return written.getvalue()


def sent_as_bytes(
    model: str, name: str, parts: list[bytes], raw: bool
) -> tuple[pb.ModelInferRequest, list[bytes]]:
    """A request of one BYTES input, raw or typed."""
    message = pb.ModelInferRequest(model_name=model)
    given = message.inputs.add(name=name, datatype="BYTES", shape=[len(parts)])
    if raw:
        return message, [elements(*parts)]
    given.contents.bytes_contents.extend(parts)
    return message, []


@pytest.mark.parametrize("raw", [True, False])
def test_an_encoded_picture_becomes_the_tensor_that_the_model_takes(tmp_path: Path, raw: bool) -> None:
    made = services(tmp_path)
    message, contents = sent_as_bytes("pictures", "P", [picture()], raw)
    answered(made, message, *contents)
    client: Any = made.engine.client
    expected = PIXELS.astype(np.float32).tobytes()
    assert client.last.inputs == [TensorInput("P", "FP32", [1, 2, 3, 3], 0, len(expected))]
    assert client.payloads[0][: len(expected)] == expected


def test_strings_become_padded_rows(tmp_path: Path) -> None:
    made = services(tmp_path)
    message, contents = sent_as_bytes("strings", "S", [b"ab", b"c"], True)
    answered(made, message, *contents)
    client: Any = made.engine.client
    assert client.last.inputs == [TensorInput("S", "UINT8", [2, 3], 0, 6)]
    assert client.payloads[0][:6] == b"ab\0c\0\0"


def test_messages_of_a_sequence_keep_their_order_whatever_becomes_of_their_strings(tmp_path: Path) -> None:
    made, lengths = services(tmp_path), [8_000_000, 1, 2, 3]

    async def run() -> None:
        tasks = []
        for length in lengths:
            message, raw = sent_as_bytes("flow", "S", [b"a" * length], True)
            message.parameters["sequence_id"].int64_param = 7
            asked = plain_scope()
            asked.deadline_ns = deadline.after(20)
            call: Any = SimpleNamespace(services=made, context=asked, raw=raw, metadata={}, data=b"")
            tasks.append(asyncio.create_task(Infer(Forwarding("")).streamed(call, message)))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    made.engine.client.inputs.close()
    client: Any = made.engine.client
    assert [request.call.inputs[0].shape for request in client.requests] == [[1, n + 1] for n in lengths]


def test_what_is_no_picture_is_refused_and_booked(tmp_path: Path) -> None:
    made = services(tmp_path)
    message, contents = sent_as_bytes("pictures", "P", [b"no picture"], True)
    with pytest.raises(InvalidInput, match="'P'"):
        answered(made, message, *contents)
    recorder: Any = made.extensions.counters
    assert recorder.booked == [("pictures", 1, 1, "INVALID_INPUT")]


@pytest.mark.parametrize("cut", [True, False])
def test_a_result_that_cannot_be_said_is_booked_as_a_failure_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    made = services(tmp_path)

    def failing(*_: Any, **__: Any) -> bytes:
        raise asyncio.CancelledError if cut else LeaseRevoked("the lease is gone")

    monkeypatch.setattr(infer, "response_of", failing)
    with pytest.raises(asyncio.CancelledError if cut else LeaseRevoked):
        answered(made, ranked(0), bytes(4))
    recorder: Any = made.extensions.counters
    assert recorder.booked == [("ranker", 1, 1, "CANCELLED" if cut else "LEASE_REVOKED")]


def test_an_answer_is_booked_once(tmp_path: Path) -> None:
    made = services(tmp_path)
    answered(made, ranked(0), bytes(4))
    recorder: Any = made.extensions.counters
    assert [(one[:3], len(recorder.booked)) for one in recorder.booked] == [(("ranker", 1, 1), 1)]


def test_a_client_that_goes_away_while_its_request_is_read_is_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = services(tmp_path)
    reached = asyncio.Event()

    async def waiting(*_: Any) -> NoReturn:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError("it was to be cancelled")

    async def run() -> None:
        asked = plain_scope()
        asked.deadline_ns = deadline.after(20)
        message, raw = sent_as_bytes("strings", "S", [b"a"], True)
        message.model_version = "1"
        call: Any = SimpleNamespace(services=made, context=asked, raw=raw, metadata={}, data=b"")
        task = asyncio.ensure_future(Infer(Forwarding("")).alone(call, message))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError), ending(made, asked):
            await task

    made.engine.client.channels[0].models = {}
    monkeypatch.setattr(made.tensor_models, "ready", waiting)
    asyncio.run(run())
    made.engine.client.inputs.close()
    recorder: Any = made.extensions.counters
    assert recorder.booked == [("strings", 1, 0, "CANCELLED")]


def test_typed_contents_are_held_while_they_are_in_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = services(tmp_path)
    held: list[int] = []
    defer = infer.conversions.defer

    def noting(*given: Any) -> None:
        held.append(made.bodies.held_nbytes)
        defer(*given)

    monkeypatch.setattr(infer.conversions, "defer", noting)
    message, _ = sent_as_bytes("strings", "S", [b"a", b"b"], False)
    answered(made, message)
    assert held == [2 * STRING_NBYTES] and not made.bodies.held_nbytes


def ranked(count: int) -> pb.ModelInferRequest:
    """The highest entries of the model `ranker`."""
    message = pb.ModelInferRequest(model_name="ranker")
    message.inputs.add(name="A", datatype="INT32", shape=[1, 1])
    message.outputs.add(name="O").parameters["classification"].int64_param = count
    return message


def test_a_classification_outlives_its_model(tmp_path: Path) -> None:
    made = services(tmp_path, gone=True)
    found = answered(made, ranked(2), bytes(4))
    with pytest.raises(UnavailableModel):
        made.tensor_models.find("ranker", 1)
    assert list(found.outputs[0].shape) == [1, 2]
    [raw] = found.raw_output_contents
    names = [f"{WIDTH - 1}.000000:{WIDTH - 1}", f"{WIDTH - 2}.000000:{WIDTH - 2}"]
    assert [bytes(one).decode() for one in datatypes.split(raw, 2, "O")] == names


@pytest.mark.parametrize(("count", "rendering"), [(WIDTH, True), (3, False)])
def test_many_classes_are_rendered_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, rendering: bool
) -> None:
    threads, response_of = [], infer.response_of

    def noting(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return response_of(*given)

    monkeypatch.setattr(infer, "response_of", noting)
    found = answered(services(tmp_path), ranked(count), bytes(4))
    assert list(found.outputs[0].shape) == [1, count]
    assert [name.startswith("render") for name in threads] == [rendering]


@pytest.mark.parametrize(
    ("given", "shown"), [("77", "[request id: 77] "), ("", "[request id: <id_unknown>] ")]
)
def test_refusals_begin_with_the_id_of_the_request_as_over_http(
    tmp_path: Path, given: str, shown: str
) -> None:
    for mistake in (
        {"model_version": "x"},
        {"outputs": [pb.ModelInferRequest.InferRequestedOutputTensor(name="Z")]},
    ):
        message, contents = sent_as_bytes("pictures", "P", [picture()], raw=True)
        message.id = given
        message.MergeFrom(pb.ModelInferRequest(**mistake))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput) as refusal:
            answered(services(tmp_path), message, *contents)
        assert refusal.value.message.startswith(shown) and refusal.value.message.count("request id") == 1
