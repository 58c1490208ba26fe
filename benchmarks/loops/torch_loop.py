"""The direct torch loop: padded batches sorted by length, and packed batches of several token budgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModel

from benchmarks.loops.child import (
    Loop,
    Tokens,
    Vectors,
    by_count,
    by_tokens,
    load_tokenizer,
    read_texts,
    serve,
    setting,
    take_output,
    tokenise,
)
from benchmarks.loops.packed import PackedBert

BUDGETS = {"cpu": (1024, 2048, 4096), "cuda": (8192, 32768, 65536)}
SIZES = {"cpu": (8, 32), "cuda": (32, 128, 512)}


def pad(batch: list[Tokens], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 [texts, longest]."""
    longest = max(map(len, batch))
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in batch], device=device)
    mask = torch.tensor(
        [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in batch], device=device
    )
    return ids, mask


class Padded:
    """The model as transformers runs it, with mean pooling over real tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, batch: list[Tokens]) -> Vectors:
        """Normalised embeddings [texts, hidden]."""
        ids, mask = pad(batch, self._model.device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        vectors: Vectors = F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1).cpu().numpy()
        return vectors


def make_loops(model: Any) -> dict[str, Loop]:
    """The candidates, by name."""
    kind = model.device.type
    loops = {f"padded, batch {size}": Loop(Padded(model), by_count(size)) for size in SIZES[kind]}
    forms = {"packed": PackedBert(model)}
    if kind == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        forms["packed oneDNN"] = PackedBert(model, onednn=True)
    for name, packed in forms.items():
        for budget in BUDGETS[kind]:
            loops[f"{name}, {budget} tokens"] = Loop(_vectors(packed), by_tokens(budget))
    return loops


def _vectors(packed: PackedBert) -> Callable[[list[Tokens]], Vectors]:
    return lambda batch: packed(batch).cpu().numpy()


def main() -> None:
    """Load the model and answer commands. See `benchmarks.loops.child`."""
    output = take_output()
    torch.set_num_threads(int(setting("THREADS")))
    model_dir, texts = Path(setting("MODEL_DIR")), read_texts()
    precision = getattr(torch, setting("PRECISION"))
    model = AutoModel.from_pretrained(
        model_dir, dtype=precision, attn_implementation="sdpa", add_pooling_layer=False
    )
    loops = make_loops(model.to(setting("DEVICE")).eval())
    tokenizer = load_tokenizer(model_dir)
    tokens = tokenise(tokenizer, texts)
    with torch.inference_mode():
        serve(
            output,
            list(loops),
            lambda name, count: loops[name].run(tokens[:count]),
            lambda name, index: loops[name].run(tokenise(tokenizer, texts[index : index + 1])),
        )


if __name__ == "__main__":
    main()
