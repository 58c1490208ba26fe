"""The metrics of a running server: all families from the first scrape on, each one moves, labels stay bounded."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend.access_log import NO_MODEL
from ipc.metrics import families as metric_families
from ipc.metrics import nv_names
from ipc.metrics.families import (
    ACCESS_REFUSALS,
    GENERATION_STATES,
    PHASES,
    REASONS,
    REJECTIONS,
    REVOCATIONS,
    SEQUENCE_STATES,
    STATES,
    UNKNOWN,
    UNLOADS,
)
from ipc.metrics.registry import LANES
from ipc.wire.streams import FINISH_REASONS
from tests.harness.raw import RawClient
from tests.harness.server import Server, alive, make_server, stopped, sum_of, wait_until

MODELS = ("fake/echo", "fake/slow", "fake/large", "fake/late", "fake/small")
SETTINGS = {
    "batch.max_items": 4,
    "arena.lease_max_age_s": 6.0,
    "arena.lease_copy_after_s": 20.0,
    "worker.count": 1,
    # On a busy machine a worker takes longer to start again than a request waits by default.
    "limits.restart_wait_s": 60.0,
}
CONSTANT = {
    "penstock_build_info",
    "penstock_batch_budget_tokens",
    "penstock_cached_prompt_tokens_total",
    "penstock_continuation_bytes",
    "penstock_continuations_total",
    "mistralrs_inter_token_latency_seconds",
    "mistralrs_kv_cache_blocks_total",
    "mistralrs_kv_cache_blocks_used",
    "mistralrs_paged_preemptions_total",
    "mistralrs_prefix_cache_evictions_total",
    "mistralrs_prefix_cache_hits_total",
    "mistralrs_prefix_cache_lookups_total",
    "mistralrs_sequences_capacity",
    "mistralrs_sequences_completed_total",
    "mistralrs_sequences_rejected_total",
    "mistralrs_sequences_running",
    "mistralrs_sequences_waiting",
    "mistralrs_time_to_first_token_seconds",
    "mistralrs_tokens_processed_total",
    "penstock_embedding_cache_bytes",
    "penstock_embedding_cache_evictions_total",
    "penstock_embedding_cache_hits_total",
    "penstock_embedding_cache_misses_total",
    "penstock_generation_sequences",
    "penstock_gpu_energy_joules",
    "penstock_gpu_memory_total_bytes",
    "penstock_gpu_power_limit_watts",
    "penstock_gpu_power_watts",
    "penstock_gpu_temperature_celsius",
    "penstock_gpu_utilization_ratio",
    "penstock_infer_cached_total",
    "penstock_input_shm_bytes_used",
    "penstock_inter_token_latency_seconds",
    "penstock_kv_cache_blocks",
    "penstock_kv_cache_blocks_used",
    "penstock_picture_cache_bytes",
    "penstock_picture_cache_evictions_total",
    "penstock_picture_cache_hits_total",
    "penstock_picture_cache_lookups_total",
    "penstock_pictures_total",
    "penstock_preemptions_total",
    "penstock_prefix_cache_evictions_total",
    "penstock_prefix_cache_hits_total",
    "penstock_prefix_cache_lookups_total",
    "penstock_quarantined",
    "penstock_sequences",
    "penstock_sequences_expired_total",
    "penstock_state_file_bytes",
    "penstock_state_files",
    "penstock_state_full",
    "penstock_stream_parts_total",
    "penstock_shm_bytes",
    "penstock_tensor_copied_bytes_total",
    "penstock_time_to_first_token_seconds",
    "penstock_tokens_by_key_total",
    "penstock_traced_requests_total",
    "sie_adaptive_batch_wait_ms",
    "sie_idle_evictions_total",
}
"""Families that traffic on one CPU worker leaves as they are; the others have tests of their own."""
Sample = tuple[str, tuple[tuple[str, str], ...]]


_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def scrape(server: Server) -> dict[Sample, float]:
    """Every sample by name and labels; dozens of looks with the parser of the library would take seconds."""
    text = server.get("/metrics").body.decode()
    found = {
        (name, tuple(sorted(_LABEL.findall(labels)))): float(value)
        for name, labels, value in _SAMPLE.findall(text)
    }
    assert len(found) == sum(not line.startswith("#") for line in text.splitlines())
    return found


def says(server: Server, path: str, text: bytes) -> bool:
    """Whether the server answers, and its body holds `text`."""
    with contextlib.suppress(OSError):
        return text in server.get(path, timeout_s=5).body
    return False


@functools.cache
def declared() -> dict[str, str]:
    """Name in the exposition to kind, for every family of the tables."""
    tables = (*metric_families.FRONTEND, *metric_families.WORKER, *metric_families.SUPERVISOR)
    return {family.name + ("_total" if family.kind == "counter" else ""): family.kind for family in tables}


def family_of(sample: str) -> str:
    """Family of a sample's name."""
    for suffix in ("_bucket", "_sum", "_count"):
        if sample.endswith(suffix) and declared().get(sample.removesuffix(suffix)) == "histogram":
            return sample.removesuffix(suffix)
    return sample


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[Sample, float]]]:
    """One worker with small batches and short leases, and what it showed while its models were loading."""
    running = make_server(tmp_path_factory.mktemp("metrics"), MODELS, SETTINGS)
    running.start()
    try:
        wait_until(lambda: says(running, "/readyz", b"loading"), what="a worker that loads")
        early = scrape(running)
        running.wait_ready()
        yield running, early
        running.stop()
        running.assert_nothing_left()
    finally:
        running.kill_everything()


