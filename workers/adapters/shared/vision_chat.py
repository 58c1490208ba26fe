"""Conversations with pictures, as vision-language models read them.

1. `VisionChat` makes a `Prompt` of messages: the checkpoint's own chat template puts the marks around texts and
   pictures, and the mark of each picture is repeated for each of its tokens.
2. `VisionChatModel.collate` packs the prompts of a batch and joins the pictures of each rectangle of similar lengths.
3. `last_rows` runs the rectangles, padded on the right, and gives the vector of each prompt's last token.

A text that holds a mark for a picture or a video is refused, as the model would look for the picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from ipc.catalog.option_names import TEXT_BESIDE_IMAGES
from ipc.errors import InvalidInput
from ipc.wire.messages import EncodeCall, InputItem, ScoreCall
from workers.adapters.base import Excess, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.checkpoint import text_limit, tokenizer_of
from workers.adapters.shared.images import VisualEncoder, from_first_image
from workers.adapters.shared.known_ids import KnownIds, embedding_rows, filler_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import PackedBatch, TokenSequence, pack
from workers.adapters.shared.rectangles import PADDED, Rectangle, padded
from workers.adapters.shared.rope import LengthClasses
from workers.adapters.shared.tokenizing import as_ids, cut_to_fit, rust_copy
from workers.generation.template_forms import PROBE, shows
from workers.images import load_image_processor

_PIXELS = ("min_pixels", "max_pixels")
_INPUTS = ("pixel_values", "image_grid_thw", "image_sizes")


@dataclass(frozen=True, slots=True)
class Picture:
    """A processed picture: arguments of the model, to be joined along their first dimension, and its tokens."""

    inputs: Mapping[str, np.ndarray]
    tokens: int


_MARKED = "stands for a picture or a video in this model"

Part = str | Picture
Message = tuple[str, Sequence[Part]]
"""The role and the parts of a message."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a conversation, and its pictures in their order."""

    ids: list[int]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts of a batch, and for each rectangle of the packed row the arguments that describe its pictures."""

    packed: PackedBatch
    pictures: list[dict[str, torch.Tensor]]


class VisionChat:
    """Tokenizer, template and image processor of one model.  Thread-safe."""

    def __init__(self, tokenizer: Any, images: Any, template: str, config: Any) -> None:
        """Take the parts and the model's config, which names the tokens that stand for pictures and videos."""
        self.tokenizer, self._images, self._template, self._config = tokenizer, images, template, config
        self._backend = rust_copy(tokenizer)
        ids = (config.image_token_id, getattr(config, "video_token_id", None))
        self._marks = tokenizer.convert_ids_to_tokens([token for token in ids if token is not None])
        self.pad_id = int(tokenizer.pad_token_id or 0)

    @classmethod
    def read(cls, context: LoadContext, **pixels: int) -> VisionChat:
        """Read from the context's directory; reports the phase "tokenizer".

        `pixels`, and over them the options of the load, bound the size of pictures. Raises ValueError for a checkpoint
        without a chat template, or with one that leaves out texts or pictures, ImportError without pillow.
        """
        pixels |= {name: context.options[name] for name in _PIXELS if name in context.options}
        trust = context.trust_remote_code
        images = load_image_processor(context.directory, trust_remote_code=trust, **pixels)
        config = AutoConfig.from_pretrained(
            str(context.directory), local_files_only=True, trust_remote_code=trust
        )
        tokenizer = tokenizer_of(context)
        chat = cls(tokenizer, images, _template(tokenizer, context.directory), config)
        chat.check_template()
        return chat

    def check_template(self) -> None:
        """Raise ValueError if the template leaves out a text, or writes no mark for a picture before the text."""
        said = [{"role": "user", "content": [{"type": "image"}, _described(PROBE)]}]
        text = self._rendered(said)
        if not shows(text) or text.count(self._marks[0]) != 1:
            raise ValueError(
                "the chat template of the checkpoint does not show a picture and a text of a user"
            )

    def picture(self, image: Any) -> Picture:
        """An RGB image in the sizes of the model."""
        processed = self._images(images=[image], return_tensors="np")
        inputs = {name: np.asarray(processed[name]) for name in _INPUTS if name in processed}
        if "image_grid_thw" in inputs:
            return Picture(inputs, int(inputs["image_grid_thw"].prod()) // self._images.merge_size**2)
        side = int(self._config.vision_config.patch_size) * int(self._config.spatial_merge_size)
        return Picture(inputs, int((inputs["image_sizes"] // side).prod()))

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The conversation, up to where the model would answer. No text may hold a mark."""
        conversation = [
            {"role": role, "content": [_described(part) for part in parts]} for role, parts in messages
        ]
        text = self._rendered(conversation)
        pictures = tuple(part for _, parts in messages for part in parts if isinstance(part, Picture))
        before, *after = text.split(self._marks[0])
        filled = [
            self._marks[0] * picture.tokens + rest for picture, rest in zip(pictures, after, strict=True)
        ]
        [encoding] = self._backend.encode_batch([before + "".join(filled)])
        return Prompt(encoding.ids, pictures)

    def _rendered(self, conversation: list[dict[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            conversation, chat_template=self._template, add_generation_prompt=True, tokenize=False
        )
        return text

    def mark_in(self, text: str) -> str | None:
        """The first mark in a text of a caller, if any."""
        return next((mark for mark in self._marks if mark in text), None)

    def starts(self, text: str) -> list[int]:
        """Where the tokens of a text begin, in characters."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        return [start for start, _ in encoding.offsets]


class VisionChatModel(VisualEncoder):
    """Base of these families: a vision-language model of which the last token's vector is used."""

    uses = frozenset(("default_instruction", TEXT_BESIDE_IMAGES))

    def __init__(self, model: Any, chat: VisionChat, context: LoadContext) -> None:
        """Take over a loaded transformers model without its output matrix."""
        super().__init__(model, text_limit(model, context.max_sequence_length))
        self._chat, self._image_id = chat, int(model.config.image_token_id)
        self._filler, self._lengths = filler_of(model, chat.pad_id), LengthClasses(model)
        self._cut = self._lengths.within(PADDED)
        self.known_ids = KnownIds(embedding_rows(model), chat.tokenizer)

    def instruction_of(self, call: EncodeCall | ScoreCall, default: str) -> str:
        """The instruction of a call. Raises `InvalidInput` for an instruction that holds a mark."""
        instruction = call.instruction or OptionReader(call).text("default_instruction", default)
        if (mark := self._chat.mark_in(instruction)) is not None:
            before = call.names.options.removesuffix("options.")
            raise InvalidInput(f"{before}instruction: {mark!r} {_MARKED}")
        return instruction

    def parts_of(self, item: InputItem) -> list[Part] | ItemFailure:
        """The first picture of an item, then the text. An item with neither has an empty text."""
        text = item.text or ""
        if (mark := self._chat.mark_in(text)) is not None:
            return ItemFailure("INVALID_INPUT", f"text: {mark!r} {_MARKED}")
        if not item.images:
            return [text]
        picture = from_first_image(item, self._chat.picture)
        return picture if isinstance(picture, ItemFailure) else [picture, text]

    def fitted(self, text: str, messages: Callable[[str], Sequence[Message]]) -> Prepared | ItemFailure:
        """The conversation around a text, whose end is cut so that all tokens are within the limit.

        Fails where the limit leaves no room for the rest of the conversation.
        """
        starts = self._chat.starts(text)
        prompt, tokens, room = cut_to_fit(
            text, starts, self._limit, lambda kept: self._chat.prompt(messages(kept)), _length
        )
        if len(prompt.ids) > self._limit:
            return ItemFailure(
                "INPUT_TOO_LONG",
                f"{len(prompt.ids)} tokens without the text, the limit of this model is {self._limit}",
            )
        excess = Excess(tokens, self._limit) if room < len(starts) else None
        return Prepared(prompt, len(prompt.ids), excess is not None, excess=excess)

    def ids_of(self, payload: Prompt) -> list[list[int]]:
        """The conversation."""
        return [payload.ids]

    def collate(self, prepared: Sequence[Prepared]) -> PromptBatch:
        """The packed prompts, and the pictures of each rectangle."""
        prompts: list[Prompt] = [item.payload for item in prepared]
        packed = pack([TokenSequence(as_ids(prompt.ids)) for prompt in prompts])
        order = packed.restore.argsort().tolist()
        pictures, first = [], 0
        for _, lens in self._cut.rectangles(packed):
            rows = order[first : first + len(lens)]
            pictures.append(_joined([picture for row in rows for picture in prompts[row].pictures]))
            first += len(lens)
        return PromptBatch(packed, pictures)

    def padding_ratio(self, batch: PromptBatch) -> float:
        """Share of padding in the rectangles."""
        return self._cut.padding([batch.packed])

    def last_rows(self, batch: PromptBatch) -> torch.Tensor:
        """fp32 [prompts, width]: the vector of each prompt's last token."""
        device = self._model.device
        packed = batch.packed.to(device)
        rows = [
            self._last(part, pictures)
            for part, pictures in zip(padded(packed, self._filler, self._cut), batch.pictures, strict=True)
        ]
        return torch.cat(rows).index_select(0, packed.restore)

    def _last(self, part: Rectangle, pictures: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._lengths.reset()
        moved = {name: tensor.to(self._model.device) for name, tensor in pictures.items()}
        hidden = self._model(
            **part.inputs(),
            **moved,
            mm_token_type_ids=(part.ids == self._image_id).int(),
            use_cache=False,
        ).last_hidden_state
        rows = torch.arange(len(part.ids), device=part.ids.device)
        return hidden[rows, part.mask.sum(dim=1) - 1].float()


def _length(prompt: Prompt) -> int:
    return len(prompt.ids)


def _described(part: Part) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _joined(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Arguments of the model for these pictures."""
    names = pictures[0].inputs if pictures else ()
    return {
        name: torch.from_numpy(np.concatenate([picture.inputs[name] for picture in pictures]))
        for name in names
    }


def _template(tokenizer: Any, directory: Path) -> str:
    """The chat template of a checkpoint. Raises ValueError where there is none."""
    template = tokenizer.chat_template
    older = directory / "chat_template.json"
    if not template and older.exists():
        template = json.loads(older.read_text(encoding="utf-8")).get("chat_template")
    if not isinstance(template, str):
        raise ValueError("the checkpoint has no chat template")
    return template
