"""The header table of the contract, on every operation of the schema: success and each error that it can give."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from frontend.protocols.registry import protocols
from tests.conformance.wire import JSON, MSGPACK
from tests.fakes.kinds import write_kinds
from tests.harness.cluster import is_gateway, ways_to
from tests.harness.server import Answer, Server, serving, wait_until

DESCRIBED = [route for route in protocols().routes if route.summary]
TIMES = ("x-total-time", "x-queue-time", "x-tokenization-time", "x-inference-time")
POSTPROCESSING = "x-postprocessing-time"
ITEMS = [{"text": "a"}, {"text": "b 2"}]
ENCODE = {"items": ITEMS}
SCORE = {"query": {"text": "q"}, "items": ITEMS}
RERANK = {"model": "ranker", "query": "q", "documents": ["a", "b 2"]}
EMBED = {"model": "plain", "input": ["a", "b"]}
OTHERS = {
    "/v1/embed": {"model": "plain", "texts": ["a"], "input_type": "search_document"},
    "/v2/embed": {
        "model": "plain",
        "texts": ["a"],
        "input_type": "search_query",
        "embedding_types": ["float"],
    },
    "/v2/rerank": RERANK,
    "/v1/score": {"model": "ranker", "text_1": "q", "text_2": ["a"]},
}


@dataclass(frozen=True)
class Case:
    """One request: `code` is that of its error, `retry_after` whether Retry-After must be there."""

    path: str
    status: int = 200
    body: Any = None
    code: str = ""
    retry_after: bool = False
    timed: bool = False
    method: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Id of the test."""
        return f"{self.path} {self.status} {self.code or '-'} {self.headers.get('Accept', '')}".strip()


def _good(path: str, body: Any, both: bool = True) -> list[Case]:
    """A successful inference, in both encodings where the route has them."""
    accepted = (JSON.media_type, MSGPACK.media_type) if both else (JSON.media_type,)
    return [Case(path, body=body, timed=True, headers={"Accept": media}) for media in accepted]


def _faults(path: str, body: dict[str, Any], renamed: Any) -> list[Case]:
    """What every inference route can answer; `renamed(model)` is the (path, body) for another model."""
    return [
        Case(path, 400, {}, "INVALID_INPUT"),
        Case(path, 400, body, "INVALID_INPUT", headers={"X-Request-Timeout": "soon"}),
        Case(path, 504, body, "DEADLINE_EXCEEDED", True, headers={"X-Request-Timeout": "1e-9"}),
        Case(path, 413, {"items": "x" * 70000}, "INPUT_TOO_LONG"),
        Case(renamed("none")[0], 404, renamed("none")[1], "MODEL_NOT_FOUND"),
        Case(renamed("lacking")[0], 409, renamed("lacking")[1], "DEPENDENCY_CONFLICT"),
        Case(renamed("broken")[0], 502, renamed("broken")[1], "MODEL_LOAD_FAILED"),
        Case(path, 405, method="DELETE"),
    ]


