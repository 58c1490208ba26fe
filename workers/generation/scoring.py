"""Log probabilities of the tokens of a prompt, from the logits before each token.

The logits of a long prompt, [tokens, vocabulary], would fill the memory: a step computes those of `scored_tokens` at
most, and `scored` reads these in pieces. The log probabilities are those of the model itself. No penalty, no bias and
no grammar changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipc.wire.streams import PromptToken
from workers.generation.request import PromptText
from workers.generation.sampling import LEAST_LOGPROB, NoNextToken
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span

LOGITS_NBYTES = 256 << 20
"""Most bytes of the logits that one step computes for prompts, as float32."""
_ROWS = 64
"""Rows of logits that are widened to float32 at a time."""


def scored_tokens(vocabulary: int) -> int:
    """Tokens of prompts whose logits one step computes."""
    return max(1, LOGITS_NBYTES // (4 * vocabulary))


def first_token(sequence: Choice, text: PromptText) -> PromptToken:
    """The first token of a prompt, which follows nothing."""
    token = sequence.tokens[0]
    return PromptToken(token, text.raw_of(token), text.starts[0])


def scored_spans(spans: Sequence[Span], logits: torch.Tensor, row: int) -> dict[Choice, list[PromptToken]]:
    """The tokens of prompts behind the scored places of `spans`; `logits` [rows, vocabulary] of these begin at `row`.

    Raises as `scored`.
    """
    by_sequence: dict[Choice, list[PromptToken]] = {}
    for span in spans:
        if places := span.scores:
            by_sequence[span.sequence] = scored(span.sequence, places, logits[row : row + len(places)])
            row += len(places)
    return by_sequence


@torch.inference_mode()
def scored(sequence: Choice, places: Sequence[int], logits: torch.Tensor) -> list[PromptToken]:
    """The tokens of the prompt behind `places`, by their logits [places, vocabulary] of any float type.

    Raises `NoNextToken` for logits without a finite highest value.
    """
    text, number = sequence.request.prompt_text, sequence.call.prompt_logprobs
    assert text is not None
    assert number is not None
    found: list[PromptToken] = []
    for at in range(0, len(places), _ROWS):
        tokens = [sequence.tokens[place + 1] for place in places[at : at + _ROWS]]
        shares = torch.log_softmax(logits[at : at + len(tokens)].float(), dim=-1)
        own = shares.gather(1, torch.tensor(tokens, device=shares.device)[:, None])[:, 0].tolist()
        likely = shares.topk(max(1, min(number, shares.shape[1])), dim=-1)
        if not bool(likely.values[:, 0].isfinite().all()):
            raise NoNextToken([sequence])
        for row, (ids, values) in enumerate(
            zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        ):
            token, place = tokens[row], places[at + row] + 1
            near = zip(ids[:number], values[:number], strict=True)
            top = [(one, text.raw_of(one), max(value, LEAST_LOGPROB)) for one, value in near]
            own_logprob = max(own[row], LEAST_LOGPROB)
            found.append(PromptToken(token, text.raw_of(token), text.starts[place], own_logprob, top))
    return found
