"""One host, and a gateway whose only box is this host: the same bytes for the same request, but for ids and times.

What the contract of gateways (section 11 of the specification of clusters) wants otherwise is named in `told`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import grpc
import msgpack
import msgspec
import pytest

from ipc.protos import kserve_v2_pb2 as pb
from tests.conformance.kserve import A, B, pair
from tests.conformance.models import DIMS, TERMS
from tests.conformance.wire import JSON, MSGPACK
from tests.fakes.kinds import write_kinds
from tests.harness.cluster import gateway_beside
from tests.harness.multipart import END, FORM, part
from tests.harness.rpc import SERVICE, UNLIMITED, address_of, grpc_settings, text_request
from tests.harness.server import FAKE_CATALOG, PATIENCE_S, Answer, Server, serving
from tests.tiny import chat_models
from tests.tiny.programs import SCRIPTED, write_repository

CHAT = "tiny/chat"
ITEMS: list[dict[str, Any]] = [{"id": "one", "text": "a"}, {"text": "b 2"}, {"text": ""}, {"text": "é " * 40}]
SCORE = {"query": {"text": "7"}, "items": [{"id": "x", "text": "0.25"}, {"text": "7.5"}, {"text": "7.5"}]}
RERANK = {
    "model": "ranker",
    "query": "7",
    "documents": ["0.25", "7.5", "-3", "7.5"],
    "return_documents": True,
}
HUGE = {"numbers": [1, {"beyond": 2**70}]}
WRONG: list[Any] = [None, True, -1, 1.5, 2**64 - 1, "", "x" * 2000, "\0", [], [None], {}, {"x": [{}]}]
BEYOND: list[Any] = [2**70, {"x": HUGE}]
"""Values that JSON alone can say."""
EVERY = ["dense", "sparse", "multivector"]
SAY = {"model": CHAT, "messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 12}
ANSWER: dict[str, Any] = {"model": CHAT, "input": "tell me a story", "max_output_tokens": 16}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"enum": [1, 2, 3]}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
CHOSEN = {"seed": 3, "temperature": 1.0, "n": 2, "logprobs": True, "top_logprobs": 2}
CALLED = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}


BESIDE_DETAIL = ("message", "compatible_bundles")
OF_SIE = ("/v1/encode", "/v1/score/", "/v1/extract")
"""Routes whose errors have `BESIDE_DETAIL` once more at a gateway, by section 11.2 of the specification of clusters."""


BESIDE_MODELS = ("bundles", "worker_count", "workers")
"""What a gateway adds to each model, by section 11.1."""
_OF_WORK = frozenset({"x-sie-worker", "x-queue-publish-time", "x-queue-wait-time"})
BESIDE = frozenset({"x-sie-version", "x-sie-request-id", *_OF_WORK})
"""Headers that a gateway adds, by section 11.6; the last ones where a box has worked."""
_OF_ONE_REQUEST = frozenset({"date", "x-request-id", "x-trace-id", "request-id", "x-sie-request-id", "etag"})


class Both(NamedTuple):
    """The two ways to the same workers."""

    local: Server
    near: Server


@dataclass(frozen=True)
class Asked:
    """One request. `body` is sent in the encoding of `form`, unless these are bytes with headers of their own."""

    path: str
    body: Any = None
    form: Any = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = ""

    def of(self, server: Server) -> Answer:
        """The answer of a server."""
        method = self.method or ("GET" if self.body is None else "POST")
        if self.body is None or isinstance(self.body, bytes):
            return server.request(method, self.path, self.body, self.headers)
        headers = {**self.form.headers, **self.headers}
        return server.request(method, self.path, self.form.dump(self.body), headers)


def binary(inputs: list[dict[str, Any]], tail: bytes, path: str) -> Asked:
    """An inference whose tensors lie behind the JSON, both ways."""
    head = json.dumps({"id": "job", "inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return Asked(path, head + tail, headers=headers)


def in_both(name: str, path: str, body: Any) -> dict[str, Asked]:
    """A request in JSON and in msgpack."""
    return {f"{name}, {form.name}": Asked(path, body, form) for form in (JSON, MSGPACK)}


def errors() -> dict[str, Asked]:
    """Mistakes and failures of each kind."""
    wrong = {"items": ITEMS, "params": {"output_dtype": "int3"}}
    found = {
        **in_both("no items", "/v1/encode/plain", {}),
        **in_both("a parameter that is wrong", "/v1/encode/plain", wrong),
        **in_both("an unknown model", "/v1/encode/plai", {"items": ITEMS}),
        **in_both("a model that cannot be loaded", "/v1/encode/broken", {"items": ITEMS}),
        **in_both("a model without its package", "/v1/encode/lacking", {"items": ITEMS}),
        **in_both("a model of another operation", "/v1/encode/ranker", {"items": ITEMS}),
        **in_both("an input that fails", "/v1/encode/plain", {"items": [{"text": "#raise"}]}),
        **in_both("an input that is not finite", "/v1/encode/plain", {"items": [{"text": "#nan"}, *ITEMS]}),
        "an option beyond 64 bits": Asked("/v1/encode/plain", {"items": ITEMS, "params": {"options": HUGE}}),
        "metadata beyond 64 bits": Asked("/v1/encode/plain", {"items": [{"text": "a", "metadata": HUGE}]}),
        "an option of score beyond 64 bits": Asked("/v1/score/ranker", {**SCORE, "options": HUGE}),
        "a schema beyond 64 bits": Asked(
            "/v1/extract/finder", {"items": ITEMS, "params": {"labels": ["x"], "output_schema": HUGE}}
        ),
        **in_both("no query", "/v1/score/ranker", {"items": ITEMS}),
        **in_both("labels that are wrong", "/v1/extract/finder", {"items": ITEMS, "params": {"labels": [1]}}),
        "no msgpack": Asked("/v1/encode/plain", b"\xc1", headers=MSGPACK.headers),
        "no json": Asked("/v1/encode/plain", b"{", headers=JSON.headers),
        "a deadline that is wrong": Asked(
            "/v1/encode/plain", {"items": ITEMS}, headers={"X-Request-Timeout": "soon"}
        ),
        "a deadline that is over": Asked(
            "/v1/encode/plain", {"items": ITEMS}, headers={"X-Request-Timeout": "1e-9"}
        ),
        "a path that is unknown": Asked("/v1/nope"),
        "a method that is wrong": Asked("/v1/encode/plain", method="DELETE"),
    }
    openai = {"no input": {"model": "plain"}, "an unknown model": {"model": "nope", "input": "a"}}
    found |= {f"embeddings: {name}": Asked("/v1/embeddings", body) for name, body in openai.items()}
    for name, more in {
        "an unknown model": {"model": "nope"},
        "no tokens": {"max_tokens": 0},
        "a model of vectors": {"model": "plain"},
        "a tool without a name": {"tools": [{"type": "function", "function": {}}]},
        "too long": {"messages": [{"role": "user", "content": "word " * chat_models.CONTEXT}]},
        "a picture for a model that sees none": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                }
            ]
        },
    }.items():
        found[f"chat: {name}"] = Asked("/v1/chat/completions", SAY | more)
        found[f"messages: {name}"] = Asked("/v1/messages", SAY | more)
    for name, response in {
        "an unknown model": {"model": "nope"},
        "an unknown response": {"previous_response_id": "resp_" + "0" * 32},
        "an unknown file": {
            "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-" + "0" * 32}]}]
        },
    }.items():
        found[f"responses: {name}"] = Asked("/v1/responses", ANSWER | response)
    for path in ("/v1/responses/resp_x", "/v1/files/file-x", "/v1/files/file-x/content", "/v1/models/nope"):
        found[f"nothing at {path}"] = Asked(path)
    for name, inputs in {
        "an unknown input": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [1]}],
        "a wrong shape": [{"name": "INPUT0", "shape": [3], "datatype": "INT32", "data": [1, 2, 3]}],
    }.items():
        found[f"infer: {name}"] = Asked("/v2/models/add_sub/infer", {"inputs": inputs})
    wide = {"inputs": [each | {"data": v.tolist()} for each, v in zip(pair(), (A, B), strict=True)]}
    found["infer: a parameter beyond 64 bits"] = Asked(
        "/v2/models/add_sub/infer", wide | {"parameters": HUGE}
    )
    found["infer: an unknown model"] = Asked("/v2/models/nope/infer", {"inputs": []})
    return found


def vectors() -> dict[str, Asked]:
    """Requests of encode, score, extract, embeddings and rerank that succeed."""
    dtypes = ("float16", "int8", "binary")
    found = {
        **in_both("encode", "/v1/encode/plain", {"items": ITEMS}),
        **in_both(
            "encode to all outputs", "/v1/encode/many", {"items": ITEMS, "params": {"output_types": EVERY}}
        ),
        **in_both(
            "encode with failures",
            "/v1/encode/plain",
            {"items": [*ITEMS, {"text": "#nan"}], "params": {"item_errors": True}},
        ),
        **in_both("encode queries", "/v1/encode/plain", {"items": ITEMS, "params": {"is_query": True}}),
        **in_both("score", "/v1/score/ranker", SCORE),
        **in_both("extract", "/v1/extract/finder", {"items": ITEMS, "params": {"labels": ["x", "y"]}}),
        "embeddings": Asked("/v1/embeddings", {"model": "plain", "input": ["a", "b"]}),
        "embeddings in base64": Asked(
            "/v1/embeddings", {"model": "plain", "input": ["a", "b"], "encoding_format": "base64"}
        ),
        "rerank": Asked("/v1/rerank", RERANK),
        "rerank of Cohere": Asked("/v2/rerank", RERANK),
        "embed of Cohere": Asked(
            "/v2/embed",
            {
                "model": "plain",
                "texts": ["a"],
                "input_type": "search_query",
                "embedding_types": ["float", "int8"],
            },
        ),
        "score of vLLM": Asked("/v1/score", {"model": "ranker", "text_1": "7", "text_2": ["0.25", "7.5"]}),
    }
    for dtype in dtypes:
        body = {"items": ITEMS, "params": {"output_types": EVERY, "output_dtype": dtype}}
        found |= in_both(f"encode to {dtype}", "/v1/encode/many", body)
    return found


def texts() -> dict[str, Asked]:
    """Requests of generated text that succeed."""
    return {
        "chat": Asked("/v1/chat/completions", SAY),
        "chat, streamed": Asked("/v1/chat/completions", SAY | {"stream": True, "ignore_eos": True}),
        "chat, two choices": Asked("/v1/chat/completions", SAY | CHOSEN),
        "chat, a call": Asked("/v1/chat/completions", SAY | CALLED | {"max_tokens": 60}),
        "completions": Asked(
            "/v1/completions", {"model": CHAT, "prompt": "once", "max_tokens": 8, "echo": True}
        ),
        "completions, two prompts": Asked(
            "/v1/completions", {"model": CHAT, "prompt": ["once", "upon"], "max_tokens": 8}
        ),
        "messages": Asked("/v1/messages", SAY),
        "messages, streamed": Asked("/v1/messages", SAY | {"stream": True}),
        "tokens of messages": Asked(
            "/v1/messages/count_tokens", {"model": CHAT, "messages": SAY["messages"]}
        ),
        "responses": Asked("/v1/responses", ANSWER),
        "responses, streamed": Asked("/v1/responses", ANSWER | {"stream": True}),
        "responses, a call": Asked(
            "/v1/responses",
            ANSWER
            | {
                "tools": [{"type": "function", **WEATHER}],
                "tool_choice": "required",
                "max_output_tokens": 60,
            },
        ),
        "chat of Ollama": Asked("/api/chat", SAY | {"stream": False, "options": {"num_predict": 12}}),
        "tokens": Asked("/tokenize", {"model": CHAT, "prompt": "once upon a time"}),
    }


def tensors() -> dict[str, Asked]:
    """Requests of KServe that succeed."""
    path = "/v2/models/add_sub/infer"
    return {
        "infer": Asked(
            path,
            {
                "id": "job",
                "inputs": [each | {"data": v.tolist()} for each, v in zip(pair(), (A, B), strict=True)],
            },
        ),
        "infer, binary": binary(
            [each | {"parameters": {"binary_data_size": A.nbytes}} for each in pair()],
            A.tobytes() + B.tobytes(),
            path,
        ),
        "metadata of a model": Asked("/v2/models/add_sub"),
        "configuration of a model": Asked("/v2/models/add_sub/config"),
        "readiness of a model": Asked("/v2/models/add_sub/ready"),
        "infer of texts": Asked(
            "/v2/models/plain/infer",
            {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]},
        ),
    }


TEXTS = texts()
CASES = vectors() | TEXTS | tensors() | {f"error: {name}": asked for name, asked in errors().items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A server with models of every kind, and a gateway beside its workers."""
    place = tmp_path_factory.mktemp("both")
    names = [*write_kinds(place / "catalog"), "many", CHAT]
    many = {
        "id": "many",
        "source": {"kind": "directory", "path": str(FAKE_CATALOG.parent / "weights")},
        "adapter": "tests.fakes.adapter:FakeAdapter",
        "max_sequence_length": 512,
        "outputs": {"dense": {"dims": DIMS}, "sparse": {"dims": TERMS}, "multivector": {"dims": DIMS}},
        "loadtime": {"dims": DIMS, "token_dims": DIMS, "vocabulary": TERMS},
    }
    (place / "catalog" / "many.yaml").write_text(json.dumps(many))  # JSON is YAML
    chat_models.write_entry(place / "catalog", CHAT, chat_models.save("chatml", place / "chat"))
    settings = {
        "repository.dirs": write_repository(place / "models", ["add_sub", "identity_bytes"], SCRIPTED),
        "repository.allow_python": "true",
        "server.compatible": "vllm",
    }
    with (
        serving(
            place, names, grpc_settings(**settings), catalog=place / "catalog", supervised=False
        ) as local,
        gateway_beside(place / "beside", local) as near,
    ):
        yield Both(local, near)


