"""The base of families that write a text about a picture, token by token, greedily or by beam search.

1. `prepare` processes each picture. The prompt is made once per request.
2. Requests share a batch if task, number of tokens and beams are equal. `collate` groups pictures of equal shape with
   prompts of equal length.
3. `extract` writes all texts of a group together. Each token is a step for the watchdog, and rows whose request was
   cancelled end. A group without rows ends at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from ipc.errors import InputTooLong
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import ItemFailure, Prepared
from workers.adapters.shared.extracting import NOT_FINITE
from workers.adapters.shared.image_extracting import ImageExtractAdapter, Size, size_of
from workers.adapters.shared.known_ids import KnownIds, embedding_rows
from workers.adapters.shared.options import NO_LIMIT, OptionReader
from workers.device import stepping

MOST_TOKENS = 4096
MOST_BEAMS = 16
_ABANDONED = ItemFailure("DEADLINE_EXCEEDED", "writing ended before the text was whole")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Task, prompt token ids, and generation options of a request."""

    task: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    num_beams: int


@dataclass(frozen=True, slots=True)
class Page:
    """One prepared picture: arguments of the model, to be joined along their first dimension, size, and assignment."""

    inputs: Mapping[str, np.ndarray]
    size: Size
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages that are written together, and their places in the batch."""

    pages: list[Page]
    places: list[int]


class ImageWriter(ImageExtractAdapter):
    """Base of the families that generate; `default_task` and `default_tokens` are defaults of the options."""

    default_task: str
    default_tokens: ClassVar[int]
    asks = True

    def __init__(self, model: Any, processor: Any) -> None:
        """Take over a loaded model and its processor."""
        super().__init__(model, processor)
        self.known_ids = KnownIds(embedding_rows(model), processor.tokenizer)

    @abstractmethod
    def prompt_of(self, task: str, call: ExtractCall) -> tuple[str, tuple[int, ...]]:
        """The task for `read`, and the token ids of its prompt. Raises `InvalidInput` for a task of another model."""

    @abstractmethod
    def room_for(self, prompt: Sequence[int]) -> int:
        """How many tokens the model can write after this prompt; below 1 for a prompt that is too long."""

    @abstractmethod
    def model_inputs(self, prompts: torch.Tensor) -> Mapping[str, Any]:
        """Arguments of `generate` beside the pictures, for prompts int64 [n, t]."""

    @abstractmethod
    def read(self, ids: list[int], page: Page) -> Extraction:
        """The findings in the written token ids."""

    def wanted_of(self, call: ExtractCall) -> Assignment:
        """The assignment of a call. Raises `InputTooLong` when its prompt leaves nothing to write."""
        options = OptionReader(call)
        task, prompt = self.prompt_of(options.text("task", self.default_task), call)
        room = self.room_for(prompt)
        if room < 1:
            raise InputTooLong(
                f"params.instruction: {len(prompt)} tokens with the task, {1 - room} more than the model has room for"
            )
        # A limit above the model's room has no effect, so any such value is allowed.
        most = MOST_TOKENS if room > MOST_TOKENS else NO_LIMIT
        return Assignment(
            task,
            prompt,
            min(room, options.whole("max_new_tokens", self.default_tokens, 1, most)),
            options.whole("num_beams", 1, 1, MOST_BEAMS),
        )

    def group(self, call: Call) -> Hashable:
        """Task, length and beams."""
        if not isinstance(call, ExtractCall):
            return None
        wanted = self.wanted_of(call)
        return wanted.task, wanted.max_new_tokens, wanted.num_beams

    def prepared(self, image: Any, item: InputItem, wanted: Any) -> Prepared | ItemFailure:
        """Pixel values of one picture; the cost is the tokens of picture and prompt."""
        processed = self._processor.image_processor(images=image, return_tensors="np")
        pixels = np.asarray(processed["pixel_values"], np.float32)
        page = Page({"pixel_values": pixels}, size_of(image), wanted)
        return Prepared(page, self.tokens_read(pixels[0]) + len(wanted.prompt))

    def ids_of(self, payload: Page) -> list[tuple[int, ...]]:
        """The prompt."""
        return [payload.assignment.prompt]

    @abstractmethod
    def tokens_read(self, pixels: np.ndarray) -> int:
        """Tokens that a picture [3, h, w] takes in the model, beside the prompt."""

    def collate(self, prepared: Sequence[Prepared]) -> list[Pages]:
        """Pages by shape and length of prompt."""
        groups: dict[Hashable, Pages] = {}
        for at, item in enumerate(prepared):
            page: Page = item.payload
            shapes = tuple(array.shape for array in page.inputs.values())
            key = (shapes, len(page.assignment.prompt), page.assignment.max_new_tokens)
            group = groups.setdefault(key, Pages([], []))
            group.pages.append(page)
            group.places.append(at)
        return list(groups.values())

    @torch.inference_mode()
    def extract(self, batch: list[Pages]) -> list[Extraction | ItemFailure]:
        """The findings in the text that the model writes about each picture."""
        extractions: dict[int, Extraction | ItemFailure] = {}
        for group in batch:
            extractions.update(zip(group.places, self._written(group), strict=True))
        return [extractions[place] for place in sorted(extractions)]

    def _written(self, group: Pages) -> list[Extraction | ItemFailure]:
        heed, sound = _Heed(group.places), _Soundness(len(group.pages), self._model.device)
        how = group.pages[0].assignment
        prompts = np.asarray([page.assignment.prompt for page in group.pages], np.int64)
        pictures = {
            name: self.on_device(np.concatenate([page.inputs[name] for page in group.pages]))
            for name in group.pages[0].inputs
        }
        rows = self._model.generate(
            **pictures,
            **self.model_inputs(self.on_device(prompts)),
            max_new_tokens=how.max_new_tokens,
            num_beams=how.num_beams,
            do_sample=False,
            use_cache=True,
            stopping_criteria=[heed],
            logits_processor=[sound],
        ).tolist()
        broken = sound.broken.tolist()
        return [
            _ABANDONED if at in heed.dropped else NOT_FINITE if broken[at] else self._read(rows[at], page)
            for at, page in enumerate(group.pages)
        ]

    def _read(self, ids: list[int], page: Page) -> Extraction:
        """Read a row without its padding."""
        pad = self._processor.tokenizer.pad_token_id
        end = next((at for at in range(len(ids), 0, -1) if ids[at - 1] != pad), 0)
        return self.read(ids[:end], page)


class _Heed(StoppingCriteria):
    """After each token report a step, and end the rows of cancelled requests (kept in `dropped`)."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places, self._steps = places, stepping.current()
        self.dropped: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """bool [rows]; beam search has several rows per item."""
        self._steps.step()
        self.dropped |= {at for at, place in enumerate(self._places) if self._steps.abandoned(place)}
        ended = torch.tensor([at in self.dropped for at in range(len(self._places))], device=input_ids.device)
        return ended.repeat_interleave(len(input_ids) // len(self._places))


class _Soundness(LogitsProcessor):
    """Marks in `broken`, bool [items], the items whose scores were no numbers at some step."""

    def __init__(self, items: int, device: torch.device) -> None:
        self.broken = torch.zeros(items, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are."""
        self.broken |= torch.isnan(scores).view(len(self.broken), -1).any(dim=1)
        return scores
