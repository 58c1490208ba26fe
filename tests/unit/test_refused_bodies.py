"""A refused request is freed with its answer, over every transport and protocol: no circle waits for the collector."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import falcon.asgi
import grpc
import pytest
from falcon.testing import TestClient
from grpc import aio

from frontend.engine.answer import CopyBudget
from frontend.grpc.accepting import Server
from frontend.grpc.door import Door
from frontend.grpc.server import mount
from frontend.grpc.streaming import Streams
from frontend.http import tracebacks
from frontend.http.middleware import ErrorRenderer, RequestMiddleware
from frontend.protocols.kserve_v2 import KserveProtocol
from frontend.protocols.kserve_v2.grpc.service import KserveService
from frontend.protocols.registry import Protocols
from frontend.protocols.sie import SieProtocol
from frontend.protocols.trtis_v1 import TrtisProtocol
from frontend.protocols.trtis_v1.grpc.service import TrtisService
from frontend.services import Services
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput, PenstockError
from ipc.processes.paths import prepare_run_dir
from ipc.protos import kserve_v2_pb2 as kserve
from ipc.protos import trtis_v1_pb2 as trtis
from tests.fakes.tensors import entry, loaded, services_of, tensor
from tests.harness.server import wait_until

NBYTES = 2 << 20
VEC = ModelConfig(
    name="vec",
    max_batch_size=0,
    inputs=(tensor("A", "UINT8", -1),),
    outputs=(tensor("O", "UINT8", -1),),
)
KSERVE, TRTIS = "/inference.GRPCInferenceService/", "/nvidia.inferenceserver.GRPCService/"
AT_ERROR = (("triton_grpc_error", "true"),)


def services(root: Path) -> Services:
    """A model whose worker refuses all that gets there, and one of the catalog."""

    def refuse(request: Any) -> PenstockError:
        return InvalidInput("the worker refuses it")

    statuses = [loaded("vec@1", VEC), loaded("org/dense", dims={"dense": 4})]
    made = services_of(root, [entry("vec@1"), entry("org/dense")], statuses, refuse)
    prepare_run_dir(made.settings.paths)
    made.started, made.copies = True, CopyBudget(NBYTES)
    for name in ("finished", "called", "refused"):
        setattr(made.recorder, name, lambda *_: None)
    return made


@contextmanager
def without_collector() -> Iterator[Callable[[], int]]:
    """No cyclic collector meanwhile; yields what tells the bytes that have been added since."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()


def forget_calls(made: Services) -> None:
    """The fake client remembers calls and their payloads."""
    client: Any = made.engine.client
    client.requests.clear()
    client.payloads.clear()


def kserve_message(name: str) -> bytes:
    """A large request with one input of this name."""
    message = kserve.ModelInferRequest(model_name="vec", raw_input_contents=[bytes(NBYTES)])
    message.inputs.add(name=name, datatype="UINT8", shape=[NBYTES])
    return message.SerializeToString()


def trtis_message(name: str) -> bytes:
    """The same in the older protocol."""
    message = trtis.InferRequest(model_name="vec", model_version=-1, raw_input=[bytes(NBYTES)])
    message.meta_data.batch_size = 1
    message.meta_data.input.add(name=name, dims=[NBYTES])
    message.meta_data.output.add(name="O")
    return message.SerializeToString()


