"""The references of Qwen3-VL: transformers alone reads one conversation at a time, without padding.

Words, pictures and pooling are those of github.com/QwenLM/Qwen3-VL-Embedding. The processor class of transformers needs
torchvision, so tokenizer, template and image processor are used one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ipc.wire.messages import InputItem
from penstock.verification.opening import Opening
from penstock.verification.samples import opened

_PIXELS = {"min_pixels": 4 * 32 * 32, "max_pixels": 1800 * 32 * 32}
_REPRESENT = "Represent the user's input."
_RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
Parts = list[dict[str, Any]]


class Conversations:
    """Qwen3-VL in float32 with tokenizer and image processor."""

    def __init__(self, opening: Opening) -> None:
        library: Any = transformers
        trust = {"local_files_only": True, "trust_remote_code": opening.trust_remote_code}
        kind = library.Qwen3VLForConditionalGeneration
        self._model = kind.from_pretrained(opening.place, dtype=torch.float32, **trust)
        self._model.to(opening.device).eval()
        self._tokenizer = library.AutoTokenizer.from_pretrained(opening.place, **trust)
        images: Any = AutoImageProcessor
        self._images = images.from_pretrained(opening.place, backend="pil", **_PIXELS, **trust)
        self._options = {**opening.entry.runtime, **opening.entry.loadtime}
        self._length, self._device = opening.length, opening.device
        self.name = f"transformers {transformers.__version__} {kind.__name__}"

    def last(
        self, system: str, text: str, parts: Callable[[str], Parts], images: Sequence[bytes] = ()
    ) -> torch.Tensor:
        """The vector [width] of the last token; the end of `text` is cut until the conversation fits."""
        pictures = dict(self._images(images=opened(list(images)), return_tensors="pt")) if images else {}
        starts = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        kept = len(starts)
        ids = self._ids(system, parts(text), pictures)
        while ids.shape[1] > self._length:
            kept -= ids.shape[1] - self._length
            ids = self._ids(system, parts(text[: starts[kept][0]]), pictures)
        marks = (ids == self._model.config.image_token_id).int()
        seen = {name: value.to(self._device) for name, value in pictures.items()}
        found = self._model.model(input_ids=ids, mm_token_type_ids=marks, **seen)
        vector: torch.Tensor = found.last_hidden_state[0, -1]
        return vector

    def _ids(self, system: str, parts: Parts, pictures: dict[str, Any]) -> torch.Tensor:
        """Token ids [1, t], up to where the model would answer, with a token for each part of a picture."""
        turns = [{"role": "system", "content": [_said(system)]}, {"role": "user", "content": parts}]
        written = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        mark = str(self._tokenizer.convert_ids_to_tokens(self._model.config.image_token_id))
        before, *after = str(written).split(mark)
        for grid, rest in zip(pictures.get("image_grid_thw", []), after, strict=True):
            before += mark * int(grid.prod() // self._images.merge_size**2) + rest
        ids: torch.Tensor = self._tokenizer(before, return_tensors="pt")["input_ids"]
        return ids.to(self._device)


class Embedder(Conversations):
    """The normalised vector of the last token."""

    @torch.inference_mode()
    def encode(self, items: Sequence[InputItem], output: str, *, is_query: bool) -> list[Any]:
        """Per item a vector [dims]."""
        system = self._options.get("default_instruction", _REPRESENT)
        return [self._one(item, system) for item in items]

    def _one(self, item: InputItem, system: str) -> np.ndarray[Any, Any]:
        pictures: Parts = [{"type": "image"} for _ in item.images]
        vector = self.last(system, item.text or "", lambda text: [*pictures, _said(text)], item.images)
        return F.normalize(vector, dim=-1).cpu().numpy()


class Reranker(Conversations):
    """The probability of "yes" against "no" as the next token."""

    @torch.inference_mode()
    def score(self, query: str, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """float32 [texts]."""
        instruction = self._options.get("default_instruction", _RETRIEVE)
        before = [
            _said(f"<Instruct>: {instruction}"),
            _said("<Query>:"),
            _said(query),
            _said("\n<Document>:"),
        ]
        words = [self._options.get("positive_token", "yes"), self._options.get("negative_token", "no")]
        answers = self._tokenizer.convert_tokens_to_ids(words)
        rows = [self.last(_JUDGE, text, lambda kept: [*before, _said(kept)]) for text in texts]
        yes, no = self._model.lm_head(torch.stack(rows))[:, answers].float().T
        sigmoid = self._options.get("activation", "sigmoid") == "sigmoid"
        found: np.ndarray[Any, Any] = (torch.sigmoid(yes - no) if sigmoid else yes - no).cpu().numpy()
        return found


def _said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
