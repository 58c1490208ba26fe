"""The output matrix of a language model, cut to the two words that answer whether a document fits a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def answer_rows(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> nn.Linear:
    """The rows of the options `positive_token` and `negative_token`, "yes" and "no" by default, in fp32.

    Raises ValueError for a word that is no single token.
    """
    words = [str(options.get("positive_token", "yes")), str(options.get("negative_token", "no"))]
    numbers = []
    for word in words:
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"{word!r} is not one token of this model but {len(ids)}")
        numbers.append(ids[0])
    whole = model.get_output_embeddings()
    rows = nn.Linear(whole.in_features, len(words), bias=whole.bias is not None, device=whole.weight.device)
    rows.weight.data = whole.weight.data[numbers].float()
    if whole.bias is not None:
        rows.bias.data = whole.bias.data[numbers].float()
    return rows.eval().requires_grad_(False)
