"""A tiny chat model in a catalog of its own, and clients that read its streams event by event."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from frontend.engine.streams import homes
from ipc.wire.messages import GenerateCall
from tests.harness.server import FAKE_CATALOG, Server
from tests.tiny import chat_models

MODEL = "tiny/chat"


def chat_catalogs(directory: Path, kind: str = "chatml", context: int = chat_models.CONTEXT) -> str:
    """Value of `catalog.dirs`: one with a tiny chat model, which is made, and that of the fake models."""
    weights = chat_models.save(kind, directory / "weights", context)
    catalog = directory / "chat_catalog"
    catalog.mkdir()
    lines = [f"id: {MODEL}", f"source: {{kind: directory, path: {weights}}}", "adapter: causal"]
    (catalog / "chat.yaml").write_text("\n".join([*lines, "outputs: {chat: {}}", ""]))
    return f"{catalog},{FAKE_CATALOG}"


def prompts_of(slot: int, count: int, slots: int = 2) -> list[str]:
    """Different prompts of conversations whose worker is the one in `slot`, while workers have about as much to do."""

    def home(prompt: str) -> int:
        call = GenerateCall(messages=[{"role": "user", "content": prompt}])
        return homes.home(range(slots), MODEL, homes.beginning_of(call))

    return [
        prompt for prompt in map("question {}".format, range(20 * slots * count)) if home(prompt) == slot
    ][:count]


@dataclass
class Ending:
    """How a stream ended: whether by `data: [DONE]`, and the events with a finish reason or an error before."""

    done: bool = False
    finishes: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end, which was told once."""
        return self.done and not self.errors and len(self.finishes) == 1

    @property
    def is_failed(self) -> bool:
        """Whether one error ended the stream."""
        return self.done and len(self.errors) == 1 and not self.finishes


class ChatStream:
    """One streamed chat completion. `chunks` is the number of pieces of text so far, which `text` joins.

    `longest_s` is the longest time between two pieces.
    """

    def __init__(
        self,
        port: int,
        prompt: str,
        max_tokens: int,
        timeout_s: float = 60,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        sent = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), sent)
        self._response: http.client.HTTPResponse | None = None
        self.chunks = 0
        self.text = ""
        self.longest_s = self._last_s = 0.0
        self.ending = Ending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def local_port(self) -> int:
        """The client's side of the connection."""
        port: int = self._connection.sock.getsockname()[1]
        return port

    @property
    def response(self) -> http.client.HTTPResponse:
        """The response, once its head has come; its status is 200."""
        if self._response is None:
            self._response = self._connection.getresponse()
            assert self._response.status == 200, self._response.read()
        return self._response

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def more(self, count: int = 1) -> None:
        """Read so many more pieces of text; fails if the stream ends before."""
        until = self.chunks + count
        while self.chunks < until:
            assert self._take(), f"the stream ended after {self.chunks} pieces of text: {self.ending}"

    def rest(self) -> Ending:
        """Read to the end of the response."""
        while self._take():
            pass
        assert not self.response.read(), "bytes behind the end"
        return self.ending

    def _take(self) -> bool:
        """Read one event; false at the end."""
        line = self.response.readline().rstrip()
        if line == b"data: [DONE]":
            self.ending.done = True
            self.response.readline()
        if not line or self.ending.done:
            return not (self.ending.done or self.response.isclosed())
        if line.startswith(b":"):
            return True
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            self.ending.errors.append(event["error"])
            return True
        for choice in event["choices"]:
            self._took(choice["delta"]["content"])
            if choice["finish_reason"]:
                self.ending.finishes.append(choice["finish_reason"])
        self.ending.usage = event["usage"] or self.ending.usage
        return True

    def _took(self, text: str | None) -> None:
        """A piece of text, if there is any."""
        if text:
            now_s, self.text = time.monotonic(), self.text + text
            self.longest_s = max(self.longest_s, now_s - self._last_s) if self.chunks else 0.0
            self._last_s = now_s
            self.chunks += 1


def sequences(server: Server, state: str, slot: int | None = None) -> float:
    """Sequences that are `running` or `waiting` at the worker in a slot, or at all workers."""
    labels = {} if slot is None else {"worker": f"worker-{slot}"}
    return server.metric("penstock_generation_sequences", model=MODEL, state=state, **labels)


def held_blocks(server: Server) -> float:
    """Blocks of the key-value caches that sequences hold."""
    return server.metric("penstock_kv_cache_blocks_used", model=MODEL)
