"""Web search, pages and files by URL on a whole server, with packages of tests and a site of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fakes
from tests.fakes.adapter import vector_of
from tests.fakes.web import HERE, Site, answer, serving_site
from tests.harness.agent_runs import MODEL
from tests.harness.server import Server, serving
from tests.tiny import chat_models

FIND, READ = "mistralrs_search_the_web", "mistralrs_website_content_extractor"
RANKING = "fake/small"
PAGE = b"<html><title>Rome</title><body>Rome has hills.</body></html>"


@pytest.fixture
def site() -> Iterator[Site]:
    pages: dict[str, bytes | None] = {
        "/rome": answer(PAGE),
        "/cities.csv": answer(b"Rome,3", kind="text/csv"),
    }
    with serving_site(pages) as running:
        yield running


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PYTHONPATH", str(Path(fakes.__file__).parent / "extras"))
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", tmp_path / "chatml", context=4096))
    shutil.copy(Path(fakes.__file__).parent / "catalog" / "small.yaml", catalog)
    shutil.copytree(Path(fakes.__file__).parent / "weights", tmp_path / "weights")
    settings: dict[str, Any] = {
        "agent.search": "true",
        "agent.search_timeout_s": 60,
        "agent.search_embedding_model": RANKING,
        "fetch.file_urls": "true",
    }
    settings["fetch.allowed_networks"] = HERE
    with serving(tmp_path, (MODEL, RANKING), settings, catalog=catalog) as running:
        yield running


@pytest.mark.long
def test_a_server_searches_reads_pages_and_fetches_files(server: Server, site: Site) -> None:
    given = [
        (FIND, {"query": "rome"}),
        (READ, {"url": site.url("/rome")}),
        (READ, {"url": "http://127.0.0.2/"}),
    ]
    calls = [
        {"type": "function", "id": f"call-{at}", "function": {"name": name, "arguments": json.dumps(values)}}
        for at, (name, values) in enumerate(given)
    ]
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": calls}],
        "max_tokens": 4,
        "web_search_options": {},
        "session_id": "web",
    }
    body = server.post("/v1/chat/completions", asked).json()
    found, page, refused = (record["result_content"] for record in body["agentic_tool_calls"])
    assert (found, page) == ("10 results\nsources: example.com", "1 results\nsources: 127.0.0.1")
    assert "not on the internet" in refused
    session = server.get("/v1/sessions/web").json()
    results = next(
        json.loads(each["content"]["Left"])["output"]
        for each in session["messages"]
        if "example.com" in str(each.get("content"))
    )
    asked_for = [{"url": f"https://example.com/{at}", "title": f"rome {at}"} for at in range(48)]
    query = vector_of("rome", 16)
    asked_for.sort(key=lambda each: -float(vector_of(f"{each['title']}\nwithin 60 s", 16) @ query))
    assert [each["url"] for each in results] == [each["url"] for each in asked_for[:10]]
    assert any("Rome has hills." in str(message.get("content")) for message in session["messages"])
    part = {"type": "input_file", "file_url": site.url("/cities.csv")}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Read."}, part]}]
    answered = server.post("/v1/responses", {"model": MODEL, "input": items, "max_output_tokens": 4})
    assert answered.status == 200, answered.body
    assert [file["filename"] for file in server.get("/v1/files").json()["data"]] == ["cities.csv"]
