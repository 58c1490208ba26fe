"""Pictures of conversations: read in every form of every dialect, fetched, checked, and laid out for a worker."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from frontend.generation.pictures import PLACEHOLDER, Album, content_of_parts
from frontend.generation.requests import MOST_NBYTES
from ipc.errors import InvalidInput
from tests.fakes.generation_server import CHAT, RecordedServer
from tests.fakes.web import HERE, Endless, Site, answer, serving_site, to
from tests.tiny.pictures import encoded, picture

EYE = "tiny/eye"
PNG, JPEG = encoded(picture(1)), encoded(picture(2), "JPEG")
B64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{B64}"
JPEG_URL = f"data:image/jpeg;base64,{base64.b64encode(JPEG).decode()}"
TEXT = {"type": "text", "text": "What is this?"}
SEEN = {"type": "image"}
CHAT_PATH, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"


def image_url(url: str = URL) -> dict[str, Any]:
    """A picture of chat completions."""
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def user(*parts: Any) -> list[dict[str, Any]]:
    """One message."""
    return [{"role": "user", "content": list(parts)}]


def base64_block() -> dict[str, Any]:
    """A picture of Messages."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B64}}


def eyes(root: Path, **settings: Any) -> closing[RecordedServer]:
    """A server with a model that sees and one that does not."""
    return closing(RecordedServer(root, seeing=(EYE,), **settings))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RecordedServer]:
    """A model that sees and one that does not; this machine may be fetched from."""
    with eyes(tmp_path, fetch__allowed_networks=(HERE,)) as running:
        yield running


@pytest.fixture
def site() -> Iterator[Site]:
    """A site with pictures."""
    pages = {
        "/a.png": answer(PNG, kind="image/png"),
        "/untyped": answer(PNG, kind="application/octet-stream"),
        "/page": answer(b"<p>no picture</p>"),
        "/svg": answer(b"<svg xmlns='http://www.w3.org/2000/svg'/>", kind="image/svg+xml"),
        "/lies": answer(b"<svg xmlns='http://www.w3.org/2000/svg'/>", kind="image/png"),
        "/empty": answer(b"", kind="image/png"),
        "/there": to("/a.png"),
        "/inward": to("http://10.0.0.1/a.png"),
        "/never": None,
    }
    with serving_site(pages) as running:
        yield running


def asked(server: RecordedServer, path: str, **body: Any) -> Any:
    """The call of a request that is answered."""
    response = server.post(path, {"model": EYE, "stream": False, **body})
    assert response.status_code == 200, response.text
    return server.engine.calls[-1]


def refused(server: RecordedServer, path: str, **body: Any) -> str:
    """What a request is refused with, in the form of its dialect; nothing has run."""
    count = len(server.engine.works)
    response = server.post(path, {"model": EYE, "stream": False, **body})
    assert response.status_code == (422 if path in (CHAT_PATH, RESPONSES) else 400), response.text
    assert len(server.engine.works) == count
    error = response.json["error"]
    return str(error if isinstance(error, str) else error["message"])


def test_a_picture_stands_before_the_text_of_its_message_in_chat(server: RecordedServer) -> None:
    parts = [{"type": "text", "text": "a"}, image_url(), {"type": "text", "text": "b"}, image_url(JPEG_URL)]
    call = asked(
        server, CHAT_PATH, messages=[*user(*parts), {"role": "assistant", "content": "x"}, *user("y")]
    )
    first, *others = call.messages
    assert first["content"] == [SEEN, SEEN, {"type": "text", "text": "a b"}]
    assert [each["content"] for each in others] == ["x", "y"]
    assert call.images == [PNG, JPEG]


@pytest.mark.parametrize("part", [image_url(), {"type": "image_url", "image_url": URL, "detail": "high"}])
def test_chat_takes_a_url_as_text_or_in_an_object(server: RecordedServer, part: dict[str, Any]) -> None:
    call = asked(server, CHAT_PATH, messages=user(part))
    assert (call.messages[0]["content"], call.images) == ([SEEN], [PNG])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_image", "image_url": {"url": URL}},
        {"type": "input_image", "image_data": B64},
        {"type": "input_image", "image_data": URL},
        image_url(),
    ],
)
def test_responses_take_every_form_of_a_picture(server: RecordedServer, part: dict[str, Any]) -> None:
    call = asked(server, RESPONSES, input=user({"type": "input_text", "text": "See"}, part))
    assert call.messages == [{"role": "user", "content": [SEEN, {"type": "text", "text": "See"}]}]
    assert call.images == [PNG]


