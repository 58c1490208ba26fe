"""A bare gRPC client with our own messages, and load over it; answers of the fake family are checked by their text."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from ipc.protos import kserve_v2_pb2 as pb
from tests.fakes.adapter import vector_of
from tests.harness.load import PAUSE_S
from tests.harness.ports import free_port
from tests.harness.server import PATIENCE_S, Server

SERVICE = "/inference.GRPCInferenceService/"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def grpc_settings(**more: Any) -> dict[str, Any]:
    """Settings of a server that speaks gRPC on a free port."""
    return {"grpc.enabled": "true", "grpc.bind": f"127.0.0.1:{free_port()}", **more}


def address_of(server: Server) -> str:
    """Where the server speaks gRPC."""
    return server.environment["PENSTOCK_GRPC__BIND"]


class Rpc:
    """One channel to a server, of its own TCP connection."""

    def __init__(self, address: str, options: Iterable[tuple[str, Any]] = ()) -> None:
        kept = [("grpc.use_local_subchannel_pool", 1), *UNLIMITED, *options]
        self.channel = grpc.insecure_channel(address, options=kept)

    def __enter__(self) -> Rpc:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, request: Any, timeout_s: float = 30, **options: Any) -> Any:
        """One unary rpc of KServe. Raises `grpc.RpcError`."""
        return self.start(method, request, timeout_s, **options).result()

    def start(self, method: str, request: Any, timeout_s: float = 30, **options: Any) -> Any:
        """One unary rpc of KServe, under way."""
        answer = getattr(pb, f"{method}Response")
        rpc = self.channel.unary_unary(SERVICE + method, _serialize, answer.FromString)
        return rpc.future(request, timeout=timeout_s, **options)

    def stream(self, requests: Iterable[pb.ModelInferRequest], **options: Any) -> Any:
        """ModelStreamInfer; iterate over the answers."""
        rpc = self.channel.stream_stream(
            f"{SERVICE}ModelStreamInfer", _serialize, pb.ModelStreamInferResponse.FromString
        )
        return rpc(iter(requests), timeout=60, **options)

    def health(self, service: str = "") -> Any:
        """grpc.health.v1.Health/Check."""
        rpc = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check", _serialize, health_pb2.HealthCheckResponse.FromString
        )
        return rpc(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status

    def watch(self, service: str = "") -> Iterator[Any]:
        """grpc.health.v1.Health/Watch."""
        rpc = self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch", _serialize, health_pb2.HealthCheckResponse.FromString
        )
        for answer in rpc(health_pb2.HealthCheckRequest(service=service), timeout=60):
            yield answer.status


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def text_request(model: str, text: str, request_id: str = "") -> pb.ModelInferRequest:
    """A request of one text to a catalog model."""
    encoded = text.encode()
    raw = len(encoded).to_bytes(4, "little") + encoded
    request = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[raw])
    request.inputs.add(name="text", datatype="BYTES", shape=[1])
    return request


def is_vector_of(text: str, answer: pb.ModelInferResponse) -> bool:
    """Whether an answer is that of the fake family to this text."""
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    return bool(np.allclose(found, vector_of(text, len(found)), atol=1e-6))


def failure_of(call: Callable[[], Any]) -> grpc.RpcError:
    """The error that an rpc ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("the rpc was answered")


def trailers_of(rpc: Any) -> Mapping[str, str]:
    """Trailing metadata by name."""
    return dict(rpc.trailing_metadata() or ())


class RpcLoad:
    """`clients` threads that infer one text after another, each on a connection of its own, until `stop`."""

    def __init__(self, address: str, clients: int, model: str = "fake/echo", fresh: bool = False) -> None:
        self._address, self._model, self._fresh = address, model, fresh
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.statuses: Counter[str] = Counter()
        self.details: list[str] = []
        self.longest_s = 0.0
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> RpcLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return self.statuses.total()

    def stop(self) -> Counter[str]:
        """Outcomes by status: OK, WRONG for the answer to another text, else the name of the gRPC status."""
        self._end.set()
        for thread in self._threads:
            thread.join(60)
        return self.statuses

    def _run(self, number: int) -> None:
        turn, rpc = 0, Rpc(self._address)
        while not self._end.is_set():
            turn += 1
            began = time.monotonic()
            self._note(self._once(rpc, f"client {number} turn {turn}"), time.monotonic() - began)
            if self._fresh:
                rpc.channel.close()
                rpc = Rpc(self._address)
            self._end.wait(PAUSE_S)
        rpc.channel.close()

    def _once(self, rpc: Rpc, text: str) -> str:
        try:
            answer = rpc.call("ModelInfer", text_request(self._model, text))
        except grpc.RpcError as error:
            with self._lock:
                self.details.append(str(error.details()))
            return str(error.code().name)
        return "OK" if is_vector_of(text, answer) else "WRONG"

    def _note(self, status: str, took_s: float) -> None:
        with self._lock:
            self.statuses[status] += 1
            self.longest_s = max(self.longest_s, took_s)
