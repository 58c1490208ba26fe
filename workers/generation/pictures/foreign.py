"""Pictures of models without a family, read by transformers' own processor for `generate()` alone.

1. `load` makes the processor of a checkpoint with the image processor in its Pillow form. transformers asks for a video
   processor, and so for torchvision, where the processor of a family has one: no video is ever read here.
2. `prompt` has the chat template write the processor's word for each picture. The processor makes the text of the
   prompt from empty pictures of the same sizes, so that nothing is decoded before the prompt is counted. Where all
   sizes give the same text, the empty pictures are small.
3. `processed` decodes all pictures of a prompt and runs the processor over them together. What comes back beside the
   ids are the arguments of `generate()`: they are made for this prompt, never for parts of it.

A stand-in takes the place of the processor's tokenizer. It keeps the text that the processor wants tokenized, and gives
the ids that `workers.generation.templates` makes of the text. Control tokens that stand as text in a request are hidden
from the processor, which would take them for pictures.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchEncoding, BatchFeature

from ipc.errors import InvalidInput
from workers import image_settings
from workers.device import stepping
from workers.device.oom import is_out_of_memory
from workers.generation.formats.tags import Wrapper
from workers.generation.pictures.family import USUAL_SIZE, Picture
from workers.generation.pictures.reading import (
    CANNOT_TAKE,
    PromptReader,
    SeenPrompt,
    cannot_take,
    refused,
    size_of,
)
from workers.generation.template_forms import PROBE
from workers.generation.templates import BEGIN, END, ChatTemplate, Prompt
from workers.image_settings import NotServed
from workers.images import WHITE, RefusedImage, decoded, load_image_processor, most_pixels, require_vision

_SMALL = (48, 64)
"""Height and width in pixels of a picture that stands for pictures of all sizes."""
_SIZES = (_SMALL, (200, 40), (40, 200), (300, 400), (700, 500), (1400, 2100))
"""The last is larger than the tiles of all processors, some of which cut no smaller picture."""
_OWN_PARTS = {"image_processor", "tokenizer"}
_TEXT_KEYS = {"input_ids", "attention_mask", "labels"}
"""Outputs of processors that are no arguments for pictures."""
_MARKED = re.compile(f"{BEGIN}([^{BEGIN}{END}]+){END}")

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(slots=True)
class _Call:
    """One call of the processor: the ids of its text, None while only the text is wanted; and what it asked for."""

    ids: list[int] | None
    text: str = ""
    around: bool = True


_call: ContextVar[_Call] = ContextVar("_call")


class _Tokenizer:
    """Stands in for the tokenizer of a processor."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *_: Any, **options: Any) -> BatchEncoding:
        call = _call.get()
        call.text = text if isinstance(text, str) else text[0]
        call.around = bool(options.get("add_special_tokens", True))
        ids = [0] if call.ids is None else call.ids
        encoded = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
        if options.get("return_token_type_ids"):
            encoded["token_type_ids"] = [[0] * len(ids)]
        return BatchEncoding(encoded, tensor_type=options.get("return_tensors"))


