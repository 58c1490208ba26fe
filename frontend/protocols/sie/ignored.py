"""What a request carries and its model does not read, for the `warnings` of an answer.

Requests of this contract are written for many models at once. What cannot change the result is accepted; a client
that wants to know about it asks with `warnings: true` or the header `X-Penstock-Warnings: 1`.
"""

from __future__ import annotations

from collections.abc import Iterator

from frontend.protocols.sie.items import foreign_inputs
from frontend.protocols.sie.schemas import (
    Body,
    EncodeParams,
    EncodeRequest,
    ExtractParams,
    ExtractRequest,
    ScoreRequest,
)
from ipc.catalog.entries import ModelEntry
from ipc.wire.messages import ModelStatus

_SHARED = frozenset(("profile", "overflow_policy", "lora", "lora_id"))
_RESOLVED = {
    EncodeParams: _SHARED
    | {"instruction", "is_query", "output_types", "output_dtype", "dimensions", "muvera"},
    ScoreRequest: _SHARED | {"instruction"},
    ExtractParams: _SHARED,
}
"""Options that the server itself reads, by what holds them."""
_SHOWN = 64


def warnings_of(request: Body, entry: ModelEntry, status: ModelStatus) -> list[str]:
    """One sentence for each field that changes nothing; `status` is that of the loaded model."""
    params: EncodeParams | ScoreRequest | ExtractParams
    if isinstance(request, ScoreRequest):
        before, params = "", request
    elif isinstance(request, EncodeRequest):
        before, params = "params.", request.params or EncodeParams()
    elif isinstance(request, ExtractRequest):
        before, params = "params.", request.params or ExtractParams()
    else:
        return []
    used = _RESOLVED[type(params)] | set(status.uses)
    unread = [
        name for name, value in (params.options or {}).items() if name not in used and value is not None
    ]
    found = [f"{before}options.{name[:_SHOWN]}: not read by this model" for name in unread]
    if isinstance(params, ExtractParams):
        for name in ("labels", "output_schema", "instruction"):
            if getattr(params, name) and name not in used:
                found.append(f"params.{name}: not read by this model")
        found += _repeated(params.labels or [])
    return [*found, *_left_out(request, entry)]


def _repeated(labels: list[str]) -> Iterator[str]:
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if first.setdefault(label, index) != index:
            yield f"params.labels[{index}]: the same label as params.labels[{first[label]}], counted once"


def _left_out(request: EncodeRequest | ScoreRequest | ExtractRequest, entry: ModelEntry) -> Iterator[str]:
    items = {f"items[{index}]": item for index, item in enumerate(request.items)}
    if isinstance(request, ScoreRequest):
        items = {"query": request.query, **items}
    places: dict[str, list[str]] = {}
    for where, item in items.items():
        for name in foreign_inputs(item, entry):
            places.setdefault(name, []).append(where)
    for name, found in places.items():
        more = f" and {len(found) - 1} other items" if len(found) > 1 else ""
        yield f"{found[0]}.{name}{more}: left out, this model takes {', '.join(entry.inputs)}"
