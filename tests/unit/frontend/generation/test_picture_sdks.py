"""The unmodified SDKs of OpenAI and Anthropic, sync and async, send pictures in every form that they offer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.fakes.generation_server import CHAT, RecordedServer
from tests.fakes.web import HERE, Site, answer, serving_site
from tests.harness.later import anthropic, openai
from tests.harness.sdks import Clients, of_anthropic, of_openai
from tests.tiny.pictures import encoded, picture

EYE = "tiny/eye"
PNG = encoded(picture(1))
B64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{B64}"
SEEN, TEXT = {"type": "image"}, {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A site with a picture."""
    with serving_site({"/a.png": answer(PNG, kind="image/png")}) as running:
        yield running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordedServer, str]]:
    """A server that may fetch from this machine, and its address."""
    made = RecordedServer(tmp_path_factory.mktemp("sdks"), seeing=(EYE,), fetch__allowed_networks=(HERE,))
    with closing(made) as server, server.listening() as url:
        yield server, url


@pytest.fixture
def server(running: tuple[RecordedServer, str]) -> RecordedServer:
    """The server, which has been asked nothing."""
    return running[0].anew()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def of_both(running: tuple[RecordedServer, str], request: Any) -> Iterator[tuple[Clients, Clients]]:
    """A client of OpenAI and one of Anthropic."""
    with (
        of_openai(running[1], is_async=request.param) as first,
        of_anthropic(running[1], is_async=request.param) as second,
    ):
        yield first, second


def seen(server: RecordedServer) -> list[Any]:
    """What the model was shown in the last message; there was one picture."""
    call = server.engine.calls[-1]
    assert call.images == [PNG]
    content: list[Any] = call.messages[-1]["content"]
    return content


def test_chat_completions_of_openai(
    server: RecordedServer, of_both: tuple[Clients, Clients], site: Site
) -> None:
    for url in (URL, site.url("/a.png")):
        part: Any = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        said: Any = [{"role": "user", "content": [TEXT, part]}]
        made = of_both[0].call(lambda c, said=said: c.chat.completions.create(model=EYE, messages=said))
        assert made.choices[0].message.content == "Hello you" and seen(server) == [SEEN, TEXT]
        chunks = of_both[0].items(
            lambda c, said=said: c.chat.completions.create(model=EYE, messages=said, stream=True)
        )
        assert "".join(each.choices[0].delta.content for each in chunks) == "Hello you"
        assert seen(server) == [SEEN, TEXT]


def test_responses_of_openai(server: RecordedServer, of_both: tuple[Clients, Clients], site: Site) -> None:
    stored = of_both[0].call(lambda c: c.files.create(file=("a.png", PNG), purpose="vision"))
    forms = [{"image_url": URL}, {"image_url": site.url("/a.png")}, {"file_id": stored.id}]
    for form in forms:
        parts: Any = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "detail": "auto", **form},
        ]
        given: Any = [{"role": "user", "content": parts}]
        made = of_both[0].call(lambda c, given=given: c.responses.create(model=EYE, input=given))
        assert made.output_text == "Hello you" and seen(server) == [SEEN, TEXT]
        again: Any = {"model": EYE, "input": "Sure?", "previous_response_id": made.id}
        of_both[0].call(lambda c, again=again: c.responses.create(**again))
        call = server.engine.calls[-1]
        assert (call.messages[0]["content"], call.images) == ([SEEN, TEXT], [PNG])
        items = of_both[0].items(lambda c, made=made: c.responses.input_items.list(made.id))
        assert items[0].content[1].type == "input_image"
        output = [{"type": "input_image", "detail": "auto", **form}]
        call_item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": output}
        turn: Any = [call_item, result]
        of_both[0].call(lambda c, turn=turn: c.responses.create(model=EYE, input=turn))
        assert seen(server) == [SEEN]


def test_messages_of_anthropic(server: RecordedServer, of_both: tuple[Clients, Clients], site: Site) -> None:
    stored = of_both[1].call(lambda c: c.beta.files.upload(file=("a.png", PNG, "image/png")))
    sources = [
        {"type": "base64", "media_type": "image/png", "data": B64},
        {"type": "url", "url": site.url("/a.png")},
        {"type": "file", "file_id": stored.id},
    ]
    for source in sources:
        block: Any = {"type": "image", "source": source}
        said: Any = [{"role": "user", "content": [TEXT, block]}]
        asked: Any = {"model": EYE, "max_tokens": 8, "messages": said}
        made = of_both[1].call(lambda c, asked=asked: c.beta.messages.create(**asked))
        assert made.content[0].text == "Hello you" and seen(server) == [TEXT, SEEN]
        _, message = of_both[1].helped(
            lambda c, asked=asked: c.beta.messages.stream(**asked), "get_final_message"
        )
        assert message.content[0].text == "Hello you" and seen(server) == [TEXT, SEEN]
        counted = of_both[1].call(lambda c, said=said: c.beta.messages.count_tokens(model=EYE, messages=said))
        assert counted.input_tokens == 4 and seen(server) == [TEXT, SEEN]
        turn: Any = [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]},
        ]
        turned: Any = {**asked, "messages": turn}
        of_both[1].call(lambda c, turned=turned: c.beta.messages.create(**turned))
        assert seen(server) == [SEEN]


def test_a_model_that_does_not_see_is_an_error_of_the_request(
    server: RecordedServer, of_both: tuple[Clients, Clients]
) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": URL}}
    with pytest.raises(openai.UnprocessableEntityError, match="takes text only") as caught:
        of_both[0].call(
            lambda c: c.chat.completions.create(model=CHAT, messages=[{"role": "user", "content": [part]}])
        )
    assert caught.value.param == "messages[0].content[0].image_url.url"
    source: Any = {"type": "base64", "media_type": "image/png", "data": B64}
    said: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="takes text only"):
        of_both[1].call(lambda c: c.messages.create(model=CHAT, max_tokens=8, messages=said))
    assert server.engine.calls == []
