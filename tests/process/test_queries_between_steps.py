"""Queries of other models while a model writes a long text: they run between its steps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.harness.lifecycle import Models
from tests.harness.server import Answer, Server, serving, wait_until

WRITER, OTHER, SAME = "org/writer", "org/other", "org/writer:again"
TEXT = "a text that takes long"


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A model that writes for six seconds in steps of 30 ms, and a quick one whose pace is known.

    A dead worker comes back if the test asks for it by the parameter "supervised".
    """
    models = Models(tmp_path / "models")
    steps = {"steps": 200, "step_ms": 30}
    for name, adapter, options in (
        (WRITER, "tests.fakes.writing:WritingAdapter", steps),
        (OTHER, "tests.fakes.adapter:FakeAdapter", {}),
    ):
        entry = {
            "id": name,
            "source": {"kind": "directory", "path": str(models.weights(name, 1 << 10))},
            "adapter": adapter,
            "loadtime": {"dims": 16, **options},
            "profiles": {"again": {"output_types": ["dense"]}} if name == WRITER else {},
        }
        models.write_text(name, json.dumps(entry))
    waits = {"limits.restart_wait_s": 100, "limits.load_wait_s": 100, "limits.request_timeout_s": 200}
    settings = {"catalog.models": "", **waits}
    supervised = getattr(request, "param", "") == "supervised"
    with serving(
        tmp_path, models=(), settings=settings, catalog=models.directory, supervised=supervised
    ) as running:
        for number in range(3):
            assert running.encode(OTHER, [f"warm {number}"]).status == 200
        yield running


@contextmanager
def writing(server: Server) -> Iterator[Future[Answer]]:
    """Meanwhile the writer is at work; the future is its answer."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.encode, WRITER, [TEXT], timeout_s=200)
        wait_until(lambda: server.metric("penstock_requests_in_flight", model=WRITER) > 0, what="its work")
        time.sleep(0.1)
        yield answer


def is_right(answer: Answer, sent: str) -> bool:
    """Whether the one vector of an answer is that of its text."""
    assert answer.status == 200, answer.body
    values = np.asarray(answer.json()["items"][0]["dense"]["values"], np.float32)
    return np.allclose(values, vector_of(sent, 16), atol=1e-6)


def test_queries_of_another_model_are_answered_while_the_text_is_written(server: Server) -> None:
    with writing(server) as written:
        written_by_then = []
        for number in range(10):
            assert is_right(server.encode(OTHER, [f"query {number}"]), f"query {number}")
            written_by_then.append(written.done())
        assert not any(written_by_then[:3]), "the queries waited for the whole text"
        assert is_right(written.result(60), TEXT)
    spent_ms = float(written.result().headers["x-inference-time"])
    assert 6000 <= spent_ms < float(written.result().headers["x-total-time"])


@pytest.mark.long
@pytest.mark.parametrize("server", ["supervised"], indirect=True)
def test_a_query_that_kills_the_process_between_steps_costs_the_writer_one_repetition(server: Server) -> None:
    with writing(server) as written:
        crashed = server.encode(OTHER, ["#crash between steps"], timeout_s=200)
        assert (crashed.status, crashed.json()["detail"]["code"]) == (500, "WORKER_CRASHED")
        assert is_right(written.result(200), TEXT)


@pytest.mark.long
def test_a_query_that_fails_between_steps_fails_alone(server: Server) -> None:
    with writing(server) as written:
        for text in ("#raise", "#nan"):
            assert server.encode(OTHER, [text]).json()["detail"]["code"] == "INFERENCE_ERROR"
        assert is_right(server.encode(OTHER, ["after it"]), "after it")
        assert not written.done()
        assert is_right(written.result(60), TEXT)


@pytest.mark.long
def test_models_that_share_the_writers_weights_wait_for_it(server: Server) -> None:
    with writing(server) as written, ThreadPoolExecutor(1) as pool:
        same = pool.submit(server.encode, SAME, ["same weights"])
        assert is_right(server.encode(OTHER, ["passes"]), "passes")
        assert is_right(written.result(60), TEXT)
        assert not same.done()
        assert is_right(same.result(60), "same weights")
