"""The named events of a run with tools of the server, and the fields of whole answers: what protocols share."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from msgspec import Meta, UnsetType

from frontend.engine.events import Asked, Calling, Completed, Produced, ToolEvent
from frontend.sending import named

MAX_FILES = 64
"""Files in a whole answer; the others can be fetched."""
RunSession = Annotated[str | UnsetType, Meta(description="Session of the tools that ran on the server.")]
RunCalls = Annotated[
    list[dict[str, Any]] | UnsetType, Meta(description="Calls that ran on the server, in their order.")
]
RunFiles = Annotated[
    list[dict[str, Any]] | UnsetType, Meta(description=f"Files that tools have made, at most {MAX_FILES}.")
]
_PROGRESS, _APPROVAL, _FILE = "agentic_tool_call_progress", "agentic_tool_approval_required", "file_produced"


def told(event: ToolEvent) -> tuple[str, dict[str, Any]] | None:
    """Name and fields of the event for clients, without `type`; None for a session, which stands in answers."""
    if isinstance(event, Calling | Completed):
        phase = "calling" if isinstance(event, Calling) else "complete"
        return _PROGRESS, {"round": event.round, "tool_name": event.name, "phase": phase, "data": event.data}
    if isinstance(event, Asked):
        asked = {"approval_id": event.approval_id, "session_id": event.session_id, "round": event.round}
        return _APPROVAL, {**asked, "tool": event.tool, "arguments": event.arguments}
    if isinstance(event, Produced):
        return _FILE, event.file
    return None


def framed(event: ToolEvent) -> bytes:
    """The event as chat and Messages send it: the File object of a file has no `type`. Empty for a session."""
    entry = told(event)
    if entry is None:
        return b""
    name, fields = entry
    return named(name, orjson.dumps(fields if name == _FILE else {"type": name, **fields}))
