"""Files that messages name by their URL: fetched from a site that runs here, stored, and told to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from falcon.util import async_to_sync

from frontend.generation.hosted import MAX_URLS, Offer
from frontend.web.fetching import Fetcher
from ipc.settings import Fetch
from tests.fakes.agent import OFFER
from tests.fakes.web import HERE, Site, answer, serving_site, to
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, AgentServer, calls

Make = Callable[..., "UrlServer"]
FETCHING = replace(OFFER, fetches_files=True)
CSV = b"city,people\nRome,3\n"


class UrlServer(AgentServer):
    """Fetches files of this machine."""

    def __init__(self, root: Path, offer: Offer = FETCHING, **bounds: Any) -> None:
        super().__init__(root, FINAL)
        self.parts.offer = offer
        bounds = {"allowed_networks": (HERE,), **bounds}
        self._fetcher = Fetcher(Fetch(**bounds))
        self.services.agent = replace(self.parts.parts, fetcher=self._fetcher)

    def respond(self, *parts: dict[str, Any], **fields: Any) -> Any:
        """The response of a request with these parts."""
        message = {"role": "user", "content": [{"type": "input_text", "text": "Read."}, *parts]}
        return self.post("/v1/responses", {"input": [message], **fields})

    def message(self, source: dict[str, Any], **fields: Any) -> Any:
        """The response of a message with a document."""
        blocks = [{"type": "text", "text": "Read."}, {"type": "document", "source": source, **fields}]
        return self.post("/v1/messages", {"messages": [{"role": "user", "content": blocks}]})

    def stored(self) -> list[str]:
        """Names of all files in the store."""
        files, _ = async_to_sync(self.parts.files.page, "")
        return [file.name for file in files]

    def close(self) -> None:
        """End the connections."""
        async_to_sync(self._fetcher.close)

    @property
    def note(self) -> str:
        """What the model was told."""
        [call] = self.engine.calls
        return str(call.messages[0]["content"])


def part(url: str, **fields: Any) -> dict[str, Any]:
    """A part with a URL."""
    return {"type": "input_file", "file_url": url, **fields}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes servers that are closed in the end."""
    with ExitStack() as stack:

        def made(*given: Any, **bounds: Any) -> UrlServer:
            return stack.enter_context(closing(UrlServer(tmp_path, *given, **bounds)))

        yield made


@pytest.fixture
def site() -> Iterator[Site]:
    """A site with one file."""
    with serving_site({"/data/cities.csv": answer(CSV, kind="text/csv")}) as running:
        yield running


def test_a_file_by_url_is_stored_and_told_to_the_model(make: Make, site: Site) -> None:
    server = make()
    assert server.respond(part(site.url("/data/cities.csv"))).status_code == 200
    assert "cities.csv (id file-" in server.note and "Rome,3" in server.note
    assert site.paths == ["/data/cities.csv"]


def test_a_document_of_messages_may_be_a_url(make: Make, site: Site) -> None:
    server = make()
    answered = server.message({"type": "url", "url": site.url("/data/cities.csv")}, title="towns.csv")
    assert answered.status_code == 200, answered.text
    assert "towns.csv (id file-" in server.note and "Rome,3" in server.note


def test_a_file_without_an_ending_has_the_format_of_its_media_type(make: Make, site: Site) -> None:
    site.pages["/report"] = answer(b"%PDF-1.7", kind="application/pdf")
    server = make()
    server.respond(part(site.url("/report")))
    assert "report (id file-" in server.note and "application/pdf, 8 bytes" in server.note


def test_chat_takes_no_urls(make: Make, site: Site) -> None:
    inner = {"file_url": site.url("/data/cities.csv")}
    for given in ({"type": "file", "file": inner}, {"type": "input_file", **inner}):
        answered = make().post("/v1/chat/completions", {"messages": [{"role": "user", "content": [given]}]})
        assert answered.status_code == 422
        assert "file_url: is taken by POST /v1/responses only" in answered.json["message"]
    assert site.heads == []


