"""`/ws/status`: the fields of the contract, true numbers from every frontend, and an end that holds nobody up."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.harness.server import PATIENCE_S, Server, serving, stopped, wait_until
from tests.harness.status import Frame, frame_when, next_frame, only_frontend, wait_joined, watching

MODEL, SLOW = "fake/echo", "fake/slow"
WORDS = 300
"""Of each text that takes its time; no other test sends so many."""
NUMBER = (int, float)
MAYBE_NUMBER = (int, float, type(None))
MAYBE_TEXT = (str, type(None))
FIELDS: dict[str, Any] = {
    "timestamp": float,
    "gpu": str,
    "machine_profile": str,
    "loaded_models": [str],
    "server": {"version": str, "uptime_seconds": int, "user": str, "working_dir": str, "pid": int},
    "gpus": [
        {
            "index": int,
            "device": str,
            "name": str,
            "gpu_type": str,
            "utilization_percent": NUMBER,
            "utilization_pct": NUMBER,
            "memory_used_bytes": int,
            "memory_total_bytes": int,
            "memory_threshold_pct": NUMBER,
            "temperature_c": int,
        }
    ],
    "models": [
        {
            "name": str,
            "state": str,
            "device": MAYBE_TEXT,
            "memory_bytes": int,
            "queue_depth": int,
            "queue_pending_items": int,
            "config": {
                "hf_id": MAYBE_TEXT,
                "adapter": str,
                "inputs": [str],
                "outputs": [str],
                "dims": {str: int},
                "max_sequence_length": (int, type(None)),
            },
            "adaptive_batching": {
                "calibrated": bool,
                "target_p50_ms": MAYBE_NUMBER,
                "wait_ms": NUMBER,
                "batch_cost": NUMBER,
                "p50_ms": MAYBE_NUMBER,
                "headroom_ms": MAYBE_NUMBER,
                "fill_ratio": MAYBE_NUMBER,
            },
        }
    ],
    "counters": {str: {str: NUMBER}},
    "histograms": {str: {str: {"buckets": [NUMBER], "counts": [int]}}},
    "ready": bool,
    "name": str,
    "pool_name": str,
    "gpu_count": int,
    "bundle": str,
    "bundle_config_hash": str,
    "max_batch_requests": int,
    "saturated": bool,
}
"""The table of section 16 as types: a class or classes, `[type]` a list, `{str: type}` a map, else named keys."""


def misfits(value: Any, kind: Any, where: str = "") -> list[str]:
    """Where `value` is not of `kind`; keys beyond the named ones are allowed."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [text for at, one in enumerate(value) for text in misfits(one, kind[0], f"{where}[{at}]")]
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return [f"{where} is no map"]
        if str in kind:
            return [text for key, one in value.items() for text in misfits(one, kind[str], f"{where}.{key}")]
        missing = [f"{where}.{key} is missing" for key in kind.keys() - value.keys()]
        known = [(key, one) for key, one in value.items() if key in kind]
        return missing + [text for key, one in known for text in misfits(one, kind[key], f"{where}.{key}")]
    exact = isinstance(value, bool) == (kind is bool)
    return [] if isinstance(value, kind) and exact else [f"{where} is {value!r}"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends, two workers, two models that load and one that does not; the last test stops the server."""
    settings = {
        "server.frontends": 2,
        "worker.count": 2,
        "limits.max_status_streams": 3,
        "server.status_origins": "http://tool.example",
        "server.graceful_timeout_s": 60,
    }
    with serving(tmp_path_factory.mktemp("status"), (MODEL, SLOW, "fake/broken"), settings) as started:
        wait_joined(started)
        yield started


def test_the_first_frame_comes_at_once_and_has_every_field(server: Server) -> None:
    assert server.encode(MODEL, ["one"]).status == 200
    with watching(server) as viewer:
        began = time.monotonic()
        frame = next_frame(viewer)
        assert time.monotonic() - began < 30
    assert misfits(frame, FIELDS) == []
    assert set(frame["loaded_models"]) == {MODEL, SLOW}
    states = {model["name"]: model["state"] for model in frame["models"]}
    assert states.keys() == {MODEL, SLOW, "fake/broken"}
    assert states[MODEL] == states[SLOW] == "loaded"
    assert states["fake/broken"] in ("failed", "loading"), "a failed load may be tried again"
    assert frame["server"]["version"] == "0.3.4"
    assert (frame["server"]["user"], frame["server"]["working_dir"]) == ("", "")
    assert frame["ready"] is True
    assert frame["gpus"] == [], "this server has no GPU"
    assert abs(frame["timestamp"] - time.time()) < 5
    memory = [model["memory_bytes"] for model in frame["models"]]
    assert memory == sorted(memory, reverse=True)


def test_every_worker_shows_its_device(server: Server) -> None:
    with watching(server) as viewer:
        frame = frame_when(viewer, lambda frame: all("batch" in device for device in frame["devices"]))
    for slot, device in enumerate(frame["devices"]):
        assert (device["worker"], device["device"], device["state"]) == (slot, "cpu", "ready")
        assert 0 < device["memory_used_bytes"] < device["memory_total_bytes"]
        assert device["batch"]["budget_tokens"] == 2048


def test_the_schema_check_finds_what_is_wrong() -> None:
    assert misfits({"a": 1}, {"a": int, "b": str}) == [".b is missing"]
    assert misfits({"a": [1, "x"]}, {"a": [int]}) == [".a[1] is 'x'"]
    assert misfits(True, int) == [" is True"]
    assert misfits({"m": {"n": None}}, {"m": {str: int}}) == [".m.n is None"]


def test_frames_follow_each_other_five_times_per_second(server: Server) -> None:
    with watching(server) as viewer:
        stamps = [next_frame(viewer)["timestamp"] for _ in range(8)]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(stamps))
    assert 0.1 < gaps[len(gaps) // 2] < 0.6, gaps


def test_every_frontend_shows_the_requests_of_all_frontends(server: Server) -> None:
    pids = server.frontend_pids()
    for number, pid in enumerate(pids):
        with only_frontend(server, pid):
            answer = server.post(
                f"/v1/encode/{MODEL}", {"items": [{"text": "x"}]}, X_Request_ID=f"status-{number}"
            )
            assert answer.status == 200
    expected = {f"status-{number}" for number in range(len(pids))}
    for pid in pids:
        with only_frontend(server, pid), watching(server) as viewer:
            frame = frame_when(viewer, lambda frame: expected <= by_id(frame["recent_requests"]).keys())
        shown = by_id(frame["recent_requests"])
        for name in expected:
            phases = shown[name]["phases"]
            assert phases["device"] > 0
            assert sum(phases.values()) == pytest.approx(shown[name]["total_ms"], abs=0.01)
    # A process writes its figures one after the other, so two frames may see a request half counted.
    wait_until(
        lambda: len({figures(server, pid) for pid in pids}) == 1, what="the same figures at both frontends"
    )


def figures(server: Server, pid: int) -> str:
    """Counters and histograms that a frontend shows."""
    with only_frontend(server, pid), watching(server) as viewer:
        frame = next_frame(viewer)
    return json.dumps([frame["counters"], frame["histograms"]], sort_keys=True)


def by_id(records: list[Frame]) -> dict[str, Frame]:
    """Requests by their id."""
    return {record["request_id"]: record for record in records}


def scraped(server: Server) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counters and histograms of the metrics that are not zero, as `shown` gives those of a frame."""
    counters: dict[str, dict[str, float]] = {}
    buckets: dict[str, dict[str, dict[float, float]]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
        for sample in family.samples:
            model = sample.labels.get("model")
            # Those of the tensor protocols are derived from others when they are asked for.
            derived = family.name.startswith("nv_")
            if model is None or derived or sample.labels.get("phase", "total") != "total":
                continue
            if family.type == "counter" and sample.name.endswith("_total") and sample.value:
                found = counters.setdefault(family.name, {})
                found[model] = found.get(model, 0) + sample.value
            elif family.type == "histogram" and sample.name.endswith("_bucket") and sample.value:
                bound = float(sample.labels["le"])
                places = buckets.setdefault(family.name, {}).setdefault(model, {})
                places[bound] = places.get(bound, 0) + sample.value
    return counters, buckets


def shown(frame: Frame) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counters by family and model, and observations up to each bound by histogram and model."""
    buckets = {
        name: {
            model: {
                bound: count
                for bound, count in zip(
                    [*one["buckets"], float("inf")], [*one["counts"], one["count"]], strict=True
                )
                if count
            }
            for model, one in models.items()
        }
        for name, models in frame["histograms"].items()
    }
    return frame["counters"], buckets


def test_counters_and_histograms_are_those_of_the_metrics(server: Server) -> None:
    for count in (1, 3, 7):
        assert server.encode(MODEL, ["text"] * count).status == 200
    last = server.post("/v1/encode/nobody/knows", {"items": [{"text": "x"}]}, X_Request_ID="status-last")
    assert last.status == 404
    with watching(server) as viewer:
        frame_when(viewer, lambda frame: "status-last" in by_id(frame["recent_errors"]))
        # Figures that another process has counted are in the files a little later.
        wait_until(lambda: shown(next_frame(viewer)) == scraped(server), what="the figures of the metrics")
        counters, buckets = shown(next_frame(viewer))
    assert counters["sie_requests"]["unknown"] >= 1
    assert buckets["sie_batch_size"][MODEL][float("inf")] >= 3


def test_what_waits_and_runs_is_shown_while_it_does(server: Server) -> None:
    def shown(frame: Frame) -> Frame:
        [model] = [model for model in frame["models"] if model["name"] == SLOW]
        return dict(model)

    def reported(frame: Frame) -> list[Frame]:
        return [device for device in frame["devices"] if "batch" in device]

    with watching(server) as viewer:
        frame_when(viewer, lambda frame: shown(frame)["in_flight"] == 0, what="the end of earlier requests")
        body = json.dumps({"items": [{"text": "word " * WORDS}] * 400}).encode()
        head = (
            f"POST /v1/encode/{SLOW} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head + body)
            frame_when(viewer, lambda frame: shown(frame)["in_flight"] == 1, what="it in flight")
            frame_when(
                viewer,
                lambda frame: (
                    shown(frame)["queue_pending_items"] > 0
                    and any(device["queue"]["tokens"] > 0 for device in reported(frame))
                ),
                what="a queue",
            )
            frame_when(
                viewer,
                lambda frame: any(
                    tokens >= WORDS for device in reported(frame) for _, tokens, *_ in device["batch"]["last"]
                ),
                what="a batch of it",
            )
        frame_when(viewer, lambda frame: shown(frame)["in_flight"] == 0, what="its end")


def test_errors_are_shown_with_their_request_ids(server: Server) -> None:
    answer = server.post(f"/v1/encode/{MODEL}", {"items": []}, X_Request_ID="status-wrong")
    assert answer.status == 400
    with watching(server) as viewer:
        frame = frame_when(viewer, lambda frame: "status-wrong" in by_id(frame["recent_errors"]))
    shown = by_id(frame["recent_errors"])["status-wrong"]
    assert (shown["status"], shown["code"], shown["model"]) == (400, "INVALID_INPUT", MODEL)
    assert shown["message"] == "items: may not be empty"


def test_a_worker_that_dies_is_shown_as_down_and_its_restart_is_counted(server: Server) -> None:
    pid = server.worker_pid(1)
    assert pid is not None
    with watching(server) as viewer:
        before = next_frame(viewer)["devices"][1]["restarts"]
        with stopped(server.supervisor_pid()):
            os.kill(pid, signal.SIGKILL)
            killed = time.time()
            down = frame_when(
                viewer, lambda frame: frame["devices"][1]["state"] != "ready", what="the death"
            )["health"]
            assert down["state"] == "degraded"
            assert down["problems"][0]["text"] == "1 of 2 workers is down"
            assert killed - 1 < down["problems"][0]["since"] < time.time() + 1
        back = frame_when(
            viewer,
            lambda frame: frame["devices"][1]["state"] == "ready" and frame["devices"][1].get("batch"),
            what="the worker's numbers after its restart",
        )
    assert back["devices"][1]["restarts"] == before + 1
    assert back["faults"]["worker_restarts"] == {"signal-9": before + 1}


def test_one_stream_more_than_allowed_is_answered_503(server: Server) -> None:
    pid = server.frontend_pids()[0]
    with only_frontend(server, pid):
        with watching(server), watching(server), watching(server):
            with pytest.raises(InvalidStatus) as refused, watching(server):
                pass
            response = refused.value.response
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert json.loads(response.body or b"")["detail"]["code"] == "QUEUE_FULL"
            assert response.headers["X-Trace-ID"]
        wait_until(lambda: server.get("/ws/status").status == 426, what="room for another stream")


def handshake(path: str = "/ws/status", method: str = "GET", **fields: str) -> bytes:
    """A handshake in bytes; a field given as empty is left out."""
    head = {
        "Host": "server.example",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
        **{name.replace("_", "-"): value for name, value in fields.items()},
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def answer_to(server: Server, sent: bytes) -> tuple[int, bytes]:
    """(status, head received) of what is sent on a connection of its own."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(sent)
        received = b""
        while b"\r\n\r\n" not in received:
            piece = client.recv(65536)
            assert piece, f"closed without an answer after {received!r}"
            received += piece
    return int(received.split(b" ", 2)[1]), received


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (handshake(), 101),
        (handshake(Origin="http://server.example"), 101),
        (handshake(Origin="http://tool.example"), 101),
        (handshake(Origin="http://evil.example"), 403),
        (handshake(Origin="null"), 403),
        (handshake("/ws/nothing"), 404),
        (handshake("/healthz"), 405),
        (handshake(Sec_WebSocket_Key=""), 426),
        (handshake(Sec_WebSocket_Key="short"), 426),
        (handshake(Sec_WebSocket_Version="8"), 426),
        (handshake(Upgrade="h2c"), 426),
        (handshake(method="POST"), 405),
        (handshake(X_Much="x" * 9000), 400),
        (handshake(Host=""), 400),
    ],
)
def test_every_handshake_gets_one_clean_answer(server: Server, sent: bytes, status: int) -> None:
    assert answer_to(server, sent)[0] == status
    assert server.get("/healthz").status == 200


