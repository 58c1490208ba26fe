"""What the routes in the forms of other APIs share: embeddings (OpenAI) and rerank (Cohere, Jina)."""

from __future__ import annotations

from typing import Any

TOP_LEVEL = "body"
"""Where these forms have their options, for messages about them."""


def usage_of(tokens: int, truncated: list[int]) -> dict[str, Any]:
    """Tokens of a request, and the places of the inputs that were cut; only where some were, as other APIs lack it."""
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {**usage, "truncated": truncated} if truncated else usage
