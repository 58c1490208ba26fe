"""ColPali and ColQwen2: a vision-language model turns page images and text queries into token vectors.

1. `sides` runs the model's own processor on each item alone. An item with an image is a page, any other a query. All
   preparing threads process images at once; the tokenizer is called by one thread at a time.
2. `collate` pads the processed inputs, pages and queries apart.
3. `encode` runs pages and queries and gives one vector per attended token, item after item.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ipc.wire.messages import Call, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.checkpoint import build_model, refuse_without_words
from workers.adapters.shared.images import VisualEncoder, from_first_image
from workers.adapters.shared.known_ids import KnownIds, embedding_rows
from workers.adapters.shared.late_interaction import LateInteraction
from workers.adapters.shared.packing import masked_share
from workers.adapters.shared.tokenizing import cut_to_fit
from workers.images import load_image_processor

Inputs = Mapping[str, np.ndarray]

_TOKEN_KEYS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, slots=True)
class PagesBatch:
    """Model inputs of the pages and of the queries of a batch, each with the places of its items in the batch."""

    parts: list[tuple[dict[str, torch.Tensor], list[int]]]


class _OneAtATime:
    """A tokenizer called under a lock, as every call sets padding and truncation on its Rust object."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def __call__(self, *given: Any, **options: Any) -> Any:
        with self._lock:
            return self._tokenizer(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class PageInputs(VisualEncoder):
    """The processor of a visual model, run on single items, and batches of its results."""

    def __init__(self, model: Any, processor: Any, limit: int) -> None:
        """Take over a model and a transformers processor with a fast tokenizer; `limit` is in tokens."""
        super().__init__(model, limit)
        processor.tokenizer = _OneAtATime(processor.tokenizer)
        self._processor = processor

    def process(self, **inputs: Any) -> Inputs:
        """Model inputs of one item, without the batch dimension."""
        processed = self._processor(**inputs, return_tensors="pt")
        return {name: tensor[0].numpy() for name, tensor in processed.items() if name != "labels"}

    def page(self, item: InputItem) -> Prepared | ItemFailure:
        """The first image of an item as a page."""
        return from_first_image(item, lambda image: _prepared(self.process(images=[image])))

    def query(self, text: str) -> Prepared | ItemFailure:
        """A text between the model's prefix and its augmentation, cut so that all tokens are within the limit.

        A text with the mark that stands for an image is refused.
        """
        mark = self._processor.image_token
        if mark in text:
            return ItemFailure("INVALID_INPUT", f"text: {mark!r} stands for an image in this model")
        spans = self._processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in spans["offset_mapping"]]
        inputs, tokens, room = cut_to_fit(
            text, starts, self._limit, lambda kept: self.process(text=[kept]), _length
        )
        return _prepared(inputs, Excess(tokens, self._limit) if room < len(starts) else None)

    def ids_of(self, payload: Inputs) -> Sequence[np.ndarray]:
        """The tokens of a page or a query."""
        return [payload["input_ids"]]

    def collate(self, prepared: Sequence[Prepared]) -> PagesBatch:
        """One part for pages and one for queries."""
        parts = []
        for with_pixels in (True, False):
            places = [
                at for at, item in enumerate(prepared) if ("pixel_values" in item.payload) == with_pixels
            ]
            if places:
                parts.append((self._padded([prepared[at].payload for at in places]), places))
        return PagesBatch(parts)

    def padding_ratio(self, batch: PagesBatch) -> float:
        """Share of padding in pages and queries."""
        return masked_share(inputs["attention_mask"] for inputs, _ in batch.parts)

    def _padded(self, inputs: Sequence[Inputs]) -> dict[str, torch.Tensor]:
        names = [name for name in _TOKEN_KEYS if name in inputs[0]]
        padded = self._processor.tokenizer.pad(
            {name: [one[name].tolist() for one in inputs] for name in names}, return_tensors="pt"
        )
        tensors: dict[str, torch.Tensor] = {name: padded[name] for name in names}
        for name in inputs[0].keys() - {*names}:
            tensors[name] = torch.from_numpy(_stacked([one[name] for one in inputs]))
        return tensors


class PageRetriever(LateInteraction, PageInputs):
    """A ...ForRetrieval model with its processor.

    model_class        transformers class of the model
    processor_options  load options that are passed to the image processor
    """

    model_class: ClassVar[str]
    processor_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Load processor and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError when the catalog's limit leaves no room for a query.
        """
        given = {name: context.options[name] for name in cls.processor_options if name in context.options}
        trust = context.trust_remote_code
        images = load_image_processor(context.directory, trust_remote_code=trust, **given)
        import transformers

        processor = transformers.AutoProcessor.from_pretrained(
            str(context.directory), local_files_only=True, trust_remote_code=trust
        )
        refuse_without_words(processor.tokenizer)
        processor.image_processor = images
        context.progress("tokenizer", 1.0)
        model = build_model(context, getattr(transformers, cls.model_class))
        positions = int(model.config.vlm_config.text_config.max_position_embeddings)
        adapter = cls(model, processor, min(context.max_sequence_length or positions, positions))
        adapter.known_ids = KnownIds(embedding_rows(model), processor.tokenizer)
        taken = len(adapter.process(text=[""])["input_ids"])
        if taken >= adapter.max_sequence_length:
            raise ValueError(
                f"max_sequence_length: {adapter.max_sequence_length}, but {taken} tokens stand around every query"
            )
        return adapter

    @property
    def dims(self) -> dict[str, int]:
        """Width of one token's vector."""
        return {"multivector": int(self._model.config.embedding_dim)}

    def sides(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Pages and queries through the processor."""
        return [self.page(item) if item.images else self.query(item.text or "") for item in items]

    @torch.inference_mode()
    def encode(self, batch: PagesBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"multivector": fp32 [R, dims]}."""
        rows: dict[int, torch.Tensor] = {}
        for inputs, places in batch.parts:
            moved = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
            if "pixel_values" in moved:
                moved["pixel_values"] = moved["pixel_values"].to(self._model.dtype)
            embeddings = self._model(**moved).embeddings.float()
            attended = moved["attention_mask"].bool()
            for at, vectors, mask in zip(places, embeddings, attended, strict=True):
                rows[at] = vectors[mask]
        return {"multivector": torch.cat([rows[at] for at in sorted(rows)])}


class ColPaliAdapter(PageRetriever):
    """PaliGemma with a projection: a page is a fixed number of patches (arXiv 2407.01449)."""

    model_class = "ColPaliForRetrieval"
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="colpali",
        operations=("encode", "score"),
        inputs=("text", "image"),
        outputs=("multivector", "score"),
    )


class ColQwen2Adapter(PageRetriever):
    """Qwen2-VL with a projection: a page keeps its shape, so larger pages give more vectors."""

    model_class = "ColQwen2ForRetrieval"
    processor_options = ("min_pixels", "max_pixels")
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="colqwen2",
        operations=("encode", "score"),
        inputs=("text", "image"),
        outputs=("multivector", "score"),
    )


def _length(inputs: Inputs) -> int:
    return len(inputs["input_ids"])


def _prepared(inputs: Inputs, excess: Excess | None = None) -> Prepared:
    tokens = int(inputs["attention_mask"].sum())
    return Prepared(inputs, tokens, excess is not None, rows=tokens, excess=excess)


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays one above another, padded with zeros along their first dimension."""
    longest = max(len(array) for array in arrays)
    stacked = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked
