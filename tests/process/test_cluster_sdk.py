"""The unmodified client of SIE against a gateway and a box: vectors, scores, models, capacity, status, pools."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.required_tool import named_python
from tests.fakes.adapter import vector_of
from tests.fakes.holding import holding
from tests.harness.broker import Broker
from tests.harness.cluster import box, gateway, held, serves
from tests.harness.server import Answer, Server, wait_until
from tests.harness.sie_clients import LINES, Client

PLAY = """
def tried(call):
    try:
        return call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "code": getattr(error, "code", None)}

with KIND(sys.argv[2]) as client:
    one = client.encode("fake/echo", {"text": "one"})
    many = client.encode("fake/echo", [{"id": "a", "text": "one"}, {"text": "two"}], output_dtype="float16")
    scored = client.score("fake/score", {"text": "q"}, [{"id": "x", "text": "a"}, {"id": "y", "text": "bb"}])
    frames = client.watch(mode="cluster")
    found = {
        "one": one["dense"].tolist(),
        "many": [[each.get("id"), each["dense"].tolist()] for each in many],
        "scored": [[each["item_id"], float(each["score"]), each["rank"]] for each in scored["scores"]],
        "models": {each["name"]: each["loaded"] for each in client.list_models()},
        "capacity": client.get_capacity(),
        "cpu": client.get_capacity(gpu="CPU")["worker_count"],
        "none": client.get_capacity(gpu="h100")["worker_count"],
        "waited": client.wait_for_capacity("cpu", model="fake/echo", timeout_s=30)["worker_count"],
        "frame": next(frames),
        "kind": client._detect_endpoint_type(),
        "before": tried(lambda: client.get_pool("bench")),
        "made": tried(lambda: client.create_pool("Bench", {"cpu": 1}, minimum_worker_count=0)),
        "pool": tried(lambda: client.get_pool("bench")),
        "pooled": tried(lambda: client.encode("fake/echo", {"text": "one"}, gpu="bench/cpu")["dense"].tolist()),
        "renewed": client._client.post("/v1/pools/bench/renew").status_code,
        "deleted": tried(lambda: client.delete_pool("bench")),
        "again": tried(lambda: client.delete_pool("bench")),
        "bad": tried(lambda: client.create_pool("a b")),
        "unknown": tried(lambda: client.encode("no/such", {"text": "x"})),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, one_broker: Broker) -> Iterator[Server]:
    """A gateway that has a box."""
    place, urls = tmp_path_factory.mktemp("cluster"), [one_broker.url]
    with (
        box(place / "a", "a", urls, models=("fake/echo", "fake/score")),
        gateway(place / "near", urls) as server,
    ):
        wait_until(lambda: serves(server), what="the first answer of a box")
        yield server


@pytest.fixture(scope="module")
def told(near: Server) -> Any:
    """What the client got."""
    return Client(named_python(*LINES["new"]), "sync").printed(PLAY, near.url)


def test_vectors_and_scores_are_those_of_the_box(told: Any) -> None:
    np.testing.assert_allclose(told["one"], vector_of("one", 16), atol=1e-6)
    assert told["many"][0][0] == "a"
    np.testing.assert_allclose(told["many"][1][1], vector_of("two", 16), atol=1e-3)
    assert [each[2] for each in told["scored"]] == [0, 1]
    assert {each[0] for each in told["scored"]} == {"x", "y"}


def test_the_client_takes_the_gateway_for_one_and_sees_its_box(told: Any) -> None:
    assert told["kind"] == "cluster"
    assert told["models"]["fake/echo"] is True
    capacity = told["capacity"]
    assert (capacity["status"], capacity["worker_count"]) == ("healthy", 1)
    assert [worker["name"] for worker in capacity["workers"]] == ["a"]
    assert (told["cpu"], told["none"], told["waited"]) == (1, 0, 1)


def test_a_frame_of_the_cluster_names_box_and_models(told: Any) -> None:
    frame = told["frame"]
    assert frame["cluster"]["worker_count"] == 1
    assert [(worker["name"], worker["healthy"]) for worker in frame["workers"]] == [("a", True)]
    states = {model["name"]: (model["state"], model["worker_count"]) for model in frame["models"]}
    assert states["fake/echo"] == ("loaded", 1)


