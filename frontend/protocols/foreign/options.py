"""Options of calls that stand for fields which several servers have: bare logits, or scores by a function."""

from __future__ import annotations

from typing import Any

FUNCTION = "function_to_apply"
"""The option by which classifiers of whole texts are known: no other family reads the option."""


def activation_option(raw: bool) -> dict[str, Any]:
    """Of pairs: bare logits, or scores from 0 to 1. Models without the choice give their own scores."""
    return {"activation": "identity" if raw else "sigmoid"}


def function_option(raw: bool) -> dict[str, Any]:
    """Of classes: bare logits, or the function that the model's configuration asks for."""
    return {FUNCTION: "none"} if raw else {}
