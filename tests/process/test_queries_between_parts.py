"""Queries of other models while a text of thousands of windows is read: they run between its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.harness.lifecycle import Models
from tests.harness.server import Answer, Server, serving, wait_until
from tests.tiny.models import build

READER, OTHER = "org/reader", "org/other"
WINDOW, BUDGET, MOST = 16, 64, 24_000
LONG, TOO_LONG = "river " * 20_000, "river " * 26_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A model with short windows and a small token budget, and a quick one whose pace is known."""
    models = Models(tmp_path / "models")
    directories = {READER: build("dense_mean", tmp_path / "tiny"), OTHER: models.weights(OTHER, 1 << 10)}
    for name, adapter in ((READER, "dense"), (OTHER, "tests.fakes.adapter:FakeAdapter")):
        entry = {
            "id": name,
            "source": {"kind": "directory", "path": str(directories[name])},
            "adapter": adapter,
            **({"max_sequence_length": WINDOW} if name == READER else {"loadtime": {"dims": 16}}),
        }
        models.write_text(name, json.dumps(entry))
    settings = {
        "catalog.models": "",
        "batch.max_tokens": BUDGET,
        "limits.max_chunked_tokens": MOST,
        "limits.load_wait_s": 100,
        "limits.request_timeout_s": 200,
    }
    with serving(
        tmp_path, models=(), settings=settings, catalog=models.directory, supervised=False
    ) as running:
        for number in range(3):
            assert running.encode(OTHER, [f"warm {number}"]).status == 200
        yield running


def split(server: Server, text: str) -> Answer:
    """The answer to one text that is split into windows."""
    body: dict[str, Any] = {
        "items": [{"text": text}],
        "params": {"options": {"overflow_policy": "chunk"}},
    }
    return server.post(f"/v1/encode/{READER}", body, timeout_s=200)


@pytest.mark.long
def test_queries_of_another_model_are_answered_while_a_long_text_is_read(server: Server) -> None:
    assert split(server, "river").status == 200
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(split, server, LONG)
        wait_until(lambda: server.metric("penstock_requests_in_flight", model=READER) > 0, what="the text")
        read_by_then = []
        for number in range(10):
            answer = server.encode(OTHER, [f"query {number}"])
            read_by_then.append(reading.done())
            assert answer.status == 200, answer.body
            found = np.asarray(answer.json()["items"][0]["dense"]["values"], np.float32)
            assert np.allclose(found, vector_of(f"query {number}", 16), atol=1e-6)
        assert not read_by_then[0], "the queries waited for the whole text"
        answer = reading.result(200)
    assert answer.status == 200, answer.body
    assert 20_000 < answer.json()["usage"]["tokens"][0] <= MOST

    refused = split(server, TOO_LONG)
    assert (refused.status, refused.json()["detail"]["code"]) == (400, "INPUT_TOO_LONG")
    message = refused.json()["detail"]["message"]
    assert "items[0].text" in message and f"limits.max_chunked_tokens is {MOST}" in message