def test_the_client_makes_uses_renews_and_removes_a_pool(told: Any) -> None:
    assert told["before"] is None and told["made"] is None
    pool = told["pool"]
    assert (pool["name"], pool["spec"]["gpus"], pool["spec"]["minimum_worker_count"]) == (
        "bench",
        {"cpu": 1},
        0,
    )
    assert pool["status"]["state"] == "active"
    assert [worker["name"] for worker in pool["status"]["assigned_workers"]] == ["a"]
    np.testing.assert_allclose(told["pooled"], vector_of("one", 16), atol=1e-6)
    assert (told["renewed"], told["deleted"], told["again"]) == (200, True, False)


def test_the_client_is_told_what_is_wrong_and_what_is_unknown(told: Any) -> None:
    assert told["bad"]["error"] == "PoolError" and "name: 'a b'" in told["bad"]["text"]
    assert "no/such" in told["unknown"]["text"]


def test_an_answer_names_its_box(near: Server) -> None:
    headers = near.encode("fake/echo", ["x"]).headers
    assert headers["x-sie-worker"] == "a/worker-0"
    assert float(headers["x-queue-wait-time"]) >= 0 and float(headers["x-queue-publish-time"]) > 0
    assert "x-payload-fetch-time" not in headers
    assert headers["x-sie-request-id"] == headers["x-request-id"]


def test_without_a_broker_a_request_is_refused_at_once_and_served_when_the_broker_is_back(
    near: Server, one_broker: Broker
) -> None:
    def asked(deadline_s: str) -> Answer:
        return near.post("/v1/encode/fake/echo", {"items": [{"text": "x"}]}, x_request_timeout=deadline_s)

    def refused() -> float:
        return near.metric(
            "sie_gateway_rejected_requests_total", machine_profile="", bundle="default", reason="no_broker"
        )

    before = refused()
    one_broker.kill()
    # What was sent just before the gateway heard of the loss waits for another broker until its deadline.
    wait_until(lambda: b"QUEUE_UNAVAILABLE" in asked("2").body, what="a refusal without a broker")
    began = time.monotonic()
    answer = asked("50")
    assert time.monotonic() - began < 25, "the refusal came at once, not at the deadline"
    assert answer.status == 503 and answer.json()["detail"]["code"] == "QUEUE_UNAVAILABLE"
    assert answer.json()["message"] == answer.json()["detail"]["message"]
    assert answer.headers["retry-after"] == "1"
    wait_until(lambda: refused() >= before + 2, what="the count of the refusals")
    # The gateway itself stays ready: another broker may come any moment.
    assert near.get("/readyz").status == 200
    one_broker.start()
    wait_until(lambda: serves(near), what="an answer of the box after the broker's return")


def test_what_a_gateway_does_and_sees_is_counted(near: Server, tmp_path: Path) -> None:
    def value(name: str, **labels: str) -> float:
        return near.metric(name, **labels)

    before = value("sie_gateway_requests_total", endpoint="encode", status="200", machine_profile="cpu")
    lanes = sum(value("penstock_cluster_lane_total", lane=lane) for lane in ("queue", "direct"))
    # A box that comes back answers before the gateway has read its row again, which names the machine.
    wait_until(
        lambda: (
            near.encode("fake/echo", ["counted"]).status == 200
            and value("sie_gateway_requests_total", endpoint="encode", status="200", machine_profile="cpu")
            > before
        ),
        what="the count of a request",
    )
    wait_until(
        lambda: sum(value("penstock_cluster_lane_total", lane=lane) for lane in ("queue", "direct")) > lanes,
        what="the count of an item",
    )
    with holding(tmp_path) as hold, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(near.post, "/v1/encode/fake/echo", held(hold))
        wait_until(lambda: value("penstock_cluster_claims_total") > 0, what="the count of a claim")
        hold.unlink()
        assert asked.result().status == 200
    wait_until(lambda: value("sie_gateway_workers", status="healthy") == 1, what="the box")
    wait_until(
        lambda: value("sie_gateway_model_workers", model="fake/echo") == 1, what="the box of the model"
    )
    assert value("sie_gateway_nats_connected") == 1
