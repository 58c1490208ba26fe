"""R5: a batch that does not fit in device memory is split; only an item that cannot fit alone fails."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.fault import rounds, serving
from tests.harness.server import Answer, Server, wait_until

MEMORY_TOKENS = 64
CONFIGURED_TOKENS = 2048
LONE_TOO_LARGE = "large " * 60
"""360 characters: 91 tokens of the fake family."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker whose device holds 64 tokens."""
    settings = {"batch.max_tokens": CONFIGURED_TOKENS}
    with serving(
        tmp_path_factory.mktemp("memory"), models=("fake/small",), settings=settings, supervised=False
    ) as running:
        pid = running.worker_pid()
        wait_until(lambda: budget(running) == CONFIGURED_TOKENS, what="the configured budget")
        yield running
        assert running.worker_pid() == pid, "the worker did not survive"


def budget(server: Server) -> float:
    """Tokens that a batch may have."""
    return server.metric("penstock_batch_budget_tokens", model="fake/small")


def text(number: int) -> str:
    """40 characters, 11 tokens: six fit on the device at once."""
    return f"{number:040d}"


def is_right(item: dict[str, Any], sent: str) -> bool:
    """Whether an answered item is the vector of its text."""
    values = np.asarray(item["dense"]["values"], np.float32)
    return np.allclose(values, vector_of(sent, len(values)), atol=1e-6)


def test_a_request_above_device_memory_is_split_and_every_item_is_answered(server: Server) -> None:
    before = server.metric("penstock_oom_total", model="fake/small")
    texts = [text(number) for number in range(100)]
    answer = server.encode("fake/small", texts, item_errors=True)
    assert answer.status == 200, answer.body
    items = answer.json()["items"]
    assert len(items) == 100
    assert all(is_right(item, sent) for item, sent in zip(items, texts, strict=True))
    assert server.metric("penstock_oom_total", model="fake/small") > before


def test_requests_of_many_clients_that_meet_in_a_large_batch_are_all_answered(server: Server) -> None:
    texts = [text(1000 + number) for number in range(64 * rounds(short=1, long=50))]

    def ask(sent: str) -> tuple[str, Answer]:
        return sent, server.encode("fake/small", [sent])

    with ThreadPoolExecutor(16) as pool:
        for sent, answer in pool.map(ask, texts):
            assert answer.status == 200, answer.body
            assert is_right(answer.json()["items"][0], sent)


def test_only_the_item_that_cannot_fit_alone_fails(server: Server) -> None:
    texts = [text(1), LONE_TOO_LARGE, text(2), text(3)]
    answer = server.encode("fake/small", texts, item_errors=True)
    assert answer.status == 200, answer.body
    items = answer.json()["items"]
    assert items[1]["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert "91 tokens" in items[1]["error"]["message"]
    assert "dense" not in items[1]
    assert all(is_right(items[at], texts[at]) for at in (0, 2, 3))


def test_a_request_of_only_that_item_gets_503_with_a_whole_retry_after(server: Server) -> None:
    answer = server.encode("fake/small", [LONE_TOO_LARGE])
    assert answer.status == 503
    assert answer.json()["detail"]["code"] == "RESOURCE_EXHAUSTED"
    assert answer.headers["x-sie-error-code"] == "RESOURCE_EXHAUSTED"
    assert int(answer.headers["retry-after"]) >= 1


def test_the_budget_of_a_batch_drops_to_what_fits(server: Server) -> None:
    assert server.encode("fake/small", [text(number) for number in range(100)]).status == 200
    wait_until(lambda: budget(server) == MEMORY_TOKENS, what="the lowered budget")
    spent = server.metric("penstock_oom_total", model="fake/small")
    assert server.encode("fake/small", [text(number) for number in range(100)]).status == 200
    assert server.metric("penstock_oom_total", model="fake/small") == spent, "the lowered budget was ignored"
