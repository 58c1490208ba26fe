"""A conversation with a model of a running server, over /v1/chat/completions: the half of `penstock chat` without a
terminal.

1. `Server` sends one request at a time. Leaving the context of an answer closes the connection, so the server stops.
   `absence` says before a message whether the server has a model.
2. `Conversation.ask` sends the messages so far with a new one, and gives the pieces of the answer as they come.
3. `Conversation.show` keeps pictures for the next message, as data URLs.
4. A message without any answer is forgotten, so that it can be sent again. Its pictures stay for the next message.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import json
import mimetypes
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from penstock import target, terminal

T = TypeVar("T")
PATH = "/v1/chat/completions"
TEXTS = ("reasoning_content", "content")
"""Kinds of pieces that are text of the model."""
MODELS = "/v1/models"
MOST_PICTURE_NBYTES = 32 << 20
_SHOWN = 20
"""Models that a message names."""
_SILENCE_S = 120.0
"""A server that works sends a comment every few seconds (`generation.keep_alive_s`)."""


class NoAnswer(Exception):
    """The server is not there, refused the request, or broke off the stream."""


class Refused(NoAnswer):
    """The server refused the request with `status`; `field` is the path of the field at fault, where it has one."""

    def __init__(self, message: str, status: int, field: str) -> None:
        super().__init__(message)
        self.status, self.field = status, field


class _Model(msgspec.Struct):
    """A model in the forms of OpenAI and of SIE. A model that writes text and nothing else has no `outputs`."""

    id: str = ""
    name: str = ""
    outputs: list[str] = []


class _Models(msgspec.Struct):
    """What a server tells of its models. A server of others tells no `models`."""

    data: list[_Model]
    models: list[_Model] = []


class Server:
    """The address of a server, and one request at a time to it."""

    def __init__(self, url: str, key: str) -> None:
        """`url` and `key` as `target` gives them."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self.url, self._tls, self._prefix = url, parts.scheme == "https", parts.path
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @contextlib.contextmanager
    def asked(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request; leaving the context closes the connection. Raises `NoAnswer`."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_SILENCE_S)
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, self._prefix + path, content, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _refusal(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or terminal.one_line(str(error)) or type(error).__name__
            raise NoAnswer(f"no answer from {self.url}: {why}; is a server running there?") from error
        finally:
            connection.close()

    def models(self) -> list[str] | None:
        """Names of the models that write text, as far as the server tells; None where no list comes.

        Raises `NoAnswer` where no server answers.
        """
        listing = self._told(MODELS, _Models)
        if listing is None:
            return None
        others = {model.name for model in listing.models if model.outputs}
        return [terminal.one_line(model.id) for model in listing.data if model.id and model.id not in others]

    def absence(self, model: str) -> str:
        """Why the server has no model of that name that writes text, with the names of those that there are.

        Empty for a model that the server has, and where the server does not tell. Raises `NoAnswer` where no server
        answers.
        """
        one = self._told(f"{MODELS}/{quote(model, errors='replace')}", _Model)
        if one is not None and not one.outputs:
            return ""
        names = self.models()
        if names is None or model in names:
            return ""
        why = "does not exist" if one is None else "generates no text"
        return f"model {model[:200]!a} {why}; {listing(names)}"

    def _told(self, path: str, kind: type[T]) -> T | None:
        """The answer to a GET, None for a refusal and for an answer of another form. Raises `NoAnswer`."""
        try:
            with self.asked("GET", path) as response:
                return msgspec.json.decode(response.read(), type=kind)
        except (Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def listing(names: list[str]) -> str:
    """Names of models as a message has them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"models of generated text: {', '.join(names[:_SHOWN]) or 'none'}{more}"


def _refusal(response: http.client.HTTPResponse) -> Refused:
    body = response.read()
    message = (
        target.message_of(body)
        or target.redirection(response.status, response.getheader("Location"))
        or f"{response.status} {terminal.one_line(response.reason)}"
    )
    try:
        field = json.loads(body)["error"]["param"]
    except (ValueError, KeyError, TypeError, RecursionError):
        field = ""
    return Refused(message, response.status, field if isinstance(field, str) else "")


class Conversation:
    """The messages so far. `usage` are the counts and times of the last answer, as far as the server tells them."""

    def __init__(self, server: Server, model: str, system: str | None, fields: dict[str, Any]) -> None:
        """`fields` stand in each request."""
        self.server, self.model = server, model
        self._fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        self._system: list[dict[str, str]] = []
        self._said: list[dict[str, Any]] = []
        self._shown: list[dict[str, Any]] = []
        """Parts of the next message that are pictures."""
        self.usage: dict[str, Any] = {}
        self.instruct(system or "")

    def instruct(self, text: str) -> None:
        """Replace the message of the system; no text: there is none."""
        self._system = [{"role": "system", "content": text}] if text else []

    def reset(self) -> None:
        """Forget all messages but that of the system, and the pictures for the next one."""
        self._said, self._shown = [], []

    def show(self, path: Path) -> str:
        """Send a picture with the next message; what to say about the file. Raises `OSError`."""
        with path.open("rb") as file:
            content = file.read(MOST_PICTURE_NBYTES + 1)
        if len(content) > MOST_PICTURE_NBYTES:
            raise OSError(errno.EFBIG, f"more than {MOST_PICTURE_NBYTES} bytes")
        media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
        self._shown.append({"type": "image_url", "image_url": {"url": url}})
        return f"{path.name} ({len(content)} bytes) goes with the next message"

    def fields(self) -> dict[str, Any]:
        """The fields of the next request, beside its model and messages."""
        return self._fields

    def ask(self, text: str) -> Generator[tuple[str, Any], None, None]:
        """Send a message; gives the pieces of the answer: one of `TEXTS` and a text, or a named event and its object.

        What has arrived is part of the conversation even if the caller stops. Raises `NoAnswer`.
        """
        content = [*self._shown, {"type": "text", "text": text}] if self._shown else text
        said, answer = [*self._said, {"role": "user", "content": content}], ""
        self.usage = {}
        body = {**self.fields(), "model": self.model, "messages": [*self._system, *said]}
        try:
            with self.server.asked("POST", PATH, body) as response:
                for kind, piece in pieces(response, self.usage):
                    answer += piece if kind == "content" else ""
                    yield kind, piece
        finally:
            if answer:
                self._said = [*said, {"role": "assistant", "content": answer}]
                self._shown = []


def pieces(lines: Iterable[bytes], usage: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The texts of a stream of chunks, and its named events; the counts go into `usage`.

    Raises `NoAnswer` for an error event, and for a stream without its end.
    """
    name = ""
    for line in lines:
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.strip()
        if not field:
            name = ""
        elif field == b"event":
            name = value.decode(errors="replace")
        if field != b"data":
            continue
        if value == b"[DONE]":
            return
        yield from _read(name, value, usage)
    raise NoAnswer("the stream ended before the answer did")


def _read(name: str, value: bytes, usage: dict[str, Any]) -> list[tuple[str, Any]]:
    """What one event tells."""
    try:
        chunk = json.loads(value)
        failed = chunk.get("error")
        if name and not failed:
            return [(name, chunk)]
        deltas = [] if failed else [choice["delta"] for choice in chunk["choices"]]
        pieces = [(kind, str(delta[kind])) for delta in deltas for kind in TEXTS if delta.get(kind)]
        usage |= chunk.get("usage") or {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NoAnswer("the stream cannot be read: this is no server of chat completions") from None
    if failed:
        raise NoAnswer(target.message_of(value) or "the answer failed, and the server did not say why")
    return pieces
