"""The unmodified client of SIE, both of its lines, against two gateways and three boxes.

`test_cluster_sdk.py` asks one gateway over one box.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.fakes.kinds import KINDS
from tests.harness.broker import Broker
from tests.harness.cluster import box, gateway, gateway_over, in_flight, living
from tests.harness.relay import relay
from tests.harness.server import FAKE_CATALOG, Server, wait_until
from tests.harness.sie_clients import Client, each_client, printed_by

BOXES = {"a", "b", "c"}
MODELS = ("fake/echo", "fake/score", "fake/extract")
PLAY = """
async def asked(client):
    one = await got(client.encode("fake/echo", {"text": "one"}))
    many = await got(client.encode("fake/echo", [{"id": "a", "text": "one"}, {"text": "two"}]))
    query = {"text": "q"}
    items = [{"id": "x", "text": "a"}, {"id": "y", "text": "bb"}]
    scored = await got(client.score("fake/score", query, items))
    extracted = await got(client.extract("fake/extract", {"text": "red fox"}, labels=["color", "animal"]))
    body = {"model": "fake/echo", "input": ["one", "two"]}
    vectors = httpx.post(f"{client.base_url}/v1/embeddings", json=body, timeout=60).json()["data"]
    frame = await frame_of(client, mode="cluster")
    return {
        "one": one["dense"].tolist(),
        "many": [[each.get("id"), each["dense"].tolist()] for each in many],
        "scored": [[each["item_id"], float(each["score"]), each["rank"]] for each in scored["scores"]],
        "extracted": [[each["text"], each["label"]] for each in extracted["entities"]],
        "embeddings": [each["embedding"] for each in vectors],
        "models": {each["name"]: each["loaded"] for each in await got(client.list_models())},
        "frame": sorted(each["name"] for each in frame["workers"] if each["healthy"]),
        "states": {each["name"]: each["worker_count"] for each in frame["models"]},
        "kind": await got(client._detect_endpoint_type()),
        "all": (await got(client.get_capacity()))["worker_count"],
        "big": (await got(client.get_capacity(gpu="BIG")))["worker_count"],
        "none": (await got(client.get_capacity(gpu="h100")))["worker_count"],
        "waited": (await got(client.wait_for_capacity("big", model="fake/echo", timeout_s=60)))["worker_count"],
    }

async def pooled(near, far):
    before = await tried(lambda: far.get_pool("bench"))
    made = await tried(lambda: near.create_pool("Bench", {"big": 2}, minimum_worker_count=0))
    known = lambda pool: pool is not None and pool["status"]["state"] == "active"
    pool = await until(lambda: far.get_pool("bench"), known)
    renewed = lambda later: later["status"]["last_renewed"] > pool["status"]["last_renewed"]
    return {
        "before": before,
        "made": made,
        "spec": pool["spec"],
        "assigned": sorted(each["name"] for each in pool["status"]["assigned_workers"]),
        "vector": (await got(far.encode("fake/echo", {"text": "one"}, gpu="bench/big")))["dense"].tolist(),
        "renewed": bool(await until(lambda: far.get_pool("bench"), renewed)),
        "deleted": await tried(lambda: far.delete_pool("bench")),
        "gone": await until(lambda: near.get_pool("bench"), lambda pool: pool is None),
        "again": await tried(lambda: near.delete_pool("bench")),
        "bad": await tried(lambda: near.create_pool("a b", {})),
        "unknown": await tried(lambda: near.encode("no/such", {"text": "x"})),
    }

async def main():
    one, two = (KIND(url) for url in sys.argv[2:4])
    print(json.dumps({"gateways": [await asked(one), await asked(two)], "pools": await pooled(one, two)}))
    await got(one.close()), await got(two.close())

asyncio.run(main())
"""
HELD = """
async def main():
    client = KIND(sys.argv[2])
    found = await got(client.encode("fake/echo", {"text": sys.argv[3]}))
    more = [(await got(client.encode("fake/echo", {"text": str(n)})))["dense"].tolist() for n in range(5)]
    print(json.dumps([found["dense"].tolist(), more]))
    await got(client.close())