def test_a_handshake_behind_an_unanswered_request_does_not_cut_into_its_answer(server: Server) -> None:
    body = json.dumps({"items": [{"text": "first"}]}).encode()
    head = f"POST /v1/encode/{MODEL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + body + handshake())
        received = b""
        while b"426" not in received:
            piece = client.recv(65536)
            assert piece, received
            received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert received.count(b"HTTP/1.1 ") == 2


def test_what_a_viewer_sends_is_ignored_and_a_huge_message_ends_its_stream_alone(server: Server) -> None:
    with watching(server) as quiet:
        with watching(server) as talker:
            next_frame(talker)
            for message in ("hello", b"\x00\x01", "{}"):
                talker.send(message)
            for _ in range(3):
                next_frame(talker)
            talker.send("x" * (1 << 20))
            with pytest.raises(ConnectionClosed):
                while True:
                    talker.recv(10)
        for _ in range(3):
            next_frame(quiet)


@pytest.mark.parametrize(
    ("behind", "answer"), [(b"", b"\x88\x02\x03\xef"), (b"\x88\x82\0\0\0\0\x03\xe8", b"\x88\x02\x03\xe8")]
)
def test_a_text_that_is_no_utf8_ends_its_stream_in_order(
    server: Server, behind: bytes, answer: bytes
) -> None:
    """The text comes in two frames, alone or with a closing frame of 1000 in one piece; 1007 answers the former."""
    with watching(server) as quiet, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(handshake(Host="x"))
        received = client.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 101 ")
        client.sendall(b"\x01\x81\0\0\0\0\xe0" + b"\x80\x81\0\0\0\0\x41" + behind)
        while piece := client.recv(1 << 16):
            received += piece
        assert received.endswith(answer)
        next_frame(quiet)
    server.assert_no_stack()


def test_a_drain_ends_streams_with_1001_and_waits_for_no_viewer_that_reads_nothing(server: Server) -> None:
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    stalled.connect(("127.0.0.1", server.port))
    stalled.sendall(handshake(Host="x"))
    with stalled, watching(server) as viewer:
        for _ in range(6):
            next_frame(viewer)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                viewer.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        server.stop(60)
        assert time.monotonic() - began < 50
