"""The list of models in the forms of OpenAI and Anthropic, page by page.

1. An entry has the fields of both forms. The first entry is `default`, where `default` stands for a model.
2. Without parameters the list is whole. `limit`, `after_id` and `before_id` cut a page, as clients of Anthropic ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from falcon.asgi import Request

from frontend.generation.models import status_of
from ipc.errors import InvalidInput

OWNER = "local"
MAX_LIMIT = 1000


class ListedModel(msgspec.Struct, kw_only=True):
    """A model in the forms of OpenAI and Anthropic; `root` is the model behind `default` or a profile.

    `max_sequences` is there for loaded models that generate text: so many sequences run together.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = OWNER
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    root: str
    parent: str | None
    status: Literal["loaded", "unloaded", "reloading"] | msgspec.UnsetType = msgspec.UNSET
    max_sequences: int | msgspec.UnsetType = msgspec.UNSET


def listed_model(
    name: str, model: str, state: str, max_input_tokens: int | None, created: float, max_sequences: int = 0
) -> ListedModel:
    """The entry `name`, which stands for `model`; an alias has no status."""
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
        status=msgspec.UNSET if aliased else status_of(state),  # type: ignore[arg-type]
        max_sequences=max_sequences or msgspec.UNSET,
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