asyncio.run(main())
"""


class Stage(NamedTuple):
    """Two gateways over the same three boxes."""

    one: Server
    two: Server
    urls: list[str]


def catalog(place: Path) -> str:
    """Directories of a catalog that also extracts."""
    more = place / "more"
    more.mkdir()
    entry = {
        "id": "fake/extract",
        "source": {"kind": "directory", "path": str(FAKE_CATALOG.parent / "weights")},
        "max_sequence_length": 512,
        **KINDS["finder"],
    }
    (more / "extract.yaml").write_text(json.dumps(entry))
    return f"{FAKE_CATALOG},{more}"


@pytest.fixture(scope="module")
def stage(place: Path, one_broker: Broker) -> Iterator[Stage]:
    """Boxes `b` and `c` have the machine profile `big`."""
    urls = [one_broker.url]
    shared = {"catalog.dirs": catalog(place)}
    big = {**shared, "server.machine_profile": "Big"}
    with (
        box(place / "a", "a", urls, models=MODELS, settings=shared),
        box(place / "b", "b", urls, models=MODELS, settings=big),
        box(place / "c", "c", urls, models=MODELS, settings=big),
        gateway_over(place / "one", urls, BOXES, {}) as one,
        gateway_over(place / "two", urls, BOXES, {}) as two,
    ):
        yield Stage(one, two, urls)


client = each_client


@pytest.fixture(scope="module")
def told(client: Client, stage: Stage) -> Any:
    """What a client got."""
    return client.printed(PLAY, stage.one.url, stage.two.url)


def test_both_gateways_answer_all_calls_alike(told: Any) -> None:
    for found in told["gateways"]:
        np.testing.assert_allclose(found["one"], vector_of("one", 16), atol=1e-6)
        assert found["many"][0][0] == "a"
        np.testing.assert_allclose(found["many"][1][1], vector_of("two", 16), atol=1e-6)
        np.testing.assert_allclose(
            found["embeddings"], [vector_of("one", 16), vector_of("two", 16)], atol=1e-6
        )
        assert [each[2] for each in found["scored"]] == [0, 1]
        assert {each[0] for each in found["scored"]} == {"x", "y"}
        assert found["extracted"] == [["red", "color"], ["fox", "animal"]]
        assert all(found["models"][model] for model in MODELS)


def test_both_gateways_tell_three_boxes(told: Any) -> None:
    for found in told["gateways"]:
        assert found["kind"] == "cluster"
        assert set(found["frame"]) == BOXES
        assert found["states"]["fake/echo"] == len(BOXES)
        assert (found["all"], found["big"], found["none"], found["waited"]) == (3, 2, 0, 2)


def test_a_pool_of_one_gateway_is_used_renewed_and_removed_at_the_other(told: Any) -> None:
    found = told["pools"]
    assert found["before"] is None and found["made"] is None
    assert (found["spec"]["gpus"], found["spec"]["minimum_worker_count"]) == ({"big": 2}, 0)
    assert found["assigned"] == ["b", "c"]
    np.testing.assert_allclose(found["vector"], vector_of("one", 16), atol=1e-6)
    assert found["renewed"] and found["deleted"] is True
    assert found["gone"] is None and found["again"] is False
    assert found["bad"]["error"] == "PoolError" and "name: 'a b'" in found["bad"]["text"]
    assert found["unknown"]["code"] == "MODEL_NOT_FOUND" and "no/such" in found["unknown"]["text"]


@pytest.mark.long
def test_a_client_behind_a_balancer_goes_on_when_its_gateway_is_killed(
    client: Client, stage: Stage, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    text = f"#hold {hold} x"
    with (
        gateway(tmp_path / "mortal", stage.urls) as mortal,
        relay(mortal.port, stage.two.port) as front,
    ):
        wait_until(lambda: living(mortal) == BOXES, what="all boxes")
        with client.started(HELD, f"http://127.0.0.1:{front.port}", text) as process:
            wait_until(lambda: in_flight(mortal) == 1, what="the request at the first gateway")
            mortal.kill_all_processes()
            # The client asks again by itself, and the balancer brings the request to the gateway that lives.
            wait_until(lambda: in_flight(stage.two) == 1, what="the request at the other gateway")
            hold.unlink()
            found, more = printed_by(process)
        np.testing.assert_allclose(found, vector_of(text, 16), atol=1e-6)
        for number, vector in enumerate(more):
            np.testing.assert_allclose(vector, vector_of(str(number), 16), atol=1e-6)
        mortal.start()
        mortal.wait_ready()
