"""What surrounds inference in the SIE contract: models, error table, headers, probes, and routes that are not there."""

from __future__ import annotations

import re
import secrets
from operator import ge
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.models import ENTRIES, LONGEST
from tests.conformance.wire import JSON, MSGPACK, assert_refused, assert_refused_openai
from tests.harness.cluster import ways_to
from tests.harness.lifecycle import Models
from tests.harness.server import Answer, Server, make_server, sum_of, wait_until

PATH = "/v1/encode/org/odd"
PHASES = ("x-total-time", "x-queue-time", "x-tokenization-time", "x-inference-time")
INFO_FIELDS = {
    "name", "inputs", "outputs", "dims", "loaded", "state", "last_error", "max_sequence_length", "profiles",
}  # fmt: skip
LISTED_FIELDS = {
    "id", "object", "created", "owned_by", "type", "display_name", "created_at", "lifecycle", "max_input_tokens",
    "root", "parent", "status",
}  # fmt: skip


server = ways_to("sie")


def info_of(server: Server, model: str) -> dict[str, Any]:
    """One ModelInfo."""
    answer = server.get(f"/v1/models/{model}")
    assert answer.status == 200
    found: dict[str, Any] = answer.json()
    return found


def test_the_models_list_has_every_model_and_every_profile(sie: Server) -> None:
    answer = sie.request("GET", "/v1/models", headers={"Accept": "application/msgpack"})
    assert answer.headers["content-type"].startswith("application/json"), "Accept is ignored here"
    body = answer.json()
    assert (
        set(body) == {"object", "data", "models", "has_more", "first_id", "last_id"}
        and body["object"] == "list"
    )
    variants = {
        f"{entry['id']}:{name}"
        for entry in ENTRIES
        for name in entry.get("profiles", {})
        if name != "default"
    }
    assert "org/profiled:heir" in variants
    assert {info["name"] for info in body["models"]} == {entry["id"] for entry in ENTRIES} | variants
    assert [entry["id"] for entry in body["data"]] == [info["name"] for info in body["models"]]
    assert all(set(info) == INFO_FIELDS for info in body["models"])
    assert all(set(entry) == LISTED_FIELDS and entry["object"] == "model" for entry in body["data"])


@pytest.mark.parametrize("path", ["org/odd", "org%2Fodd", "plain", "org/profiled:byte"])
def test_a_model_can_be_asked_for_by_name(sie: Server, path: str) -> None:
    info = info_of(sie, path)
    assert set(info) == INFO_FIELDS | LISTED_FIELDS
    assert info["name"] == info["id"] == path.replace("%2F", "/")


def test_model_info_of_a_loaded_model(server: Server) -> None:
    info = info_of(server, "org/odd")
    assert {name: info[name] for name in INFO_FIELDS} == {
        "name": "org/odd",
        "inputs": ["text"],
        "outputs": ["dense"],
        "dims": {"dense": 13},
        "loaded": True,
        "state": "loaded",
        "last_error": None,
        "max_sequence_length": LONGEST,
        "profiles": {
            "default": {
                "is_default": True,
                "output_types": ["dense"],
                "output_similarity": {"dense": "cosine"},
            }
        },
    }


def test_model_info_lists_profiles_and_similarity(server: Server) -> None:
    profiles = info_of(server, "org/profiled")["profiles"]
    assert set(profiles) == {"default", "byte", "wide", "heir"}
    assert [name for name, profile in profiles.items() if profile["is_default"]] == ["default"]
    assert all(profile["output_similarity"] == {"dense": "dot"} for profile in profiles.values())
    assert set(info_of(server, "org/profiled:byte")["profiles"]) == {"default"}


@pytest.mark.parametrize(("model", "error_class"), [("org/broken", "UNKNOWN"), ("org/lacking", "DEPENDENCY")])
def test_model_info_of_a_model_that_could_not_be_loaded(server: Server, model: str, error_class: str) -> None:
    info = info_of(server, model)
    assert info["loaded"] is False and info["state"] == "failed"
    assert set(info["last_error"]) == {"code", "message", "attempts", "permanent"}
    assert info["last_error"]["permanent"] is True and info["last_error"]["attempts"] == 1
    assert info["last_error"]["message"]


def test_an_unknown_model_is_not_found_and_the_nearest_name_is_given(server: Server) -> None:
    message = assert_refused(server.get("/v1/models/org/od"), 404, "MODEL_NOT_FOUND", "org/odd")
    assert message == assert_refused(server.encode("org/od", ["a"]), 404, "MODEL_NOT_FOUND")


def test_a_bad_body_wins_over_an_unknown_model_and_a_failed_load_over_bad_params(server: Server) -> None:
    assert_refused(server.post("/v1/encode/unknown", {}), 400, "INVALID_INPUT", "items")
    assert_refused(server.encode("org/broken", ["a"], output_dtype="nope"), 502, "MODEL_LOAD_FAILED")


