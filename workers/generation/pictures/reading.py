"""Messages with pictures become token ids and places.

`PromptReader` is what all readers share. `PictureReader` is that of a model with a family:

1. The size of each picture is read from its header, and the family tells what stands for the picture in the prompt.
2. The chat template writes a word for each picture. The word becomes the text of the picture's layout, in which one
   token stands for each run of placeholders. The same word in a string of the request stays text.
3. The whole text is tokenized, so that words join across the borders of pictures as they do in transformers.
4. Each run gets its length. Its tokens are the places of the picture.

No pixel is decoded before `processed`, which makes the inputs of the vision tower: counting and refusing cost
milliseconds, and a picture whose features are stored is never decoded. Inputs may have a thousand times the bytes of
their file, so `ahead` makes none while those of earlier pictures have `MOST_AHEAD_NBYTES`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ipc.errors import InvalidInput
from workers.generation.formats.tags import Wrapper
from workers.generation.pictures.family import Family, Layout, Picture, arguments_of
from workers.generation.template_forms import PROBE, shows
from workers.generation.templates import ChatTemplate, Prompt, pieces_between
from workers.images import WHITE, RefusedImage, decoded, upright_size

_DIGEST_NBYTES = 32
CANNOT_TAKE = (ArithmeticError, TypeError, ValueError)
"""What image processors raise of pictures that they do not take."""
MOST_AHEAD_NBYTES = 512 << 20
"""Bytes of inputs that wait in one model; each preparing thread may exceed them by a picture."""


class SeenPrompt(NamedTuple):
    """A prompt with its pictures in the order of their places. In the prompt's text a run is one token."""

    prompt: Prompt
    pictures: tuple[Picture, ...]


class PromptReader(ABC):
    """Prompts with pictures of one model. Methods may be called from several threads."""

    in_steps: ClassVar[bool] = True
    """Whether an engine may make features of single pictures, and compute prompts in parts."""

    def __init__(self, word: str, template: ChatTemplate) -> None:
        """The chat template writes `word` for a picture."""
        self._word, self._template = word, template
        self._waiting: dict[int, int] = {}
        """Bytes of the tensors that `ahead` has made and somebody still holds."""
        self._numbers = count()

    def check(self) -> None:
        """Raise ValueError if the chat template does not show a picture and a text of a user."""
        parts = [{"type": "image"}, {"type": "text", "text": PROBE}]
        counts: list[int] = []

        def place(text: str) -> str:
            counts.append(len(pieces_between(self._word, text)) - 1)
            return text

        try:
            prompt = self._template.prompt([{"role": "user", "content": parts}], place=place)
            is_shown = counts == [1] and shows(prompt.text)
        except InvalidInput:
            # NOTE: there is no template, or it takes texts only.
            is_shown = False
        if not is_shown:
            raise ValueError(
                "the chat template of the model does not show a picture and a text of a user: "
                "name another one with the option chat_template"
            )

    @property
    @abstractmethod
    def usual_tokens(self) -> int:
        """Placeholders of a picture of a usual size, for estimates."""

    def texts(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wrapper: Wrapper | None = None,
    ) -> Prompt:
        """The prompt of a conversation without pictures, as `ChatTemplate.prompt` makes it."""
        return self._template.prompt(messages, tools, variables, wrapper)

    @abstractmethod
    def prompt(
        self,
        messages: list[dict[str, Any]],
        images: Sequence[bytes],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wrapper: Wrapper | None = None,
    ) -> SeenPrompt:
        """The prompt of a conversation, as `ChatTemplate.prompt` makes it.

        `images` are encoded pictures in the order of the parts `{"type": "image"}` in `messages`. Raises
        `InvalidInput` for a picture that is not read, with its number, and for a template that leaves out pictures.
        """

    @abstractmethod
    def processed(self, picture: Picture) -> Picture:
        """The picture with its `inputs`. Raises `InvalidInput` for a picture that cannot be decoded."""

    @abstractmethod
    def arguments(self, model: Any, length: int, pictures: Sequence[Picture]) -> dict[str, Any]:
        """What a whole model takes for the pictures of a text of so many tokens, beside the ids.

        `pictures` have `inputs`.
        """

    def ahead(self, picture: Picture) -> Picture:
        """`processed`, or the picture as it is while too many inputs wait. Raises as `processed`."""
        if sum(list(self._waiting.values())) >= MOST_AHEAD_NBYTES:
            return picture
        processed = self.processed(picture)
        for tensor in processed.inputs.values():
            number = next(self._numbers)
            self._waiting[number] = tensor.nbytes
            weakref.finalize(tensor, self._waiting.pop, number).atexit = False
        return processed

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        count: int,
        place: Callable[[list[str]], str],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        wrapper: Wrapper | None,
    ) -> Prompt:
        """The prompt of a conversation with so many pictures.

        `place` makes the text of the pieces before, between and behind the pictures. Raises `InvalidInput`.
        """
        roles = [message.get("role") for message in messages for part in _parts(message) if _is_image(part)]
        if len(roles) != count:
            raise InvalidInput(f"messages: {len(roles)} places for {count} images", param="messages")

        def placed(text: str) -> str:
            pieces = pieces_between(self._word, text)
            if len(pieces) != count + 1:
                raise InvalidInput(
                    f"messages: the chat template of the model shows {len(pieces) - 1} of {count} images, which "
                    f"stand in messages of the roles {', '.join(sorted(set(map(repr, roles))))}",
                    param="messages",
                )
            return place(pieces)

        return self._template.prompt(messages, tools, variables, wrapper, placed)


