"""Valid requests of all protocols over HTTP, in the layouts of their contracts: what the fuzzing begins with."""

from __future__ import annotations

import gzip
import io
import json
import struct
from dataclasses import dataclass, field

import msgpack
import numpy as np
from PIL import Image

LENGTH = "Inference-Header-Content-Length"
A = np.arange(16, dtype="<i4")
B = np.full(16, 3, dtype="<i4")
PAIR = A.tobytes() + B.tobytes()
JSON, MSGPACK, OCTETS = "application/json", "application/msgpack", "application/octet-stream"
TRTIS_INPUTS = 'input { name: "INPUT0" dims: [16] } input { name: "INPUT1" }'


@dataclass(frozen=True, slots=True)
class Valid:
    """One request that is answered 200."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def wire(self, **more: str) -> bytes:
        """It as HTTP/1.1, with `more` header fields."""
        fields = {"Host": "fuzz", **self.headers, **more}
        if self.body:
            fields["Content-Length"] = str(len(self.body))
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in fields.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


def strings(*values: bytes) -> bytes:
    """Elements of BYTES, each behind its length."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def picture() -> bytes:
    """A JPEG of 32 x 32 pixels."""
    values = np.random.default_rng(1).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).resize((32, 32)).save(file, "JPEG", quality=40)
    return file.getvalue()


def _tensor(name: str, shape: list[int], datatype: str, **more: object) -> dict[str, object]:
    return {"name": name, "shape": shape, "datatype": datatype, **more}