ERRORS = {
    "INVALID_INPUT": ("org/odd", {}, 400, None),
    "INPUT_TOO_LONG": (
        "org/odd",
        {"items": [{"text": "a" * 9999}], "params": {"options": {"overflow_policy": "error"}}},
        400,
        None,
    ),
    "MODEL_NOT_FOUND": ("org/none", {"items": [{"text": "a"}]}, 404, None),
    "DEPENDENCY_CONFLICT": ("org/lacking", {"items": [{"text": "a"}]}, 409, None),
    "MODEL_LOAD_FAILED": ("org/broken", {"items": [{"text": "a"}]}, 502, None),
    "RESOURCE_EXHAUSTED": ("org/small", {"items": [{"text": "a" * 1000}]}, 503, "5"),
    "INFERENCE_ERROR": ("org/odd", {"items": [{"text": "#raise"}, {"text": "#nan"}]}, 500, None),
}


@pytest.mark.parametrize("code", ERRORS)
def test_the_error_table_of_encode(sie: Server, code: str) -> None:
    model, body, status, retry_after = ERRORS[code]
    for form in (JSON, MSGPACK):
        answer = form.post(sie, f"/v1/encode/{model}", body)
        message = assert_refused(answer, status, code)
        assert "fake" not in message.lower() or code == "MODEL_LOAD_FAILED", (
            "the exception's text stays inside"
        )
        assert answer.headers.get("retry-after") == retry_after
        assert answer.headers["x-sie-error-code"] == code


EMBEDDING_ERRORS = {
    "model_not_found": ("org/none", "a", 404, "MODEL_NOT_FOUND"),
    "invalid_input": ("org/odd", [], 400, "INVALID_INPUT"),
    "model_not_available": ("org/broken", "a", 502, "MODEL_LOAD_FAILED"),
    "inference_error": ("org/odd", "#raise", 500, "INFERENCE_ERROR"),
}


@pytest.mark.parametrize("kind", EMBEDDING_ERRORS)
def test_the_error_table_of_embeddings(server: Server, kind: str) -> None:
    model, given, status, code = EMBEDDING_ERRORS[kind]
    answer = server.post("/v1/embeddings", {"model": model, "input": given})
    assert_refused_openai(answer, status, code, kind)
    assert answer.headers["x-sie-error-code"] == code


def test_a_failed_load_says_what_failed_and_whether_it_is_final(server: Server) -> None:
    detail = server.encode("org/broken", ["a"]).json()["detail"]
    assert detail["error_class"] == "UNKNOWN" and detail["attempts"] == 1 and detail["permanent"] is True
    assert server.encode("org/lacking", ["a"]).json()["detail"]["compatible_bundles"] == []


def test_a_loading_model_is_waited_for_then_answered_503_and_served_once_it_is_loaded(tmp_path: Path) -> None:
    hold, models = tmp_path / "hold", Models(tmp_path / "catalog")
    hold.touch()
    names = (models.write("early"), models.write("late", hold_file=str(hold)))
    server = make_server(tmp_path, names, {"limits.load_wait_s": 0.3}, models.directory)
    server.fresh = False
    server.start()
    try:

        def state(model: str = "late") -> str:
            try:
                return str(server.get(f"/v1/models/{model}").json()["state"])
            except OSError:
                return ""

        wait_until(lambda: state("early") == "loaded" and state() == "loading", what="the load")
        assert server.get("/readyz").status == 503
        assert server.encode("early", ["a"]).status == 200, "a loaded model does not wait for another one"
        answer = server.encode("late", ["a"])
        assert_refused(answer, 503, "MODEL_NOT_LOADED", "loading")
        assert answer.headers["x-sie-error-code"] == "MODEL_LOADING"
        assert int(answer.headers["retry-after"]) >= 1
        answer = server.post("/v1/embeddings", {"model": "late", "input": "a"})
        assert_refused_openai(answer, 503, "MODEL_NOT_LOADED", "model_not_available")
        for own in ({"X-SIE-SDK-Version": "unknown"}, {"User-Agent": "node @superlinked/sie-sdk/0.3.1"}):
            for path, body in (
                ("encode/late", {"items": [{"text": "a"}]}),
                ("embeddings", {"model": "late", "input": "a"}),
            ):
                answer = server.request("POST", f"/v1/{path}", JSON.dump(body), {**JSON.headers, **own})
                assert (answer.status, answer.json()["detail"]["code"]) == (503, "MODEL_LOADING")
                assert answer.headers["x-sie-error-code"] == "MODEL_LOADING" and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "model_not_available"
        assert server.get("/v1/models/late").json()["loaded"] is False
        hold.unlink()
        wait_until(lambda: state() == "loaded", what="the end of the load")
        assert server.encode("late", ["a"]).status == 200
        server.stop()
        server.assert_nothing_left()
    finally:
        server.kill_everything()


