"""A masked language model in two parts: the transformer, and the head that turns token vectors into vocabulary logits.

The whole logits of a batch (tokens x vocabulary) would be its largest tensor by far, and what is pooled from them needs
only their maximum per sequence. So the head runs over a bounded number of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from workers.adapters.shared.packing import Layout, Run
from workers.adapters.shared.sentence_transformers_layout import UnsupportedLayoutError

Head = Callable[[torch.Tensor], torch.Tensor]

CHUNK_TOKENS = 1024
_WHOLE_HEADS = ("cls", "lm_head", "predictions")


def head_of(model: Any) -> Head:
    """The head of a ...ForMaskedLM model: [T, width] to logits [T, vocabulary].

    Raises UnsupportedLayoutError where what is found does not give the model's own logits.
    """
    head = _find(model)
    ids = torch.arange(5, 10, device=model.device)[None]
    with torch.inference_mode():
        wanted = model(input_ids=ids).logits[0].float()
        got = head(model.base_model(input_ids=ids).last_hidden_state[0]).float()
    if got.shape != wanted.shape or float((got - wanted).norm()) > 5e-2 * float(wanted.norm()):
        raise UnsupportedLayoutError(f"the head of {type(model).__name__} is of an unknown kind")
    return head


def _find(model: Any) -> Head:
    for name in _WHOLE_HEADS:
        whole = getattr(model, name, None)
        if whole is not None:
            return whole
    if hasattr(model, "vocab_projector"):
        return lambda rows: model.vocab_projector(
            model.vocab_layer_norm(model.activation(model.vocab_transform(rows)))
        )
    if hasattr(model, "decoder") and hasattr(model, "head"):
        return lambda rows: model.decoder(model.head(rows))
    raise UnsupportedLayoutError(f"the head of {type(model).__name__} is of an unknown kind")


def largest_logits(head: Head, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The largest logit of each term in each sequence: fp32 [N, vocabulary], in the layout's order."""
    parts: list[torch.Tensor] = []
    for start, runs in _chunks(layout.runs):
        tokens = sum(run.rows * run.length for run in runs)
        if tokens > CHUNK_TOKENS:
            parts.append(_largest_of_one(head, rows[start : start + tokens]))
            continue
        logits = head(rows[start : start + tokens])
        for run in runs:
            at = run.start - start
            part = logits[at : at + run.rows * run.length].view(run.rows, run.length, -1)
            parts.append(part.amax(1).float())
    return torch.cat(parts)


def _largest_of_one(head: Head, rows: torch.Tensor) -> torch.Tensor:
    """The same [1, vocabulary] for one sequence longer than a chunk."""
    pieces = [head(piece).amax(0, keepdim=True).float() for piece in rows.split(CHUNK_TOKENS)]
    return torch.cat(pieces).amax(0, keepdim=True)


def _chunks(runs: tuple[Run, ...]) -> Iterator[tuple[int, list[Run]]]:
    """(first token, runs) of neighbouring whole sequences of at most CHUNK_TOKENS; a longer one stands alone."""
    held: list[Run] = []
    room = CHUNK_TOKENS
    for start, count, length in runs:
        done = 0
        while done < count:
            fitting = min(count - done, room // length)
            if not fitting:
                if held:
                    yield held[0].start, held
                    held, room = [], CHUNK_TOKENS
                    continue
                yield start + done * length, [Run(start + done * length, 1, length)]
                done += 1
                continue
            held.append(Run(start + done * length, fitting, length))
            done += fitting
            room -= fitting * length
    if held:
        yield held[0].start, held
