"""The shared part of the routes in the forms of other APIs: embeddings (OpenAI) and rerank (Cohere, Jina)."""

from __future__ import annotations

from typing import Any

from frontend.protocols.sie.schemas import EmbeddingsRequest, RerankRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput


def check_takes_texts(entry: ModelEntry) -> None:
    """Raise `InvalidInput` for a model that takes no texts, the only inputs that these forms have."""
    if "text" not in entry.inputs:
        raise InvalidInput(f"model: '{entry.id}' takes no text, only {', '.join(entry.inputs)}")


def options_of(request: EmbeddingsRequest | RerankRequest) -> dict[str, Any]:
    """The options of a model that these forms offer."""
    return {"overflow_policy": request.overflow_policy}


def usage_of(tokens: int, truncated: list[int]) -> dict[str, Any]:
    """Tokens of a request, and the places of the inputs that were cut; only where some were, as other APIs lack it."""
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {**usage, "truncated": truncated} if truncated else usage