_UUID = rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_IDS = re.compile(rb"(?<![0-9A-Za-z])((?:[a-z]+[-_])?)(?:[0-9a-f]{24,}|" + _UUID + rb")(?![0-9A-Za-z])")
_TIMES = re.compile(
    rb'("(?:created|[a-z]+_at|[a-z_]+_duration|[a-z_]+_ms|[a-z_]*time_sec|[a-z_]+_per_sec)": ?)(?:[0-9.e+-]+|"[^"]*")'
)


def scrubbed(body: bytes) -> bytes:
    """JSON, or events of JSON, whose ids and times are all the same."""
    return _TIMES.sub(rb"\1 0", _IDS.sub(rb"\1 id", body))


_PIECES = re.compile(
    rb'"(?:content|text|delta)":"((?:[^"\\]|\\.)*)"|"role":"assistant",|"finish_reason":(null|"[a-z_]+")'
)
_NUMBERS = re.compile(rb'"sequence_number":\d+')


def told_events(body: bytes) -> tuple[bytes, list[bytes]]:
    """What a stream says: its text, joined, and the forms of its events, each once in a row.

    How many tokens an event has depends on the time in which they came.
    """
    forms: list[bytes] = []
    for event in body.split(b"\n\n"):
        form = _NUMBERS.sub(b"", _PIECES.sub(b"", event))
        if form not in forms[-1:]:
            forms.append(form)
    return b"".join(b"".join(found) for found in _PIECES.findall(body)).replace(b"null", b""), forms


