"""Log probabilities of tokens in the form of OpenAI, which chat, Responses and Messages share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipc.wire.generation import TokenLogprob

LEAST = -9999.0
"""What stands for a probability of zero, whose logarithm JSON cannot express."""


def entries_of(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """`[{"token", "logprob", "bytes", "token_id", "top_logprobs"}]`: text, natural logarithm, bytes as integers."""
    return [
        {
            **_entry(token.id, token.raw, token.logprob),
            "top_logprobs": [_entry(*each) for each in token.top],
        }
        for token in tokens
    ]


def text_of_token(raw: bytes) -> str:
    """The text of a token, which may end inside of a character."""
    return raw.decode(errors="replace")


def finite(logprob: float) -> float:
    """`logprob` as JSON can express it."""
    return max(logprob, LEAST)


def _entry(token: int, raw: bytes, logprob: float) -> dict[str, Any]:
    text = text_of_token(raw)
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw), "token_id": token}