@pytest.fixture(scope="module")
def server(started: tuple[Server, dict[Sample, float]]) -> Server:
    """The server, ready."""
    return started[0]


@pytest.fixture(scope="module")
def first(started: tuple[Server, dict[Sample, float]]) -> dict[Sample, float]:
    """The first scrape with a worker, before any model was loaded."""
    return started[1]


@pytest.fixture(scope="module")
def seen(server: Server, first: dict[Sample, float]) -> dict[str, set[float]]:
    """By family, all changes from the first scrape that showed while traffic of all kinds went through."""
    values: dict[str, set[float]] = {}

    def look() -> dict[Sample, float]:
        found = scrape(server)
        for key, value in found.items():
            values.setdefault(family_of(key[0]), set()).add(value - first.get(key, 0.0))
        return found

    for act in (
        plain,
        tensors,
        refused,
        turned_away,
        queued_and_left,
        without_memory,
        taken_out,
        slow_reader,
        crash,
    ):
        act(server, look)
    return values


Look = Callable[[], dict[Sample, float]]


def moved(look: Look, *names: str, **labels: str) -> bool:
    """Whether a sample of each name is above zero now; everything else that shows is noted on the way."""
    wanted = set(labels.items())
    found = {key[0] for key, value in look().items() if value > 0 and wanted <= set(key[1])}
    return found.issuperset(names)


def plain(server: Server, look: Look) -> None:
    """Good requests, one of them too long for the model."""
    assert server.encode("fake/echo", ["hello", "x" * 4000]).status == 200
    assert server.encode("fake/large", ["large"]).status == 200
    wait_until(lambda: moved(look, "penstock_truncated_inputs_total"), what="a truncation")


def tensors(server: Server, look: Look) -> None:
    """A tensor request that is answered, one that is refused, and a look at the server."""
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
    assert server.post("/v2/models/fake/echo/infer", {"inputs": [text]}).status == 200
    assert server.post("/v2/models/fake/echo/infer", {"inputs": []}).status == 400
    assert server.get("/api/status").status == 200
    wait_until(lambda: moved(look, "penstock_infer_calls_total", kind="status"), what="a call")


def refused(server: Server, look: Look) -> None:
    """A deadline that passes."""
    body = {"items": [{"text": "late" * 200}] * 10}
    assert server.post("/v1/encode/fake/slow", body, X_Request_Timeout="0.01").status == 504
    wait_until(lambda: moved(look, "penstock_rejected_total", reason="deadline"), what="a refusal")


