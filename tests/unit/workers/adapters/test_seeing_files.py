"""The files of a chat model that sees: the template for pictures, and bounds on the area of pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import chat_models, chat_tokenizers, seeing
from tests.tiny.pictures import encoded, picture
from tests.unit.workers.adapters.test_seeing_adapter import context
from workers.adapters.shared.causal_files import CausalFiles

ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.save("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def placeholders(directory: Path, **options: Any) -> int:
    """Placeholders of a picture of 320 x 240 pixels."""
    files = CausalFiles(replace(context(directory), options=options))
    tokenizer = files.tokenizer()
    family = files.family(tokenizer)
    assert family is not None
    reader = files.reader(family, files.template(tokenizer, family))
    assert reader is not None
    [found] = reader.prompt(ASKED, [encoded(picture(1, 320, 240))]).pictures
    assert len(found.places) == len(reader.processed(found).inputs["pixel_values"]) // 4
    return len(found.places)


def test_bounds_of_the_options_go_before_those_of_the_files(directory: Path) -> None:
    assert placeholders(directory) == 6 * 9
    assert placeholders(directory, max_pixels=4096) == 3 * 4
    assert placeholders(directory, max_pixels=1 << 20) == 15 * 20
    assert placeholders(directory, min_pixels=4 * 320 * 240, max_pixels=1 << 20) == 30 * 40


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_pixels": "many"}, "max_pixels: 'many' is no number of pixels"),
        ({"min_pixels": 9000, "max_pixels": 5000}, "min_pixels: 9000 is over max_pixels, 5000"),
    ],
)
def test_bounds_that_no_picture_meets_end_the_load(
    directory: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        placeholders(directory, **options)


def test_a_model_of_texts_has_no_bounds_of_pictures(tmp_path: Path) -> None:
    files = CausalFiles(
        replace(context(chat_models.save("chatml", tmp_path / "text")), options={"max_pixels": 4096})
    )
    with pytest.raises(ValueError, match="max_pixels: only models of Qwen that see have this option"):
        files.family(files.tokenizer())


def test_the_template_that_is_stored_for_pictures_is_used(tmp_path: Path) -> None:
    directory = seeing.save("qwen2_5_vl", tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    stored = chat_tokenizers.template("seeing_qwen2_5_vl").replace("helpful assistant", "painter")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": stored}))
    files = CausalFiles(context(directory))
    tokenizer = files.tokenizer()
    family, said = files.family(tokenizer), [{"role": "user", "content": "a"}]
    assert "You are a painter." in files.template(tokenizer, family).prompt(said).text
    named = CausalFiles(replace(context(directory), options={"chat_template": "{{ messages[0].content }}!"}))
    assert named.template(tokenizer, family).prompt(said).text == "a!"


@pytest.mark.parametrize("source", ["", "{{ messages[0].role + messages[0].content }}", "{{ messages }}"])
def test_a_model_whose_template_shows_no_picture_is_served_without_pictures(
    tmp_path: Path, source: str
) -> None:
    directory = seeing.save("qwen2_5_vl", tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    if source:
        (directory / "chat_template.jinja").write_text(source)
    files = CausalFiles(context(directory))
    tokenizer = files.tokenizer()
    family = files.family(tokenizer)
    assert family is not None
    assert files.reader(family, files.template(tokenizer, family)) is None