@pytest.mark.long
def test_a_request_that_waits_for_a_load_goes_on_when_it_ends(tmp_path: Path) -> None:
    server = make_server(tmp_path, models=("fake/late",), settings={"limits.load_wait_s": 20})
    server.fresh = False
    server.start()
    try:

        def listening() -> bool:
            try:
                return server.get("/healthz").status == 200
            except OSError:
                return False

        wait_until(listening, what="the listener")
        assert server.encode("fake/late", ["a"]).status == 200
        server.stop()
    finally:
        server.kill_everything()


def every_kind_of_answer(server: Server, headers: dict[str, str]) -> dict[str, Answer]:
    """One answer of each kind: success in both encodings, coded errors, plain 404 and 405, probes."""
    good = JSON.dump({"items": [{"text": "a"}]})
    embeddings = JSON.dump({"model": "plain", "input": "a"})
    return {
        "msgpack": server.request("POST", PATH, good, headers),
        "json": server.request("POST", PATH, good, {**headers, "Accept": "application/json"}),
        "embeddings": server.request("POST", "/v1/embeddings", embeddings, headers),
        "400": server.request("POST", PATH, b"{", headers),
        "404 model": server.request("POST", "/v1/encode/none", good, headers),
        "500": server.request("POST", PATH, JSON.dump({"items": [{"text": "#raise"}]}), headers),
        "score": server.request("POST", "/v1/score/plain", good, headers),
        "404": server.request("GET", "/nope", headers=headers),
        "405": server.request("GET", PATH, headers=headers),
        "models": server.request("GET", "/v1/models", headers=headers),
        "healthz": server.request("GET", "/healthz", headers=headers),
        "readyz": server.request("GET", "/readyz", headers=headers),
        "metrics": server.request("GET", "/metrics", headers=headers),
    }


def test_every_answer_names_trace_request_and_version(server: Server) -> None:
    seen = set()
    for kind, answer in every_kind_of_answer(server, {}).items():
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-trace-id"]), kind
        assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["x-request-id"]), kind
        assert answer.headers["x-sie-server-version"] == "0.3.4", kind
        seen |= {answer.headers["x-trace-id"], answer.headers["x-request-id"]}
    assert len(seen) == 26, "ids are fresh for every request"


def test_every_answer_echoes_the_clients_ids(server: Server) -> None:
    trace = secrets.token_hex(16)
    headers = {
        "X-Request-ID": "job-7/part.2:a=b@c+d_E",
        "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01",
    }
    for kind, answer in every_kind_of_answer(server, headers).items():
        assert answer.headers["x-request-id"] == headers["X-Request-ID"], kind
        assert answer.headers["x-trace-id"] == trace, kind


@pytest.mark.parametrize("given", ["", " ", "a b", "x" * 129, "<script>", "a\tb", "\xe9", '"', "a,b", "a;b"])
def test_a_request_id_that_is_not_safe_to_echo_is_replaced(server: Server, given: str) -> None:
    answer = server.post(PATH, {"items": [{"text": "a"}]}, X_Request_ID=given)
    assert answer.status == 200
    assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["x-request-id"])


@pytest.mark.parametrize(
    "given",
    [
        "",
        "nonsense",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 31 + "-" + "1" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
    ],
)
def test_an_invalid_traceparent_is_replaced(server: Server, given: str) -> None:
    answer = server.post(PATH, {"items": [{"text": "a"}]}, traceparent=given)
    assert answer.status == 200
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-trace-id"])
    assert answer.headers["x-trace-id"] not in ("0" * 32, "1" * 32, "a" * 32)


def test_a_successful_answer_has_its_times_in_headers(server: Server) -> None:
    answers = every_kind_of_answer(server, {})
    for kind in ("msgpack", "json", "embeddings"):
        times = {name: answers[kind].headers[name] for name in PHASES}
        assert all(re.fullmatch(r"\d+\.\d\d", value) for value in times.values()), times
        assert float(times["x-total-time"]) >= float(times["x-inference-time"])
        after = answers[kind].headers.get("x-postprocessing-time", "0.01")
        assert re.fullmatch(r"\d+\.\d\d", after)
    assert not any(name in answers["400"].headers for name in PHASES)


