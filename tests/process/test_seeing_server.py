"""A real server with tiny models that see: tokens as those of transformers in every dialect, and bad pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.conformance.hostile_images import FAILED, USED, animated_gif, rotated, saved, vast_png
from tests.fakes.seeing import TOKENS, Chat, Seeing
from tests.fakes.web import HERE, Site, answer, serving_site
from tests.harness.cluster import ways_to
from tests.harness.later import anthropic, openai
from tests.harness.server import Answer, Server, serving
from tests.tiny import chat_models, seeing_others
from tests.tiny.pictures import encoded, picture

QWEN, GEMMA, BLIND, LLAVA = "tiny/qwen2_5_vl", "tiny/gemma3", "tiny/blind", "tiny/llava_next"
FAMILIES = {QWEN: "qwen2_5_vl", GEMMA: "gemma3"}
CHATS = {
    "no picture": Chat(("hello there",)),
    "one picture": Chat((1, "what is this")),
    "two pictures": Chat((2, 3, "which one is larger")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seeing]:
    """The models in this process, as the reference."""
    root = tmp_path_factory.mktemp("seeing")
    return {name: Seeing(family, root / family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def local(models: dict[str, Seeing], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the same models, and of one that sees nothing."""
    root = tmp_path_factory.mktemp("server")
    catalog = root / "catalog"
    catalog.mkdir()
    for name, seeing in models.items():
        chat_models.write_entry(catalog, name, seeing.directory)
    chat_models.write_entry(catalog, BLIND, chat_models.save("chatml", root / "chatml"))
    chat_models.write_entry(catalog, LLAVA, seeing_others.save("llava_next", root / "llava_next"))
    settings = {"fetch.allowed_networks": HERE}
    with serving(root, (*FAMILIES, BLIND, LLAVA), settings, catalog=catalog, supervised=False) as running:
        yield running