def turned_away(server: Server, look: Look) -> None:
    """A caller from elsewhere who wants to change the server."""
    answer = server.post("/v1/admin/load/fake/echo", {}, X_Forwarded_For="10.0.0.1")
    assert answer.status == 403
    wait_until(lambda: moved(look, "penstock_access_refused_total", reason="forbidden"), what="a refusal")


QUEUE = (
    "penstock_queue_depth",
    "penstock_queue_tokens",
    "penstock_queue_oldest_seconds",
    "sie_queue_depth",
)


def queued_and_left(server: Server, look: Look) -> None:
    """A queue with an age, of which one client leaves."""
    text = "waiting " * 200
    with RawClient(server.port) as staying:
        staying.encode("fake/slow", [f"{text} {number}" for number in range(400)])
        wait_until(lambda: moved(look, "penstock_requests_in_flight", *QUEUE), what="a queue")
    wait_until(lambda: moved(look, "penstock_cancelled_saved_seconds_total"), what="a cancellation")


def without_memory(server: Server, look: Look) -> None:
    """Items that fit on the device only when they are apart, and one that does not fit at all."""
    assert server.encode("fake/small", ["x" * 120] * 3).status == 200
    wait_until(lambda: moved(look, "sie_oom_recoveries_succeeded_total"), what="a recovery")
    assert server.encode("fake/small", ["x" * 400]).status == 503
    wait_until(lambda: moved(look, "penstock_oom_total"), what="memory trouble")


def taken_out(server: Server, look: Look) -> None:
    """A model that is unloaded by hand; the trouble with memory may have unloaded it before."""
    assert server.post("/v1/admin/load/fake/late", {}).status == 200
    assert server.post("/v1/admin/unload/fake/late", {}).status == 200
    wait_until(lambda: moved(look, "penstock_model_unloads_total", reason="admin"), what="its end")


def slow_reader(server: Server, look: Look) -> None:
    """A lease that gets too old."""
    with RawClient(server.port, receive_nbytes=4096) as client:
        client.encode("fake/large", [f"slow {number}" for number in range(10)])
        wait_until(lambda: moved(look, "penstock_shm_bytes_used", "penstock_shm_leases"), what="a lease")
        wait_until(lambda: moved(look, "penstock_shm_leases_revoked_total", reason="age"), what="its end")