def test_messages_keep_the_order_of_blocks(server: RecordedServer) -> None:
    blocks = [
        TEXT,
        base64_block(),
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c"},
        base64_block(),
    ]
    call = asked(server, MESSAGES, messages=user(*blocks))
    assert call.messages[0]["content"] == [TEXT, SEEN, {"type": "text", "text": "b c"}, SEEN]
    assert call.images == [PNG, PNG]


def test_results_of_tools_have_pictures_in_all_dialects(server: RecordedServer) -> None:
    shown = [SEEN, {"type": "text", "text": "done"}]
    function = {"name": "look", "arguments": "{}"}
    turn = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": [image_url(), {"type": "text", "text": "done"}]}
    call = asked(server, CHAT_PATH, messages=[*user("look"), turn, result])
    assert (call.messages[2]["content"], call.messages[2]["name"], call.images) == (shown, "look", [PNG])
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    given = {"type": "tool_result", "tool_use_id": "c", "content": [base64_block(), {**TEXT, "text": "done"}]}
    call = asked(
        server, MESSAGES, messages=[*user(TEXT), {"role": "assistant", "content": [use]}, *user(given)]
    )
    assert (call.messages[2]["content"], call.images) == (shown, [PNG])
    output = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "done"}]
    items = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    call = asked(server, RESPONSES, input=[*user({"type": "input_text", "text": "look"}), *items])
    assert (call.messages[2]["content"], call.images) == (shown, [PNG])


def test_ollama_has_pictures_beside_its_texts(server: RecordedServer) -> None:
    call = asked(server, OLLAMA, messages=[{"role": "user", "content": "See", "images": [B64, B64]}])
    assert call.messages[0]["content"] == [SEEN, SEEN, {"type": "text", "text": "See"}]
    call = asked(server, "/api/generate", prompt="See", images=[B64])
    assert (call.messages[0]["content"], call.images) == ([SEEN, {"type": "text", "text": "See"}], [PNG])
    assert "raw" in refused(server, "/api/generate", prompt="See", images=[B64], raw=True)


def test_a_model_that_does_not_see_names_those_that_do_before_anything_is_fetched(
    server: RecordedServer, site: Site
) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT_PATH, {"messages": user(image_url(site.url("/a.png")))}),
        (RESPONSES, {"input": user({"type": "input_image", "image_url": site.url("/a.png")})}),
        (MESSAGES, {"messages": user({"type": "image", "source": {"type": "url", "url": site.url()}})}),
        (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": [B64]}]}),
    ]
    for path, body in bodies:
        message = refused(server, path, **body, model=CHAT)
        assert "takes text only, no images; no loaded model sees" in message
    asked(server, CHAT_PATH, messages=user("load it"))
    for path, body in bodies:
        assert refused(server, path, **body, model=CHAT).endswith(f"these models see: {EYE}")
    assert site.heads == []


def test_a_model_that_does_not_see_reads_a_word_for_the_picture_of_a_tool(server: RecordedServer) -> None:
    given = {"type": "tool_result", "tool_use_id": "c", "content": [{**TEXT, "text": "a"}, base64_block()]}
    call = asked(server, MESSAGES, messages=user(given), model=CHAT)
    assert (call.messages[0]["content"], call.images) == (f"a {PLACEHOLDER}", [])