def test_a_server_that_fetches_no_files_names_the_flag(make: Make) -> None:
    server = make(OFFER)
    refused = server.respond(part("http://example.com/a"))
    assert refused.status_code == 422 and refused.json["error"]["param"] == "input[0].content[1].file_url"
    assert "--fetch-file-urls" in refused.json["message"]
    refused = server.message({"type": "url", "url": "http://example.com/a"})
    assert refused.status_code == 400
    assert (
        "messages[0].content[1].source.url: this server fetches no files" in refused.json["error"]["message"]
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"file_url": 3}, "file_url: expected a string"),
        ({"file_url": ""}, "file_url: expected a string that is not empty"),
        ({"file_url": "http://a/" + "x" * 5000}, "the limit is 4096"),
        ({"file_url": "http://a/", "file_id": "file-1"}, "only one of file_url, file_id and file_data"),
        ({"file_url": "http://a/", "file_data": "YQ=="}, "only one of file_url, file_id and file_data"),
        ({"file_url": "http://a/", "filename": "x" * 300}, "the limit is 255"),
        ({"file_url": "ftp://a.example/"}, "file_url: expected a URL with the scheme http or https"),
        ({"file_url": "http://127.0.0.2/"}, "file_url: the host is not on the internet"),
        ({"file_url": "http://169.254.169.254/latest"}, "file_url: the host is not on the internet"),
    ],
)
def test_urls_that_are_refused_name_their_field(given: dict[str, Any], text: str, make: Make) -> None:
    server = make()
    refused = server.respond({"type": "input_file", **given})
    assert refused.status_code == 422 and text in refused.json["message"], refused.text
    assert server.engine.calls == []


def test_the_title_of_a_document_by_url_names_its_field(make: Make) -> None:
    refused = make().message({"type": "url", "url": "http://example.com/a"}, title="x" * 300)
    assert "messages[0].content[1].title: 300 characters" in refused.json["error"]["message"]


def test_a_redirect_to_a_private_address_stores_nothing(make: Make, site: Site) -> None:
    site.pages["/away"] = to("http://10.0.0.1/")
    server = make()
    assert server.respond(part(site.url("/away"))).status_code == 422
    assert server.stored() == []


@pytest.mark.parametrize("nbytes", [99, 100, 101])
def test_the_size_of_a_fetched_file_is_bounded_to_the_byte(nbytes: int, make: Make, site: Site) -> None:
    site.pages["/big.bin"] = answer(bytes(nbytes))
    server = make(max_bytes=100)
    answered = server.respond(part(site.url("/big.bin")))
    assert (answered.status_code == 200) is (nbytes <= 100)
    assert server.stored() == (["big.bin"] if nbytes <= 100 else [])


def test_the_number_of_files_by_url_is_bounded(make: Make, site: Site) -> None:
    parts = [part(site.url("/data/cities.csv"))] * (MAX_URLS + 1)
    refused = make().respond(*parts)
    assert refused.status_code == 422 and f"more than {MAX_URLS} files by URL" in refused.json["message"]
    assert site.heads == []


def test_a_fetched_file_is_mounted_for_code(make: Make, site: Site) -> None:
    server = make()
    server.script(calls((EXECUTE, '{"code":"1"}')), FINAL)
    server.respond(
        part(site.url("/data/cities.csv")),
        tools=[{"type": "code_interpreter", "container": {"type": "auto"}}],
    )
    assert server.parts.host.mounted == [("cities.csv", CSV)]


def test_a_url_is_fetched_once_though_the_conversation_comes_again(make: Make, site: Site) -> None:
    server = make()
    for _ in range(2):
        server.respond(part(site.url("/data/cities.csv")), session_id="s")
    assert site.paths == ["/data/cities.csv"] and server.stored() == ["cities.csv"]