class PictureReader(PromptReader):
    """Prompts with pictures of a model with a family."""

    def __init__(self, family: Family, template: ChatTemplate) -> None:
        """`template` must have been made with the family's `words` as `reserved`."""
        super().__init__(family.word, template)
        self.family, self._settings = family, family.settings

    @property
    def usual_tokens(self) -> int:
        """Placeholders of a picture of a usual size, for estimates."""
        return self.family.usual_tokens

    def prompt(
        self,
        messages: list[dict[str, Any]],
        images: Sequence[bytes],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wrapper: Wrapper | None = None,
    ) -> SeenPrompt:
        """The prompt of a conversation, see `PromptReader`."""
        layouts = [self._layout(data, at, len(images)) for at, data in enumerate(images, 1)]

        def place(pieces: list[str]) -> str:
            first, *others = pieces
            return first + "".join(layout.text + piece for layout, piece in zip(layouts, others, strict=True))

        prompt = self._rendered(messages, len(images), place, tools, variables, wrapper)
        ids, places = _with_runs(np.asarray(prompt.ids, np.int64), layouts, self.family.image_id)
        pictures = [
            self._picture(data, layout, own, at, len(images))
            for at, (data, layout, own) in enumerate(zip(images, layouts, places, strict=True), 1)
        ]
        return SeenPrompt(prompt._replace(ids=ids), tuple(pictures))

    def processed(self, picture: Picture) -> Picture:
        """The picture with its `inputs`. Raises `InvalidInput` for a picture that cannot be decoded."""
        try:
            image = decoded(picture.data, WHITE)
            return replace(picture, inputs=self.family.inputs(image, picture.alone))
        except RefusedImage as refusal:
            raise refused(picture.number, str(refusal)) from None
        except CANNOT_TAKE as error:
            raise refused(picture.number, cannot_take(error)) from error

    def arguments(self, model: Any, length: int, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """What a whole model takes for the pictures, see `arguments_of`."""
        return arguments_of(model, self.family, length, pictures)

    def _layout(self, data: bytes, number: int, count: int) -> Layout:
        height, width = size_of(data, number)
        try:
            return self.family.layout(height, width, count == 1)
        except ValueError as error:
            raise refused(number, f"{width} x {height} pixels: {error}") from None

    def _picture(self, data: bytes, layout: Layout, places: np.ndarray, number: int, count: int) -> Picture:
        alone = count == 1
        company = bytes([alone]) if self.family.by_company else b""
        digest = blake2b(company, digest_size=_DIGEST_NBYTES)
        digest.update(len(self._settings).to_bytes(8, "big") + self._settings)
        digest.update(data)
        return Picture(digest.digest(), places, layout.cost, layout.grid, number, alone, data)


def _with_runs(
    ids: np.ndarray, layouts: Sequence[Layout], image_id: int
) -> tuple[list[int], list[np.ndarray]]:
    """(ids, places of each picture) of a prompt in which one token stands for each run."""
    runs = np.asarray([run for layout in layouts for run in layout.runs], np.int64)
    repeats, is_run = np.ones(len(ids), np.int64), ids == image_id
    if np.count_nonzero(is_run) != len(runs):
        raise RuntimeError(f"the prompt has {np.count_nonzero(is_run)} runs of placeholders, not {len(runs)}")
    repeats[is_run] = runs
    whole = ids.repeat(repeats)
    [places] = np.nonzero(whole == image_id)
    ends = np.cumsum([sum(layout.runs) for layout in layouts], dtype=np.int64)
    return whole.tolist(), np.split(places, ends)[:-1]


def _parts(message: Mapping[str, Any]) -> Iterable[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def size_of(data: bytes, number: int) -> tuple[int, int]:
    """(height, width) in pixels of an upright picture. Raises `InvalidInput` with the number of the picture."""
    try:
        return upright_size(data)
    except RefusedImage as refusal:
        raise refused(number, str(refusal)) from None


def cannot_take(error: Exception) -> str:
    """Why a picture is refused on which an image processor has raised."""
    return f"the model's image processor cannot take the picture ({type(error).__name__})"


def refused(number: int, why: str) -> InvalidInput:
    """The error of a picture by its number in the prompt."""
    # NOTE: frontends know the field of the picture, and tell the reason with its name.
    return InvalidInput(f"messages: image {number}: {why}", param="messages", image=number, why=why)
