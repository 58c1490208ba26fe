"""Pools over a real broker: two boxes, two gateways, and a box that belongs to one pool at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import nats
import pytest

from tests.harness.broker import PATIENCE_S, Broker
from tests.harness.cluster import box, gateway, living, serves
from tests.harness.server import Answer, Server, wait_until

BODY = {"items": [{"text": "x"}]}
BOXES = {"a", "b"}
Pair = tuple[Server, Server]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, one_broker: Broker) -> Iterator[Pair]:
    """Two gateways that know both boxes; box `b` has the machine profile `big`, and may load another model."""
    place, urls = tmp_path_factory.mktemp("cluster"), [one_broker.url]
    models = ("fake/echo", "fake/score")
    big = {"server.machine_profile": "Big", "catalog.preload": "fake/echo"}
    with (
        box(place / "a", "a", urls, models=models, settings={"catalog.preload": "fake/echo"}),
        box(place / "b", "b", urls, models=models, settings=big),
        gateway(place / "one", urls) as one,
        gateway(place / "two", urls) as two,
    ):
        for server in (one, two):
            wait_until(lambda server=server: serves(server), what="the first answer of a box")
            wait_until(lambda server=server: living(server) == BOXES, what="both boxes")
        yield one, two


def asked(server: Server, **headers: str) -> Answer:
    return server.post("/v1/encode/fake/echo", BODY, accept="application/json", **headers)


def by(answer: Answer) -> str:
    """The box that answered."""
    assert answer.status == 200, answer.body
    return answer.headers["x-sie-worker"].partition("/")[0]


def boxes_of(server: Server, pool: str) -> list[str]:
    """The boxes that a gateway hears in a pool."""
    found = server.request("GET", "/health", headers={"Accept": "application/json"}).json()["workers"]
    return sorted(worker["name"] for worker in found if worker["pool_name"] == pool)


def pool(server: Server, name: str) -> Any:
    return server.get(f"/v1/pools/{name}").json()


@pytest.fixture
def bench(pair: Pair) -> Iterator[Pair]:
    """The pool `bench` has the box `b`; afterwards the pool is gone, and both boxes are in the pool of settings."""
    one, two = pair
    made = one.post("/v1/pools", {"name": "Bench", "gpus": {"BIG": 1}, "pinned_models": ["fake/score"]})
    assert made.status == 201, made.body
    for server in pair:
        wait_until(lambda server=server: boxes_of(server, "bench") == ["b"], what="the box in its pool")
    yield pair
    if one.get("/v1/pools/bench").status == 200:
        assert two.request("DELETE", "/v1/pools/bench").status == 200
    for server in pair:
        wait_until(lambda server=server: set(boxes_of(server, "default")) == BOXES, what="both boxes back")


def test_a_pool_has_its_boxes_alone_and_they_serve_nobody_else(bench: Pair) -> None:
    for server in bench:
        # What the box had asked of the other queue may still come, for at most five seconds.
        wait_until(
            lambda server=server: {by(asked(server)) for _ in range(8)} == {"a"}, what="the reservation"
        )
        assert {by(asked(server, x_sie_pool="bench")) for _ in range(4)} == {"b"}
        assert by(asked(server, x_sie_machine_profile="bench/big")) == "b"
        wait_until(
            lambda server=server: pool(server, "bench")["status"]["state"] == "active", what="the pool"
        )
        assert pool(server, "bench")["status"]["assigned_workers"] == [
            {"name": "b", "url": "", "gpu": "big", "bundle": "default"}
        ]
    # What has gone by the queue has gone by that of its pool.
    one = bench[0]
    wait_until(
        lambda: by(asked(one, x_sie_pool="bench")) == "b" and "bench" in str(streams(one)),
        what="a queue of the pool",
    )


def streams(server: Server) -> list[str]:
    """Names of the streams at the gateway's broker."""

    async def read() -> list[str]:
        client = await nats.connect(server.environment["PENSTOCK_CLUSTER__URLS"])
        try:
            found = await client.jetstream(timeout=PATIENCE_S).streams_info()
            return [each.config.name or "" for each in found]
        finally:
            await client.close()

    return asyncio.run(read())


