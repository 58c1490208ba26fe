"""Leave for pages of other sites: preflights, answers and errors, for all origins, for a list, and for none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from falcon.testing import TestClient

from frontend.access.api_keys import KeyEntry, fresh, hashed
from frontend.access.gate import Gate
from frontend.app import REQUEST_HEADERS
from ipc.errors import ConfigError
from ipc.settings import load
from tests.fakes.generation_server import RecordedServer

ORIGIN = "https://chat.example"
PATH = "/v1/chat/completions"


def client(root: Path, *origins: str, **settings: Any) -> TestClient:
    return RecordedServer(root, server__cors_origins=",".join(origins), **settings).client


def preflight(asked: TestClient, origin: str = ORIGIN, path: str = PATH, more: str = "") -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": f"content-type{more}",
    }
    return asked.simulate_options(path, headers=headers)


def test_a_preflight_is_answered_with_methods_and_headers(tmp_path: Path) -> None:
    answer = preflight(client(tmp_path, "*"))
    assert answer.status_code == 204 and answer.content == b""
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-methods"] == "GET, POST, PUT, DELETE"
    assert answer.headers["access-control-allow-headers"] == ", ".join(REQUEST_HEADERS)
    assert answer.headers["x-request-id"].startswith("req_")


def test_headers_of_the_sdks_are_allowed_when_they_are_asked_for_and_no_others(tmp_path: Path) -> None:
    answer = preflight(client(tmp_path, "*"), more=", X-Stainless-Lang,x-secret, anthropic-beta")
    allowed = answer.headers["access-control-allow-headers"].split(", ")
    assert allowed == [*REQUEST_HEADERS, "x-stainless-lang"]


@pytest.mark.parametrize("origins", [("*",), ("http://other.example", ORIGIN)])
def test_answers_and_errors_name_the_origin_and_expose_the_request_id(
    tmp_path: Path, origins: tuple[str, ...]
) -> None:
    answer = client(tmp_path, *origins).simulate_post(PATH, body=b"{", headers={"Origin": ORIGIN})
    assert answer.status_code >= 400
    assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else ORIGIN)
    assert answer.headers["access-control-expose-headers"] == "x-request-id"
    assert ("Origin" in answer.headers.get("vary", "")) == (origins != ("*",))


@pytest.mark.parametrize(
    ("origins", "origin", "path"),
    [
        ((ORIGIN,), "https://evil.example", PATH),
        ((ORIGIN,), "null", PATH),
        ((), ORIGIN, PATH),
        (("*",), ORIGIN, "/openapi.yaml"),
    ],
)
def test_others_get_no_leave(tmp_path: Path, origins: tuple[str, ...], origin: str, path: str) -> None:
    asked = client(tmp_path, *origins)
    for answer in (preflight(asked, origin, path), asked.simulate_get(path, headers={"Origin": origin})):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_preflight_needs_no_key_and_any_other_request_does() -> None:
    gate = Gate((KeyEntry("k", hashed(fresh())),))
    asked = [(b"origin", ORIGIN.encode()), (b"access-control-request-method", b"POST")]
    for method, headers, let_in in (("OPTIONS", asked, True), ("OPTIONS", [], False), ("POST", asked, False)):
        assert (
            gate.admit({"type": "http", "path": PATH, "method": method, "headers": headers}, "infer")
            == let_in
        )


def test_without_keys_only_pages_of_this_machine_have_leave(tmp_path: Path) -> None:
    asked = RecordedServer(tmp_path).client
    for origin in ("http://localhost:3000", "https://app.localhost", "http://127.0.0.1", "http://[::1]:80"):
        for path in (PATH, "/api/chat", "/api/embeddings"):
            assert preflight(asked, origin, path).headers["access-control-allow-origin"] == origin
    others = (ORIGIN, "null", "file://", "http://localhost.evil.example", "http://evil.example/localhost")
    for origin in (*others, "http://127.0.0.1.evil.example", "http://[::1", "http://192.168.1.5"):
        answer = preflight(asked, origin)
        assert not [name for name in answer.headers if name.startswith("access-control-")], origin
    assert "access-control-allow-origin" not in preflight(asked, "http://localhost", "/api/status").headers


@pytest.mark.parametrize("path", ["/api/showx", "/api/embeds", "/api/chat/x", "/healthz", "/openapi.json5"])
def test_a_path_that_only_begins_like_one_of_these_has_no_leave(tmp_path: Path, path: str) -> None:
    assert "access-control-allow-origin" not in preflight(client(tmp_path, "*"), path=path).headers


def test_with_keys_every_page_has_leave_to_send_a_key(tmp_path: Path) -> None:
    gate = Gate((KeyEntry("k", hashed(fresh())),))
    answer = preflight(RecordedServer(tmp_path, gate).client)
    assert answer.headers["access-control-allow-origin"] == "*"


def test_local_stands_beside_origins(tmp_path: Path) -> None:
    asked = client(tmp_path, "local", ORIGIN)
    for origin in (ORIGIN, "http://localhost:3000"):
        assert preflight(asked, origin).headers["access-control-allow-origin"] == origin
    assert "access-control-allow-origin" not in preflight(asked, "https://other.example").headers


def test_answers_lack_the_request_id_when_it_is_switched_off(tmp_path: Path) -> None:
    answer = client(tmp_path, server__request_id_header="false").simulate_get(PATH)
    assert "x-request-id" not in answer.headers and "x-trace-id" in answer.headers


@pytest.mark.parametrize("value", ["chat.example", "https://a.example/", "https://a b", "ftp://a.example"])
def test_a_text_that_is_no_origin_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.cors_origins"):
        load(None, {"server.cors_origins": value}, {})
