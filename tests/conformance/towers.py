"""Tiny models of the visual encode families behind one server, and what they must answer, by transformers alone."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

from tests.conformance.wire import JSON, MSGPACK, Form
from tests.harness.server import FAKE_CATALOG, Answer, Server
from tests.tiny.models import build
from tests.tiny.pictures import encoded
from tests.tiny.towers import QUERY_TOKENS, TEXT_TOKENS

CLIP, SIGLIP = "openai/clip-vit-base-patch32", "google/siglip-base-patch16-224"
PALI, QWEN = "vidore/colpali-v1.3-hf", "vidore/colqwen2-v1.0-hf"
SMALL_PAGES, RAW, PICTURES_ONLY, TEXTS_ONLY = "tiny/small-pages", "tiny/raw", "tiny/pictures", "tiny/texts"
EMBEDDING, RERANKER = "Qwen/Qwen3-VL-Embedding-2B", "Qwen/Qwen3-VL-Reranker-2B"
SMALL_PIXELS = 28 * 28
"""Most pixels of a page of `SMALL_PAGES`."""

ENCODERS = (CLIP, SIGLIP, PALI, QWEN, SMALL_PAGES, RAW, EMBEDDING, RERANKER, PICTURES_ONLY, TEXTS_ONLY)
_LATE = {"multivector": {}, "score": {}}
_ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    CLIP: ("clip", {}),
    SIGLIP: ("siglip", {}),
    PALI: ("colpali", {"outputs": _LATE}),
    QWEN: ("colqwen2", {"outputs": _LATE}),
    SMALL_PAGES: ("colqwen2", {"outputs": _LATE, "loadtime": {"max_pixels": SMALL_PIXELS}}),
    RAW: ("clip", {"loadtime": {"normalize": False}}),
    PICTURES_ONLY: ("clip", {"inputs": ["image"]}),
    EMBEDDING: ("qwen3_vl_embedding", {}),
    RERANKER: ("qwen3_vl_reranker", {"outputs": {"score": {}}}),
}
_TINY = {"qwen3_vl_embedding": "qwen3_vl", "qwen3_vl_reranker": "qwen3_vl"}
"""Tiny models of families that share one; the others are called as their family."""

Input = str | Image.Image | bytes
"""What an item is made of: a text, a picture, or an image file."""


def write_models(place: Path, wanted: Sequence[str]) -> list[str]:
    """Build the models of these ids below `place` and write their catalog into `place / "catalog"`; returns the ids."""
    (place / "catalog").mkdir(parents=True)
    for number, model in enumerate(wanted):
        (place / "catalog" / f"{number}.yaml").write_text(json.dumps(_entry(place, model)))
    return list(wanted)


def _entry(place: Path, model: str) -> dict[str, Any]:
    if model == TEXTS_ONLY:
        source = FAKE_CATALOG.parent / "weights"
        adapter, fields = "tests.fakes.adapter:FakeAdapter", {"inputs": ["text"]}
    else:
        adapter, fields = _ENTRIES[model]
        tiny = _TINY.get(adapter, adapter)
        source = place / tiny
        if not source.exists():
            build(tiny, source)
    given = {"inputs": ["text", "image"], "outputs": {"dense": {}}, **fields}
    return {"id": model, "source": {"kind": "directory", "path": str(source)}, "adapter": adapter, **given}


def item_of(given: Input, form: Form) -> dict[str, Any]:
    """An item as a client sends it; images are always said to be JPEG."""
    if isinstance(given, str):
        return {"text": given}
    data = encoded(given) if isinstance(given, Image.Image) else given
    return {"images": [{"data": base64.b64encode(data).decode() if form is JSON else data, "format": "jpeg"}]}


def ask(server: Server, model: str, inputs: Sequence[Input], form: Form = MSGPACK, **params: Any) -> Answer:
    """POST texts and images to encode, in any mix."""
    body = {"items": [item_of(one, form) for one in inputs], "params": params}
    return form.post(server, f"/v1/encode/{model}", body)


def items_of(
    server: Server, model: str, inputs: Sequence[Input], form: Form = MSGPACK, **params: Any
) -> list[Any]:
    """Items of a successful answer."""
    answer = ask(server, model, inputs, form, **params)
    assert answer.status == 200, answer.body
    found: list[Any] = form.load(answer.body)["items"]
    assert len(found) == len(inputs)
    return found


@functools.cache
def parts(directory: Path) -> tuple[Any, Any]:
    """CLIP or SigLIP and its processor, opened by transformers alone."""
    return (
        transformers.AutoModel.from_pretrained(directory).eval(),
        transformers.AutoProcessor.from_pretrained(directory, backend="pil"),
    )


@torch.inference_mode()
def dense(
    directory: Path, given: str | Image.Image, normalize: bool = True, side: str = "right"
) -> np.ndarray:
    """The vector [32] of a text, cut on this side, or a picture, computed alone."""
    model, processor = parts(directory)
    processor.tokenizer.truncation_side = side
    if isinstance(given, str):
        padding = "max_length" if model.config.model_type == "siglip" else False
        inputs = processor.tokenizer(
            [given], padding=padding, truncation=True, max_length=TEXT_TOKENS, return_tensors="pt"
        )
        mask = None if model.config.model_type == "siglip" else inputs["attention_mask"]
        found = model.get_text_features(input_ids=inputs["input_ids"], attention_mask=mask)
    else:
        found = model.get_image_features(**processor.image_processor(given, return_tensors="pt"))
    row = found.pooler_output[0]
    return np.asarray(F.normalize(row, dim=-1) if normalize else row)


class Pages:
    """ColPali or ColQwen2 by sentence-transformers, one input at a time."""

    def __init__(self, directory: Path) -> None:
        from sentence_transformers import MultiVectorEncoder

        self.model = MultiVectorEncoder(str(directory), device="cpu")
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        # Where torchvision is installed, other processors are the default, which round pixels in another way.
        images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.processor.image_processor = self.model[0].processor.image_processor = images

    def vectors(self, given: str | Image.Image) -> np.ndarray:
        """Token vectors [n, 128] of a query or a page."""
        run = self.model.encode_query if isinstance(given, str) else self.model.encode_document
        return np.asarray(run([given])[0])

    def scores(self, query: str | Image.Image, items: Sequence[str | Image.Image]) -> np.ndarray:
        """Scores [items] by the processor's own late interaction."""
        rows = [torch.from_numpy(self.vectors(one)) for one in (query, *items)]
        return np.asarray(self.processor.score_retrieval(rows[:1], rows[1:])[0])

    def cut(self, text: str) -> list[np.ndarray]:
        """Token vectors of the beginnings of `text` that nearly fill the limit, the longest first."""
        found = []
        for size in range(len(text), 0, -1):
            tokens = self.processor.process_queries(text=[text[:size]])["input_ids"]
            if QUERY_TOKENS - 4 <= len(tokens[0]) <= QUERY_TOKENS:
                found.append(self.vectors(text[:size]))
            elif found:
                break
        return found