def test_a_pinned_model_is_loaded_on_the_box_of_its_pool(bench: Pair) -> None:
    wait_until(
        lambda: "b" in bench[1].get("/v1/models/fake/score").json()["workers"], what="the pinned model"
    )


def test_a_pool_is_the_same_at_all_gateways_and_gone_at_all(bench: Pair) -> None:
    one, two = bench
    assert two.request("POST", "/v1/pools/bench/renew").status == 200
    wait_until(
        lambda: pool(one, "bench")["status"]["last_renewed"] == pool(two, "bench")["status"]["last_renewed"],
        what="the renewal at the other gateway",
    )
    changed = two.post("/v1/pools", {"name": "bench", "gpus": {"big": 2}})
    assert changed.status == 200 and changed.json()["status"]["state"] == "pending"
    wait_until(
        lambda: pool(one, "bench")["spec"]["gpus"] == {"big": 2}, what="the change at the other gateway"
    )
    assert two.request("DELETE", "/v1/pools/bench").status == 200
    wait_until(lambda: one.get("/v1/pools/bench").status == 404, what="the end of the pool")
    wait_until(lambda: "WORK_POOL_bench" not in streams(one), what="the end of its queue")


def test_a_pool_without_boxes_is_provisioning_and_no_wait(pair: Pair) -> None:
    answer = asked(pair[0], x_sie_pool="nobody", x_request_timeout="50")
    assert (answer.status, answer.headers["x-sie-error-code"]) == (503, "PROVISIONING")
    assert answer.headers["retry-after"] == "120"
    body = answer.json()
    assert (body["status"], body["bundle"]) == ("provisioning", "default")
    wait_until(
        lambda: pair[0].metric("sie_gateway_pending_demand", machine_profile="", bundle="default") > 0,
        what="the count of demand",
    )


def test_a_machine_profile_is_preferred_and_others_serve_where_it_is_not_there(pair: Pair) -> None:
    for profile, name in (("BIG", "b"), ("cpu", "a")):
        # A box that was silent for a moment serves nobody.
        wait_until(
            lambda profile=profile, name=name: (
                {by(asked(pair[0], x_sie_machine_profile=profile)) for _ in range(6)} == {name}
            ),
            what=f"box {name} alone",
        )
    assert by(asked(pair[0], x_sie_machine_profile="h100")) in BOXES


def test_a_pool_that_nobody_renews_ends_by_itself(pair: Pair) -> None:
    one, two = pair
    assert one.post("/v1/pools", {"name": "short", "gpus": {"big": 1}, "ttl_seconds": 1}).status == 201
    for server in pair:
        wait_until(
            lambda server=server: server.get("/v1/pools/short").status == 404, what="the end of a lease"
        )
        wait_until(lambda server=server: set(boxes_of(server, "default")) == BOXES, what="the box back")
    wait_until(
        lambda: (
            sum(each.metric("sie_gateway_pool_events_total", event="expired") for each in (one, two)) == 1
        ),
        what="the count of the end",
    )
    assert one.metric("sie_gateway_pool_events_total", event="created") >= 1


@pytest.mark.long
def test_pools_outlive_broker_and_box(bench: Pair, one_broker: Broker) -> None:
    one_broker.kill()
    wait_until(
        lambda: bench[0].post("/v1/pools", {"name": "more"}).status == 503, what="the loss of the broker"
    )
    assert pool(bench[0], "bench")["spec"]["gpus"] == {"big": 1}, "what was read is still known"
    one_broker.start()
    for server in bench:
        wait_until(
            lambda server=server: asked(server, x_sie_pool="bench").status == 200,
            what="the pool after the loss",
        )
        assert by(asked(server)) == "a"