@pytest.mark.parametrize("page", ["/a.png", "/untyped", "/there"])
def test_a_picture_is_fetched_by_its_url(server: RecordedServer, site: Site, page: str) -> None:
    source = {"type": "image", "source": {"type": "url", "url": site.url(page)}}
    assert asked(server, MESSAGES, messages=user(source)).images == [PNG]
    twice = user(image_url(site.url(page)), image_url(site.url(page)))
    count = len(site.heads)
    assert asked(server, CHAT_PATH, messages=twice).images == [PNG, PNG]
    assert len(site.heads) == 2 * count, "a URL that stands twice was fetched twice"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("/missing", "status 404"),
        ("/page", "'text/html' is no image in one of png, jpeg, gif, webp, bmp"),
        ("/svg", "'image/svg+xml' is no image"),
        ("/lies", "not an image in one of"),
        ("/empty", "not an image in one of"),
        ("/inward", "the host is not on the internet"),
    ],
)
def test_what_is_no_picture_behind_a_url_is_refused_by_its_field(
    server: RecordedServer, site: Site, page: str, message: str
) -> None:
    text = refused(server, CHAT_PATH, messages=user(image_url(site.url(page))))
    assert text.startswith("messages[0].content[0].image_url.url: ") and message in text
    source = {"type": "image", "source": {"type": "url", "url": site.url(page)}}
    text = refused(server, MESSAGES, messages=user(TEXT, source))
    assert text.startswith("messages[0].content[1].source.url: ") and message in text


def test_a_url_that_never_ends_is_given_up(tmp_path: Path, site: Site) -> None:
    with eyes(tmp_path, fetch__allowed_networks=(HERE,), fetch__timeout_s="0.05") as server:
        text = refused(server, CHAT_PATH, messages=user(image_url(site.url("/never"))))
    assert "fetch.timeout_s" in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT_PATH, "messages[0].content[1].image_url.url"),
        (RESPONSES, "input[0].content[1].image_url"),
        (MESSAGES, "messages[0].content[1].source.url"),
    ],
)
def test_a_picture_that_drips_without_end_is_an_error_of_the_dialect_that_names_the_limit(
    tmp_path: Path,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    field: str,
    stream: bool,
) -> None:
    drops = count(1)
    clock = {"ahead_s": 0.0}

    def dripped() -> None:
        if next(drops) == 10:
            clock["ahead_s"] = 21.0

    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.monotonic() + clock["ahead_s"])
    site.pages["/drips"] = Endless("image/png", PNG, dripped)
    url = site.url("/drips")
    bodies = {
        CHAT_PATH: {"messages": user(TEXT, image_url(url))},
        RESPONSES: {"input": user({**TEXT, "type": "input_text"}, {"type": "input_image", "image_url": url})},
        MESSAGES: {"messages": user(TEXT, {"type": "image", "source": {"type": "url", "url": url}})},
    }
    with eyes(tmp_path, fetch__allowed_networks=(HERE,), fetch__timeout_s="20") as server:
        response = server.post(path, {"model": EYE, "max_tokens": 8, "stream": stream, **bodies[path]})
        assert (server.engine.works, server.services.bodies.held_nbytes) == ([], 0)
    # The clock has passed a keep-alive comment as well, so a stream is open when the fetch ends.
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    told = events[-1] if stream else response.json
    error = told["error"]
    assert error["message"] == f"{field}: no complete answer came within 20 s (fetch.timeout_s)"
    if stream:
        kinds = {CHAT_PATH: "server_error", RESPONSES: "validation_error", MESSAGES: "invalid_request_error"}
        assert (response.status_code, error["type"]) == (200, kinds[path])
        assert told.get("type") == (None if path == CHAT_PATH else "error")
    else:
        assert response.status_code == (400 if path == MESSAGES else 422)
        assert error["type"] == "invalid_request_error"
        assert path == MESSAGES or error["param"] == field
    assert site.paths == ["/drips"] and clock["ahead_s"], "another limit ended the fetch"


def test_the_deadline_of_a_request_ends_its_fetches(server: RecordedServer, site: Site) -> None:
    body = {"model": EYE, "messages": user(image_url(site.url("/never")))}
    response = server.post(CHAT_PATH, body, **{"X-Request-Timeout": "0.2"})
    assert response.status_code == 504 and "while images were fetched" in response.text
    assert server.services.bodies.held_nbytes == 0


def test_private_addresses_are_refused_unless_a_setting_names_them(tmp_path: Path, site: Site) -> None:
    with eyes(tmp_path) as server:
        for url in (site.url("/a.png"), site.url("/a.png", "localhost"), "http://169.254.169.254/latest"):
            text = refused(server, CHAT_PATH, messages=user(image_url(url)))
            assert "fetch.allowed_networks" in text
    assert site.heads == []


