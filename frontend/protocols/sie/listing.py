"""The list of models in the forms of OpenAI and Anthropic, page by page.

1. An entry has the fields of both forms. The first entry is `default`, where `default` stands for a model.
2. Without parameters the list is whole. `limit`, `after_id` and `before_id` cut a page, as clients of Anthropic ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from falcon.asgi import Request
from msgspec import Meta

from frontend.generation.models import status_of
from ipc.errors import InvalidInput
from ipc.wire.messages import ModelStatus

OWNER = "local"
MAX_LIMIT = 1000


class ListedModel(msgspec.Struct, kw_only=True):
    """A model in the forms of OpenAI and Anthropic; `root` is the model behind `default` or a profile.

    `max_sequences` and `tools` are there for loaded models that generate text, `limited_by` where a setting keeps
    `max_input_tokens` below what the model could take.
    """

    id: Annotated[str, Meta(description="Id of what is told here.")]
    object: Annotated[Literal["model"], Meta(description="Kind of what is told here.")] = "model"
    created: Annotated[int, Meta(description="Unix time of the beginning.")]
    owned_by: Annotated[str, Meta(description="Who serves the model.")] = OWNER
    type: Annotated[Literal["model"], Meta(description="Kind of what is told here.")] = "model"
    display_name: Annotated[str, Meta(description="The name for people.")]
    created_at: Annotated[str, Meta(description="Time since which the model is known, as RFC 3339.")]
    lifecycle: Annotated[Literal["active"], Meta(description="Whether the model will stay.")] = "active"
    max_input_tokens: Annotated[int | None, Meta(description="Longest input in tokens.")]
    root: Annotated[str, Meta(description="The model that this one is a form of.")]
    parent: Annotated[str | None, Meta(description="The model whose weights this one adapts.")]
    status: Annotated[
        Literal["loaded", "unloaded", "reloading"] | msgspec.UnsetType, Meta(description="The state.")
    ] = msgspec.UNSET
    max_sequences: Annotated[int | msgspec.UnsetType, Meta(description="Sequences that run together.")] = (
        msgspec.UNSET
    )
    tools: Annotated[
        str | msgspec.UnsetType,
        Meta(description="How the model is shown functions: `template`, `system text` or `none`."),
    ] = msgspec.UNSET
    limited_by: Annotated[
        str | msgspec.UnsetType, Meta(description="The setting that bounds `max_input_tokens`.")
    ] = msgspec.UNSET


def listed_model(
    name: str, model: str, max_input_tokens: int | None, created: float, status: ModelStatus
) -> ListedModel:
    """The entry `name`, which stands for `model` of this status; an alias has no status."""
    base, _, profile = model.partition(":")
    aliased = name != model
    return ListedModel(
        id=name,
        created=int(created),
        display_name=name,
        created_at=datetime.fromtimestamp(int(created), UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=max_input_tokens,
        root=model if aliased else base,
        parent=base if profile and not aliased else None,
        status=msgspec.UNSET if aliased else status_of(status.state),  # type: ignore[arg-type]
        max_sequences=status.max_sequences or msgspec.UNSET,
        tools=status.tools or msgspec.UNSET,
        limited_by=status.limited_by or msgspec.UNSET,
    )


def page_of(names: Sequence[str], req: Request) -> tuple[Sequence[str], bool]:
    """(the names of the page that a request asks for, whether more follow in its direction). Raises `InvalidInput`."""
    limit = _limit(req)
    after, before = req.get_param("after_id"), req.get_param("before_id")
    if after is not None and before is not None:
        raise InvalidInput("before_id: cannot be used together with after_id")
    if before is not None:
        names = names[: _place(names, before, "before_id")]
        return names[-limit:], len(names) > limit
    if after is not None:
        names = names[_place(names, after, "after_id") + 1 :]
    return names[:limit], len(names) > limit


def _limit(req: Request) -> int:
    given = req.get_param("limit")
    if given is None:
        return sys.maxsize
    if not (given.isascii() and given.isdigit() and len(given) <= 4 and 1 <= int(given) <= MAX_LIMIT):
        raise InvalidInput(f"limit: {given[:64]!a} is not in 1 to {MAX_LIMIT}")
    return int(given)


def _place(names: Sequence[str], name: str, parameter: str) -> int:
    if name not in names:
        raise InvalidInput(f"{parameter}: no model {name[:200]!a} is listed")
    return names.index(name)