class Foreign:
    """The processor of one model. Thread-safe."""

    def __init__(self, processor: Any, tokenizer: Any, word: str) -> None:
        """`processor` works with the stand-in; the chat template writes `word` for a picture."""
        self._processor, self.tokenizer, self.word = processor, tokenizer, word
        tokens = {word, *map(str, getattr(processor, "all_special_multimodal_tokens", ()))}
        ids = getattr(processor, "image_token_ids", None) or [getattr(processor, "image_token_id", None)]
        known = [number for number in ids if isinstance(number, int)]
        self.words = frozenset(tokens.union(map(str, tokenizer.convert_ids_to_tokens(known))))
        self.settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str).encode()
        self.by_size = True
        """Whether the text of a picture depends on its size."""
        self.changes_texts = False
        """Whether the processor changes texts without pictures."""

    def try_out(self) -> None:
        """Read pictures of several sizes, one and two, and none. Raises what the processor raises of pictures."""
        texts = {self.text(self.word, [size]) for size in _SIZES}
        self.by_size = len(texts) > 1
        self.text(f"{self.word} {self.word}", [_SMALL, _SMALL])
        # NOTE: the processors of some models read no text without a picture, and raise errors of any class.
        with suppress(Exception):
            self.changes_texts = self.text(PROBE, [])[0] != PROBE

    def text(self, text: str, sizes: Sequence[Size]) -> tuple[str, bool]:
        """What the processor makes of a text with pictures of these sizes, and whether special tokens belong around."""
        hidden: list[str] = []
        images = [_empty(size if self.by_size else _SMALL) for size in sizes]
        call = _Call(None)
        self._run(call, _hide(text, hidden), images)
        return _shown(call.text, hidden), call.around

    def arguments(self, text: str, ids: list[int], images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The arguments of `generate()` for PIL images in RGB in a text with these ids, without the ids."""
        processed = self._run(_Call(ids), _hide(text, []), images)
        return {name: torch.as_tensor(value) for name, value in processed.items() if name not in _TEXT_KEYS}

    def _run(self, call: _Call, text: str, images: Sequence[Any]) -> BatchFeature:
        begin = self.tokenizer.bos_token
        # NOTE: as `apply_chat_template` of processors does. A template that writes the begin means to write all of it.
        around = {"add_special_tokens": False} if begin is not None and text.startswith(begin) else {}
        token = _call.set(call)
        try:
            given: dict[str, Any] = {"text": [text], "images": [list(images)] if images else None}
            return self._processor(**given, return_tensors="pt", **around)
        finally:
            _call.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class Together(Picture):
    """All pictures of one prompt. `inputs` are the arguments of `generate()`.

    `text` is the prompt before the processor, with marks; `ids` are its tokens.
    """

    files: tuple[bytes, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    ids: tuple[int, ...] = field(default=(), repr=False)


class ForeignReader(PromptReader):
    """Prompts with pictures of a model without a family. All pictures of a prompt are one `Together`."""

    in_steps: ClassVar[bool] = False

    def __init__(self, foreign: Foreign, template: ChatTemplate) -> None:
        """`template` must have been made with the processor's `words` as `reserved`."""
        super().__init__(foreign.word, template)
        self._foreign = foreign
        self._before, self._behind = _around(foreign.tokenizer)
        seen, _ = foreign.text(foreign.word, [USUAL_SIZE])
        self._usual_tokens = len(foreign.tokenizer.encode(seen, add_special_tokens=False))

    @property
    def usual_tokens(self) -> int:
        """Tokens of a picture of a usual size, for estimates."""
        return self._usual_tokens

    def texts(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wrapper: Wrapper | None = None,
    ) -> Prompt:
        """The prompt of a conversation without pictures, with the special tokens of the processor around."""
        place = self._text_alone if self._foreign.changes_texts else None
        prompt = self._template.prompt(messages, tools, variables, wrapper, place)
        return self._whole(prompt, around=True)

    def prompt(
        self,
        messages: list[dict[str, Any]],
        images: Sequence[bytes],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wrapper: Wrapper | None = None,
    ) -> SeenPrompt:
        """The prompt of a conversation, see `PromptReader`."""
        sizes = [size_of(data, number) for number, data in enumerate(images, 1)]
        self._check_sizes(sizes)
        texts: list[str] = []
        around = True

        def place(pieces: list[str]) -> str:
            nonlocal around
            texts.append(self._word.join(pieces))
            try:
                text, around = self._foreign.text(texts[-1], sizes)
            except CANNOT_TAKE as error:
                raise refused(self._guilty(sizes), cannot_take(error)) from error
            return text

        prompt = self._rendered(messages, len(images), place, tools, variables, wrapper)
        prompt = self._whole(prompt, around=around)
        digest = blake2b(digest_size=32)
        for data in (self._foreign.settings, *images):
            digest.update(len(data).to_bytes(8, "big") + data)
        nowhere = np.empty(0, np.int64)
        ids = tuple(prompt.ids)
        seen = Together(
            digest.digest(), nowhere, 0, None, 1, len(images) == 1, b"", {}, tuple(images), texts[-1], ids
        )
        return SeenPrompt(prompt, (seen,))

    def processed(self, picture: Picture) -> Picture:
        """The pictures with the arguments of `generate()`.

        Raises `InvalidInput`, and `Deserted` between two pictures of a request that nobody waits for any more.
        """
        assert isinstance(picture, Together)
        steps, images = stepping.current(), []
        for number, data in enumerate(picture.files, 1):
            if steps.deserted:
                raise stepping.Deserted("the request ended before all of its images were decoded")
            try:
                images.append(decoded(data, WHITE))
            except RefusedImage as refusal:
                raise refused(number, str(refusal)) from None
        try:
            inputs = self._foreign.arguments(picture.text, list(picture.ids), images)
        except CANNOT_TAKE as error:
            sizes = [(image.height, image.width) for image in images]
            raise refused(self._guilty(sizes), cannot_take(error)) from error
        return replace(picture, inputs=inputs)

    def arguments(self, model: Any, length: int, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The arguments of `generate()` on the model's device; numbers with a fraction have the model's dtype."""
        [together] = pictures
        return {
            name: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
            for name, value in together.inputs.items()
        }

    def _text_alone(self, text: str) -> str:
        return self._foreign.text(text, [])[0]

    def _check_sizes(self, sizes: Sequence[Size]) -> None:
        """Refuse more pixels than may be in memory, as the processor has all at once. Raises `InvalidInput`."""
        pixels, most = sum(height * width for height, width in sizes), most_pixels()
        if pixels > most:
            raise InvalidInput(
                f"messages: {len(sizes)} images with {pixels} pixels in all, a model without a family of ours takes "
                f"{most} (limits.max_image_pixels)",
                param="messages",
            )

    def _guilty(self, sizes: Sequence[Size]) -> int:
        """The number of the first picture on which the processor raises alone, else 1."""
        for number, size in enumerate(sizes, 1):
            try:
                self._foreign.text(self._word, [size])
            except CANNOT_TAKE:
                return number
        return 1

    def _whole(self, prompt: Prompt, *, around: bool) -> Prompt:
        begin = self._foreign.tokenizer.bos_token
        if not around or (begin is not None and prompt.text.startswith(begin)):
            return prompt
        return prompt._replace(ids=[*self._before, *prompt.ids, *self._behind])


def load(directory: Path, config: Any, tokenizer: Any, *, trust_remote_code: bool = False) -> Foreign:
    """The processor of the model in a directory.

    Raises `NotServed` for an architecture whose processor cannot be had or used, with the reason, `DamagedFile` for
    files that make no processor, OSError without the file of the image processor, ImportError without pillow.
    """
    stored = _stored(directory)
    kind = _processor_class(config.model_type, stored)
    others = set(kind.get_attributes()) - _OWN_PARTS - {"video_processor"}
    if others:
        raise NotServed(f"{kind.__name__} reads more than pictures and text: {', '.join(sorted(others))}")
    images = _images(directory, trust_remote_code=trust_remote_code)
    own = copy.deepcopy(tokenizer)
    with image_settings.trying(image_settings.PROCESSOR):
        processor = _made(kind, stored, images, own)
        word = getattr(processor, "image_token", None)
        if not isinstance(word, str) or not word:
            raise NotServed(f"{kind.__name__} names no token that stands for a picture")
        if len(own) != len(tokenizer):
            raise NotServed(f"the tokenizer lacks tokens that {kind.__name__} adds")
        processor.tokenizer = _Tokenizer(own)
        # NOTE: it compares tokens with the text, of which the stand-in gives other tokens.
        processor._check_special_mm_tokens = lambda *_, **__: None
        foreign = Foreign(processor, own, word)
        try:
            foreign.try_out()
        except Exception as error:
            # NOTE: files are damaged only if the processor fails with the tokenizer of its own as well.
            if not is_out_of_memory(error) and _reads(_made(kind, stored, images, own), word):
                raise NotServed(
                    f"{kind.__name__} reads pictures, but not as they are handed over here ({type(error).__name__})"
                ) from error
            raise
    return foreign


def _reads(processor: Any, word: str) -> bool:
    """Whether a processor as transformers has it reads a picture, in the list of a text or by itself."""
    for images in ([[_empty(_SMALL)]], [_empty(_SMALL)]):
        try:
            processor(text=[word], images=images, return_tensors="pt")
        except Exception:
            continue
        return True
    return False


def _processor_class(model_type: str, stored: Mapping[str, Any]) -> Any:
    """The class of a processor in transformers. Raises `NotServed` for one that needs a package beyond Pillow."""
    from transformers.models.auto import processing_auto

    names: Mapping[str, Any] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    name = stored.get("processor_class") or names.get(model_type)
    if not isinstance(name, str):
        raise NotServed(f"transformers has no processor for {model_type!r}")
    try:
        kind = processing_auto.processor_class_from_name(name)
    except ImportError as error:
        raise NotServed(f"{name} cannot be imported: {_first_line(error)}") from error
    # NOTE: without a package transformers gives a class that only names the package.
    missing = [
        name for name in getattr(kind, "_backends", None) or () if name not in ("torch", "vision", "pil")
    ]
    if missing:
        raise NotServed(f"{name} needs {', '.join(missing)}, which is not installed")
    if kind is None or not hasattr(kind, "get_attributes"):
        raise NotServed(f"{name} is no processor of transformers")
    return kind


def _images(directory: Path, *, trust_remote_code: bool) -> Any:
    try:
        return load_image_processor(directory, trust_remote_code=trust_remote_code)
    except image_settings.DamagedFile as error:
        if "torchvision" in str(error.__cause__):
            raise NotServed(
                f"the image processor has no form for Pillow, only one that needs torchvision ({_first_line(error)})"
            ) from error
        raise


def _stored(directory: Path) -> dict[str, Any]:
    """The options of the processor; none without a file."""
    return dict(image_settings.read_object(directory, image_settings.PROCESSOR))


def _made(kind: Any, stored: Mapping[str, Any], images: Any, tokenizer: Any) -> Any:
    """A processor of these parts, and without videos."""
    parts: dict[str, Any] = {"image_processor": images, "tokenizer": tokenizer}
    if "video_processor" in kind.get_attributes():
        parts["video_processor"] = None
    # NOTE: the check of the parts' classes asks for torchvision.
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    names = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount]
    options = {name: value for name, value in stored.items() if name in names and name not in parts}
    return unchecked(**parts, **options)


def _empty(size: Size) -> Any:
    height, width = size
    return require_vision().new("RGB", (width, height))


def _hide(text: str, hidden: list[str]) -> str:
    """A text with marks in which numbers stand for marked control tokens, which are put into `hidden`."""

    def number(found: re.Match[str]) -> str:
        hidden.append(found[1])
        return f"{BEGIN}{len(hidden) - 1}{END}"

    return _MARKED.sub(number, text)


def _shown(text: str, hidden: Sequence[str]) -> str:
    return _MARKED.sub(lambda found: f"{BEGIN}{hidden[int(found[1])]}{END}", text)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and behind each text."""
    bare, whole = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