def test_nothing_is_fetched_where_a_setting_says_so(tmp_path: Path, site: Site) -> None:
    with eyes(tmp_path, fetch__allowed_networks=(HERE,), generation__fetch_media="false") as server:
        text = refused(server, CHAT_PATH, messages=user(image_url(site.url("/a.png"))))
        assert "this server fetches no images (generation.fetch_media)" in text
        assert site.heads == [] and asked(server, CHAT_PATH, messages=user(image_url())).images == [PNG]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "scheme data, http or https"),
        ("ftp://a.example/x.png", "scheme data, http or https"),
        ("a.png", "scheme data, http or https"),
        ("data:image/png,abc", "expected base64 in the data URL"),
        ("data:image/png;base64", "expected base64 in the data URL"),
        ("data:image/png" + ";a" * 5000 + ";base64,aGk=", "expected base64 in the data URL"),
        ("data:image/png;base64,", "no bytes"),
        ("data:image/png;base64,a=b", "no valid base64"),
        ("data:image/png;base64,iVBO Rw==", "no valid base64"),
        ("data:text/plain;base64,aGk=", "'text/plain' is no image"),
        ("data:image/svg+xml;base64,aGk=", "'image/svg+xml' is no image"),
        ("data:image/png;base64,aGk=", "not an image in one of"),
        ("https://" + "a" * 5000, "the limit of a URL is 4096"),
    ],
)
def test_a_url_that_is_none_is_refused(server: RecordedServer, url: str, message: str) -> None:
    assert message in refused(server, CHAT_PATH, messages=user(image_url(url)))
    assert message in refused(server, RESPONSES, input=user({"type": "input_image", "image_url": url}))
    source = {"type": "image", "source": {"type": "url", "url": url}}
    assert message in refused(server, MESSAGES, messages=user(source))


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT_PATH, {"messages": user({"type": "image_url"})}, "content[0]: expected image_url"),
        (CHAT_PATH, {"messages": user({"type": "image_url", "image_url": 1})}, "expected a URL"),
        (CHAT_PATH, {"messages": user({"type": "image_url", "image_url": {"url": 1}})}, "expected a URL"),
        (CHAT_PATH, {"messages": user({**image_url(), "image_url": {"url": URL, "detail": 1}})}, "detail"),
        (CHAT_PATH, {"messages": user({"type": "image", "image": URL})}, "expected 'image_url'"),
        (CHAT_PATH, {"messages": [{"role": "system", "content": [image_url()]}]}, "user and tool only"),
        (CHAT_PATH, {"messages": [{"role": "assistant", "content": [image_url()]}]}, "user and tool only"),
        (RESPONSES, {"input": user({"type": "input_image"})}, "one of image_url, image_data, file_id"),
        (RESPONSES, {"input": user({"type": "input_image", "image_url": URL, "file_id": "f"})}, "one of"),
        (RESPONSES, {"input": user({"type": "input_image", "image_data": 1})}, "expected base64"),
        (RESPONSES, {"input": user({"type": "input_image", "file_id": 1})}, "expected the id of a file"),
        (RESPONSES, {"input": user({"type": "input_image", "file_id": "file-1"})}, "no file with the id"),
        (MESSAGES, {"messages": user({"type": "image"})}, "source"),
        (MESSAGES, {"messages": user({"type": "image", "source": {"type": "x"}})}, "base64, url, file"),
        (MESSAGES, {"messages": user({"type": "image", "source": {"type": "base64"}})}, "media_type"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [base64_block()]}]}, "not accepted"),
        (MESSAGES, {"system": [base64_block()], "messages": user(TEXT)}, "system[0].type"),
        (OLLAMA, {"messages": [{"role": "user", "images": [1]}]}, "messages[0].images[0]: expected base64"),
        (OLLAMA, {"messages": [{"role": "user", "images": ["%"]}]}, "no valid base64"),
    ],
)
def test_a_picture_in_a_wrong_form_or_place_is_refused_by_its_field(
    server: RecordedServer, path: str, body: dict[str, Any], message: str
) -> None:
    assert message in refused(server, path, **body)