server = ways_to("local")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A site with the pictures of the chats."""
    files = [file for chat in CHATS.values() for file in chat.files]
    with serving_site({f"/{at}.png": answer(file, kind="image/png") for at, file in enumerate(files)}) as run:
        yield run


def data_url(data: bytes, kind: str = "png") -> str:
    """A picture in a URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(*urls: str, text: str = "what is this") -> list[dict[str, Any]]:
    """A message of a user."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def asked(server: Server, model: str, messages: Any, **more: Any) -> Answer:
    """The answer to a conversation."""
    body = {"model": model, "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **more}
    return server.post("/v1/chat/completions", body)


def tokens_of(answer: Any) -> list[int]:
    """The ids of the tokens of an answer."""
    return [entry["token_id"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.sample
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("chat", CHATS)
def test_answers_have_the_tokens_of_transformers(
    server: Server, models: dict[str, Seeing], model: str, chat: str
) -> None:
    wanted, _ = models[model].expected(CHATS[chat])
    [text] = [part for part in CHATS[chat].parts if isinstance(part, str)]
    messages = shown(*map(data_url, CHATS[chat].files), text=text)
    for _ in range(2):
        found = asked(server, model, messages, logprobs=True)
        assert found.status == 200, found.body
        assert tokens_of(found.json()) == wanted
    assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    counted = models[model].request("k", CHATS[chat]).prompt
    assert found.json()["usage"]["prompt_tokens"] == len(counted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [QWEN, LLAVA])
def test_all_dialects_and_forms_of_a_picture_give_the_same_answer(
    server: Server, site: Site, model: str
) -> None:
    [data], text = CHATS["one picture"].files, "what is this"
    more: Any = {"extra_body": {"ignore_eos": True}}
    said = set()
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
        anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as claude,
    ):
        for url in (data_url(data), site.url("/0.png")):
            messages: Any = shown(url, text=text)
            chat = client.chat.completions.create(model=model, messages=messages, max_tokens=TOKENS, **more)
            said.add(chat.choices[0].message.content)
            pieces = client.chat.completions.create(
                model=model, messages=messages, max_tokens=TOKENS, stream=True, **more
            )
            said.add("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))
            parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
            given: Any = [{"role": "user", "content": parts}]
            response = client.responses.create(model=model, input=given, max_output_tokens=TOKENS, **more)
            said.add(response.output_text)
        sources = [
            {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()},
            {"type": "url", "url": site.url("/0.png")},
        ]
        for source in sources:
            blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
            turn: Any = [{"role": "user", "content": blocks}]
            message = claude.messages.create(model=model, max_tokens=TOKENS, messages=turn, **more)
            said.add(message.content[0].text)
            with claude.messages.stream(model=model, max_tokens=TOKENS, messages=turn, **more) as stream:
                said.add(stream.get_final_text())
            counted = claude.messages.count_tokens(model=model, messages=turn)
            assert counted.input_tokens == message.usage.input_tokens == chat.usage.prompt_tokens
        onward = client.responses.create(
            model=model, input="and now", previous_response_id=response.id, max_output_tokens=TOKENS, **more
        )
        assert onward.usage.input_tokens > response.usage.input_tokens
        # NOTE: with generate() alone nothing is kept of prompts.
        assert (onward.usage.input_tokens_details.cached_tokens > 0) is (model == QWEN)
    body = {"model": model, "stream": False, "options": {"num_predict": TOKENS}}
    image = base64.b64encode(data).decode()
    ollama = server.post(
        "/api/chat", {**body, "messages": [{"role": "user", "content": text, "images": [image]}]}
    )
    assert ollama.json()["prompt_eval_count"] == chat.usage.prompt_tokens
    assert len(said) == 1


def test_models_say_that_they_see_and_one_that_does_not_names_them(server: Server) -> None:
    known = {each["id"]: each.get("vision") for each in server.get("/v1/models").json()["data"]}
    assert (known[QWEN], known[GEMMA], known[LLAVA], known[BLIND]) == (True, True, True, None)
    refused = asked(server, BLIND, shown("http://10.0.0.1/never-asked.png"))
    assert refused.status == 422
    assert GEMMA in refused.json()["message"] and QWEN in refused.json()["message"]


def test_unusual_pictures_are_read(server: Server) -> None:
    small = Image.new("RGB", (1, 1), (200, 10, 10))
    files = {
        "CMYK": (saved(picture(4).convert("CMYK"), "JPEG"), "jpeg"),
        "turned": (rotated()[0], "jpeg"),
        "animated": (animated_gif(3), "gif"),
        "transparent": (encoded(picture(5).convert("RGBA")), "png"),
        "of one pixel": (encoded(small), "png"),
    }
    for name, (data, kind) in files.items():
        found = asked(server, QWEN, shown(data_url(data, kind)))
        assert found.status == 200, (name, found.body)


@pytest.mark.parametrize("name", ["JPEG cut in half", "PNG cut in half", "GIF cut in half"])
def test_a_torn_picture_is_an_error_of_its_field(server: Server, name: str) -> None:
    whole = data_url(encoded(picture(1)))
    found = asked(server, QWEN, shown(whole, data_url(FAILED[name])))
    assert found.status == 422, found.body
    assert found.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    block = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FAILED[name]).decode()}
    turn = [{"role": "user", "content": [{"type": "image", "source": block}]}]
    found = server.post("/v1/messages", {"model": QWEN, "max_tokens": 4, "messages": turn})
    assert found.status == 400 and found.json()["error"]["type"] == "invalid_request_error"
    assert found.json()["error"]["message"].startswith("messages[0].content[0].source.data: ")


BAD = {
    "nothing": b"",
    "an SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a promise of pixels": vast_png(60_000, 60_000),
    "a strip": FAILED["a strip"],
    "JPEG cut in half": FAILED["JPEG cut in half"],
    "frame larger than its GIF": FAILED["frame larger than its GIF"],
}


REFUSED = {
    "/v1/chat/completions": (422, "messages[0].content[0]"),
    "/v1/responses": (422, "input[0].content[0]"),
    "/v1/messages": (400, "messages[0].content[0]"),
    "/api/chat": (400, "messages[0].images[0]"),
    "/api/generate": (400, "images[0]"),
}
"""Status of a request with a bad picture by path, and how the text of the error begins."""


def in_dialects(model: str, data: bytes, kind: str) -> dict[str, dict[str, Any]]:
    """A question about a picture by path."""
    encoded_data = base64.b64encode(data).decode()
    image = {"type": "input_image", "image_url": data_url(data, kind)}
    source = {"type": "base64", "media_type": f"image/{kind}", "data": encoded_data}
    text, user = {"type": "text", "text": "what is this"}, "user"
    few = {"options": {"num_predict": 4}, "stream": False}
    return {
        "/v1/chat/completions": {"messages": shown(data_url(data, kind)), "max_tokens": 4},
        "/api/chat": {
            "messages": [{"role": user, "content": "what is this", "images": [encoded_data]}],
            **few,
        },
        "/api/generate": {"prompt": "what is this", "images": [encoded_data], **few},
        "/v1/responses": {
            "input": [{"role": user, "content": [image, {"type": "input_text", "text": "what is this"}]}],
            "max_output_tokens": 4,
        },
        "/v1/messages": {
            "messages": [{"role": user, "content": [{"type": "image", "source": source}, text]}],
            "max_tokens": 4,
        },
    }


@pytest.mark.parametrize("model", [QWEN, LLAVA])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_with_its_field_in_every_dialect(
    server: Server, model: str, name: str
) -> None:
    for asked_model in (model, BLIND):
        for path, body in in_dialects(asked_model, BAD[name], "png").items():
            found = server.post(path, {"model": asked_model, **body})
            error, (status, beginning) = found.json()["error"], REFUSED[path]
            assert found.status == status, (path, found.body)
            text = error["message"] if isinstance(error, dict) else error
            assert text.startswith(beginning), (path, found.body)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [QWEN, LLAVA])
def test_an_unusual_picture_is_read_in_every_dialect(server: Server, model: str) -> None:
    for name in ("one pixel", "CMYK", "on its side", "animated WebP", "palette with alpha"):
        data, _ = USED[name]
        for path, body in in_dialects(model, data, "png").items():
            found = server.post(path, {"model": model, **body})
            assert found.status == 200, (name, path, found.body)


def test_twenty_large_pictures_are_refused(server: Server) -> None:
    large = data_url(encoded(Image.new("RGB", (4096, 4096), (1, 2, 3))))
    found = asked(server, QWEN, shown(*[large] * 20))
    assert found.status == 422 and "limits.max_images" in found.json()["message"]
