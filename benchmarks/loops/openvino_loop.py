"""The direct OpenVINO loop over padded batches sorted by length, with mean pooling inside the compiled graph.

Runs in the `openvino` environment of `benchmarks.peers.environments`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn
from transformers import AutoModel

from benchmarks.loops.child import (
    Loop,
    Tokens,
    Vectors,
    by_count,
    load_tokenizer,
    read_texts,
    serve,
    setting,
    take_output,
    tokenise,
)

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Embedding(nn.Module):
    """BERT, mean pooling and normalisation as one graph: int64 [texts, tokens] twice to [texts, hidden]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Normalised embeddings."""
        hidden = self._model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        return nn.functional.normalize(pooled, dim=1)


def compile_model(model_dir: Path, threads: int, precision: str) -> Any:
    """The model compiled for CPU with dynamic shapes."""
    model = AutoModel.from_pretrained(model_dir, attn_implementation="sdpa", add_pooling_layer=False).eval()
    example = torch.ones(2, 8, dtype=torch.int64)
    graph = openvino.convert_model(Embedding(model), example_input=(example, example))
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
    }
    return openvino.Core().compile_model(graph, "CPU", options)


def main() -> None:
    """Compile the model and answer commands. See `benchmarks.loops.child`."""
    warnings.simplefilter("ignore")
    output = take_output()
    threads, model_dir, texts = int(setting("THREADS")), Path(setting("MODEL_DIR")), read_texts()
    torch.set_num_threads(threads)
    request = compile_model(model_dir, threads, _PRECISIONS[setting("PRECISION")]).create_infer_request()
    tokenizer = load_tokenizer(model_dir)
    tokens = tokenise(tokenizer, texts)

    def forward(batch: list[Tokens]) -> Vectors:
        longest = max(map(len, batch))
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(batch):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        result: Vectors = request.infer([ids, mask])[0]
        return result

    loops = {f"padded, batch {size}": Loop(forward, by_count(size)) for size in (8, 32)}
    serve(
        output,
        list(loops),
        lambda name, count: loops[name].run(tokens[:count]),
        lambda name, index: loops[name].run(tokenise(tokenizer, texts[index : index + 1])),
    )


if __name__ == "__main__":
    main()
