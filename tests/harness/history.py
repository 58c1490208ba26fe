"""A history of every call and answer of many clients, and what must hold of it afterwards.

1. Each client has one connection to one gateway, and encodes one text after another, each text once in the whole run.
   Each `LARGE_EACH` calls there are `LARGE_ITEMS` texts more, so that the gateway cuts the request into pieces. A call
   notes the digest of its input, and the digest of the input that its answer belongs to.
2. The one who injects faults notes the spans in which calls may fail: `broker` (503 `QUEUE_UNAVAILABLE` with
   Retry-After) and `gateway NAME` (the connection breaks, nobody listens, or a new gateway has yet to hear of boxes).
3. `violations` tells every call that was answered wrongly, twice, never, or that failed outside of such a span.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.fakes.adapter import vector_of

PATIENCE_S = 30.0
"""A call that takes longer hangs."""
AFTER_S = 2.0
"""For so long after a fault has ended calls may fail in its way: gateways look for a broker again, sockets open."""
PAUSE_S = 0.02
LARGE_EACH, LARGE_ITEMS = 8, 150


def digest_of_input(text: str) -> str:
    """What stands for an input."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_of_answer(values: list[float]) -> str:
    """What stands for a vector: float32 values to five places."""
    return hashlib.blake2b((np.round(np.asarray(values), 5) + 0.0).tobytes(), digest_size=16).hexdigest()


@dataclass(slots=True)
class Call:
    """One call. `status` 0: no answer came. `right`: the answer is that of the call's own input."""

    gateway: str
    input: str
    began_s: float
    ended_s: float = 0.0
    status: int = 0
    code: str = ""
    retry_after: str = ""
    answer: str = ""
    right: bool = False
    error: str = ""


@dataclass(slots=True)
class Span:
    """A time in which calls may fail in a way."""

    what: str
    began_s: float
    ended_s: float = float("inf")


@dataclass
class History:
    """All calls and all faults of a run."""

    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @contextlib.contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """A span as long as the block, and `AFTER_S` more."""
        span = Span(what, time.monotonic())
        self.spans.append(span)
        yield
        span.ended_s = time.monotonic() + AFTER_S

    def overlaps(self, what: str, began_s: float, ended_s: float) -> bool:
        """Whether a fault of this name lasted at any instant of a time."""
        return any(
            span.what == what and span.began_s <= ended_s and began_s <= span.ended_s for span in self.spans
        )

    def _may_fail(self, call: Call, what: str) -> bool:
        return self.overlaps(what, call.began_s, call.ended_s)

    def violations(self) -> list[str]:
        """What must not have happened, a line each."""
        found = []
        inputs = [call.input for call in self.calls]
        if len(set(inputs)) != len(inputs):
            found.append("an input was asked for twice, so the history proves nothing")
        answers = [call.answer for call in self.calls if call.answer]
        if len(set(answers)) != len(answers):
            found.append("two calls got the same answer")
        for call in self.calls:
            wrong = self._wrong(call)
            if wrong:
                found.append(
                    f"{call.gateway} {call.input} after {call.ended_s - call.began_s:.2f} s: {wrong}"
                )
        return found

    def _wrong(self, call: Call) -> str:
        if not call.ended_s:
            return "never ended"
        if call.ended_s - call.began_s > PATIENCE_S:
            return f"took longer than {PATIENCE_S:g} s"
        if call.status == 200:
            return "" if call.right else "the answer is that of another input"
        if call.status == 0:
            return "" if self._may_fail(call, f"gateway {call.gateway}") else f"no answer: {call.error}"
        way = {"QUEUE_UNAVAILABLE": "broker", "PROVISIONING": f"gateway {call.gateway}"}.get(call.code)
        if way is not None and call.retry_after and self._may_fail(call, way):
            return ""
        return f"{call.status} {call.code} {call.error}"


class Clients:
    """Clients of several gateways that call until the block ends."""

    def __init__(self, history: History, gateways: dict[str, int], each: int, seed: int) -> None:
        """`gateways`: port by name. `each` clients for each of them."""
        self._history, self._seed, self._end = history, seed, threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(name, port, number), daemon=True)
            for name, port in gateways.items()
            for number in range(each)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S * 3)
            assert not thread.is_alive(), "a client hangs"

    def answered(self, gateway: str) -> int:
        """Calls through a gateway that were answered 200 so far."""
        with self._lock:
            return sum(call.gateway == gateway and call.status == 200 for call in self._history.calls)

    def _run(self, gateway: str, port: int, number: int) -> None:
        connection: http.client.HTTPConnection | None = None
        turn = 0
        while not self._end.is_set():
            turn += 1
            connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S + 5)
            text = f"seed {self._seed} gateway {gateway} client {number} turn {turn}"
            call = Call(gateway, digest_of_input(text), time.monotonic())
            with self._lock:
                self._history.calls.append(call)
            texts = [text] + [
                f"{text} item {at}" for at in range(LARGE_ITEMS if turn % LARGE_EACH == 0 else 0)
            ]
            if not self._call(connection, texts, call):
                connection.close()
                connection = None
            self._end.wait(PAUSE_S)

    @staticmethod
    def _call(connection: http.client.HTTPConnection, texts: list[str], call: Call) -> bool:
        """Make a call; returns whether the connection can be used again."""
        body = json.dumps({"items": [{"text": text} for text in texts]}).encode()
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/encode/fake/echo", body, headers)
            response = connection.getresponse()
            value = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            call.error, call.ended_s = repr(error), time.monotonic()
            return False
        call.status, call.retry_after = response.status, response.getheader("Retry-After", "")
        if call.status == 200:
            rows = [item["dense"]["values"] for item in value["items"]]
            call.answer = digest_of_answer(rows[0])
            call.right = len(rows) == len(texts) and all(
                np.allclose(row, vector_of(text, len(row)), atol=1e-6)
                for row, text in zip(rows, texts, strict=True)
            )
        else:
            detail = value.get("detail", {})
            call.code, call.error = detail.get("code", ""), detail.get("message", "")
        call.ended_s = time.monotonic()
        return response.getheader("Connection", "").lower() != "close"
