"""The named events of a stream: numbered from 0, framed, and none of those that a client has already.

1. `response.created` tells a queued response, `response.in_progress` the same response at work.
2. `Output` tells what happens to items. `NamedEvents` collects the events until somebody takes them.
3. One event ends the stream, by the status of the response; `data: [DONE]` follows. What is wrong with a request, or
   with this server, is an event `error` instead.
"""

from __future__ import annotations

from typing import Any

import orjson

from frontend.generation.errors import error_info
from frontend.protocols.responses import resource
from frontend.protocols.responses.resource import Resource
from frontend.sse import DONE, named
from ipc.errors import PenstockError

_LAST = {resource.COMPLETED: "response.completed", resource.FAILED: "response.failed"}


class NamedEvents:
    """The events of one response behind event number `after`."""

    def __init__(self, after: int = -1) -> None:
        self._after, self._number = after, 0
        self._made: list[bytes] = []

    def tell(self, name: str, /, **fields: Any) -> None:
        """Add one event."""
        number = self._number
        self._number += 1
        if number > self._after:
            told = {"type": name, "sequence_number": number, **fields}
            self._made.append(named(name, orjson.dumps(told)))

    @property
    def is_at_work(self) -> bool:
        """Whether the stream has told that the response is at work."""
        return self._number > 1

    def queue(self, begun: Resource) -> None:
        """The response is known."""
        self.tell("response.created", response=begun)

    def work(self, begun: Resource) -> None:
        """The response is at work."""
        self.tell("response.in_progress", response=resource.at(begun, resource.IN_PROGRESS))

    def end(self, whole: Resource) -> bytes:
        """The rest of the stream of a response that has ended."""
        self.tell(_LAST.get(whole["status"], "response.incomplete"), response=whole)
        return self.taken() + DONE

    def fail(self, error: PenstockError) -> bytes:
        """The rest of a stream that ends before its response, or whose request was wrong."""
        info, inner = error_info(error), {"type": resource.kind_of(error), "message": error.message}
        self.tell("error", error=inner, message=error.message, code=info.code, param=info.param)
        return self.taken() + DONE

    def taken(self) -> bytes:
        """All events since the last call."""
        made, self._made = self._made, []
        return b"".join(made)
