"""Options of calls that stand for fields which several servers have: bare logits, or scores by a function."""

from __future__ import annotations

from typing import Any

FUNCTION = "function_to_apply"
"""The option by which classifiers of whole texts are known: no other family reads the option."""


def activation_option(raw: bool) -> dict[str, Any]:
    """The option for scores of pairs: bare logits if `raw`, else 0 to 1. Models without the option score as they do."""
    return {"activation": "identity" if raw else "sigmoid"}


def function_option(raw: bool) -> dict[str, Any]:
    """The option for scores of classes: bare logits if `raw`, else the function of the model's configuration."""
    return {FUNCTION: "none"} if raw else {}
