"""R2: an input that crashes every process it runs on, and inputs that fail without harm to their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.fault import serving
from tests.harness.server import Answer, Server, wait_until

MODEL = "fake/slow"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers; requests wait long enough for the restart of both."""
    directory: Path = tmp_path_factory.mktemp("poison")
    settings = {"worker.count": 2, "limits.restart_wait_s": 40}
    with serving(directory, models=(MODEL,), settings=settings) as running:
        wait_until(lambda: running.metric("penstock_worker_up") == 2, what="two workers")
        yield running


def deaths(server: Server) -> float:
    """Worker processes that have ended so far."""
    return server.metric("penstock_worker_restarts_total")


def is_right(values: list[float], text: str) -> bool:
    """Whether these are the values of that text."""
    return bool(np.allclose(values, vector_of(text, len(values)), atol=1e-6))


def assert_only(answer: Answer, texts: list[str], bad: set[int], code: str) -> None:
    """The items `bad` carry an error with `code`, all others the vector of their text."""
    assert answer.status == 200, answer.body[:500]
    for index, (item, text) in enumerate(zip(answer.json()["items"], texts, strict=True)):
        if index in bad:
            assert item["error"]["code"] == code
            assert "dense" not in item
        else:
            assert "error" not in item
            assert is_right(item["dense"]["values"], text)


@pytest.mark.parametrize("command", ["#raise", "#nan"])
def test_an_item_that_fails_in_the_model_leaves_its_neighbours_right(server: Server, command: str) -> None:
    texts = [f"{command} {n}" if n in (0, 7, 19) else f"neighbour {command[1:]} {n}" for n in range(20)]
    before = deaths(server)
    assert_only(server.encode(MODEL, texts, item_errors=True), texts, {0, 7, 19}, "INFERENCE_ERROR")
    assert deaths(server) == before


@pytest.mark.parametrize("command", ["#raise", "#nan", "#unpreparable"])
def test_a_request_whose_only_item_fails_is_answered_500(server: Server, command: str) -> None:
    before = deaths(server)
    answer = server.encode(MODEL, [f"alone {command}"])
    assert answer.status == 500
    assert answer.json()["detail"]["code"] == "INFERENCE_ERROR"
    assert deaths(server) == before


def test_a_request_that_cannot_be_prepared_leaves_other_requests_alone(server: Server) -> None:
    texts = [f"#unpreparable {n}" if n == 5 else f"other request {n}" for n in range(12)]
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: server.encode(MODEL, [text]), texts))
    for index, (answer, text) in enumerate(zip(answers, texts, strict=True)):
        if index == 5:
            assert answer.status == 500
        else:
            assert_only(answer, [text], set(), "")


def test_one_poison_among_64_requests_costs_two_processes_and_no_other_answer(server: Server) -> None:
    texts = [f"innocent {n}" for n in range(64)]
    texts[40] = "#crash"
    before = deaths(server)
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: server.encode(MODEL, [text]), texts))
    poisoned = answers.pop(40)
    texts.pop(40)
    for answer, text in zip(answers, texts, strict=True):
        assert_only(answer, [text], set(), "")
    assert poisoned.status == 500
    assert poisoned.json()["detail"]["code"] == "WORKER_CRASHED"
    wait_until(lambda: deaths(server) - before == 2, what="two deaths")
    wait_until(lambda: server.metric("penstock_worker_up") == 2, what="both workers' return")

    again = server.encode(MODEL, ["#crash"])
    assert again.status == 500
    assert again.json()["detail"]["code"] == "WORKER_CRASHED"
    assert server.encode(MODEL, ["innocent again"]).status == 200
    assert server.metric("penstock_poison_total", reason="crashed") == 1
    assert server.metric("penstock_poison_total", reason="refused") == 1
    assert deaths(server) - before == 2
