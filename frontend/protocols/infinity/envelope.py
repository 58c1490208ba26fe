"""What answers of infinity share: id, time, model and usage."""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope


def envelope(kind: str, scope: RequestScope, reply: Answer) -> dict[str, Any]:
    """All of an answer but its list."""
    used = sum(reply.tokens)
    return {
        "object": kind,
        "model": scope.model,
        "usage": {"prompt_tokens": used, "total_tokens": used},
        "id": f"infinity-{uuid.uuid4()}",
        "created": int(time.time()),
    }


def around(kind: str, scope: RequestScope, data: list[bytes], reply: Answer) -> list[bytes]:
    """The body around a list that is JSON already."""
    return [orjson.dumps(envelope(kind, scope, reply))[:-1] + b',"data":', *data, b"}"]
