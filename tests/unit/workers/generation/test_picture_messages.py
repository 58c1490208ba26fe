"""Messages with pictures in templates that know no tools or no pictures, and counting without pixels."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from ipc.errors import InvalidInput
from tests.conformance.hostile_images import vast_png
from tests.tiny import chat_tokenizers, seeing
from tests.tiny.pictures import encoded, picture
from tests.unit.workers.generation.test_generation_templates import CALL, TOOLS
from workers.generation.formats.table import detect
from workers.generation.pictures import families, reading
from workers.generation.pictures.reading import PictureReader
from workers.generation.templates import ChatTemplate

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Directory, configuration and tokenizer of Qwen2.5-VL."""
    directory = seeing.save("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))
    config = transformers.AutoConfig.from_pretrained(str(directory))
    return directory, config, transformers.AutoTokenizer.from_pretrained(str(directory))


def reader(model: tuple[Path, Any, Any], source: str = "") -> PictureReader:
    directory, config, tokenizer = model
    family = families.load(directory, config, tokenizer)
    return PictureReader(family, ChatTemplate(tokenizer, source, family.words))


def test_functions_stand_before_a_message_that_begins_with_a_picture(qwen: Any) -> None:
    wrapper = detect(qwen[2], "", "qwen").wrapper
    messages = [{"role": "user", "content": [IMAGE, text("Weather?")]}]
    prompt = reader(qwen).prompt(messages, [encoded(picture(1))], TOOLS, None, wrapper).prompt
    before, found, behind = prompt.text.partition("<|image_pad|>")
    assert "get_weather" in before and found and "Weather?" in behind


def test_a_picture_that_a_function_gave_stands_behind_the_text_of_the_result(qwen: Any) -> None:
    wrapper = detect(qwen[2], "", "qwen").wrapper
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": [text("cold"), IMAGE]},
        {"role": "user", "content": [IMAGE, text("And this?")]},
    ]
    found = reader(qwen).prompt(messages, [encoded(picture(1)), encoded(picture(2))], TOOLS, None, wrapper)
    result = found.prompt.text.rpartition("<tool_response>")[2]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert result.replace(mark, "@").startswith(
        '\n{"content": "cold"}\n</tool_response>@\n@And this?<|im_end|>'
    )
    assert len(found.pictures) == 2


def test_a_template_that_leaves_out_pictures_of_a_role_refuses_them(qwen: Any) -> None:
    source = chat_tokenizers.template("seeing_qwen2_5_vl")
    blind = source.replace(
        "part.type == 'image' or", "message.role == 'user' and part.type == 'image' or"
    ).replace("or 'image' in part or 'image_url' in part", "")
    messages = [{"role": "system", "content": [IMAGE]}, {"role": "user", "content": [IMAGE, text("a")]}]
    with pytest.raises(InvalidInput, match=r"shows 1 of 2 images, .* roles 'system', 'user'"):
        reader(qwen, blind).prompt(messages, [encoded(picture(1))] * 2)


def test_a_template_that_shows_no_picture_ends_the_load(qwen: Any) -> None:
    with pytest.raises(ValueError, match="does not show a picture and a text of a user"):
        reader(qwen, "{% for m in messages %}{{ m.content }}{% endfor %}").check()


def test_the_template_of_a_processor_goes_before_that_of_its_tokenizer(tmp_path: Path) -> None:
    assert families.stored_template(tmp_path) == ""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert families.stored_template(tmp_path) == "of the processor"
    (tmp_path / "chat_template.jinja").write_text("of both")
    assert families.stored_template(tmp_path) == ""


def test_twenty_large_pictures_are_counted_without_their_pixels(qwen: Any) -> None:
    directory, config, tokenizer = qwen
    family = families.load(directory, config, tokenizer)
    family.images.size = {"shortest_edge": 1024, "longest_edge": 1 << 26}
    counting = PictureReader(family, ChatTemplate(tokenizer, "", family.words))
    # NOTE: the header alone. A file whose pixels were read would be refused.
    data = vast_png(4096, 4096)
    messages = [{"role": "user", "content": [IMAGE] * 20}]
    began = time.thread_time()
    found = counting.prompt(messages, [data] * 20)
    assert time.thread_time() - began < 1
    assert found.prompt.ids.count(family.image_id) == 20 * (4096 // 16) ** 2
    with pytest.raises(InvalidInput, match="messages: image 1: cannot be decoded"):
        counting.processed(found.pictures[0])


def test_a_picture_over_the_limit_of_pixels_is_refused_by_its_header(qwen: Any) -> None:
    reading, messages = reader(qwen), [{"role": "user", "content": [IMAGE]}]
    with pytest.raises(InvalidInput, match=r"image 1: 10000 x 10000 pixels, the limit is \d+ in all"):
        reading.prompt(messages, [vast_png(10_000, 10_000)])
    with pytest.raises(InvalidInput, match=r"image 1: over \d+ pixels, the limit is \d+ in all"):
        reading.prompt(messages, [vast_png(50_000, 50_000)])


def test_transparent_pixels_are_white(qwen: Any) -> None:
    clear = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    white = Image.new("RGB", (40, 40), "white")
    reading = reader(qwen)
    seen = [
        reading.processed(reading.prompt([{"role": "user", "content": [IMAGE]}], [encoded(each)]).pictures[0])
        for each in (clear, white)
    ]
    np.testing.assert_array_equal(*(np.asarray(each.inputs["pixel_values"]) for each in seen))


def test_an_architecture_without_a_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"pictures of the architecture 'llama' are not read; those of qwen2_vl, "
    ):
        families.load(tmp_path, transformers.LlamaConfig(), None)


def test_inputs_that_wait_are_bounded_and_make_room_when_they_go(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_AHEAD_NBYTES", 1)
    seer, messages = reader(qwen), [{"role": "user", "content": [IMAGE, text("a")]}]
    [bare] = seer.prompt(messages, [encoded(picture(1))]).pictures
    first = seer.ahead(bare)
    assert first.inputs and not seer.ahead(bare).inputs
    del first
    gc.collect()
    assert seer.ahead(bare).inputs