@pytest.mark.parametrize("value", ["l4", "pool/l4", "nonsense"])
def test_client_headers_without_meaning_here_are_accepted(sie: Server, value: str) -> None:
    headers = {
        "X-SIE-MACHINE-PROFILE": value,
        "X-SIE-Pool": value,
        "X-SIE-SDK-Version": "unknown",
        "Authorization": "Bearer secret",
    }
    assert sie.request("POST", PATH, JSON.dump({"items": [{"text": "a"}]}), headers).status == 200
    assert "secret" not in sie.log


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/nope", "/v1", "/v1/encode", "/v3/models", "/v1/models2", "//nope"]
)
def test_an_unknown_path_is_not_found_with_a_plain_detail(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        answer = server.request(method, path, b"" if method == "POST" else None)
        assert answer.status == 404
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.json() == {"detail": "Not Found"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("PUT", PATH, "POST"),
        ("DELETE", "/v1/embeddings", "POST"),
        ("GET", "/v1/score/plain", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/v1/models/plain", "GET"),
        ("POST", "/healthz", "GET"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_a_wrong_method_is_refused_with_the_right_ones(
    server: Server, method: str, path: str, allowed: str
) -> None:
    answer = server.request(method, path, b"" if method != "GET" else None)
    assert answer.status == 405
    assert allowed in answer.headers["allow"]
    assert answer.json() == {"detail": "Method Not Allowed"}


@pytest.mark.parametrize("operation", ["score", "extract"])
def test_operations_that_are_not_offered_say_so(server: Server, operation: str) -> None:
    body = {"query": {"text": "a"}, "items": [{"text": "b"}]}
    answer = server.post(f"/v1/{operation}/org/odd", body)
    assert_refused(answer, 400, "INVALID_INPUT", operation)
    assert_refused(server.post(f"/v1/{operation}/org/none", body), 404, "MODEL_NOT_FOUND")


def test_probes_answer_in_plain_text(sie: Server) -> None:
    for path, text in (
        ("/healthz", b"ok"),
        ("/livez", b"ok"),
        ("/readyz", b"ok"),
        ("/ping", b"ok"),
        ("/health", b"OK"),
    ):
        answer = sie.get(path)
        assert answer.status == 200 and answer.body == text
        assert answer.headers["content-type"].startswith("text/plain")
    asked = sie.request("GET", "/health", headers={"Accept": "Application/JSON, */*"})
    assert asked.headers["content-type"] == "application/json"
    assert asked.json() == {"status": "ok", "type": "worker"}
    for path in ("/healthz", "/readyz"):
        answer = sie.request("HEAD", path)
        assert answer.status == 200 and answer.body == b""
    assert sie.get("/readyz?model=org/odd").status == 200
    assert sie.get("/readyz?model=org/broken").status == 503
    assert sie.get("/readyz?model=org/none").status == 404


def test_metrics_name_all_families_of_the_contract(sie: Server) -> None:
    text = sie.get("/metrics").body.decode()
    for family, kind in (
        ("sie_requests_total", "counter"),
        ("sie_request_duration_seconds", "histogram"),
        ("sie_batch_size", "histogram"),
        ("sie_tokens_processed_total", "counter"),
        ("sie_queue_depth", "gauge"),
        ("sie_model_loaded", "gauge"),
        ("sie_model_memory_bytes", "gauge"),
    ):
        assert f"# TYPE {family} {kind}" in text
    assert sie.metric("sie_model_loaded", model="plain") == 1
    assert sie.metric("sie_model_loaded", model="org/broken") == 0
    assert sie.metric("sie_model_memory_bytes", model="plain") > 0


def test_metrics_count_every_request_and_no_invented_model(sie: Server) -> None:
    requests: list[tuple[dict[str, str], int]] = [
        ({"model": "plain", "endpoint": "encode", "status": "success"}, 3),
        ({"model": "unknown", "endpoint": "encode", "status": "error"}, 1),
        ({"model": "plain", "endpoint": "encode", "status": "error"}, 1),
        ({"model": "plain", "endpoint": "embeddings", "status": "success"}, 1),
    ]
    families: list[tuple[str, dict[str, str], int]] = [
        ("sie_request_duration_seconds_count", {"model": "plain", "endpoint": "encode", "phase": "total"}, 3),
        ("sie_tokens_processed_total", {"model": "plain"}, 7),
        ("sie_batch_size_count", {"model": "plain"}, 4),
    ]
    expected = [("sie_requests_total", labels, count) for labels, count in requests] + families

    def counts() -> list[float]:
        scraped = sie.get("/metrics").body.decode()
        return [sum_of(scraped, name, **labels) for name, labels, _ in expected]

    before = counts()
    for turn in range(3):
        sie.encode("plain", [f"counted {turn}", f"b {turn}"])
    sie.encode("plain/invented", ["a"])
    sie.encode("plain", [])
    sie.post("/v1/embeddings", {"model": "plain", "input": "counted"})
    least = [old + count for old, (_, _, count) in zip(before, expected, strict=True)]
    # A worker counts its batch after it has told the results.
    wait_until(lambda: all(map(ge, counts(), least)), what="all counts")
    assert counts()[: len(requests)] == least[: len(requests)]
    assert "invented" not in sie.get("/metrics").body.decode()
