"""The families `http_*` and the access log: labels, bodies, streams to their end, and what is left out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.access_log import HttpCounts
from frontend.engine.events import Started, Text
from ipc.metrics.registry import FrontendMetrics
from ipc.settings import Log
from tests.fakes.generation_server import CHAT, RecordedServer
from tests.harness.server import wait_until

ROUTE = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}


class Counted:
    """A server on a socket whose HTTP requests are counted."""

    def __init__(self, root: Path, settings: Log | None = None, counting: bool = True) -> None:
        self.server, self.metrics = RecordedServer(root), FrontendMetrics()
        services = self.server.services
        services.finisher.http = HttpCounts(self.metrics, services.catalog, settings or Log(), counting)

    def samples(self, family: str, ending: str) -> dict[tuple[str, ...], float]:
        """Values above zero by the values of the labels, of the samples whose names end so."""
        [found] = getattr(self.metrics, family).collect()
        return {
            tuple(sample.labels.values()): sample.value
            for sample in found.samples
            if sample.name.endswith(ending) and sample.value
        }

    def requests(self) -> dict[tuple[str, ...], float]:
        """Ended requests by method, path, model and status."""
        return self.samples("http_requests", "_total")


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


@pytest.fixture
def asked(counted: Counted) -> Iterator[httpx.Client]:
    with counted.server.listening() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_a_request_has_the_labels_of_its_route_and_model(counted: Counted, asked: httpx.Client) -> None:
    body = json.dumps({**ASK, "model": "default"}).encode()
    asked.post(ROUTE, content=body, headers={"Content-Type": "application/json"})
    key = ("POST", ROUTE, CHAT)
    wait_until(lambda: counted.requests() == {(*key, "200"): 1}, what="its count")
    assert counted.samples("http_duration", "_count") == {(*key, "200"): 1}
    assert counted.samples("http_body", "_sum") == {key: len(body)}
    assert counted.samples("http_in_flight", "in_flight") == {}


@pytest.mark.parametrize(
    ("method", "path", "body", "label"),
    [
        ("POST", ROUTE, json.dumps({**ASK, "model": "invented"}).encode(), (ROUTE, "unknown", "404")),
        ("POST", ROUTE, b"{", (ROUTE, "unknown", "400")),
        ("GET", ROUTE, b"", (ROUTE, "unknown", "405")),
        ("POST", "/v1/models/status", b'{"model_id": "tiny/chat"}', ("/v1/models/status", CHAT, "200")),
        ("POST", "/v1/models/status", b'{"model_id": "x"}', ("/v1/models/status", "unknown", "404")),
        ("GET", "/v1/models", b"", ("/v1/models", "none", "200")),
        ("GET", "/made/up/7", b"", ("<unmatched>", "none", "404")),
    ],
)
def test_labels_are_bounded(
    counted: Counted, asked: httpx.Client, method: str, path: str, body: bytes, label: tuple[str, ...]
) -> None:
    asked.request(method, path, content=body, headers={"Content-Type": "application/json"})
    wait_until(lambda: counted.requests() == {(method, *label): 1}, what="its count")


def test_a_method_of_nobody_is_no_label(counted: Counted, asked: httpx.Client) -> None:
    asked.request("PROPFIND", "/v1/models")
    wait_until(counted.requests, what="its count")
    assert {key[0] for key in counted.requests()} == {"other"}


@pytest.mark.parametrize(
    "path", ["/health", "/docs", "/docs/start.js", "/openapi.json", "/api-doc/openapi.json"]
)
def test_probes_and_pages_are_not_counted(counted: Counted, asked: httpx.Client, path: str) -> None:
    asked.get(path)
    asked.options(ROUTE)
    asked.get("/v1/models")
    wait_until(lambda: list(counted.requests()) == [("GET", "/v1/models", "none", "200")], what="one count")


def test_a_body_without_a_declared_length_is_measured(counted: Counted, asked: httpx.Client) -> None:
    body = json.dumps(ASK).encode()
    asked.post(ROUTE, content=iter([body[:9], body[9:]]), headers={"Content-Type": "application/json"})
    key = ("POST", ROUTE, CHAT)
    wait_until(lambda: counted.samples("http_body", "_sum") == {key: len(body)}, what="its size")


def test_a_stream_is_in_flight_until_its_end(counted: Counted, asked: httpx.Client) -> None:
    counted.server.script([[Started(4)], [Text(0, "Once")], None])
    with asked.stream("POST", ROUTE, json={**ASK, "stream": True}) as response:
        pieces = response.iter_text()
        assert "Once" in next(pieces)
        assert counted.samples("http_in_flight", "in_flight") == {("POST", ROUTE, CHAT): 1}
        assert counted.requests() == {}
    wait_until(lambda: counted.requests() == {("POST", ROUTE, CHAT, "200"): 1}, what="its end")
    assert counted.samples("http_in_flight", "in_flight") == {}


@pytest.mark.parametrize(("health", "lines"), [(False, 4), (True, 6)])
def test_the_access_log_has_two_lines_for_each_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, health: bool, lines: int
) -> None:
    caplog.set_level(logging.INFO, "frontend.access_log")
    counted = Counted(tmp_path, Log(access=True, access_health=health))
    with (
        counted.server.listening() as url,
        httpx.Client(base_url=url, headers={"X-Request-ID": "mine"}) as asked,
    ):
        asked.get("/health")
        asked.post(ROUTE, json=ASK)
        asked.get("/v1/models")
        wait_until(lambda: len(counted.requests()) == 2, what="their end")

    def fields(record: Any, *names: str) -> list[Any]:
        return [getattr(record, name) for name in names]

    records = [record for record in caplog.records if record.name == "frontend.access_log"]
    assert len(records) == lines
    began, ended = (record for record in records if record.path == ROUTE)
    assert fields(began, "method", "route") == ["POST", ROUTE]
    assert began.getMessage() == f"mine POST {ROUTE} started"
    assert fields(ended, "method", "route", "status", "model") == ["POST", ROUTE, 200, CHAT]
    assert ended.getMessage() == f"mine POST {ROUTE} 200 in {ended.duration_ms:.3f} ms, model {CHAT}"


def test_the_access_log_is_written_without_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "frontend.access_log")
    counted = Counted(tmp_path, Log(access=True), counting=False)

    def paths() -> list[str]:
        return [record.path for record in caplog.records if record.name == "frontend.access_log"]

    with counted.server.listening() as url, httpx.Client(base_url=url, timeout=60) as asked:
        asked.get("/health")
        asked.post(ROUTE, json=ASK)
        wait_until(lambda: len(paths()) == 2, what="the lines of the request")
    assert paths() == [ROUTE, ROUTE]
    assert counted.requests() == {}
