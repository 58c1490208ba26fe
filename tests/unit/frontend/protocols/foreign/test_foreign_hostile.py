"""Hostile requests to every route of other servers: the error has the form of that server, and nothing is a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from ipc import errors
from tests.fakes.vector_server import CLASSIFIER, DENSE, SCORE, VectorServer

PAIR = {"source_sentence": "a", "sentences": ["b"]}
CUT = {"truncate": True, "truncation_direction": "left"}
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "tei": {
        "/embed": {"inputs": ["a"], "prompt_name": "query", "normalize": True, "dimensions": 2, **CUT},
        "/embed_all": {"inputs": "a"},
        "/embed_sparse": {"inputs": "a"},
        "/similarity": {"inputs": PAIR, "parameters": CUT},
        "/rerank": {"query": "q", "texts": ["1"], "raw_scores": True, "return_text": True},
        "/predict": {"inputs": [["a", "b"]], "raw_scores": True},
        "/tokenize": {"inputs": ["a"], "add_special_tokens": True},
        "/decode": {"ids": [[97]], "skip_special_tokens": True},
        "/invocations": {"inputs": ["a"]},
    },
    "vllm": {
        "/pooling": {
            "model": DENSE,
            "input": ["a"],
            "task": "embed",
            "encoding_format": "float",
            "dimensions": 2,
            "truncate_prompt_tokens": -1,
        },
        "/score": {"model": SCORE, "text_1": ["q"], "text_2": ["1"], "use_activation": True},
        "/v1/score": {"model": SCORE, "queries": ["q"], "documents": ["1"]},
        "/rerank": {"model": SCORE, "query": "q", "documents": ["1"], "top_n": 1},
        "/classify": {"model": CLASSIFIER, "input": ["a"], "activation": True},
        "/tokenize": {"model": DENSE, "prompt": "a", "messages": None, "return_token_strs": True},
        "/detokenize": {"model": DENSE, "tokens": [97]},
    },
    "infinity": {
        "/embeddings": {
            "model": DENSE,
            "input": ["a"],
            "modality": "text",
            "encoding_format": "base64",
            "dimensions": 2,
        },
        "/rerank": {"model": SCORE, "query": "q", "documents": ["1"], "return_documents": True, "top_n": 1},
        "/classify": {"model": CLASSIFIER, "input": ["a"], "raw_scores": True},
    },
    "cohere": {
        "/v1/embed": {"model": DENSE, "texts": ["a"], "images": None, "truncate": "END"},
        "/v2/embed": {
            "model": DENSE,
            "texts": ["a"],
            "input_type": "search_query",
            "embedding_types": ["float", "int8"],
            "inputs": None,
            "max_tokens": None,
            "output_dimension": 2,
        },
        "/v2/rerank": {"model": SCORE, "query": "q", "documents": ["1"], "top_n": 1, "rank_fields": None},
    },
}
UNSERVED = ("/embed_all", "/embed_sparse")
"""No model of the fake server has these outputs."""
WRONG: tuple[Any, ...] = (
    0,
    -1,
    1.5,
    2**63,
    True,
    "\0" * 2000,
    [],
    {},
    [[]],
    [None],
    ["a", 1],
    [{"image": "data:image/png;base64,AAAA"}],
    [{"image": "https://images.example/a.png"}],
    {"a": {"b": [1]}},
)
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"a": "\\ud800"}',
    b'{"a": NaN}',
    b"[" * 20_000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
)
NAMES = (
    "org/nobody",
    "org/" + "x" * 5000,
    SCORE,
    DENSE,
    CLASSIFIER,
    f"{DENSE}:nope",
    "../../etc",
    "\0",
    "a\nb",
)


@pytest.fixture(scope="module", params=BODIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, VectorServer]:
    """A server in the form of another one, and the name of that one."""
    name: str = request.param
    models = f"{DENSE},{SCORE},{CLASSIFIER}"
    settings = {"server__default_models": models, "server__compatible": "" if name == "cohere" else name}
    return name, VectorServer(tmp_path_factory.mktemp(name), **settings)


def check(name: str, path: str, found: Any) -> None:
    """An answer, or an error in the form of the server; its message is short and tells no place of this machine."""
    status, body = found.status_code, found.json
    if status == 200:
        return
    assert status < 500 or status == 501
    check_form(name, path, status, body)
    text = body.get("message") or body["error"]
    text = text["message"] if isinstance(text, dict) else text
    assert 0 < len(text) < 1000 and "/frontend/" not in text and "Traceback" not in text


def check_form(name: str, path: str, status: int, body: Any) -> None:
    """The body of an error has the form of the server."""
    if path == "/v1/score":
        assert set(body) == {"error", "detail", "message"}
    elif name == "tei":
        assert set(body) == {"error", "error_type"}
        assert body["error_type"] in ("Backend", "Overloaded", "Unhealthy", "Validation")
    elif name == "cohere":
        assert set(body) == {"message"}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == status


def wrong_bodies(body: dict[str, Any]) -> Iterator[bytes]:
    """A body with each field wrong or missing, with other models, and bytes that are no such body."""
    for field in body:
        yield orjson.dumps({name: value for name, value in body.items() if name != field})
        yield from (orjson.dumps({**body, field: wrong}) for wrong in WRONG)
    yield from (orjson.dumps({**body, "model": name}) for name in NAMES)
    yield from RAW
    yield orjson.dumps(body)[:-1] + b', "model": "a", "model": "b"}'


def test_wrong_requests_get_errors_in_the_form_of_the_server(served: tuple[str, VectorServer]) -> None:
    name, server = served
    for path, body in BODIES[name].items():
        plain = server.post(path, body)
        assert plain.status_code == (424 if path in UNSERVED else 200), plain.text
        refused = 0
        for wrong in wrong_bodies(body):
            found = server.post(path, wrong)
            check(name, path, found)
            refused += found.status_code != 200
        assert refused > 10
    assert all(lease.releases == 1 for lease in server.engine.leases)


SIE_BODIES: dict[str, dict[str, Any]] = {
    f"/v1/encode/{DENSE}": {"items": [{"text": "a"}, {"text": "b"}]},
    f"/v1/score/{SCORE}": {"query": {"text": "q"}, "items": [{"id": "1", "text": "a"}]},
    f"/v1/extract/{CLASSIFIER}": {"items": [{"text": "a"}], "params": {"labels": ["b"]}},
    "/v1/embeddings": {"model": DENSE, "input": ["a", "b"]},
    "/v1/rerank": {"model": SCORE, "query": "q", "documents": ["1", {"text": "2"}]},
    "/v1/chat/completions": {"model": DENSE, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"model": DENSE, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"model": DENSE, "input": "a"},
}


def half_texts(body: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, kind, body) for each text of a body with half of a character in it, and with a byte that is not UTF-8."""
    if isinstance(body, str):
        yield path.lstrip("."), "\\ud83d is half of a character", f"{body}\ud83d \N{TIGER}"
        yield path.lstrip("."), "byte 0xff of the body is not UTF-8", f"\udcff{body}"
    elif isinstance(body, list):
        for at, entry in enumerate(body):
            for inner, kind, changed in half_texts(entry, f"{path}[{at}]"):
                yield inner, kind, [*body[:at], changed, *body[at + 1 :]]
    elif isinstance(body, dict):
        for name, entry in body.items():
            for inner, kind, changed in half_texts(entry, f"{path}.{name}"):
                yield inner, kind, {**body, name: changed}