def test_number_size_and_pixels_of_pictures_are_bounded(tmp_path: Path) -> None:
    with eyes(tmp_path, limits__max_images="2", limits__max_image_pixels="5000") as server:
        text = refused(server, CHAT_PATH, messages=[*user(image_url()), *user(image_url(), image_url())])
        small = refused(server, CHAT_PATH, messages=user(image_url()))
    assert text == "messages[1].content[1].image_url.url: more than 2 images up to here (limits.max_images)"
    assert "96 x 72 pixels, the limit is 5000 in all (limits.max_image_pixels)" in small
    with (
        serving_site({"/a.png": answer(PNG, kind="image/png")}) as site,
        eyes(tmp_path, limits__max_image_bytes="100", fetch__allowed_networks=(HERE,)) as server,
    ):
        text = refused(server, CHAT_PATH, messages=user(image_url()))
        assert f"{len(PNG)} bytes, the limit is 100 (limits.max_image_bytes)" in text
        text = refused(server, CHAT_PATH, messages=user(image_url(site.url("/a.png"))))
        assert "the limit is 100" in text


def test_pictures_of_a_request_have_a_bound_together_that_fetched_bytes_count_for(tmp_path: Path) -> None:
    large = PNG + bytes((MOST_NBYTES >> 1) - len(PNG) + 1)
    with (
        serving_site({path: answer(large, kind="image/png") for path in ("/a", "/b")}) as site,
        eyes(tmp_path, fetch__allowed_networks=(HERE,)) as server,
    ):
        both = user(image_url(site.url("/a")), image_url(site.url("/b")))
        text = refused(server, CHAT_PATH, messages=both)
        assert f"more than {MOST_NBYTES} bytes of images up to here" in text
        twice = user(*[image_url(site.url("/a"))] * 2)
        text = refused(server, CHAT_PATH, messages=twice)
        assert f"content[1].image_url.url: more than {MOST_NBYTES} bytes of images up to here" in text
        assert asked(server, CHAT_PATH, messages=user(image_url(site.url("/a")))).images == [large]
    assert server.services.bodies.held_nbytes == 0


def test_many_parts_behind_a_long_text_cost_no_copy_of_the_text_each() -> None:
    parts = [{"type": "text", "text": "a" * (1 << 20)}, *[{"type": "text", "text": ""}] * 100_000]
    began = time.thread_time()
    assert content_of_parts(parts) == "a" * (1 << 20) + " " * 100_000
    assert time.thread_time() - began < 1


def test_bytes_of_pictures_count_in_the_budget_of_bodies(tmp_path: Path, site: Site) -> None:
    site.pages["/large"] = answer(PNG + bytes(1 << 20), kind="image/png")
    with eyes(tmp_path, fetch__allowed_networks=(HERE,), limits__max_buffered_bytes="1") as server:
        response = server.post(CHAT_PATH, {"model": EYE, "messages": user(image_url(site.url("/large")))})
        assert response.status_code == 503 and "limits.max_buffered_bytes" in response.text
        assert server.services.bodies.held_nbytes == 0
        assert asked(server, CHAT_PATH, messages=user(image_url())).images == [PNG]