def _binary(model: str, head: object, tail: bytes, action: str = "infer") -> Valid:
    """A KServe request with bytes behind its JSON, which may be written as the contract writes it."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    headers = {"Content-Type": OCTETS, LENGTH: str(len(text))}
    return Valid("POST", f"/v2/models/{model}/{action}", text + tail, headers)


def _json(path: str, value: object, **headers: str) -> Valid:
    return Valid("POST", path, json.dumps(value).encode(), {"Content-Type": JSON, **headers})


def _trtis(model: str, header: str, body: bytes, query: str = "") -> Valid:
    return Valid(
        "POST", f"/api/infer/{model}{query}", body, {"NV-InferRequest": header, "Content-Type": OCTETS}
    )


PICTURE = picture()
IMAGE_HEAD = (
    b'{ "model_name" : "my_model"\n, "inputs" : [ \n  { \n    "name" : "image", \n    "shape" : [ 1 ], \n'
    b'    "datatype" : "BYTES" \n  } \n] \n} '
)
INT_PAIR = [_tensor("INPUT0", [1, 16], "INT32"), _tensor("INPUT1", [1, 16], "INT32")]
_WANTED = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT1"}]
_JSON_PAIR = [
    _tensor("INPUT0", [1, 16], "INT32", data=A.tolist()),
    _tensor("INPUT1", [1, 16], "INT32", data=[B.tolist()]),
]
_GZIPPED = gzip.compress(json.dumps({"inputs": _JSON_PAIR}).encode(), mtime=0)
_PIXELS = np.random.default_rng(2).integers(0, 256, (1, 32, 32, 3)).astype("<f4").tobytes()
_STRING = {"name": "INPUT", "shape": [1, 2], "datatype": "BYTES"}
_ITEMS = {"items": [{"id": "a", "text": "one"}, {"text": "two"}], "params": {"output_types": ["dense"]}}
_SCORED = {"query": {"id": "q", "text": "one"}, "items": [{"id": "a", "text": "two"}, {"text": "three"}]}
_TRTIS_STRING = (
    'batch_size: 1 input { name: "INPUT" dims: 2 batch_byte_size: 13 } output { name: "OUTPUT" } id: 7'
)

REQUESTS: dict[str, Valid] = {
    "kserve-json": _json("/v2/models/add_sub/infer", {"id": "7", "inputs": _JSON_PAIR, "outputs": _WANTED}),
    "kserve-gzip": Valid("POST", "/v2/models/add_sub/infer", _GZIPPED, {"Content-Encoding": "gzip"}),
    "kserve-binary": _binary(
        "add_sub/versions/1", {"inputs": INT_PAIR, "parameters": {"binary_data_output": True}}, PAIR
    ),
    "kserve-sizes": _binary(
        "add_sub", {"inputs": [one | {"parameters": {"binary_data_size": 64}} for one in INT_PAIR]}, PAIR
    ),
    "kserve-image": _binary("classifier_nhwc", IMAGE_HEAD, strings(PICTURE)),
    "kserve-raw": _binary("classifier_nhwc", {"inputs": [_tensor("image", [1, 32, 32, 3], "FP32")]}, _PIXELS),
    "kserve-classes": _binary(
        "classifier_nhwc",
        {
            "inputs": [_tensor("image", [1], "BYTES")],
            "outputs": [{"name": "scores", "parameters": {"classification": 3}}],
        },
        strings(PICTURE),
    ),
    "kserve-strings": _binary("identity_bytes", {"inputs": [_STRING]}, strings(b"ab", b"\xc3\xa9c")),
    "kserve-texts": _json(
        "/v2/models/identity_bytes/infer", {"inputs": [_STRING | {"data": ["x", {"b64": "YQ=="}]}]}
    ),
    "kserve-headless": _binary("identity_bytes", b"", b"a single string"),
    "kserve-generate": _json(
        "/v2/models/identity_bytes/generate", {"INPUT": ["one"], "parameters": {"k": 1.5}}
    ),
    "kserve-stream": _json("/v2/models/identity_bytes/generate_stream", {"INPUT": "one"}),
    "kserve-server": Valid("GET", "/v2"),
    "kserve-ready": Valid("GET", "/v2/models/add_sub/ready"),
    "kserve-model": Valid("GET", "/v2/models/add_sub"),
    "kserve-config": Valid("GET", "/v2/models/add_sub/config"),
    "kserve-stats": Valid("GET", "/v2/models/stats"),
    "kserve-index": _json("/v2/repository/index", {"ready": True}),
    "kserve-regions": Valid("GET", "/v2/systemsharedmemory/status"),
    "trtis-infer": _trtis(
        "add_sub",
        f'batch_size: 1 {TRTIS_INPUTS} output {{ name: "OUTPUT0" }} output {{ name: "OUTPUT1" }}',
        PAIR,
    ),
    "trtis-classes": _trtis(
        "classifier_nhwc/1",
        'batch_size: 1 input { name: "image" } output { name: "scores" cls { count: 3 } }',
        _PIXELS,
    ),
    "trtis-strings": _trtis("identity_bytes", _TRTIS_STRING, strings(b"ab", b"\xc3\xa9c"), "?format=binary"),
    "trtis-live": Valid("GET", "/api/health/live"),
    "trtis-status": Valid("GET", "/api/status"),
    "trtis-model": Valid("GET", "/api/status/add_sub?format=binary"),
    "trtis-index": Valid("GET", "/api/repository/index"),
    "sie-json": _json("/v1/encode/fake/echo", _ITEMS, Accept=JSON),
    "sie-msgpack": Valid("POST", "/v1/encode/fake/echo", msgpack.packb(_ITEMS), {"Content-Type": MSGPACK}),
    "sie-embeddings": _json("/v1/embeddings", {"model": "fake/echo", "input": ["one", "two"]}),
    "sie-score": _json("/v1/score/fake/score", _SCORED, Accept=JSON),
    "sie-score-msgpack": Valid(
        "POST", "/v1/score/fake/score", msgpack.packb(_SCORED), {"Content-Type": MSGPACK}
    ),
    "sie-rerank": _json(
        "/v1/rerank", {"model": "fake/score", "query": "one", "documents": ["two", {"text": "three"}]}
    ),
    "sie-models": Valid("GET", "/v1/models"),
    "sie-model": Valid("GET", "/v1/models/fake/echo"),
    "live": Valid("GET", "/healthz"),
    "ready": Valid("GET", "/readyz"),
    "metrics": Valid("GET", "/metrics"),
    "openapi": Valid("GET", "/openapi.json"),
    "page": Valid("GET", "/"),
}
"""By name, for a server with add_sub, identity_bytes, classifier_nhwc, fake/echo and fake/score."""
