"""CLIP and SigLIP: a text tower and an image tower give dense vectors in one space.

1. `prepare` tokenizes texts and turns images into pixel values, in any mix. An item with an image counts as an image.
2. `collate` stacks the images of a batch and pads the texts.
3. `encode` runs each tower once and puts the rows back in the order of the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

from ipc.extras import require
from ipc.wire.messages import Call, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.checkpoint import build_model, text_limit
from workers.adapters.shared.images import VisualEncoder, from_first_image
from workers.adapters.shared.known_ids import embedding_rows, filler_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import masked_share
from workers.adapters.shared.tokenizing import TextTokenizer
from workers.images import load_image_processor

_PLAIN = "{text}"
_LONGEST_TEMPLATE = 200


@dataclass(frozen=True, slots=True)
class TowersBatch:
    """Host tensors of one batch. `texts` and `images` are the places of the items in the batch."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    pixel_values: torch.Tensor
    texts: list[int]
    images: list[int]


class TwoTowersAdapter(VisualEncoder):
    """A contrastive model with a text and an image tower.

    `pads_to_limit`: texts are padded to the model's full length and the padding is attended, as in training.
    Otherwise texts are padded to the longest text of the batch and the padding is masked.
    """

    pads_to_limit: ClassVar[bool]
    overflows = ("truncate", "truncate_left", "error")
    uses = frozenset(("text_template",))

    def __init__(
        self, model: Any, tokenizer: TextTokenizer, processor: Any, limit: int, normalize: bool
    ) -> None:
        """Take over a loaded model with `get_text_features` and `get_image_features`; `limit` is in tokens."""
        super().__init__(model, limit)
        self._tokenizer, self._processor, self._normalize = tokenizer, processor, normalize
        tokenizer.limit(limit)
        tokenizer.knows(embedding_rows(model.text_model))
        self.known_ids = tokenizer.known
        # NOTE: CLIP looks for the end of a text among the ids, so no other id of a row may look like an end.
        own = filler_of(model.text_model, tokenizer.pad_id)
        end = getattr(model.config.text_config, "eos_token_id", None)
        self._filler = own if self.pads_to_limit else int(end == 0)
        vision = model.config.vision_config
        self._image_cost = (vision.image_size // vision.patch_size) ** 2
        self._width = self._vectors(
            self.collate([self._prepare_text(InputItem(""), _PLAIN, "truncate")])
        ).shape[1]

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Load tokenizer, image processor and weights; progress phases are "tokenizer", "weights" and "proof"."""
        processor = load_image_processor(context.directory, trust_remote_code=context.trust_remote_code)
        tokenizer = TextTokenizer.read(context.directory, trust_remote_code=context.trust_remote_code)
        context.progress("tokenizer", 1.0)
        model = build_model(context)
        limit = text_limit(model.text_model, context.max_sequence_length)
        adapter = cls(model, tokenizer, processor, limit, bool(context.options.get("normalize", True)))
        context.progress("proof", 1.0)
        return adapter

    @property
    def dims(self) -> dict[str, int]:
        """Width of the space that texts and images share."""
        return {"dense": self._width}

    @property
    def image_tokens(self) -> int:
        """Patches of an image."""
        return self._image_cost

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse also a template without a place for the text."""
        super().refuse_unsupported(call)
        _template(call)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Pixel values of items with an image, token ids of the others."""
        template = _template(call)
        return [
            self._prepare_image(item) if item.images else self._prepare_text(item, template, call.overflow)
            for item in items
        ]

    def _prepare_image(self, item: InputItem) -> Prepared | ItemFailure:
        return from_first_image(item, lambda image: Prepared(self._pixels(image), self._image_cost))

    def _pixels(self, image: Any) -> np.ndarray:
        """float32 [3, height, width]."""
        return np.asarray(self._processor(images=image, return_tensors="np")["pixel_values"][0], np.float32)

    def _prepare_text(self, item: InputItem, template: str, overflow: str) -> Prepared:
        before, _, after = template.partition("{text}")
        [([[window], truncated, tokens], _)] = self._tokenizer.fitted([item], (before, after), overflow)
        excess = Excess(tokens, self._limit) if truncated and tokens else None
        return Prepared(np.asarray(window.ids), len(window.ids), truncated, excess=excess)

    def ids_of(self, payload: np.ndarray) -> list[np.ndarray]:
        """A text; pictures have none."""
        return [payload] if payload.ndim == 1 else []

    def collate(self, prepared: Sequence[Prepared]) -> TowersBatch:
        """Padded texts and stacked images."""
        texts = [at for at, item in enumerate(prepared) if item.payload.ndim == 1]
        images = [at for at, item in enumerate(prepared) if item.payload.ndim == 3]
        longest = max((len(prepared[at].payload) for at in texts), default=0)
        input_ids = np.full(
            (len(texts), self._limit if self.pads_to_limit else longest), self._filler, np.int64
        )
        mask = np.zeros_like(input_ids)
        for row, at in enumerate(texts):
            ids = prepared[at].payload
            input_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        pixels = np.stack([prepared[at].payload for at in images]) if images else np.empty(0, np.float32)
        return TowersBatch(
            torch.from_numpy(input_ids), torch.from_numpy(mask), torch.from_numpy(pixels), texts, images
        )

    def padding_ratio(self, batch: TowersBatch) -> float:
        """Share of padding in the texts. All images have one size."""
        return masked_share([batch.attention_mask], len(batch.images) * self._image_cost)

    def encode(self, batch: TowersBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"dense": fp32 [n, dims]} on the device."""
        return {"dense": self._vectors(batch)}

    @torch.inference_mode()
    def _vectors(self, batch: TowersBatch) -> torch.Tensor:
        device, vectors = self._model.device, []
        if batch.texts:
            mask = None if self.pads_to_limit else batch.attention_mask.to(device)
            vectors.append(
                self._model.get_text_features(input_ids=batch.input_ids.to(device), attention_mask=mask)
            )
        if batch.images:
            pixels = batch.pixel_values.to(device, self._model.dtype)
            vectors.append(self._model.get_image_features(pixel_values=pixels))
        rows = torch.cat([_pooled(features).float() for features in vectors])
        order = torch.tensor(batch.texts + batch.images, device=device).argsort()
        rows = rows.index_select(0, order)
        return F.normalize(rows, dim=-1) if self._normalize else rows


class ClipAdapter(TwoTowersAdapter):
    """CLIP."""

    pads_to_limit = False
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="clip",
        operations=("encode",),
        inputs=("text", "image"),
        outputs=("dense",),
    )


class SiglipAdapter(TwoTowersAdapter):
    """SigLIP."""

    pads_to_limit = True
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="siglip",
        operations=("encode",),
        inputs=("text", "image"),
        outputs=("dense",),
    )

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """As the base. Raises ImportError that names the extra when the tokenizer needs a package that is missing."""
        if (context.directory / "spiece.model").exists():
            require("sentencepiece", "siglip")
            require("google.protobuf", "siglip", package="protobuf")
        return super().load(context)


def _template(call: Call) -> str:
    """The `text_template` of the call. Raises `InvalidInput` for a template without a place for the text."""
    options = OptionReader(call)
    template = options.text("text_template", _PLAIN, _LONGEST_TEMPLATE)
    if template.count("{text}") != 1:
        raise options.refused("text_template", template, "must hold {text} once")
    return template


def _pooled(features: Any) -> torch.Tensor:
    """The projected vectors [n, dims]. Since 5.0 transformers returns them in an output object."""
    pooled: torch.Tensor = features if isinstance(features, torch.Tensor) else features.pooler_output
    return pooled