async def alone(channel: aio.Channel, path: str, message: bytes) -> None:
    """One unary rpc, whatever it is answered."""
    try:
        await channel.unary_unary(path)(message)
    except aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def streamed(channel: aio.Channel, path: str, message: bytes, metadata: Any = None) -> None:
    """One message of a stream, and the end of it."""
    rpc = channel.stream_stream(path)(metadata=metadata)
    try:
        await rpc.write(message)
        await rpc.read()
        await rpc.done_writing()
        await rpc.read()
    except aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda ch: alone(ch, f"{KSERVE}ModelInfer", kserve_message("X")), id="name"),
        pytest.param(lambda ch: alone(ch, f"{KSERVE}ModelInfer", kserve_message("A")), id="worker"),
        pytest.param(lambda ch: alone(ch, f"{KSERVE}ModelInfer", b"\xff" * NBYTES), id="no message"),
        pytest.param(lambda ch: alone(ch, f"{KSERVE}ModelInfer", b"\x2a\x00" * (NBYTES // 2)), id="fields"),
        pytest.param(lambda ch: streamed(ch, f"{KSERVE}ModelStreamInfer", kserve_message("X")), id="stream"),
        pytest.param(
            lambda ch: streamed(ch, f"{KSERVE}ModelStreamInfer", kserve_message("A"), AT_ERROR), id="end"
        ),
        pytest.param(lambda ch: alone(ch, f"{TRTIS}Infer", trtis_message("X")), id="v1 name"),
        pytest.param(lambda ch: alone(ch, f"{TRTIS}Infer", trtis_message("A")), id="v1 worker"),
        pytest.param(lambda ch: streamed(ch, f"{TRTIS}StreamInfer", trtis_message("A")), id="v1 stream"),
    ],
)
def test_a_refused_message_is_freed_at_once(
    ask: Callable[[aio.Channel], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    made = services(tmp_path)

    async def test() -> None:
        server, streams = Server([], Door(made.access, made.settings)), Streams(8)
        for service in (KserveService(made.settings.kserve, made.restrictions), TrtisService(made)):
            mount(server, made, service, streams)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        unlimited = [("grpc.max_send_message_length", -1)]
        async with aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
            with without_collector() as added:
                await ask(channel)
                forget_calls(made)
                # What gRPC does behind an answer ends a moment later.
                for _ in range(500):
                    if added() < NBYTES // 2:
                        break
                    await asyncio.sleep(0.01)
                left_nbytes = added()
        await server.stop(0)
        assert left_nbytes < NBYTES // 2

    try:
        asyncio.run(test())
    finally:
        made.engine.client.inputs.close()


JSON_OF_MANY = b'{"inputs": [{"name": "%s", "datatype": "UINT8", "shape": [%d], "data": [' + b"1," * 200_000
TRTIS_HEADER = 'batch_size: 1 input { name: "%s" dims: ' + str(NBYTES) + ' } output { name: "O" }'


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/v2/models/vec/infer", {}, JSON_OF_MANY % (b"X", 200_001) + b"1]}]}"),
        ("/v2/models/vec/infer", {}, JSON_OF_MANY % (b"A", 200_001) + b"1]}]}"),
        ("/v2/models/vec/infer", {}, JSON_OF_MANY % (b"A", 200_001)),
        ("/api/infer/vec", {"NV-InferRequest": TRTIS_HEADER % "A"}, bytes(NBYTES)),
        ("/api/infer/vec", {"NV-InferRequest": TRTIS_HEADER % "A"}, bytes(NBYTES - 1)),
        (
            "/v1/encode/org/dense",
            {"Content-Type": "application/json"},
            b'{"items": 7, "x": "' + b"x" * NBYTES,
        ),
        (
            "/v1/encode/org/dense",
            {"Content-Type": "application/json", "Accept": "application/json"},
            b'{"items": [' + b'{"text": "abcdefgh"},' * 9000 + b'{"text": "x"}]}',
        ),
    ],
)
def test_a_refused_body_is_freed_at_once(
    path: str, headers: dict[str, str], body: bytes, tmp_path: Path
) -> None:
    made = services(tmp_path)
    protocols = Protocols([KserveProtocol(), TrtisProtocol(), SieProtocol()])
    renderer = ErrorRenderer(protocols)
    app = falcon.asgi.App(middleware=[RequestMiddleware(made, protocols)])
    app.add_error_handler(PenstockError, renderer.penstock)
    app.add_error_handler(Exception, renderer.unexpected)
    for protocol in protocols:
        protocol.mount(app, made)
    client = TestClient(app)
    try:
        assert client.simulate_post(path, headers=headers, body=body).status_code == 400
        with without_collector() as added:
            client.simulate_post(path, headers=headers, body=body)
            forget_calls(made)
            # A rendering thread lets go of what it has read a moment later.
            wait_until(lambda: added() < len(body) // 4, what="the body's end")
    finally:
        made.engine.client.inputs.close()


def test_what_is_forgotten_is_an_error_without_the_errors_before_it() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise InvalidInput("second") from first

    with pytest.raises(InvalidInput) as caught:
        fail()
    error, first = caught.value, caught.value.__cause__
    assert first is not None
    tracebacks.forget(error)
    for one in (error, first):
        assert (one.__traceback__, one.__cause__, one.__context__) == (None, None, None)
