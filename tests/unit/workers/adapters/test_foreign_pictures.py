"""Chat models that see and have no family of ours: `generate()` alone, with pictures by transformers' own processor."""

from __future__ import annotations

import copy
import functools
import io
import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from ipc.errors import InputTooLong, InvalidInput
from ipc.wire.messages import GenerateCall, Written
from tests.fakes.generating import Answers
from tests.fakes.seeing import TOKENS, Chat
from tests.harness import seeing_reference
from tests.tiny import loras, seeing_others
from tests.tiny.models import write_json
from tests.tiny.pictures import encoded, picture
from tests.unit.workers.adapters.test_seeing_adapter import (
    answer,
    context,
    decoded_until_the_end,
    prepared,
)
from workers.adapters.base import Prepared
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared.causal_files import CausalFiles
from workers.generation.pictures import foreign, reading
from workers.generation.plain import PlainEngine
from workers.image_settings import DamagedFile

QUESTION = "What do you see?"
CHATS = {
    "one": Chat((1, QUESTION)),
    "none": Chat((QUESTION,)),
    "two": Chat((1, "Compare.", 2, QUESTION)),
    "two in a row": Chat((3, 4, QUESTION)),
}


class Other:
    """One tiny model, and what transformers says of it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, seeing_others.save(name, directory)
        self.adapter = CausalAdapter.load(context(self.directory))
        self._model: Any = transformers.AutoModelForImageTextToText.from_pretrained(str(directory)).eval()
        self._processor = seeing_reference.processor(directory)

    def merged(self, lora: Path) -> Other:
        """The model with the weights of an adapter of rank 4 and alpha 8."""
        found = copy.copy(self)
        found._model = copy.deepcopy(self._model)
        tensors = load_file(lora / loras.WEIGHTS)
        for key, down in tensors.items():
            if "lora_A" in key:
                path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = tensors[key.replace("lora_A", "lora_B")]
                found._model.get_submodule(path).weight.data += 2 * (up @ down)
        return found

    def inputs(self, messages: list[dict[str, Any]]) -> Any:
        """What transformers' processor makes of a conversation whose images stand in it."""
        images = [part["image"] for message in messages for part in message["content"] if "image" in part]
        tokenizer = self._processor.tokenizer
        if self.name == "paligemma" and not images:
            # NOTE: its processor reads no prompt without a picture.
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        return self._processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )

    @functools.cache  # noqa: B019
    def expected(self, chat: Chat, tokens: int = TOKENS) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, and of the answer of `generate()`."""
        inputs = self.inputs(chat.messages(Image.open(io.BytesIO(data)) for data in chat.files))
        given = {name: value for name, value in inputs.items() if name != "labels"}
        found = self._model.generate(**given, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        ids = inputs["input_ids"][0].tolist()
        return ids, found[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Other]:
    """The model of a name, made once."""
    return functools.cache(lambda name: Other(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=seeing_others.OTHERS)
def other(request: pytest.FixtureRequest, model_of: Callable[[str], Other]) -> Other:
    """Each model."""
    return model_of(request.param)


@pytest.fixture
def aya(model_of: Callable[[str], Other]) -> Other:
    """A model whose pictures take tokens by their size."""
    return model_of("aya_vision")


@pytest.fixture
def llava(model_of: Callable[[str], Other]) -> Other:
    """A model whose pictures take the same tokens whatever their size."""
    return model_of("llava")


@pytest.mark.sample(3)
def test_prompts_and_answers_are_those_of_generate(other: Other) -> None:
    assert other.adapter.sees and type(other.adapter.engine) is PlainEngine
    assert other.adapter.image_tokens > 0
    for chat in CHATS.values():
        assert prepared(other.adapter, chat).prompt == other.expected(chat)[0]
    found = answer(other.adapter, *CHATS.values())
    assert found == [other.expected(chat)[1] for chat in CHATS.values()]
    first, second = Chat((1, QUESTION)), Chat((2, QUESTION))
    assert other.expected(first)[1] != other.expected(second)[1], "another picture gives another text"


def test_a_stream_that_rests_goes_on_as_before(aya: Other) -> None:
    first, second = CHATS["one"], CHATS["two"]
    engine, found = aya.adapter.engine, Answers()
    for number, chat in enumerate((first, second)):
        request = prepared(aya.adapter, chat)
        request.key = number
        engine.add(request)
    for _ in range(2):
        found.take(engine.step())
    engine.pause(0)
    while engine.has_work:
        found.take(engine.step())
    engine.resume(0)
    found.run(engine)
    assert [found.tokens[number, 0] for number in (0, 1)] == [
        aya.expected(chat)[1] for chat in (first, second)
    ]


def test_choices_of_one_request_see_the_same_pictures(aya: Other) -> None:
    request = prepared(aya.adapter, CHATS["two"], n=2)
    request.key = "k"
    aya.adapter.engine.add(request)
    found = Answers()
    found.run(aya.adapter.engine)
    assert [found.tokens["k", choice] for choice in (0, 1)] == [aya.expected(CHATS["two"])[1]] * 2


@pytest.mark.sample
@pytest.mark.parametrize("size", [(1, 1), (16, 16), (300, 5), (7, 320), (96, 96), (400, 300)])
def test_pictures_of_all_sizes_take_the_tokens_of_transformers(other: Other, size: tuple[int, int]) -> None:
    image = picture(5, *size) if min(size) > 4 else Image.new("RGB", size, "red")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    call = GenerateCall(messages=asked, images=[encoded(image)], counts_only=True)
    asked_there = [{"role": "user", "content": [{"type": "image", "image": image}, asked[0]["content"][1]]}]
    try:
        wanted = other.inputs(asked_there)["input_ids"][0].tolist()
    except ValueError:
        with pytest.raises(
            InvalidInput, match="image 1: the model's image processor cannot take the picture"
        ):
            other.adapter.prepare(call.items, call)
    else:
        assert other.adapter.prompt_ids(call) == wanted
        [item] = other.adapter.prepare(call.items, call)
        assert isinstance(item, Prepared) and item.cost == len(wanted), "what is counted is what is asked"


@pytest.mark.sample(3)
def test_a_placeholder_in_a_text_stays_text(other: Other) -> None:
    word = seeing_reference.processor(other.directory).image_token
    said = f"{word} is {word}? {word}"
    chat, bare = Chat((1, said)), Chat((1, QUESTION))
    found, plain = (prepared(other.adapter, each).prompt for each in (chat, bare))
    tokenizer = other.adapter.tokenizer
    assert said in tokenizer.decode(found)
    placeholder = max(set(plain), key=plain.count)
    assert found.count(placeholder) == plain.count(placeholder)
    assert len(answer(other.adapter, chat)[0]) == TOKENS


def test_counting_and_refusing_decode_nothing(aya: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(foreign, "decoded", decode)
    counted = prepared(aya.adapter, CHATS["two"], counts_only=True)
    assert counted.prompt == aya.expected(CHATS["two"])[0] and not counted.pictures
    for truncate in (False, True):
        with pytest.raises(InputTooLong, match="a prompt with images is not cut"):
            prepared(aya.adapter, Chat((1, "word " * 600)), truncate=truncate)


def test_all_pictures_of_a_prompt_have_the_pixels_of_one_at_most(
    aya: Other, llava: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "decoded", None)
    monkeypatch.setattr(foreign, "most_pixels", lambda: 5000)
    for other in (aya, llava):
        with pytest.raises(InvalidInput, match=r"2 images with 8208 pixels in all, .* 5000 "):
            prepared(other.adapter, Chat((1, 2, QUESTION)))


@pytest.mark.parametrize(("cuts_above", "by_size"), [(1000, True), (1 << 20, False)])
def test_a_processor_that_cuts_large_pictures_only_goes_by_size(
    llava: Other, monkeypatch: pytest.MonkeyPatch, cuts_above: int, by_size: bool
) -> None:
    def cut(self: foreign.Foreign, asked: str, sizes: Any) -> tuple[str, bool]:
        return asked * (2 if max(map(max, sizes)) > cuts_above else 1), True

    tried = copy.copy(llava.adapter.engine.reader._foreign)
    monkeypatch.setattr(foreign.Foreign, "text", cut)
    tried.try_out()
    assert tried.by_size is by_size


@pytest.mark.parametrize(
    "torn", [b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", encoded(picture(1))[:-40]]
)
def test_a_picture_that_cannot_be_read_is_refused_with_its_number(aya: Other, torn: bytes) -> None:
    call = GenerateCall(messages=CHATS["two"].messages(), images=[encoded(picture(1)), torn])
    with pytest.raises(InvalidInput, match="messages: image 2: cannot be decoded"):
        aya.adapter.prepare(call.items, call)


def test_a_picture_that_the_processor_does_not_take_is_named(
    aya: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = foreign.Foreign.text

    def picky(self: foreign.Foreign, asked: str, sizes: Any) -> tuple[str, bool]:
        if (20, 20) in sizes:
            raise ValueError("twenty")
        return text(self, asked, sizes)

    monkeypatch.setattr(foreign.Foreign, "text", picky)
    files = [encoded(picture(1)), encoded(picture(2, 20, 20))]
    call = GenerateCall(messages=CHATS["two"].messages(), images=files)
    with pytest.raises(
        InvalidInput, match=r"image 2: the model's image processor cannot take .* \(ValueError\)"
    ):
        aya.adapter.prepare(call.items, call)


def test_pictures_get_their_arguments_late_while_too_many_wait(
    aya: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_AHEAD_NBYTES", 0)
    assert not any(each.inputs for each in prepared(aya.adapter, CHATS["two"]).pictures)
    assert answer(aya.adapter, CHATS["two"]) == [aya.expected(CHATS["two"])[1]]


@pytest.fixture
def files(llava: Other, tmp_path: Path) -> Path:
    """A copy of the files of a model."""
    return Path(shutil.copytree(llava.directory, tmp_path / "llava"))


def is_seeing(directory: Path) -> bool:
    """Whether something reads pictures for the model of a directory."""
    files = CausalFiles(context(directory))
    return files.family(files.tokenizer()) is not None


@pytest.mark.parametrize(
    ("file", "values", "why"),
    [
        ("preprocessor_config.json", {"image_processor_type": "Cohere2VisionImageProcessor"}, "torchvision"),
        (
            "processor_config.json",
            {"processor_class": "PixtralProcessor"},
            "PixtralProcessor needs torchvision",
        ),
        (
            "processor_config.json",
            {"processor_class": "Gemma3nProcessor"},
            "reads more than pictures and text",
        ),
        ("processor_config.json", {"processor_class": "NoSuchProcessor"}, "is no processor of transformers"),
        ("preprocessor_config.json", None, "preprocessor_config.json"),
    ],
)
def test_a_model_whose_processor_cannot_be_had_reads_texts_and_the_log_says_why(
    files: Path, caplog: pytest.LogCaptureFixture, file: str, values: dict[str, Any] | None, why: str
) -> None:
    if values is None:
        (files / file).unlink()
    else:
        write_json(files / file, json.loads((files / file).read_text()) | values)
    assert not is_seeing(files)
    assert "is served without pictures" in caplog.text and why in caplog.text


@pytest.mark.parametrize(
    "kind", [transformers.Blip2Config, transformers.InstructBlipConfig, transformers.BlipConfig]
)
def test_a_model_that_answers_nothing_without_a_picture_is_refused(
    files: Path, kind: type[transformers.PreTrainedConfig]
) -> None:
    kind().save_pretrained(files)
    with pytest.raises(
        ValueError, match=r"Generation answers nothing without pixel_values.*, and conversations"
    ):
        CausalAdapter.load(context(files))


@pytest.mark.parametrize("kind", [transformers.Florence2Config, transformers.T5Gemma2Config])
def test_a_model_that_gives_prompts_to_an_encoder_is_refused(
    files: Path, kind: type[transformers.PreTrainedConfig]
) -> None:
    kind().save_pretrained(files)
    with pytest.raises(ValueError, match="Generation gives prompts to an encoder"):
        CausalAdapter.load(context(files))


def test_a_processor_that_takes_no_lists_of_pictures_leaves_the_model_its_texts(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json(files / "processor_config.json", {"processor_class": "GotOcr2Processor"})
    images = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}}
    write_json(files / "preprocessor_config.json", images)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(files))
    tokenizer.add_tokens(["<imgpad>"], special_tokens=True)
    tokenizer.save_pretrained(str(files))
    assert not is_seeing(files)
    assert "GotOcr2Processor reads pictures, but not as they are handed over here (ValueError)" in caplog.text


def test_a_missing_package_of_a_processor_is_named(
    files: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needy(*_: Any) -> Any:
        raise ImportError("Package `num2words` is required to run SmolVLM processor")

    monkeypatch.setattr(foreign, "_made", needy)
    assert not is_seeing(files) and "num2words" in caplog.text


def test_a_processor_that_wants_more_of_its_tokenizer_leaves_the_model_its_texts(
    files: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any, **__: Any) -> Any:
        raise KeyError("offset_mapping")

    monkeypatch.setattr(foreign._Tokenizer, "__call__", lacking)
    assert not is_seeing(files)
    assert "LlavaProcessor reads pictures, but not as they are handed over here (KeyError)" in caplog.text


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("preprocessor_config.json", {"crop_size": "wide"}),
        ("processor_config.json", {"patch_size": 0}),
        ("processor_config.json", {"num_additional_image_tokens": "one"}),
    ],
)
def test_a_damaged_file_ends_the_load_and_is_named(files: Path, file: str, values: dict[str, Any]) -> None:
    write_json(files / file, json.loads((files / file).read_text()) | values)
    with pytest.raises(DamagedFile, match=r"_config\.json"):
        is_seeing(files)


@pytest.mark.long
def test_a_model_that_does_not_take_what_its_processor_makes_reads_texts(
    files: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = foreign.Foreign.arguments

    def more(self: Any, *given: Any) -> dict[str, torch.Tensor]:
        return arguments(self, *given) | {"heat": torch.zeros(1)}

    monkeypatch.setattr(foreign.Foreign, "arguments", more)
    adapter = CausalAdapter.load(context(files))
    assert not adapter.sees and "generate() takes none" in caplog.text and "heat" in caplog.text
    assert len(answer(adapter, CHATS["none"])[0]) == TOKENS
    with pytest.raises(InvalidInput, match="takes text only"):
        prepared(adapter, CHATS["one"])


def test_the_log_says_that_a_model_sees_with_generate_alone(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert CausalAdapter.load(context(files)).sees
    assert "LlavaForConditionalGeneration sees with generate() alone; requests run one by one" in caplog.text


def test_a_text_goes_on_behind_the_tokens_that_another_worker_has_written(aya: Other) -> None:
    _, wanted = aya.expected(CHATS["two"])
    request = prepared(aya.adapter, CHATS["two"])
    request.key, request.written = "k", Written(seed=1, choices=[array("I", wanted[:3]).tobytes()])
    aya.adapter.engine.add(request)
    found = Answers()
    found.run(aya.adapter.engine)
    assert found.tokens["k", 0] == wanted[3:]


def test_an_adapter_of_the_text_gives_the_text_of_the_merged_model(llava: Other, tmp_path: Path) -> None:
    layers = [f"model.language_model.layers.{at}.self_attn.q_proj" for at in range(3)]
    path = loras.write_layers(
        tmp_path / "lora", dict.fromkeys(layers, (64, 64)), tuple(layers), spread=0.3, r=4, lora_alpha=8
    )
    adapter = CausalAdapter.load(context(llava.directory))
    adapter.loras.install("polite", adapter.loras.fit(path))
    found = Answers()
    for name in ("polite", ""):
        request = prepared(adapter, CHATS["two"], lora=name)
        request.key = name
        adapter.engine.add(request)
    found.run(adapter.engine)
    wanted = llava.merged(path).expected(CHATS["two"])[1]
    assert [found.tokens[name, 0] for name in ("polite", "")] == [wanted, llava.expected(CHATS["two"])[1]]
    assert wanted != llava.expected(CHATS["two"])[1]


@pytest.mark.parametrize("ended", ["cancelled", "late"])
def test_pictures_that_nobody_waits_for_are_not_decoded(
    llava: Other, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    assert decoded_until_the_end(llava.adapter, monkeypatch, foreign, ended) == 3, "of sixteen"
