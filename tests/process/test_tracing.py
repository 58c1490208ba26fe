"""Spans of a running server, received by an OTLP collector: one tree per request, with links between batch members."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.collector import Collector, SeenSpan, collecting
from tests.harness.cluster import ways_to
from tests.harness.server import ROOT, Answer, Server, make_server, serving, wait_until

MODELS = ("fake/echo", "fake/slow")
SECRET = "s3cret-token-of-the-collector"


class Traced(NamedTuple):
    """A server, and where its spans go."""

    server: Server
    collector: Collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A server that traces requests whose traceparent says so, and none of the others."""
    place = tmp_path_factory.mktemp("tracing")
    headers = place / "headers"
    headers.write_text(f"# of the collector\nAuthorization: Bearer {SECRET}\n")
    headers.chmod(0o600)
    with collecting() as collector:
        settings = {
            "tracing.endpoint": collector.url,
            "tracing.sample_ratio": 0,
            "tracing.service_name": "penstock-test",
            "tracing.headers_file": headers,
        }
        with serving(place, MODELS, settings, supervised=False) as server:
            yield Traced(server, collector)


either_traced = ways_to("traced")


def parent(flag: str = "01") -> tuple[str, str, str]:
    """Trace id, span id and traceparent of a caller."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{flag}"


def encode(server: Server, model: str, texts: list[str], traceparent: str) -> Answer:
    """One encode request with a traceparent."""
    return server.post(
        f"/v1/encode/{model}", {"items": [{"text": text} for text in texts]}, traceparent=traceparent
    )


def arrived(collector: Collector, trace_id: str) -> dict[str, SeenSpan]:
    """The spans of a trace by name, once its server span is there (all of a request come in one export)."""
    wait_until(lambda: collector.server_span(trace_id), what="the server span")
    return {span.name: span for span in collector.of(trace_id)}


def test_one_request_gives_the_whole_tree(either_traced: Traced) -> None:
    server, collector = either_traced
    trace_id, caller, traceparent = parent()
    before = time.time_ns()
    answer = encode(server, "fake/echo", ["one", "two"], traceparent)
    assert answer.status == 200 and answer.headers["x-trace-id"] == trace_id
    spans = arrived(collector, trace_id)
    root = spans.pop("POST /v1/encode/{model:path}")
    parents = {name: span.parent_id for name, span in spans.items()}
    batch = spans["batch"]
    assert parents == {
        "prepare": root.span_id,
        "queue": root.span_id,
        "batch": root.span_id,
        "device": batch.span_id,
        "copy": batch.span_id,
        "encode": root.span_id,
    }
    assert (root.parent_id, root.kind, root.status) == (caller, "SPAN_KIND_SERVER", "STATUS_CODE_UNSET")
    assert len({root.span_id, *(span.span_id for span in spans.values())}) == 7
    assert batch.links == {(trace_id, root.span_id)}
    assert before <= root.start_ns and root.end_ns <= time.time_ns()
    for span in spans.values():
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns, span.name
    order = ("prepare", "queue", "batch", "copy", "encode")
    starts = [spans[name].start_ns for name in order]
    assert starts == sorted(starts)
    assert (batch.start_ns, batch.end_ns) == (spans["device"].start_ns, spans["copy"].end_ns)


def test_attributes_say_what_was_asked_and_where_it_ran(either_traced: Traced) -> None:
    server, collector = either_traced
    trace_id, _, traceparent = parent()
    answer = encode(server, "fake/echo", ["a", "b", "c"], traceparent)
    spans = arrived(collector, trace_id)
    root = spans["POST /v1/encode/{model:path}"]
    assert root.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/encode/{model:path}",
        "url.path": "/v1/encode/fake/echo",
        "penstock.request_id": answer.headers["x-request-id"],
        "penstock.model": "fake/echo",
        "penstock.operation": "encode",
    }
    batch = spans["batch"].attributes
    assert batch["penstock.batch.items"] == 3 and batch["penstock.batch.requests"] == 1
    assert batch["penstock.batch.tokens"] > 0
    box = "beside/" if "PENSTOCK_CLUSTER__URLS" in server.environment else ""
    assert batch["penstock.worker"] == f"{box}worker-0"
    assert root.resource["service.name"] == "penstock-test"
    assert root.resource["service.instance.id"].endswith(f"/t{server.port}/frontend-0")
    assert collector.requests[-1]["path"] == "/v1/traces"
    assert collector.requests[-1]["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in server.log


def test_two_requests_in_one_batch_are_linked_to_each_other(traced: Traced) -> None:
    server, collector = traced

    def together() -> tuple[str, str] | None:
        """Two traces whose batches were one, behind a request that keeps the device busy."""
        first, second = parent(), parent()
        with ThreadPoolExecutor(3) as pool:
            busy = pool.submit(server.encode, "fake/slow", ["busy " * 100])
            sent = [pool.submit(encode, server, "fake/slow", ["x"], p[2]) for p in (first, second)]
            assert {call.result().status for call in (busy, *sent)} == {200}
        batches = [arrived(collector, p[0])["batch"] for p in (first, second)]
        # A batch of this model takes 20 ms, so batches that start within one are one.
        same = abs(batches[0].start_ns - batches[1].start_ns) < 1_000_000
        return (first[0], second[0]) if same else None

    first, second = wait_until(together, what="a batch with both requests")
    roots = {(found.trace_id, found.span_id) for t in (first, second) if (found := collector.server_span(t))}
    for trace_id in (first, second):
        batch = arrived(collector, trace_id)["batch"]
        assert roots <= batch.links
        assert batch.attributes["penstock.batch.requests"] >= 2


def test_a_failed_request_has_an_error_status_and_its_code(either_traced: Traced) -> None:
    server, collector = either_traced
    trace_id, _, traceparent = parent()
    assert encode(server, "fake/echo", ["#raise"], traceparent).status == 500
    root = arrived(collector, trace_id)["POST /v1/encode/{model:path}"]
    assert root.status == "STATUS_CODE_ERROR"
    assert root.attributes["error.type"] == "INFERENCE_ERROR"
    assert root.attributes["http.response.status_code"] == 500
    trace_id, _, traceparent = parent()
    assert encode(server, "none", ["a"], traceparent).status == 404
    root = arrived(collector, trace_id)["POST /v1/encode/{model:path}"]
    assert (root.status, root.attributes["error.type"]) == ("STATUS_CODE_UNSET", "MODEL_NOT_FOUND")


def test_the_callers_decision_is_honoured_and_probes_are_not_traced(
    either_traced: Traced,
) -> None:
    server, collector = either_traced
    refused, _, unsampled = parent("00")
    probed, _, probe = parent()
    assert encode(server, "fake/echo", ["a"], unsampled).headers["x-trace-id"] == refused
    assert server.request("GET", "/readyz", headers={"traceparent": probe}).headers["x-trace-id"] == probed
    own = server.encode("fake/echo", ["a"]).headers["x-trace-id"]
    last, _, sampled = parent()
    encode(server, "fake/echo", ["a"], sampled)
    arrived(collector, last)
    assert [collector.of(trace) for trace in (refused, probed, own)] == [[], [], []]


def test_a_collector_that_refuses_costs_spans_and_no_requests(
    either_traced: Traced,
) -> None:
    server, collector = either_traced
    exported = server.metric("penstock_traced_requests_total", outcome="exported")
    assert exported > 0
    collector.answer = 400
    try:
        lost, _, traceparent = parent()
        assert encode(server, "fake/echo", ["a"], traceparent).status == 200
        wait_until(
            lambda: server.metric("penstock_traced_requests_total", outcome="failed") > 0, what="its count"
        )
        wait_until(lambda: "the collector does not take them" in server.log, what="the log line")
    finally:
        collector.answer = 200
    kept, _, traceparent = parent()
    encode(server, "fake/echo", ["a"], traceparent)
    arrived(collector, kept)
    assert collector.of(lost) == []


@pytest.mark.long
def test_every_request_is_sampled_by_default_and_what_is_left_is_sent_at_the_end(tmp_path: Path) -> None:
    with collecting() as collector, serving(tmp_path, settings={"tracing.endpoint": collector.url}) as server:
        answers = [server.encode("fake/echo", [f"text {number}"]) for number in range(3)]
        server.stop()
        assert all(collector.server_span(answer.headers["x-trace-id"]) for answer in answers)


@pytest.mark.long
def test_a_dead_collector_holds_up_neither_requests_nor_the_stop(tmp_path: Path) -> None:
    with serving(tmp_path, settings={"tracing.endpoint": "http://127.0.0.1:9"}) as server:
        began = time.monotonic()
        for number in range(20):
            assert server.encode("fake/echo", [f"text {number}"]).status == 200
        assert time.monotonic() - began < 10
        assert server.stop() == 0


@pytest.mark.long
def test_with_tracing_off_no_process_imports_opentelemetry(tmp_path: Path) -> None:
    decoy = tmp_path / "decoy" / "opentelemetry"
    decoy.mkdir(parents=True)
    mark = tmp_path / "imported"
    (decoy / "__init__.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    server = make_server(tmp_path)
    server.environment["PYTHONPATH"] = str(decoy.parent)
    server.start()
    try:
        server.wait_ready()
        _, _, traceparent = parent()
        assert encode(server, "fake/echo", ["a"], traceparent).status == 200
        assert not mark.exists()
        imported = subprocess.run(
            [sys.executable, "-c", "import opentelemetry"], env=server.environment, cwd=ROOT, check=False
        )
        assert imported.returncode == 0 and mark.exists(), "the decoy is what an import finds"
        server.stop()
    finally:
        server.kill_everything()


def test_tracing_without_its_libraries_is_a_clear_error_at_the_start(tmp_path: Path) -> None:
    decoy = tmp_path / "decoy" / "opentelemetry"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("")
    server = make_server(tmp_path, settings={"tracing.endpoint": "http://127.0.0.1:4318"})
    server.environment["PYTHONPATH"] = str(decoy.parent)
    server.start()
    try:
        assert server.process.wait(60) == 3
        assert (
            "tracing.endpoint needs the extra tracing (pip install -c constraints.txt -e '.[tracing]'"
            in server.log
        )
    finally:
        server.kill_everything()
