"""Web searches of a run as content blocks of Anthropic: the use of the tool, and the pages that were found.

A page that the model reads has no block of its own; records and progress events tell of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from frontend.agent.tools import MAX_USES, SEARCH_TOOL, values_of
from frontend.engine.events import Calling, Completed

_NO_ID = re.compile("[^A-Za-z0-9_]")


def is_search(event: Calling | Completed) -> bool:
    """Whether blocks tell the event."""
    return event.name == SEARCH_TOOL


def use_block(event: Calling | Completed) -> dict[str, Any]:
    """The block of a search that begins, with no input yet."""
    return {"type": "server_tool_use", "id": _id(event), "name": "web_search", "input": {}}


def input_of(arguments: str) -> dict[str, Any]:
    """The input of a search; empty for arguments that are no object."""
    values = values_of(arguments)
    return values if isinstance(values, dict) else {}


def result_block(event: Completed) -> dict[str, Any]:
    """The block of what a search found, or why the search failed."""
    return {"type": "web_search_tool_result", "tool_use_id": _id(event), "content": _content(event)}


def _content(event: Completed) -> Any:
    if "results_count" not in event.data:
        code = MAX_USES if MAX_USES in event.record["result_content"] else "unavailable"
        return {"type": "web_search_tool_result_error", "error_code": code}
    return [
        {"type": "web_search_result", **each, "encrypted_content": "", "page_age": None}
        for each in event.sources
    ]


def whole(completed: Iterable[Completed]) -> list[dict[str, Any]]:
    """The blocks of all searches of a run."""
    blocks: list[dict[str, Any]] = []
    for event in completed:
        if is_search(event):
            blocks += [
                {**use_block(event), "input": input_of(event.record["arguments"])},
                result_block(event),
            ]
    return blocks


def _id(event: Calling | Completed) -> str:
    return f"srvtoolu_{_NO_ID.sub('_', event.id)}"