def told(answer: Answer) -> Any:
    """What an answer says but for ids and times: its bytes in JSON, in msgpack its keys and values in their order."""
    media = answer.headers.get("content-type", "")
    if media.startswith("text/event-stream"):
        return told_events(scrubbed(answer.body))
    if media != MSGPACK.media_type:
        return scrubbed(answer.body)
    pairs = msgpack.unpackb(answer.body, object_pairs_hook=list, strict_map_key=False)
    return len(answer.body), [pair for pair in pairs if pair[0] != "timing"]


def told_headers(answer: Answer) -> dict[str, str]:
    """Headers of an answer; those of ids and times without values."""
    return {
        name: "" if name in _OF_ONE_REQUEST or name.endswith("-time") else value
        for name, value in answer.headers.items()
        if name != "content-length"  # bodies are compared; the digits of times in them differ
    }


def assert_same(asked: Asked, local: Answer, near: Answer) -> None:
    """The gateway says what the local server says."""
    assert local.status == near.status, near.body
    wanted = told(local)
    if local.status >= 400 and asked.path.startswith(OF_SIE):
        detail = local.json()["detail"]
        beside = {name: detail[name] for name in BESIDE_DETAIL if name in detail}
        wanted = wanted[:-1] + (b"," + msgspec.json.encode(beside)[1:-1] if beside else b"") + b"}"
    assert told(near) == wanted
    headers = told_headers(near)
    assert headers.keys() & BESIDE == BESIDE - (set() if "x-inference-time" in headers else _OF_WORK)
    assert told_headers(local) == {name: value for name, value in headers.items() if name not in BESIDE}


