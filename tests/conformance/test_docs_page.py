"""`/openapi.json` and `/docs` of a running server; the page in a real browser, without the internet.

With TEST_SCREENSHOTS naming a directory, pictures of the page are put there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from frontend.openapi.document import operations, schema
from tests.harness.browser import browser_page
from tests.harness.server import Server


@pytest.fixture
def server(fakes: Server) -> Server:
    return fakes


@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "application/msgpack"])
def test_the_document_is_served_as_json_whatever_is_asked_for(server: Server, accept: str) -> None:
    answer = server.request("GET", "/openapi.json", headers={"Accept": accept} if accept else {})
    assert (answer.status, answer.body) == (200, schema())
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_page_may_load_and_run_nothing_from_elsewhere(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy and "unsafe" not in policy
    assert b"http:" not in answer.body and b"https:" not in answer.body and b"//" not in answer.body
    etag = answer.headers["etag"]
    assert server.request("GET", path, headers={"If-None-Match": etag}).status == 304


@pytest.mark.timeout(120)
def test_a_browser_shows_every_operation(server: Server, tmp_path: Path) -> None:
    with browser_page(tmp_path) as page:
        page.open(f"{server.url}/docs")
        page.until("document.querySelectorAll('main section').length > 0")
        shown = page.evaluate("[...document.querySelectorAll('main section')].map(section => section.id)")
        assert shown and set(shown) == {operation.name for operation in operations()}
        encode = page.text("#post_v1_encode_model")
        assert f"curl {server.url}/v1/encode/MODEL" in encode
        assert "items" in encode and "required" in encode and "application/msgpack" in encode
        assert page.evaluate("document.querySelectorAll('nav a').length") == len(shown)
        assert page.console == []
        assert {url.partition(str(server.port))[0] for url in page.requests} == {"http://127.0.0.1:"}
        place = os.environ.get("TEST_SCREENSHOTS")
        if place:
            for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
                page.look(width, 1000, scheme)
                page.picture(Path(place) / f"docs-{scheme}-{width}.png")