def test_half_of_a_character_is_refused_by_field_and_index(served: tuple[str, VectorServer]) -> None:
    name, server = served
    found = 0
    for path, body in (BODIES[name] | (SIE_BODIES if name == "cohere" else {})).items():
        for place, kind, changed in half_texts(body):
            written = json.dumps(changed, ensure_ascii="byte" not in kind)
            answer = server.post(path, written.encode(errors="surrogateescape"))
            assert answer.status_code in (400, 422), (path, answer.text)
            assert f"{place}: {kind}" in answer.text.replace("\\\\", "\\"), (path, answer.text)
            found += 1
    assert found > 10


def stray_bytes(written: bytes) -> Iterator[bytes]:
    """A body in JSON with a byte that is not UTF-8 outside of its fields: in a name, in a value, and inside."""
    for more in (b'"\xffx": 1', b'"unknown": "\xff"', b'"unknown": {"\xff": [1]}', b'"unknown": [["\xff"]]'):
        yield written[:-1] + b", " + more + b"}"


def test_a_byte_that_is_not_utf_8_is_refused_also_where_no_field_is(served: tuple[str, VectorServer]) -> None:
    name, server = served
    for path, body in (BODIES[name] | (SIE_BODIES if name == "cohere" else {})).items():
        for changed in stray_bytes(orjson.dumps(body)):
            answer = server.post(path, changed)
            assert answer.status_code in (400, 422), (path, answer.text)
            assert "0xff" in answer.text or "unknown" in answer.text, (path, answer.text)


BUSY = (
    errors.QueueFull,
    errors.Draining,
    errors.NoReplica,
    errors.DeadlineExceeded,
    errors.ResourceExhausted,
    errors.ShmExhausted,
    errors.LeaseRevoked,
    errors.ModelNotLoaded,
    errors.ModelLoading,
    errors.RateLimited,
)
"""What passes with time."""
LASTING = (
    errors.WorkerCrashed,
    errors.ModelLoadFailed,
    errors.DependencyConflict,
    errors.InferenceFailed,
    errors.UnexpectedOutput,
    errors.Unsupported,
)


def test_failures_have_the_form_of_the_server_and_say_when_to_come_again(
    served: tuple[str, VectorServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, server = served
    for path, body in BODIES[name].items():
        if path in UNSERVED:
            continue
        for kind in (*BUSY, *LASTING):

            async def fail(*_: Any, kind: Any = kind) -> Any:
                raise kind("it failed")

            monkeypatch.setattr(server.engine, "run", fail)
            found = server.post(path, body)
            assert found.status_code >= 409, kind
            check_form(name, path, found.status_code, found.json)
            assert ("retry-after" in found.headers) == (kind in BUSY), (path, kind)
            if kind in BUSY:
                assert found.status_code in (429, 503, 504) and int(found.headers["retry-after"]) > 0