def test_a_stored_file_is_a_picture_of_its_owner(server: RecordedServer) -> None:
    body = (
        b"--x\r\nContent-Disposition: form-data; name=purpose\r\n\r\nvision\r\n"
        b'--x\r\nContent-Disposition: form-data; name=file; filename="a.png"\r\n\r\n' + PNG + b"\r\n--x--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    id_ = server.client.simulate_post("/v1/files", body=body, headers=headers).json["id"]
    call = asked(server, RESPONSES, input=user({"type": "input_image", "file_id": id_}))
    assert call.images == [PNG]
    call = asked(
        server, MESSAGES, messages=user({"type": "image", "source": {"type": "file", "file_id": id_}})
    )
    assert call.images == [PNG]


def test_pictures_cost_what_the_model_says(server: RecordedServer) -> None:
    asked(server, CHAT_PATH, messages=user("See"))
    asked(server, CHAT_PATH, messages=user(image_url(), image_url(), {"type": "text", "text": "See"}))
    plain, seeing = (work.cost for work in server.engine.works)
    assert seeing == plain + 2 * 20


def test_a_stored_response_keeps_its_pictures(server: RecordedServer, site: Site) -> None:
    parts = [
        {"type": "input_image", "image_url": URL},
        {"type": "input_image", "image_url": site.url("/a.png")},
    ]
    first = server.post(RESPONSES, {"model": EYE, "input": user(*parts, {"type": "input_text", "text": "a"})})
    onward = {"previous_response_id": first.json["id"], "input": "and now?"}
    call = asked(server, RESPONSES, **onward)
    assert call.messages[0]["content"] == [SEEN, SEEN, {"type": "text", "text": "a"}]
    assert (call.messages[-1]["content"], call.images) == ("and now?", [PNG, PNG])
    del site.pages["/a.png"]
    call = asked(server, RESPONSES, **onward)
    assert call.messages[0]["content"] == [SEEN, {"type": "text", "text": f"{PLACEHOLDER} a"}]
    assert call.images == [PNG]
    assert "takes text only" in refused(server, RESPONSES, **onward, model=CHAT)


def test_pictures_of_earlier_turns_that_are_too_much_together_are_refused_and_not_left_out(
    server: RecordedServer, site: Site
) -> None:
    site.pages["/b.png"] = answer(PNG, kind="image/png")
    parts = [{"type": "input_image", "image_url": site.url(page)} for page in ("/a.png", "/b.png")]
    first = server.post(RESPONSES, {"model": EYE, "input": user(*parts)}).json
    large = PNG + bytes(MOST_NBYTES >> 1)
    site.pages |= {page: answer(large, kind="image/png") for page in ("/a.png", "/b.png")}
    text = refused(server, RESPONSES, previous_response_id=first["id"], input="and now?")
    assert f"more than {MOST_NBYTES} bytes of images up to here" in text


def test_large_pictures_of_responses_are_decoded_by_a_thread(
    server: RecordedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    taken = Album.from_base64

    def noted(album: Album, *args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return taken(album, *args)

    monkeypatch.setattr(Album, "from_base64", noted)
    large = {"type": "input_image", "image_data": base64.b64encode(PNG + bytes(1 << 17)).decode()}
    asked(server, RESPONSES, input=user({"type": "input_image", "image_url": URL}))
    first = server.post(RESPONSES, {"model": EYE, "input": user(large)}).json
    asked(server, RESPONSES, previous_response_id=first["id"], input="and now?")
    small, *others = threads
    assert len(others) == 2 and small not in others


def test_tokens_of_pictures_are_counted_by_the_worker(server: RecordedServer) -> None:
    response = server.post("/v1/messages/count_tokens", {"model": EYE, "messages": user(base64_block())})
    assert response.json == {"input_tokens": 4}
    [call] = server.engine.calls
    assert (call.counts_only, call.images) == (True, [PNG])


def test_a_picture_that_the_worker_refuses_is_named_by_its_field(server: RecordedServer) -> None:
    why = {"param": "messages", "image": 2, "why": "cannot be decoded"}
    server.script(InvalidInput("messages: image 2: cannot be decoded", **why))
    for path, where in ((CHAT_PATH, "messages[1].content[0].image_url.url"), (MESSAGES, None)):
        part = base64_block() if where is None else image_url()
        response = server.post(path, {"model": EYE, "messages": [*user(TEXT, part), *user(part)]})
        error = response.json["error"]
        assert response.status_code == (400 if where is None else 422)
        assert error["message"] == f"{where or 'messages[1].content[0].source.data'}: cannot be decoded"
        assert error.get("param") == where


def test_models_say_whether_they_see(server: RecordedServer) -> None:
    asked(server, CHAT_PATH, messages=user("load it"))
    asked(server, CHAT_PATH, messages=user("load it"), model=CHAT)
    found = {each["id"]: each.get("vision") for each in server.client.simulate_get("/v1/models").json["data"]}
    assert found[EYE] is True and found[CHAT] is None
