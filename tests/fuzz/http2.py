"""HTTP/2 by hand: frames, header blocks without compression, and rpcs of gRPC made of them.

Frames: RFC 9113, section 4.1. Header blocks: RFC 7541, section 6.2.2, literals that are never indexed.
Messages of gRPC: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from ipc.protos import kserve_v2_pb2 as kserve
from ipc.protos import trtis_v1_pb2 as trtis
from tests.fuzz.valid import PAIR, PICTURE, A, strings

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, END_HEADERS, PADDED, PRIORITIZED, ACK = 1, 4, 8, 32, 1
_KSERVE, _TRTIS = "/inference.GRPCInferenceService/", "/nvidia.inferenceserver.GRPCService/"


def frame(
    kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", nbytes: int | None = None
) -> bytes:
    """One frame; `nbytes` is a length that may lie."""
    length = len(payload) if nbytes is None else nbytes
    return (
        struct.pack(">I", length & 0xFFFFFF)[1:]
        + struct.pack(">BBI", kind & 255, flags & 255, stream & 0xFFFFFFFF)
        + payload
    )


def block(fields: Mapping[str, str] | Sequence[tuple[str, str]]) -> bytes:
    """A header block."""
    pairs = fields.items() if isinstance(fields, Mapping) else fields
    return b"".join(b"\x10" + _text(name) + _text(value) for name, value in pairs)


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, b"\x7f"
    while rest > 127:
        size += bytes([rest & 127 | 128])
        rest >>= 7
    return size + bytes([rest]) + data


def message(data: bytes, compressed: int = 0, nbytes: int | None = None) -> bytes:
    """A message of gRPC behind its length, which may lie."""
    return struct.pack(">BI", compressed, len(data) if nbytes is None else nbytes) + data


def opening() -> list[bytes]:
    """How a connection begins."""
    return [PREFACE, frame(SETTINGS)]


def fields_of(path: str, **more: str) -> dict[str, str]:
    """The header fields of an rpc."""
    return {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "fuzz",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def rpc(stream: int, path: str, *messages: Message | bytes, **more: str) -> list[bytes]:
    """The frames of a whole rpc."""
    sent = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
    frames = [frame(HEADERS, END_HEADERS, stream, block(fields_of(path, **more)))]
    frames += [frame(DATA, 0, stream, message(data)) for data in sent]
    return [*frames, frame(DATA, END_STREAM, stream)]


def kserve_infer(request_id: str = "") -> kserve.ModelInferRequest:
    """A request to add_sub."""
    request = kserve.ModelInferRequest(
        model_name="add_sub", id=request_id, raw_input_contents=[A.tobytes(), A.tobytes()]
    )
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    request.outputs.add(name="OUTPUT0")
    return request


def kserve_typed() -> kserve.ModelInferRequest:
    """A request of strings with typed contents and parameters."""
    request = kserve.ModelInferRequest(model_name="identity_bytes", model_version="1")
    request.inputs.add(name="INPUT", datatype="BYTES", shape=[1, 2]).contents.bytes_contents.extend(
        [b"a", b"bc"]
    )
    request.parameters["priority"].int64_param = 1
    return request


def kserve_image() -> kserve.ModelInferRequest:
    """An encoded image."""
    request = kserve.ModelInferRequest(model_name="classifier_nhwc", raw_input_contents=[strings(PICTURE)])
    request.inputs.add(name="image", datatype="BYTES", shape=[1])
    return request


def trtis_infer(number: int = 7) -> trtis.InferRequest:
    """A request to add_sub."""
    request = trtis.InferRequest(model_name="add_sub", model_version=-1, raw_input=[PAIR[:64], PAIR[64:]])
    request.meta_data.batch_size, request.meta_data.id = 1, number
    for name in ("INPUT0", "INPUT1"):
        request.meta_data.input.add(name=name, dims=[16])
    request.meta_data.output.add(name="OUTPUT1").cls.count = 2
    return request


RPCS: dict[str, list[bytes]] = {
    "kserve-infer": rpc(1, f"{_KSERVE}ModelInfer", kserve_infer("7"), x_request_id="job", grpc_timeout="5S"),
    "kserve-typed": rpc(1, f"{_KSERVE}ModelInfer", kserve_typed()),
    "kserve-image": rpc(1, f"{_KSERVE}ModelInfer", kserve_image()),
    "kserve-stream": rpc(1, f"{_KSERVE}ModelStreamInfer", *(kserve_infer(str(n)) for n in range(3))),
    "kserve-ready": rpc(1, f"{_KSERVE}ServerReady", b""),
    "kserve-model": rpc(1, f"{_KSERVE}ModelMetadata", kserve.ModelMetadataRequest(name="add_sub")),
    "kserve-regions": rpc(1, f"{_KSERVE}SystemSharedMemoryStatus", b""),
    "trtis-infer": rpc(1, f"{_TRTIS}Infer", trtis_infer()),
    "trtis-stream": rpc(1, f"{_TRTIS}StreamInfer", *(trtis_infer(n) for n in range(3))),
    "trtis-status": rpc(1, f"{_TRTIS}Status", trtis.StatusRequest(model_name="add_sub")),
    "health": rpc(1, "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest()),
    "watch": rpc(1, "/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest()),
    "reflection": rpc(1, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\x3a\x00"),
    "two": [*rpc(1, f"{_KSERVE}ModelInfer", kserve_infer()), *rpc(3, f"{_TRTIS}Infer", trtis_infer())],
}
"""Valid rpcs by name: the frames that follow `opening`."""
