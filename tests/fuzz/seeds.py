"""Writes the valid inputs of the corpus: `python -m tests.fuzz.seeds`. Findings beside them are left alone."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import msgpack
import msgspec

from ipc.wire import codec
from tests.fakes.vector_server import CLASSIFIER, DENSE, PICTURES, SCORE
from tests.fuzz import corpus, http2, http_sessions
from tests.fuzz.session import Session
from tests.fuzz.valid import JSON, LENGTH, MSGPACK, PICTURE, REQUESTS, Valid, strings
from tests.tiny.pictures import encoded, picture
from tests.unit.frontend.protocols.trtis_v1.test_trtis_text import PLAIN
from tests.unit.ipc.wire.test_codec import TO_FRONTEND, TO_WORKER
from tests.unit.workers.repository.test_repository_properties import VALID

SIE = {
    "encode": {
        "items": [{"id": "a", "text": "one"}],
        "params": {"output_types": ["dense"], "options": {"x": 1}},
    },
    "embeddings": {"model": "m", "input": ["one", [1, 2]], "encoding_format": "base64", "dimensions": 4},
    "score": {"query": {"text": "q"}, "items": [{"text": "a"}, {"id": "2", "text": "b"}], "options": {}},
    "extract": {"items": [{"text": "one"}], "params": {"labels": ["x"], "output_schema": {"a": "b"}}},
    "rerank": {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
}
_FUNCTION = {
    "name": "f",
    "description": "d",
    "strict": True,
    "parameters": {"properties": {"a": {"$ref": "#"}}},
}
_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": -1.5}, "dry_multiplier": 1, "seed": 7}
_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
TEXT = {
    "chat": {
        "model": "default",
        "messages": [
            {"role": "system", "content": _PARTS},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}},
        },
        "stop": ["x"],
        "logprobs": True,
        "reasoning_effort": "low",
        **_SAMPLING,
    },
    "completions": {"prompt": [[1, 2], [3]], "n": 1, "best_of": 2, "logprobs": 1, **_SAMPLING},
    "messages": {
        "max_tokens": 5,
        "system": _PARTS,
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": []}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": _PARTS}, *_PARTS],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled"},
        "grammar": {"type": "llguidance", "value": {"grammars": [{"lark_grammar": "start: /a/"}]}},
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
        "instructions": "be kind",
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **_FUNCTION}]}],
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
    },
}
YAML = b"""max_batch_size: 8
input: [{name: A, data_type: TYPE_FP32, dims: [3, -1]}]
output: [{name: B, data_type: TYPE_INT64, dims: [2], label_filename: l}]
version_policy: {specific: {versions: [1, 2]}}
dynamic_batching: {preferred_batch_size: [4], max_queue_delay_microseconds: 100}
"""
CONFIG = json.dumps(
    {
        "max_batch_size": 8,
        "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": ["3", "-1"]}],
        "output": [{"name": "B", "data_type": "TYPE_INT64", "dims": [2], "label_filename": "l"}],
        "version_policy": {"specific": {"versions": ["1", 2]}},
        "dynamic_batching": {"preferred_batch_size": [4], "max_queue_delay_microseconds": "100"},
    }
).encode()
_PACKED = json.dumps({"inputs": [0] * 100}).encode()


def _kserve(valid: Valid) -> bytes:
    return valid.headers.get(LENGTH, "-").encode() + b"\n" + valid.body


def _readers() -> dict[str, dict[str, bytes]]:
    """Inputs by target and name."""
    kserve = {name: _kserve(one) for name, one in REQUESTS.items() if one.path.endswith("/infer")}
    trtis = {
        name: f"{one.headers['NV-InferRequest']}\n".encode() + one.body
        for name, one in REQUESTS.items()
        if "NV-InferRequest" in one.headers
    }
    wire = {name: message.SerializeToString() for name, message in _messages().items()}
    return {
        "trtis_request": trtis | {"grammar": PLAIN.encode() + b"\n"},
        "kserve_request": kserve,
        "kserve_generate": {"list": REQUESTS["kserve-generate"].body, "text": REQUESTS["kserve-stream"].body},
        "kserve_packed": {
            "gzip": b"gzip\n" + gzip.compress(_PACKED, mtime=0),
            "deflate": b"deflate\n" + zlib.compress(_PACKED),
        },
        "bytes_tensor": {
            "equal": b"3\n" + strings(b"ab", b"cd", b"ef"),
            "other": b"3\n" + strings(b"", b"abc", b"\xff"),
            "none": b"0\n",
            "one": b"1\n" + strings(b"x" * 300),
        },
        "grpc_kserve": {name: data for name, data in wire.items() if name.startswith("kserve")},
        "grpc_trtis": {"infer": wire["trtis-infer"]},
        "config_text": {"all": VALID},
        "config_yaml": {"all": YAML},
        "config_json": {"all": CONFIG},
        "load_request": {
            "config": json.dumps({"parameters": {"config": CONFIG.decode()}}).encode(),
            "files": json.dumps(
                {"parameters": {"config": "{}", "file:1/model.onnx": "AAEC", "file:labels.txt": "YQo="}}
            ).encode(),
        },
        "ipc_bundle": {"all": _bundle()},
        "ipc_to_worker": {type(one).__name__.lower(): codec.encode(one) for one in TO_WORKER},
        "ipc_to_frontend": {type(one).__name__.lower(): codec.encode(one) for one in TO_FRONTEND},
        "image_header": {
            **{form: encoded(picture(1, 9, 7), form.upper())[:600] for form in ("png", "gif", "webp", "bmp")},
            "jpeg": PICTURE,
        },
        "sie_json": {name: json.dumps(body).encode() for name, body in SIE.items()},
        "sie_msgpack": {name: msgpack.packb(body) for name, body in SIE.items()},
        "sie_answer": _asked(),
        "text_request": {name: json.dumps(body).encode() for name, body in TEXT.items()},
        "request_headers": {
            "all": b"job-7\x0000-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01\0gzip;q=0.5, *;q=0"
        },
    }


def _asked() -> dict[str, bytes]:
    """Requests of the SIE contract: each in JSON, and where the contract takes msgpack in msgpack too."""
    picture = {"data": PICTURE, "format": "jpeg"}
    embeddings = {"model": DENSE, "encoding_format": "base64"}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "encode": (f"/v1/encode/{DENSE}", SIE["encode"]),
        "pictures": (f"/v1/encode/{PICTURES}", {"items": [{"images": [picture]}, {"text": "one"}]}),
        "score": (f"/v1/score/{SCORE}", SIE["score"]),
        "extract": (f"/v1/extract/{CLASSIFIER}", SIE["extract"]),
        "embeddings": ("/v1/embeddings", {"input": ["one", "two"], "late_chunking": False, **embeddings}),
        "embeddings-ids": ("/v1/embeddings", {"input": [[1, 2], [3]], "user": "u", **embeddings}),
        "rerank": ("/v1/rerank", SIE["rerank"] | {"model": SCORE, "return_documents": True}),
    }
    found = {}
    for name, (path, body) in bodies.items():
        found[name] = f"{path} {JSON} {JSON}\n".encode() + msgspec.json.encode(body)
        if "items" in body:
            found[f"{name}-msgpack"] = f"{path} {MSGPACK} {MSGPACK}\n".encode() + msgpack.packb(body)
    return found


def _bundle() -> bytes:
    waiting = codec.Bundle()
    for number, message in enumerate(TO_WORKER):
        waiting.add(message, b"raw" if number == 1 else None)
    return bytes(waiting.take()[0])


def _messages() -> dict[str, http2.Message]:
    return {
        "kserve-raw": http2.kserve_infer("7"),
        "kserve-typed": http2.kserve_typed(),
        "kserve-image": http2.kserve_image(),
        "trtis-infer": http2.trtis_infer(),
    }


def _sessions() -> dict[str, Session]:
    """Sessions of valid requests, by name."""
    found = {
        name: Session("http", (("send", one.wire(Connection="close")),)) for name, one in REQUESTS.items()
    }
    for name, frames in http2.RPCS.items():
        found[f"grpc-{name}"] = Session("grpc", (("send", b"".join([*http2.opening(), *frames])),))
    found["websocket"] = Session("http", (("send", http_sessions.HANDSHAKE), ("wait", b"")))
    two = REQUESTS["kserve-binary"].wire() + REQUESTS["trtis-infer"].wire(Connection="close")
    found["pipelined"] = Session("http", (("send", two[:100]), ("send", two[100:]), ("half", b"")))
    found["preface-at-http"] = Session("http", (("send", b"".join(http2.opening())),))
    found["http-at-grpc"] = Session("grpc", (("send", REQUESTS["live"].wire()),))
    return found


def main() -> None:
    """Write all of them."""
    kept = _readers() | {"sessions": {name: one.dump() for name, one in _sessions().items()}}
    for target, named in kept.items():
        place = corpus.ROOT / target
        place.mkdir(parents=True, exist_ok=True)
        for name, data in named.items():
            (place / name).write_bytes(data)


if __name__ == "__main__":
    main()
