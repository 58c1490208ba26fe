"""The direct loop of reranking: Penstock's own cross-encoder adapter over batches of several token budgets.

Pairs are tokenised and sorted by length beforehand, so this is a little faster than any server can be.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.loops.child import Vectors, by_tokens, read_questions, serve, setting, take_output
from ipc.wire.messages import InputItem, ScoreCall
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.cross_encoder import CrossEncoderAdapter

BUDGETS = {"cpu": (1024, 2048, 4096), "cuda": (8192, 32768, 65536)}


def prepare(adapter: CrossEncoderAdapter, query: str, documents: list[str]) -> list[Prepared]:
    """The pairs of one question."""
    call = ScoreCall([InputItem(document) for document in documents], InputItem(query))
    return [pair for pair in adapter.prepare(call.items, call) if isinstance(pair, Prepared)]


def main() -> None:
    """Load the adapter and answer commands. See `benchmarks.loops.child`."""
    output = take_output()
    torch.set_num_threads(int(setting("THREADS")))
    directory, device = Path(setting("MODEL_DIR")), torch.device(setting("DEVICE"))
    precision = getattr(torch, setting("PRECISION"))
    context = LoadContext(directory, "direct", device, precision, None, {}, lambda phase, fraction: None)
    adapter, questions = CrossEncoderAdapter.load(context), read_questions()
    prepared = [prepare(adapter, *question) for question in questions]

    def run(name: str, count: int) -> Vectors:
        pairs = [pair for question in prepared[:count] for pair in question]
        lengths = [pair.cost for pair in pairs]
        order = sorted(range(len(pairs)), key=lengths.__getitem__)
        scores = np.empty(len(pairs), np.float32)
        for batch in by_tokens(budgets[name])(order, lengths):
            scores[batch] = adapter.score(adapter.collate([pairs[index] for index in batch])).cpu().numpy()
        return scores

    def lone(name: str, index: int) -> Vectors:
        pairs = prepare(adapter, *questions[index])
        scores: Vectors = adapter.score(adapter.collate(pairs)).cpu().numpy()
        return scores

    budgets = {f"packed, {budget} tokens": budget for budget in BUDGETS[device.type]}
    serve(output, list(budgets), run, lone)


if __name__ == "__main__":
    main()
