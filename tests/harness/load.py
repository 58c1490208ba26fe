"""Closed-loop load from threads: every answer is checked against the text that asked for it.

The fake family derives a vector from its text, so a wrong pairing of request and answer is seen at once.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.fakes.adapter import vector_of

PAUSE_S = 0.05
"""What a client waits between two requests: some are always under way, and the cores have time for what is started."""


@dataclass
class Outcome:
    """What became of the requests of a load."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    broken: list[str] = field(default_factory=list)
    refused_connections: int = 0
    latencies_s: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Requests without the expected answer."""
        return sum(n for status, n in self.statuses.items() if status != 200) + self.wrong + len(self.broken)


class Load:
    """`clients` threads that encode one text after another until `stop`."""

    def __init__(
        self,
        port: int,
        clients: int,
        model: str = "fake/echo",
        keep_alive: bool = True,
        text: Callable[[int, int], str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._port, self._model, self._keep_alive = port, model, keep_alive
        self._headers = {"Accept": "application/json", **(headers or {})}
        self._text = text or (lambda client, turn: f"client {client} turn {turn}")
        self._end = threading.Event()
        self.outcome = Outcome()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> Outcome:
        """End all clients after their present request."""
        self._end.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a client hangs"
        return self.outcome

    @property
    def done(self) -> int:
        """Requests answered so far."""
        return sum(self.outcome.statuses.values())

    def _run(self, client: int) -> None:
        connection: http.client.HTTPConnection | None = None
        turn = 0
        while not self._end.is_set():
            turn += 1
            text = self._text(client, turn)
            fresh = connection is None
            connection = connection or http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            if fresh:
                try:
                    connection.connect()
                except OSError:
                    with self._lock:
                        self.outcome.refused_connections += 1
                    connection = None
                    self._end.wait(0.05)
                    continue
            if not self._one(connection, text) or not self._keep_alive:
                connection.close()
                connection = None
            self._end.wait(PAUSE_S)

    def _one(self, connection: http.client.HTTPConnection, text: str) -> bool:
        """One request; returns whether the connection can be used again."""
        body = json.dumps({"items": [{"text": text}]}).encode()
        began = time.monotonic()
        try:
            connection.request("POST", f"/v1/encode/{self._model}", body, self._headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            with self._lock:
                self.outcome.broken.append(f"{type(error).__name__}: {error}")
            return False
        right = response.status != 200 or self._right(raw, text)
        with self._lock:
            self.outcome.statuses[response.status] += 1
            self.outcome.latencies_s.append(time.monotonic() - began)
            self.outcome.wrong += not right
            if response.status != 200 and len(self.outcome.bodies) < 20:
                self.outcome.bodies.append(raw[:300])
        return response.getheader("Connection", "").lower() != "close"

    @staticmethod
    def _right(raw: bytes, text: str) -> bool:
        values = np.asarray(json.loads(raw)["items"][0]["dense"]["values"], np.float32)
        return bool(np.allclose(values, vector_of(text, len(values)), atol=1e-6))
