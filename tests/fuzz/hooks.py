"""What schemathesis is told beside the schema, so that many of its requests get as far as a model.

Four of five requests name a model that offers what is asked. In half of the bodies the inputs are texts and the options
are left out, since a schema cannot say what a model takes; the other half stays as it was generated.
"""

from __future__ import annotations

import hashlib
from typing import Any

import hypothesis
import msgpack
import numpy as np
import schemathesis

from tests.conformance.wire import unpack

# NOTE: hypothesis 6.170 ends with an IndexError of its own when it climbs towards the targets that schemathesis sets.
hypothesis.target = lambda *_, **__: 0.0  # type: ignore[assignment]
LEAST_TIMEOUT_S = 10
MODELS = {
    "encode": "plain",
    "embeddings": "plain",
    "score": "ranker",
    "rerank": "ranker",
    "extract": "finder",
}
FREE_FIELDS = ("params", "options", "instruction", "dimensions", "encoding_format")


def _draw(given: Any) -> int:
    """A number that follows from the value, so that a run can be repeated."""
    return hashlib.sha256(repr(given).encode()).digest()[0]


def _model(context: Any, given: Any) -> str | None:
    """A model that offers the operation, for four of five values."""
    words = context.operation.path.split("/")
    return None if _draw(given) % 5 == 0 else MODELS.get(words[2] if len(words) > 2 else "", "plain")


def _plain(item: Any) -> dict[str, Any]:
    """An item with a text and nothing but its id beside it."""
    known = item if isinstance(item, dict) else {}
    kept = {"id": known["id"]} if isinstance(known.get("id"), str) else {}
    return {**kept, "text": f"text {_draw(item)}"}


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Models in paths."""
    if isinstance(path_parameters, dict) and "model" in path_parameters:
        given = path_parameters["model"]
        path_parameters["model"] = _model(context, given) or given
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Models and inputs in bodies."""
    if not isinstance(body, dict):
        return body
    draw = _draw(body)
    if isinstance(body.get("model"), str):
        body["model"] = _model(context, body) or body["model"]
    if draw % 2:
        return body
    if isinstance(body.get("items"), list):
        body["items"] = [_plain(item) for item in body["items"]] or [_plain(None)]
    if isinstance(body.get("query"), dict):
        body["query"] = _plain(body["query"])
    if isinstance(body.get("documents"), list):
        body["documents"] = [
            _plain(one) if isinstance(one, dict) else f"text {_draw(one)}" for one in body["documents"]
        ]
    if "input" in body:
        body["input"] = [f"text {draw}", "text"]
    return {name: value for name, value in body.items() if name not in FREE_FIELDS}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for JSON in half of the calls; the others get msgpack where the route has it.

    A deadline that is allowed but cannot be kept is answered 504, as it should be, so it is made longer. The phase of
    coverage does not ask the hooks above, but it asks this one.
    """
    if _draw(case.body) % 2:
        case.headers["Accept"] = "application/json"
    try:
        short = 0 < float(case.headers["X-Request-Timeout"]) < LEAST_TIMEOUT_S
    except (KeyError, TypeError, ValueError):
        return
    if short:
        case.headers["X-Request-Timeout"] = str(LEAST_TIMEOUT_S)


@schemathesis.deserializer("application/msgpack")
def from_msgpack(context: Any, response: Any) -> Any:
    """Answers in msgpack, their arrays as lists, so that the same schema fits."""
    return _listed(unpack(response.content))


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, list) else value


@schemathesis.serializer("application/msgpack")
def to_msgpack(context: Any, value: Any) -> bytes:
    """Bodies in msgpack."""
    packed: bytes = msgpack.packb(value, default=repr)
    return packed
