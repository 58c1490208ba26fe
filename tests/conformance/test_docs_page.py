"""The document and Swagger UI: over HTTP, and in a real browser without the internet, which sends requests itself.

With TEST_SCREENSHOTS naming a directory, a picture of the page is put there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.protocols.registry import protocols
from tests.fakes.generation_server import RecordedServer
from tests.harness.browser import Browser, Page
from tests.harness.server import Server


@pytest.fixture
def server(fakes: Server) -> Server:
    return fakes


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    with chromium.page() as opened:
        yield opened


@pytest.mark.parametrize("path", ["/openapi.json", "/api-doc/openapi.json"])
@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "application/msgpack"])
def test_the_document_is_served_as_json_whatever_is_asked_for(server: Server, path: str, accept: str) -> None:
    answer = server.request("GET", path, headers={"Accept": accept} if accept else {})
    assert (answer.status, answer.body) == (200, protocols().schema())
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("path", ["/docs", "/docs/", "/docs/docs.html", "/redoc"])
def test_the_page_may_load_and_run_nothing_from_elsewhere(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;")
    assert "connect-src 'self'" in policy and "unsafe" not in policy
    assert b"http:" not in answer.body and b"https:" not in answer.body and b"//" not in answer.body
    etag = answer.headers["etag"]
    assert server.request("GET", path, headers={"If-None-Match": etag}).status == 304


@pytest.mark.parametrize(
    ("name", "media"),
    [
        ("swagger-ui.css", "text/css"),
        ("swagger-ui-bundle.js", "text/javascript"),
        ("page.css", "text/css"),
        ("start.js", "text/javascript"),
        ("favicon-32x32.png", "image/png"),
    ],
)
def test_files_of_the_page_come_from_this_server(server: Server, name: str, media: str) -> None:
    answer = server.get(f"/docs/{name}")
    assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, media)
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.body


@pytest.mark.parametrize("name", ["nope.js", "swagger-editor.js", "index.html/more"])
def test_other_files_are_not_there(server: Server, name: str) -> None:
    assert server.get(f"/docs/{name}").status == 404


_BLOCK = "[id$='post_v1_chat_completions'].opblock"
_AREA = f"{_BLOCK} textarea.body-param__text"
_ANSWER = f"{_BLOCK} .live-responses-table"


def _ask(page: Page, body: object) -> str:
    """Send `body` from the open operation, and return the answer that the page shows."""
    # React sees a change of the text by an event only, and keeps its own setter of the value.
    page.evaluate(
        f'(area => {{ Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set'
        f".call(area, {json.dumps(json.dumps(body))});"
        f' area.dispatchEvent(new Event("input", {{bubbles: true}})) }})(document.querySelector("{_AREA}"))'
    )
    page.evaluate(f'document.querySelector("{_BLOCK} button.execute").click()')
    page.until(f'document.querySelector("{_ANSWER} .response-col_status") !== null')
    shown = page.text(_ANSWER)
    page.evaluate(f'document.querySelector("{_BLOCK} button.btn-clear").click()')
    page.until(f'document.querySelector("{_ANSWER}") === null')
    return shown


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_browser_shows_every_operation_and_sends_requests(page: Page, tmp_path: Path) -> None:
    server = RecordedServer(tmp_path)
    with server.listening() as url:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        page.open(f"{url}/docs")
        page.until(f'document.querySelector("{_BLOCK}") !== null')
        page.evaluate(f'document.querySelector("{_BLOCK} .opblock-summary-control").click()')
        page.until(f'document.querySelector("{_AREA}") !== null')
        whole = _ask(page, body)
        assert whole.split()[:3] == ["Code", "Details", "200"] and '"content": "Hello you"' in whole
        shown = page.evaluate("[...document.querySelectorAll('.opblock')].map(block => block.id)")
        names = {operation.name for operation in server.known.routes if operation.summary}
        assert {name for name in names if any(one.endswith(name) for one in shown)} == names
        assert len(shown) == len(names)
        assert page.evaluate("document.querySelector('.opblock-tag').dataset.tag") == "chat"
        type_in = (
            "(box => {{ box.value = '{}'; box.dispatchEvent(new Event('input')) }})"
            "(document.getElementById('filter'))"
        )
        paths = "[...document.querySelectorAll('.opblock-summary-path')].map(path => path.dataset.path)"
        page.evaluate(type_in.format("RERANK post"))
        page.until(f"{paths}.join() === '/v1/rerank'")
        page.until("document.getElementById('found').innerText === '1 found'")
        page.evaluate("document.querySelector('.opblock-tag').click()")
        page.until(f"{paths}.length === 0")
        page.evaluate(type_in.format(""))
        page.until("document.getElementById('found').innerText === ''")
        page.evaluate(type_in.format("rerank post"))
        page.until("document.getElementById('found').innerText === '1 found'")
        page.until(f"document.querySelectorAll('.opblock-tag').length === 1 && {paths}.length === 0")
        page.evaluate("document.querySelector('.opblock-tag').click()")
        page.evaluate(type_in.format("no such thing"))
        page.until("document.getElementById('found').innerText === 'nothing fits'")
        page.evaluate(type_in.format(""))
        page.until(f"{paths}.length === {len(names)}")
        streamed = _ask(page, {**body, "stream": True})
        assert '"content":"Hello"' in streamed and "data: [DONE]" in streamed
        assert len(server.engine.calls) == 2
        assert page.console == []
        assert [one for one in page.requests if not one.startswith((url, "data:"))] == []
        place = os.environ.get("TEST_SCREENSHOTS")
        if place:
            page.look(1280, 1600, "light")
            page.picture(Path(place) / "docs.png")
