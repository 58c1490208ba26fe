"""Parameters of a tensor request to a catalog model: the options of the SIE routes, by their names there.

A value that is a list or a map in those routes is JSON text here, since parameters are texts, numbers and truth values.
A parameter that no model of the kind knows is refused; whether this family knows it, its worker says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from frontend.tensors.request import Parameter
from ipc.catalog.option_names import EXTRACT_OPTIONS, SCORE_OPTIONS
from ipc.errors import InvalidInput

_SHARED = frozenset({"instruction", "lora", "lora_id", "overflow_policy"})
_KNOWN: dict[str, frozenset[str]] = {
    "encode": _SHARED
    | {
        "dimensions",
        "document_template",
        "is_query",
        "max_terms",
        "output_dtype",
        "query_template",
        "text_template",
    },
    "score": _SHARED | SCORE_OPTIONS,
    "extract": _SHARED | EXTRACT_OPTIONS | {"labels", "metadata", "output_schema"},
}
_JSON: dict[str, tuple[type, str]] = {
    "labels": (list, "array"),
    "metadata": (dict, "object"),
    "output_schema": (dict, "object"),
    "relations": (list, "array"),
    "score_weights": (dict, "object"),
}


def options_of(kind: str, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """The options that these parameters mean for a `kind` of model. Raises `InvalidInput` that names the parameter."""
    known = _KNOWN[kind]
    options: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in known:
            raise InvalidInput(
                f"parameters.{name[:64]!a}: unknown to {kind} models, which know {', '.join(sorted(known))}"
            )
        options[name] = _structured(name, value, *_JSON[name]) if name in _JSON else value
    return options


def _structured(name: str, value: Parameter, kind: type, text: str) -> Any:
    """A list or map from JSON text; plain `labels` are separated by commas."""
    if isinstance(value, str) and name == "labels" and not value.lstrip().startswith("["):
        return [label.strip() for label in value.split(",")]
    try:
        found = msgspec.json.decode(value) if isinstance(value, str) else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"parameters.{name}: no JSON text: {error}") from error
    if not isinstance(found, kind):
        raise InvalidInput(f"parameters.{name}: expected the JSON text of an {text}")
    return found
