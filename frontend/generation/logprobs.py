"""Log probabilities of tokens in the form of OpenAI, which chat, Responses and Messages share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipc.wire.streams import TokenLogprob

LEAST = -9999.0
"""What stands for a probability of zero, whose logarithm JSON cannot express."""


def entries_of(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """`[{"token", "logprob", "bytes", "token_id", "top_logprobs"}]`: text, natural logarithm, bytes as integers.

    `bytes` are those of the answer: a token of which the answer has nothing has none.
    """
    return [_told(token) for token in tokens]


def _told(token: TokenLogprob) -> dict[str, Any]:
    entry = _entry(token.id, token.raw, token.logprob)
    if token.is_silent:
        entry["bytes"] = []
    return {**entry, "top_logprobs": [_entry(*each) for each in token.top]}


def text_of_token(raw: bytes) -> str:
    """The text of a token, which may end inside of a character."""
    return raw.decode(errors="replace")


def finite(logprob: float) -> float:
    """`logprob` as JSON can express it."""
    return max(logprob, LEAST)


def _entry(token: int, raw: bytes, logprob: float) -> dict[str, Any]:
    text = text_of_token(raw)
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw), "token_id": token}