@pytest.mark.parametrize("name", CASES)
def test_a_gateway_answers_with_the_bytes_of_the_local_server(both: Both, name: str) -> None:
    asked = CASES[name]
    if name in TEXTS:
        # The worker keeps the beginning of the prompt from here on, so both answers count the same cached tokens.
        asked.of(both.local)
    assert_same(asked, *(asked.of(server) for server in both))


def changed(value: Any, wrong: Any) -> Iterator[Any]:
    """The value with each of its fields and entries in turn replaced by `wrong`, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: new} for new in (wrong, *changed(inner, wrong)))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from ([*value[:at], new, *value[at + 1 :]] for new in (wrong, *changed(inner, wrong)))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(name, wrong, id=f"{name}, {str(wrong)[:20]!a}")
        for name, asked in CASES.items()
        if isinstance(asked.body, dict) and not name.startswith("error")
        for wrong in (WRONG if asked.form is MSGPACK else WRONG + BEYOND)
    ],
)
def test_a_gateway_answers_a_wrong_field_as_the_local_server(both: Both, name: str, wrong: Any) -> None:
    for body in changed(CASES[name].body, wrong):
        asked = replace(CASES[name], body=body)
        local, near = (asked.of(server) for server in both)
        if local.status >= 400 or name not in TEXTS:
            assert_same(asked, local, near)
        else:
            assert local.status == near.status, body


def test_models_are_listed_with_their_boxes_besides(both: Both) -> None:
    local, near = (server.get("/v1/models").json() for server in both)
    for model in near["models"]:
        assert (model["worker_count"], model["workers"]) == ((1, ["beside"]) if model["loaded"] else (0, []))
        assert model["bundles"] == ["default"]
    for model in near["models"] + near["data"]:
        for name in BESIDE_MODELS:
            model.pop(name, None)
    assert scrubbed(json.dumps(local).encode()) == scrubbed(json.dumps(near).encode())


def life(server: Server) -> list[tuple[Asked, Answer]]:
    """What a client asks of a file and of responses that the server keeps."""
    found: list[tuple[Asked, Answer]] = []

    def ask(path: str, body: Any = None, method: str = "", headers: Mapping[str, str] | None = None) -> Any:
        asked = Asked(path, body, JSON, headers or {}, method)
        found.append((asked, asked.of(server)))
        return found[-1][1]

    form = part("purpose", "user_data") + part("file", b"a story of the sea", "story.txt") + END
    file = f"/v1/files/{ask('/v1/files', form, headers={'Content-Type': FORM}).json()['id']}"
    ask(file)
    ask(f"{file}/content")
    ask("/v1/files")
    first = ask("/v1/responses", ANSWER | {"metadata": {"of": "a test"}}).json()["id"]
    ask("/v1/responses", ANSWER | {"previous_response_id": first})
    ask(f"/v1/responses/{first}")
    ask(f"/v1/responses/{first}/input_items")
    for path in (f"/v1/responses/{first}", file):
        ask(path, method="DELETE")
        ask(path)
    return found


def test_stored_objects_are_told_with_the_bytes_of_the_local_server(both: Both) -> None:
    life(both.local)  # The worker keeps the beginnings of the prompts.
    for (asked, local), (_, near) in zip(*map(life, both), strict=True):
        assert_same(asked, local, near)


SAID = {
    "ServerLive": pb.ServerLiveRequest(),
    "ServerReady": pb.ServerReadyRequest(),
    "ModelReady": pb.ModelReadyRequest(name="add_sub"),
    "ModelMetadata": pb.ModelMetadataRequest(name="add_sub"),
    "ModelConfig": pb.ModelConfigRequest(name="add_sub"),
    "ModelInfer": text_request("plain", "a text", "job"),
}
REFUSED = {
    "an unknown model": text_request("nope", "a text"),
    "a model that cannot be loaded": text_request("broken", "a text"),
    "a model without its package": text_request("lacking", "a text"),
    "a model of text": text_request(CHAT, "a text"),
    "an input that fails": text_request("plain", "#raise"),
    "an unknown version": pb.ModelInferRequest(model_name="add_sub", model_version="7"),
    "no inputs": pb.ModelInferRequest(model_name="add_sub"),
}


def called(server: Server, method: str, request: Any) -> Any:
    """The bytes of an answer over gRPC, or the status, the words and the names of the trailers of an error."""
    with grpc.insecure_channel(address_of(server), options=UNLIMITED) as channel:
        rpc = channel.unary_unary(SERVICE + method)  # bytes both ways
        try:
            return rpc(request.SerializeToString(), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            trailers = sorted(name for name, _ in error.trailing_metadata() or ())
            return error.code().name, error.details(), trailers


@pytest.mark.parametrize("method", SAID)
def test_a_gateway_answers_rpcs_with_the_bytes_of_the_local_server(both: Both, method: str) -> None:
    local, near = (called(server, method, SAID[method]) for server in both)
    assert isinstance(local, bytes)
    assert local == near


@pytest.mark.parametrize("name", REFUSED)
def test_a_gateway_refuses_rpcs_in_the_words_of_the_local_server(both: Both, name: str) -> None:
    local, near = (called(server, "ModelInfer", REFUSED[name]) for server in both)
    assert isinstance(local, tuple)
    assert local == near