CASES = [
    *_good("/v1/encode/plain", ENCODE),
    *_faults("/v1/encode/plain", ENCODE, lambda model: (f"/v1/encode/{model}", ENCODE)),
    Case("/v1/encode/plain", 500, {"items": [{"text": "#raise"}]}, "INFERENCE_ERROR"),
    Case("/v1/encode/small", 503, {"items": [{"text": "a" * 1000}]}, "RESOURCE_EXHAUSTED", True),
    Case("/v1/encode/ranker", 400, ENCODE, "INVALID_INPUT"),
    *_good("/v1/score/ranker", SCORE),
    Case("/v1/score/ranker", 400, {}, "INVALID_INPUT"),
    Case("/v1/score/plain", 400, SCORE, "INVALID_INPUT"),
    Case("/v1/score/none", 404, SCORE, "MODEL_NOT_FOUND"),
    Case("/v1/score/ranker", 500, {**SCORE, "items": [{"text": "#raise"}]}, "INFERENCE_ERROR"),
    *_good("/v1/extract/finder", {"items": ITEMS, "params": {"labels": ["x"]}}),
    Case("/v1/extract/finder", 400, {}, "INVALID_INPUT"),
    Case("/v1/extract/finder", 500, {"items": [{"text": "#raise"}]}, "INFERENCE_ERROR"),
    Case("/v1/extract/plain", 400, ENCODE, "INVALID_INPUT"),
    Case("/v1/extract/none", 404, ENCODE, "MODEL_NOT_FOUND"),
    *_good("/v1/embeddings", EMBED, both=False),
    *_faults("/v1/embeddings", EMBED, lambda model: ("/v1/embeddings", {**EMBED, "model": model})),
    *_good("/v1/rerank", RERANK, both=False),
    *(case for path, body in OTHERS.items() for case in _good(path, body, both=False)),
    *(Case(path, 400, {}, "INVALID_INPUT") for path in OTHERS),
    Case("/v1/rerank", 400, {}, "INVALID_INPUT"),
    Case("/v1/rerank", 404, {**RERANK, "model": "none"}, "MODEL_NOT_FOUND"),
    Case("/v1/admin/load/plain", body={}),
    Case("/v1/admin/load/plain", 400, {"wait": 1}, "INVALID_INPUT"),
    Case("/v1/admin/load/none", 404, {}, "MODEL_NOT_FOUND"),
    Case("/v1/admin/load/broken", 502, {}, "MODEL_LOAD_FAILED"),
    Case("/v1/admin/unload/small", body={}),
    Case("/v1/admin/unload/none", 404, {}, "MODEL_NOT_FOUND"),
    Case("/v1/models"),
    Case("/v1/models/plain"),
    Case("/v1/models/none", 404, code="MODEL_NOT_FOUND"),
    Case("/"),
    Case("/", headers={"Accept": "text/html"}),
    *(
        Case(path)
        for path in (
            "/healthz",
            "/livez",
            "/readyz",
            "/ping",
            "/health",
            "/metrics",
            "/openapi.json",
            "/api-doc/openapi.json",
            "/docs",
            "/redoc",
        )
    ),
    Case("/readyz?model=none", 404, code="MODEL_NOT_FOUND"),
    Case("/readyz?model=broken", 503),
    Case("/nope", 404),
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model of every kind that the cases need."""
    place = tmp_path_factory.mktemp("headers")
    names = write_kinds(place / "catalog")
    settings = {"limits.max_body_bytes": 65536, "log.format": "json"}
    with serving(place, names, settings, catalog=place / "catalog") as running:
        yield running


server = ways_to("local")


def ask(server: Server, case: Case, headers: Mapping[str, str]) -> Answer:
    """The answer to a case."""
    method = case.method or ("GET" if case.body is None else "POST")
    body = None if case.body is None else JSON.dump(case.body)
    return server.request(method, case.path, body, {**headers, **case.headers})


def expected(server: Server, case: Case) -> tuple[int, str]:
    """Status and error code of the answer; a gateway loads and unloads no model, as models run elsewhere."""
    is_load = case.path.startswith("/v1/admin/") and case.status not in (400, 404)
    return (501, "UNSUPPORTED") if is_load and is_gateway(server) else (case.status, case.code)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_answer_has_the_headers_of_the_table_and_no_others_of_them(server: Server, case: Case) -> None:
    trace_id = secrets.token_hex(16)
    sent = {"X-Request-ID": "job-1", "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    status, code = expected(server, case)
    for headers in ({}, sent):
        answer = ask(server, case, headers)
        assert answer.status == status, answer.body[:300]
        found = answer.headers
        assert found["x-sie-server-version"] == "0.3.4"
        assert re.fullmatch(trace_id if headers else "[0-9a-f]{32}", found["x-trace-id"])
        assert re.fullmatch("job-1" if headers else "req_[0-9a-f]{32}", found["x-request-id"])
        assert found.get("x-sie-error-code", "") == code
        assert ("retry-after" in found) == case.retry_after
        if case.retry_after:
            assert re.fullmatch("[1-9][0-9]*", found["retry-after"])
        _check_times(found, case.timed)
        if code:
            body = answer.json()
            assert body["message"] if "detail" not in body else body["detail"]["code"] == code
            assert found["content-type"].startswith("application/json")


def _check_times(found: Mapping[str, str], timed: bool) -> None:
    """All four times, or none; the fifth only when there was something."""
    present = {name: found[name] for name in (*TIMES, POSTPROCESSING) if name in found}
    if not timed:
        assert present == {}
        return
    assert set(TIMES) <= set(present)
    assert all(re.fullmatch(r"\d+\.\d\d", value) for value in present.values()), present
    assert float(present["x-total-time"]) >= float(present["x-inference-time"])


def test_every_operation_of_the_contract_is_in_the_table() -> None:
    asked = {
        (case.method or ("GET" if case.body is None else "POST"), case.path.partition("?")[0])
        for case in CASES
    }
    for operation in DESCRIBED:
        if not operation.error_code_header:
            continue
        pattern = re.escape(operation.shown).replace(r"\{model\}", ".+")
        assert any(
            method == operation.method.upper() and re.fullmatch(pattern, path) for method, path in asked
        ), operation.shown


def test_what_the_table_sees_is_in_the_schema() -> None:
    by_path = {(one.method.upper(), one.shown): one for one in DESCRIBED}
    for case in CASES:
        method, path = case.method or ("GET" if case.body is None else "POST"), case.path.partition("?")[0]
        for (known, template), operation in by_path.items():
            if known == method and re.fullmatch(re.escape(template).replace(r"\{model\}", ".+"), path):
                assert case.status in (200, *operation.errors), (path, case.status)
                assert not case.timed or operation.timed


def test_log_lines_are_json_and_name_the_request(local: Server) -> None:
    body = {"items": [{"text": "#raise secret-text"}]}
    assert local.post("/v1/encode/plain", body, X_Request_ID="job-9").status == 500
    wait_until(lambda: local.log.count("job-9") >= 2, what="a line of the frontend and one of the worker")
    *whole, _ = local.log.split("\n")
    ours = [json.loads(line) for line in whole if line.startswith("{")]
    sources = {line["source"] for line in ours}
    assert {"supervisor", "worker-0", "frontend-0"} <= sources
    for line in ours:
        assert set(line) >= {"time", "level", "source", "message"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("debug", "info", "warning", "error", "critical")
    mine = [line for line in ours if line.get("request_id") == "job-9"]
    assert [line["level"] for line in mine] == ["warning"] and "INFERENCE_ERROR" in mine[0]["message"]
    [failed] = [line for line in ours if "exception" in line and "job-9" in line["message"]]
    assert failed["source"] == "worker-0"
    assert not any("secret-text" in json.dumps(line) for line in ours), "the payload is never logged"
