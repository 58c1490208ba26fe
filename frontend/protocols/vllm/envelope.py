"""What answers of vLLM's pooling routes share: id, time, model and usage around a list."""

from __future__ import annotations

import random
import time
from typing import Any

import orjson

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope


def envelope(kind: str, scope: RequestScope) -> dict[str, Any]:
    """What an answer begins with."""
    identity = f"{kind}-{random.getrandbits(128):032x}"
    return {"id": identity, "object": "list", "created": int(time.time()), "model": scope.model}


def usage_of(reply: Answer) -> dict[str, Any]:
    """Tokens of a request."""
    used = sum(reply.tokens)
    return {
        "prompt_tokens": used,
        "total_tokens": used,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def around(kind: str, scope: RequestScope, data: list[bytes], reply: Answer) -> list[bytes]:
    """The body around a list that is JSON already."""
    head = orjson.dumps(envelope(kind, scope))[:-1] + b',"data":'
    return [head, *data, b',"usage":' + orjson.dumps(usage_of(reply)) + b"}"]
