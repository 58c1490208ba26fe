"""Two keys on one server: no answer, header, count or page of one shows what the other sent.

Each test first shows that a key finds again what the key itself has sent, and then that the other key is answered as
if that had never been sent. What the server keeps of requests, and where the walk through it is:

kept                        found again by                    the walk
embeddings                  equal items                       here, over each protocol that encodes
sequences of programs       correlation id                    here, over both contracts and both transports
plans of equal heads        the bytes of a head               here; test_head_plans.py
recent requests, errors     /ws/status                        here; test_watching_keys.py
names that nobody serves    pages, lists, statistics, sums    here, over each GET of the OpenAPI document
ids of requests             X-Request-ID                      here
rates                       Retry-After                       test_access_rates.py
prompts' blocks             cached_tokens                     tests/process/test_chat_server.py
spaces of prompts, grammars the same prompt, the same grammar test_generation_spaces.py
stored responses            /v1/responses/...                 test_responses_background.py

Administration makes models, adapters, regions of shared memory, log and trace settings for all keys; inputs that end
workers are refused for all keys (ADR 60). Sums by model and key hold nothing of a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest

from ipc.protos import kserve_v2_pb2 as v2
from ipc.protos import trtis_v1_pb2 as v1
from tests.conformance import kserve, trtis
from tests.conformance.conftest import Keyed
from tests.harness.keys import bearer
from tests.harness.rpc import Rpc, address_of, text_request
from tests.harness.server import PATIENCE_S, Answer, sum_of, wait_until
from tests.harness.status import frame_when, watching

MODEL = "/v1/encode/fake/echo"
SECRET = "the tram of key one"
MARK = "two-keys-mark"
FIRST, OTHER = "infer", "neighbour"
COUNTERS = ("penstock_embedding_cache_hits_total", "penstock_embedding_cache_misses_total")
OF_REQUESTS = ("x-request-id", "x-trace-id", "x-sie-request-id", "date")
OWN_FIELDS = ("id", "created", "request_id", "texts")
"""Fields of answers that name the request or repeat its texts."""
SUMS = ("/metrics", "/v2/models/stats", "/stats", "/api/status", "/v1/config")
"""Ends and beginnings of paths whose pages tell sums of the whole server, which move with each request."""


def _post(served: Keyed, key: str, path: str, body: Any, **headers: str) -> Answer:
    sent = {"Content-Type": "application/json", "Accept": "application/json", **headers}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return served.server.request("POST", path, raw, sent | bearer(served.keys[key]))


def _send(served: Keyed, key: str, body: Any, request_id: str, path: str = MODEL) -> Answer:
    return _post(served, key, path, body, **{"X-Request-ID": request_id})


def _metadata(served: Keyed, key: str) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in bearer(served.keys[key]).items())


def _over_grpc(served: Keyed, key: str, request: v2.ModelInferRequest) -> Answer:
    """The answer to a message of KServe, its trailing metadata as headers; also of a refusal."""
    with Rpc(address_of(served.server)) as rpc:
        started = rpc.start("ModelInfer", request, metadata=_metadata(served, key))
        code, body = started.code(), b""
        if code is grpc.StatusCode.OK:
            body = started.result().SerializeToString()
        headers = {name: str(value) for name, value in started.trailing_metadata()}
        return Answer(code.value[0], headers | {"message": started.details()}, body)


# Embeddings


def _packed(served: Keyed, key: str, text: str) -> Answer:
    forms = dict.fromkeys(("Content-Type", "Accept"), "application/msgpack")
    return _post(served, key, MODEL, msgpack.packb({"items": [{"text": text}]}), **forms)


def _kserve_text(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}]}


ENCODING: dict[str, Callable[[Keyed, str, str], Answer]] = {
    "sie": lambda served, key, text: _post(served, key, MODEL, {"items": [{"text": text}]}),
    "sie-msgpack": _packed,
    "openai": lambda served, key, text: _post(
        served, key, "/v1/embeddings", {"model": "fake/echo", "input": text}
    ),
    "tei": lambda served, key, text: _post(served, key, "/embed", {"inputs": text}),
    "cohere": lambda served, key, text: _post(
        served, key, "/v2/embed", {"model": "fake/echo", "texts": [text], "input_type": "search_query"}
    ),
    "vllm": lambda served, key, text: _post(served, key, "/pooling", {"model": "fake/echo", "input": text}),
    "kserve": lambda served, key, text: _post(
        served, key, "/v2/models/fake%2Fecho/infer", _kserve_text(text)
    ),
    "kserve-grpc": lambda served, key, text: _over_grpc(served, key, text_request("fake/echo", text)),
}


def _looks(answer: Answer) -> tuple[Any, ...]:
    """All of an answer but its numbers with a fraction, its times, and what names its request."""
    headers = {
        name: "" if name in OF_REQUESTS or name.endswith("-time") else value
        for name, value in answer.headers.items()
        if name != "content-length"
    }
    body = _plain(answer.json()) if "json" in headers.get("content-type", "") else ""
    return answer.status, headers, body


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "" if name in OWN_FIELDS else _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return "" if isinstance(value, float) else value


@pytest.mark.parametrize("way", ENCODING)
def test_embeddings_are_kept_for_their_key_alone(either_keyed: Keyed, way: str) -> None:
    """The kept text and the one that was never kept are equally long, so all counts of both answers are equal."""
    ask, kept, never = ENCODING[way], f"{SECRET} {way} a", f"{SECRET} {way} b"

    def counts() -> tuple[float, ...]:
        scraped = either_keyed.server.get("/metrics").body.decode()
        return tuple(sum_of(scraped, name) for name in COUNTERS)

    hits, misses = counts()
    theirs = [ask(either_keyed, FIRST, kept) for _ in range(3)]
    assert theirs[0].status in (200, grpc.StatusCode.OK.value[0]), theirs[0].body
    wait_until(lambda: counts() == (hits + 2, misses + 1), what="the key finds what the key itself has sent")
    answers = [ask(either_keyed, OTHER, text) for text in (kept, never)]
    wait_until(lambda: counts()[1] == misses + 3, what="the other key's embeddings computed")
    assert _looks(answers[0]) == _looks(answers[1])
    for each, known in ((answers[0], 0), (theirs[0], 0), (theirs[-1], 1)):
        assert each.headers.get("x-penstock-cache-hits", str(known)) == str(known)
    assert ask(either_keyed, OTHER, kept).status == answers[0].status
    wait_until(lambda: counts() == (hits + 3, misses + 3), what="the other key finds its own")


# Sequences


def _by_http(served: Keyed, key: str, name: int, number: int, start: bool) -> int | str:
    step = {"sequence_id": name, "sequence_start": start}
    given = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    answer = _post(served, key, "/v2/models/accumulator/infer", {"inputs": [given], "parameters": step})
    return int(answer.json()["outputs"][0]["data"][0]) if answer.status == 200 else answer.json()["error"]


def _by_grpc(served: Keyed, key: str, name: int, number: int, start: bool) -> int | str:
    made = v2.ModelInferRequest(model_name="accumulator", raw_input_contents=[np.int32(number).tobytes()])
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    made.parameters["sequence_id"].int64_param = name
    made.parameters["sequence_start"].bool_param = start
    answer = _over_grpc(served, key, made)
    if answer.status:
        return answer.headers["message"]
    return int(
        np.frombuffer(v2.ModelInferResponse.FromString(answer.body).raw_output_contents[0], np.int32)[0]
    )


def _by_trtis(served: Keyed, key: str, name: int, number: int, start: bool) -> int | str:
    header = (
        f'batch_size: 1 correlation_id: {name} flags: {int(start)} input {{ name: "INPUT" dims: 1 }} '
        'output { name: "OUTPUT" }'
    )
    data = np.int32(number).tobytes()
    found = trtis.infer(served.server, "accumulator", header, data, **bearer(served.keys[key]))
    return int(found.array("OUTPUT", "<i4")[0, 0]) if found.answer.status == 200 else found.status.msg


def _by_trtis_grpc(served: Keyed, key: str, name: int, number: int, start: bool) -> int | str:
    made = v1.InferRequest(model_name="accumulator", model_version=-1, raw_input=[np.int32(number).tobytes()])
    made.meta_data.batch_size, made.meta_data.correlation_id, made.meta_data.flags = 1, name, int(start)
    made.meta_data.input.add(name="INPUT", dims=[1])
    made.meta_data.output.add(name="OUTPUT")
    with Rpc(address_of(served.server)) as rpc:
        path = "/nvidia.inferenceserver.GRPCService/Infer"
        call = rpc.channel.unary_unary(path, v1.InferRequest.SerializeToString, v1.InferResponse.FromString)
        found = call(made, timeout=PATIENCE_S, metadata=_metadata(served, key))
    good = found.request_status.code == v1.SUCCESS
    return int(np.frombuffer(found.raw_output[0], "<i4")[0]) if good else found.request_status.msg


WAYS = {"http": _by_http, "grpc": _by_grpc, "trtis": _by_trtis, "trtis-grpc": _by_trtis_grpc}


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_goes_on_for_its_key_alone(either_keyed: Keyed, way: str) -> None:
    name, never = (10 * list(WAYS).index(way) + digit for digit in (1, 2))
    assert WAYS[way](either_keyed, FIRST, name, 5, True) == 5
    assert [ask(either_keyed, FIRST, name, 1, False) for ask in WAYS.values()] == [6, 7, 8, 9]
    for ask in WAYS.values():
        told, unknown = (ask(either_keyed, OTHER, each, 1, False) for each in (name, never))
        assert f"{told}".replace(f"sequence {name}", f"sequence {never}") == unknown
        assert "START" in f"{unknown}"
    assert WAYS[way](either_keyed, OTHER, name, 100, True) == 100
    assert [WAYS[way](either_keyed, key, name, 1, False) for key in (FIRST, OTHER)] == [10, 101]


# Plans of heads


def _element(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_equal_heads_of_two_keys_get_answers_of_their_own(either_keyed: Keyed, transport: str) -> None:
    def ask(key: str, text: str) -> bytes:
        if transport == "grpc":
            made = v2.ModelInferRequest(model_name="identity_bytes", id=MARK)
            made.inputs.add(name="INPUT", datatype="BYTES", shape=[1, 1])
            made.raw_input_contents.append(_element(text))
            answer = _over_grpc(either_keyed, key, made)
            assert answer.status == 0, answer.headers
            return v2.ModelInferResponse.FromString(answer.body).raw_output_contents[0]
        size = {"binary_data_size": len(_element(text))}
        tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "BYTES", "parameters": size}
        wanted = {"name": "OUTPUT", "parameters": {"binary_data": True}}
        head = json.dumps({"id": MARK, "inputs": [tensor], "outputs": [wanted]}).encode()
        path, length = "/v2/models/identity_bytes/infer", {kserve.LENGTH: str(len(head))}
        answer = _post(either_keyed, key, path, head + _element(text), **length)
        assert answer.status == 200, answer.body
        return answer.body[int(answer.headers[kserve.LENGTH.lower()]) :]

    asked = [(FIRST, "one"), (FIRST, "two"), (OTHER, "six"), (FIRST, "ten"), (OTHER, "one")]
    assert [ask(*each) for each in asked] == [_element(text) for _, text in asked]


# Recent requests, pages, ids


def _ids(frame: dict[str, Any]) -> set[str]:
    return {each["request_id"] for name in ("recent_requests", "recent_errors") for each in frame[name]}


def _seen_by(served: Keyed, key: str, until: set[str]) -> dict[str, Any]:
    """The first frame for a key that has these requests."""
    with watching(served.server, additional_headers=bearer(served.keys[key])) as viewer:
        return frame_when(viewer, lambda frame: until <= _ids(frame))


def test_recent_requests_are_those_of_the_watching_key(either_keyed: Keyed) -> None:
    first, second = {"two-keys-one", "two-keys-one-failed"}, {"two-keys-two", "two-keys-two-failed"}
    for key, (good, failed) in ((FIRST, sorted(first)), (OTHER, sorted(second))):
        assert _send(either_keyed, key, {"items": [{"text": SECRET}]}, good).status == 200
        assert _send(either_keyed, key, {"items": [{"text": 1}]}, failed).status == 400
    seen = _seen_by(either_keyed, "both", first | second)
    assert first | second <= _ids(seen), "the operator sees all"
    for key, own, others in ((FIRST, first, second), (OTHER, second, first)):
        text = json.dumps(_seen_by(either_keyed, key, own))
        assert not any(f'"{other}"' in text for other in others)
        assert SECRET not in text


def _pages(served: Keyed) -> list[str]:
    """All GET routes of the server, with a name for each parameter of a path."""
    paths = served.server.get("/openapi.json").json()["paths"]
    named = {"{version}": "1", "{response_id}": f"resp_{MARK}", "{name}": "status.js"}
    found = []
    for path, operations in paths.items():
        if "get" in operations and "/ws/" not in path:
            for name, value in named.items():
                path = path.replace(name, value)
            found += [path.replace("{model}", model) for model in ("fake/echo", "accumulator", f"{MARK}/x")]
    return list(dict.fromkeys(found))


def _ask_with_marks(served: Keyed, key: str) -> None:
    """Requests whose every part that a server could keep has the mark; most are refused."""
    name, text = f"{MARK}/x", f"{MARK} {SECRET}"
    items = {"items": [{"id": MARK, "text": text, "metadata": {MARK: MARK}}]}
    sent: list[tuple[str, Any]] = [
        (MODEL, items),
        (MODEL, {**items, "params": {"options": {MARK: MARK, "lora": MARK}}}),
        (f"/v1/encode/{name}", items),
        ("/v1/embeddings", {"model": name, "input": text}),
        ("/v1/embeddings", {"model": "fake/echo", "input": text, "user": MARK}),
        ("/v1/rerank", {"model": name, "query": text, "documents": [text]}),
        ("/v1/score/fake/echo", {"query": {"text": text}, **items}),
        ("/v1/extract/fake/echo", {**items, "params": {"labels": [MARK]}}),
        ("/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"model": name, "input": text, "metadata": {MARK: MARK}}),
        ("/embed", {"inputs": text}),
        ("/v2/embed", {"model": name, "texts": [text], "input_type": "search_query"}),
        (f"/v2/models/{MARK}/infer", _kserve_text(text)),
        ("/v2/models/accumulator/infer", {**_kserve_text(text), "id": MARK, "parameters": {MARK: MARK}}),
        (f"/v2/models/accumulator/versions/{MARK}/infer", _kserve_text(text)),
        (f"/api/infer/{MARK}", text),
        (f"/{MARK}/{MARK}", items),
    ]
    for path, body in sent:
        answer = _send(served, key, body, MARK, path)
        assert answer.status < 500, (path, answer.body)


def test_no_page_shows_what_another_key_sent(either_keyed: Keyed) -> None:
    """Pages without sums are the same, byte for byte, before and after another key's requests."""

    def views() -> dict[str, Answer]:
        headers = bearer(either_keyed.keys[OTHER])
        return {
            path: either_keyed.server.request("GET", path, None, headers) for path in _pages(either_keyed)
        }

    before = views()
    assert len(before) > 40 and len([each for each in before.values() if each.status == 200]) > 20
    _ask_with_marks(either_keyed, FIRST)
    assert MARK in json.dumps(_seen_by(either_keyed, FIRST, {MARK})), "the key itself sees its requests"
    after = views()
    public_id = either_keyed.keys[FIRST].split("_")[1]
    for path, answer in after.items():
        told = f"{dict(answer.headers)} {answer.body.decode(errors='replace')}"
        asked = MARK in path
        for mark in (SECRET, public_id, *([] if asked else [MARK])):
            assert mark not in told, path
        if not path.startswith(SUMS) and not path.endswith(SUMS):
            assert _exactly(answer) == _exactly(before[path]), path


def _exactly(answer: Answer) -> tuple[Any, ...]:
    """All of an answer but what names its request or tells its time."""
    own = [answer.headers.get(name, "") for name in OF_REQUESTS[:2]]
    body = answer.body.decode(errors="replace")
    for value in filter(None, own):
        body = body.replace(value, "")
    return answer.status, set(answer.headers), body


def test_an_id_of_a_request_may_be_used_again_by_another_key(either_keyed: Keyed) -> None:
    body = {"items": [{"text": "a"}]}
    answers = [_send(either_keyed, key, body, "two-keys-same") for key in (FIRST, OTHER)]
    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.headers["x-request-id"] for answer in answers] == ["two-keys-same"] * 2