def crash(server: Server, look: Look) -> None:
    """An input that kills the worker twice; nobody starts it again before its absence shows."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(server.supervisor_pid()):
            answer = pool.submit(server.encode, "fake/echo", ["#crash metrics"])
            wait_until(lambda: not moved(look, "penstock_worker_up"), what="its absence")
        assert answer.result().status == 500
    for name in ("penstock_retries_total", "penstock_poison_total", "penstock_worker_restarts_total"):
        wait_until(lambda name=name: moved(look, name), what=name)
    look()


def test_every_declared_family_exists_at_the_first_scrape_and_no_other(first: dict[Sample, float]) -> None:
    found = {family_of(name) for name, _ in first}
    assert {name for name in found if not name.startswith("nv_")} == set(declared())
    assert found >= {family.name for family in nv_names.INFERENCE}


def test_types_and_help_of_the_exposition_are_those_declared(server: Server) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(answer.body.decode())
        if not family.name.startswith("nv_")
    }
    assert {name: family.type for name, family in found.items()} == declared()
    assert all(family.documentation for family in found.values())


@pytest.mark.parametrize("name", sorted(set(declared()) - CONSTANT))
def test_a_family_moves_under_traffic(seen: dict[str, set[float]], name: str) -> None:
    assert any(change != 0 for change in seen[name]), f"{name} never changed"


def test_a_frontend_that_dies_with_a_lease_is_counted(server: Server) -> None:
    assert server.encode("fake/large", ["loaded"]).status == 200
    with RawClient(server.port, receive_nbytes=4096) as client:
        client.encode("fake/large", [f"held {number}" for number in range(10)])
        assert client.head()[0] == 200
        frontend = server.frontend_pids()[0]
        os.kill(frontend, signal.SIGKILL)
    wait_until(lambda: frontend not in server.frontend_pids(), what="its death")
    wait_until(lambda: says(server, "/livez", b"ok"), what="a new frontend")
    wait_until(
        lambda: server.metric("penstock_shm_leases_revoked_total", reason="session") > 0, what="its count"
    )


def test_clients_cannot_invent_label_values(server: Server) -> None:
    assert server.encode("no/such/model", ["x"]).status == 404

    def attack(number: int) -> int:
        headers = {"X_Request_ID": f"r{number}", "X_Forwarded_For": f"10.0.0.{number}"}
        paths = (
            f"/v1/encode/no/such/model{number}",
            f"/v1/encode/%7B{number}%7D",
            f"/v1/no{number}",
            f"/{number}",
        )
        return max(server.post(path, {"items": [{"text": "x"}]}, **headers).status for path in paths)

    attack(40)
    before = set(scrape(server))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(attack, range(40))) <= {404, 405}
    for number in range(10):
        server.post("/v1/embeddings", {"model": f"invented{number}", "input": "x"})
    after = scrape(server)
    of_embeddings = {("operation", "embeddings"), ("endpoint", "embeddings"), ("path", "/v1/embeddings")}
    assert {key for key in set(after) - before if not of_embeddings & set(key[1])} == set()
    allowed = {
        "model": {*MODELS, UNKNOWN, NO_MODEL},
        "operation": {"encode", "embeddings", "infer", "status"},
        "endpoint": {"encode", "embeddings"},
        "protocol": {"sie", "kserve", "trtis_v1"},
        "lane": set(LANES),
        "phase": {*PHASES, "inference"},
        "state": {*STATES, *SEQUENCE_STATES, *GENERATION_STATES},
        "worker": {"worker-0"},
        "stage": {"queued", "running"},
        "uuid": {"", "cpu"},
        "device": {"cpu"},
    }
    for name, labels in after:
        for label, value in labels:
            assert label not in allowed or value in allowed[label], (name, label, value)
    reasons = {value for _, labels in after for label, value in labels if label == "reason"}
    known = {
        *REJECTIONS,
        *REVOCATIONS,
        *UNLOADS,
        *ACCESS_REFUSALS,
        *REASONS,
        *FINISH_REASONS,
        "suspect",
        "bystander",
        "crashed",
        "refused",
        "signal-9",
        "hang",
    }
    assert reasons <= known
    assert server.metric("penstock_requests_total", model=UNKNOWN, code="404") >= 80


def test_counters_go_on_and_files_stay_bounded_over_restarts(server: Server) -> None:
    before = counts(server)
    assert server.encode("fake/echo", ["turn 1"]).status == 200
    wait_until(lambda: counts(server) == (before[0] + 1, before[1] + 2), what="the first request's counts")
    frontends, worker = set(server.frontend_pids()), server.worker_pid()
    assert worker is not None
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(map(alive, frontends)), what="a reload")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: server.worker_pid() not in (None, worker), what="a new worker")
    wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
    assert server.encode("fake/echo", ["turn 2"]).status == 200
    wait_until(lambda: counts(server) == (before[0] + 2, before[1] + 4), what="the counts of both lives")
    names = {path.stem.rpartition("_")[2] for path in (server.run_dir / "metrics").iterdir()}
    assert names <= {"frontend-0", "frontend-1", "worker-0", "supervisor", "history"}


def counts(server: Server) -> tuple[float, float]:
    """Requests and tokens that both sides have counted since the server began."""
    text = server.get("/metrics").body.decode()
    requests = sum_of(text, "penstock_requests_total", model="fake/echo", code="200")
    return requests, sum_of(text, "penstock_tokens_total", model="fake/echo")
