"""The two encodings of the SIE contract as a client sees them, and what every refusal has to look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from tests.harness.server import Answer, Server

NUMPY_KEYS = [b"nd", b"type", b"kind", b"shape", b"data"]


def _restore(pairs: list[tuple[Any, Any]]) -> Any:
    """A msgpack-numpy map becomes an array; every other map stays a map. The order of the keys is part of the form."""
    if [key for key, _ in pairs] != NUMPY_KEYS:
        return dict(pairs)
    found = dict(pairs)
    assert found[b"nd"] is True and found[b"kind"] == b""
    return np.frombuffer(found[b"data"], found[b"type"]).reshape(found[b"shape"])


def unpack(body: bytes) -> Any:
    """A msgpack body with its arrays as numpy arrays."""
    return msgpack.unpackb(body, object_pairs_hook=_restore, strict_map_key=False)


@dataclass(frozen=True)
class Form:
    """One encoding: its media type, and how a value is written and read."""

    name: str
    media_type: str
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]

    @property
    def headers(self) -> dict[str, str]:
        """Headers that send and ask for this encoding."""
        return {"Content-Type": self.media_type, "Accept": self.media_type}

    def post(self, server: Server, path: str, value: Any) -> Answer:
        """POST `value` in this encoding, asking for the same."""
        return server.request("POST", path, self.dump(value), self.headers)


JSON = Form("json", "application/json", lambda value: json.dumps(value).encode(), json.loads)
MSGPACK = Form("msgpack", "application/msgpack", msgpack.packb, unpack)
FORMS = (JSON, MSGPACK)


def assert_refused(answer: Answer, status: int, code: str, *mentions: str) -> str:
    """The SIE form of an error, in JSON whatever was asked for; returns the message, which holds all `mentions`."""
    assert answer.status == status, (answer.status, answer.body[:500])
    assert answer.headers["content-type"].startswith("application/json")
    body = answer.json()
    message = _message_of(body["detail"], code, mentions)
    # The route of one model tells the message once more, for clients of OpenAI.
    assert body == {"detail": body["detail"]} or body == {"detail": body["detail"], "message": message}
    return message


def assert_refused_openai(answer: Answer, status: int, code: str, kind: str, *mentions: str) -> str:
    """The error form of /v1/embeddings: OpenAI's keys and the SIE ones side by side."""
    assert answer.status == status, (answer.status, answer.body[:500])
    assert answer.headers["content-type"].startswith("application/json")
    body = answer.json()
    assert set(body) == {"error", "detail", "message"}
    group = "invalid_request_error" if status < 500 else "server_error"
    assert body["error"] == {"message": body["message"], "type": group, "param": None, "code": kind}
    assert body["detail"]["error"] == body["error"]
    assert body["detail"]["message"] == body["message"]
    return _message_of(body["detail"], code, mentions)


def _message_of(detail: dict[str, Any], code: str, mentions: tuple[str, ...]) -> str:
    assert detail["code"] == code, detail
    message: str = detail["message"]
    assert 0 < len(message) < 1000, "a message is for people: neither empty nor a copy of the input"
    for text in mentions:
        assert text in message, (text, message)
    for leak in ("Traceback", "site-packages", "msgspec", "0x7f"):
        assert leak not in message
    return message
