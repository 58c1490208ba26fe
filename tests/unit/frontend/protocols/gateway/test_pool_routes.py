"""`/v1/pools` of a gateway, over pools without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from falcon import testing

from frontend.cluster.pools import ClusterPools
from ipc.settings import Cluster
from tests.fakes.shared import Cell, SharedCopy
from tests.fakes.vector_server import DENSE
from tests.unit.frontend.protocols.gateway.test_gateway_routes import Gateway

POOLS = "/v1/pools"


class Pooled(Gateway):
    """A gateway of the boxes `b1` and `b2`, both with the machine profile `l4`."""

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.cell = Cell()
        self.copy = SharedCopy(self.cell)
        self.pools = ClusterPools(Cluster(), self.copy, self.boxes, lambda: True)  # type: ignore[arg-type]
        self.services.pools = self.pools
        self.peer, application = "127.0.0.1", self.client.app

        async def from_peer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                sent = [tuple(each) for each in scope["headers"]]
                headers = [*(each for each in sent if each[0] != b"host"), (b"host", b"localhost")]
                ends = {"client": (self.peer, 1), "server": ("127.0.0.1", 80)}
                scope = {**scope, "headers": headers, **ends}
            await application(scope, receive, send)

        self.client = testing.TestClient(from_peer)

    def make(self, **body: Any) -> Any:
        return self.client.simulate_post(POOLS, json=body)


@pytest.fixture
def gateway(tmp_path: Path) -> Pooled:
    return Pooled(tmp_path)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Pooled:
    """A gateway whose pools no test changes."""
    return Pooled(tmp_path_factory.mktemp("gateway"))


def test_a_new_pool_is_201_with_its_boxes_and_the_same_again_200(gateway: Pooled) -> None:
    made = gateway.make(name="Bench", gpus={"L4": 1}, pinned_models=[DENSE])
    assert made.status_code == 201
    pool = made.json
    assert pool["name"] == pool["spec"]["name"] == "bench"
    assert pool["spec"]["gpus"] == {"l4": 1} and pool["spec"]["pinned_models"] == [DENSE]
    assert pool["status"]["state"] == "active"
    assert pool["status"]["assigned_workers"] == [{"name": "b1", "url": "", "gpu": "l4", "bundle": "default"}]
    assert pool["status"]["created_at"] == pool["status"]["last_renewed"] > 0
    again = gateway.make(name="bench", gpus={"l4": 2})
    assert again.status_code == 200
    assert [box["name"] for box in again.json["status"]["assigned_workers"]] == ["b1", "b2"]
    assert again.json["spec"]["pinned_models"] == [], "the values of the caller replace all of the old ones"
    assert again.json["status"]["created_at"] == pool["status"]["created_at"]
    assert gateway.get(f"{POOLS}/bench").json == again.json
    assert [each["name"] for each in gateway.get(POOLS).json["pools"]] == ["bench", "default"]


def test_a_pool_that_needs_more_boxes_than_there_are_is_pending(gateway: Pooled) -> None:
    assert gateway.make(name="big", gpus={"l4": 3}).json["status"]["state"] == "pending"
    assert gateway.make(name="other", gpus={"h100": 1}).json["status"] | {
        "created_at": 0,
        "last_renewed": 0,
    } == {"state": "pending", "assigned_workers": [], "created_at": 0, "last_renewed": 0}


def test_a_pool_is_renewed_and_removed_by_any_spelling_of_its_name(gateway: Pooled) -> None:
    first = gateway.make(name="bench").json
    renewed = gateway.client.simulate_post(f"{POOLS}/BENCH/renew")
    assert renewed.status_code == 200
    assert renewed.json["status"]["last_renewed"] > first["status"]["last_renewed"]
    gone = gateway.client.simulate_delete(f"{POOLS}/Bench")
    assert gone.status_code == 200 and "bench" in gone.json["message"]
    for method, path in (("GET", "bench"), ("DELETE", "bench"), ("POST", "bench/renew")):
        answer = gateway.client.simulate_request(method, f"{POOLS}/{path}")
        assert answer.status_code == 404 and answer.json["detail"]["code"] == "POOL_NOT_FOUND"
        assert answer.json["message"] == answer.json["detail"]["message"]


def test_the_pool_of_settings_is_shown_and_stays(gateway: Pooled) -> None:
    shown = gateway.get(f"{POOLS}/default").json
    assert [box["name"] for box in shown["status"]["assigned_workers"]] == ["b1", "b2"]
    assert gateway.client.simulate_delete(f"{POOLS}/default").status_code == 403
    answer = gateway.make(name="Default")
    assert answer.status_code == 403 and answer.json["detail"]["code"] == "FORBIDDEN"
    assert gateway.client.simulate_post(f"{POOLS}/default/renew").status_code == 200


NAMES = ["", "..", "a.b", "a b", "a>", "*", "__", "a\x00b", "a\n", "\u00e4", "p" * 64, "p" * 500, "a/b"]


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_the_name_of_a_pool_is_refused_by_name(lasting: Pooled, name: str) -> None:
    answer = lasting.make(name=name)
    assert answer.status_code == 400 and answer.json["detail"]["code"] == "INVALID_INPUT"
    assert answer.json["message"].startswith("name: ") and len(answer.json["message"]) < 250
    assert lasting.cell.revision == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body: empty"),
        (b"[]", "body"),
        (b"{", "body: malformed JSON"),
        (b"[" * 10_000, "body"),
        (b'{"gpus": {"l4": 1}}', "name"),
        (b'{"name": "p", "gpus": {"l4": -1}}', "gpus"),
        (b'{"name": "p", "gpus": {"l4": 1.5}}', "gpus"),
        (b'{"name": "p", "gpus": {"a b": 1}}', "gpus: expected"),
        (b'{"name": "p", "gpus": {"l4": 1, "L4": 2}}', "gpus: 'L4' is there twice"),
        (b'{"name": "p", "bundle": "a b"}', "bundle: 'a b'"),
        (b'{"name": "p", "bundle": "a\\n"}', "bundle: 'a\\n'"),
        (b'{"name": "p", "bundle": "' + b"b" * 64 + b'"}', "bundle: 'bbb"),
        (b'{"name": "p", "gpu_caps": [1]}', "gpu_caps"),
        (b'{"name": "p", "ttl_seconds": 0}', "ttl_seconds"),
        (b'{"name": "p", "ttl_seconds": 1e30}', "ttl_seconds"),
        (b'{"name": "p", "minimum_worker_count": -1}', "minimum_worker_count"),
        (b'{"name": "p", "queue_pool": "A"}', "queue_pool"),
        (b'{"name": "p", "pinned_models": ["no/such"]}', "pinned_models"),
        (b'{"name": "p", "name": "q"}', "name"),
    ],
)
def test_a_bad_body_is_refused_by_field(lasting: Pooled, body: bytes, words: str) -> None:
    answer = lasting.client.simulate_post(POOLS, body=body)
    assert answer.status_code == 400 and answer.json["detail"]["code"] == "INVALID_INPUT"
    assert words in answer.json["message"] and len(answer.json["message"]) < 400
    assert lasting.cell.revision == 0


def test_nulls_are_as_if_absent_and_unknown_fields_are_passed_over(gateway: Pooled) -> None:
    made = gateway.make(
        name="p", gpus=None, gpu_caps=None, bundle=None, ttl_seconds=None, queue_pool="", colour=1
    )
    assert made.status_code == 201 and made.json["spec"]["ttl_seconds"] == 1200


def test_a_body_that_is_too_large_is_413(gateway: Pooled) -> None:
    answer = gateway.client.simulate_post(POOLS, body=b'{"name": "p", "x": "' + b"x" * (64 << 10) + b'"}')
    assert answer.status_code == 413


def test_a_profile_that_no_setting_names_is_refused(tmp_path: Path) -> None:
    gateway = Pooled(tmp_path)
    gateway.services.pools = ClusterPools(
        Cluster(profiles=("l4",)),
        SharedCopy(gateway.cell),  # type: ignore[arg-type]
        gateway.boxes,
        lambda: True,
    )
    answer = gateway.make(name="p", gpus={"h100": 1})
    assert answer.status_code == 400 and answer.json["message"].startswith("gpus: 'h100'")


def test_without_a_broker_pools_are_read_and_not_changed(gateway: Pooled) -> None:
    gateway.make(name="bench")
    gateway.cell.up = False
    assert gateway.get(f"{POOLS}/bench").status_code == 200
    answer = gateway.make(name="other")
    assert answer.status_code == 503 and answer.json["detail"]["code"] == "QUEUE_UNAVAILABLE"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/v1/pools/a/b", "/v1/pools/a/renew/b"])
def test_paths_below_a_pool_are_none(gateway: Pooled, path: str) -> None:
    assert gateway.client.simulate_get(path).status_code == 404


def test_who_may_not_change_the_server_may_only_look(gateway: Pooled) -> None:
    def asked(method: str, path: str) -> int:
        return gateway.client.simulate_request(method, path, json={"name": "p"}).status_code

    gateway.make(name="p")
    gateway.peer = "192.0.2.9"
    assert asked("GET", POOLS) == 200
    assert asked("GET", f"{POOLS}/p") == 200
    for method, path in (
        ("POST", POOLS),
        ("DELETE", f"{POOLS}/p"),
        ("POST", f"{POOLS}/p/renew"),
        ("POST", "/v1/configs/models"),
        ("GET", "/v1/configs/export"),
    ):
        assert asked(method, path) == 403


def test_a_bundle_is_known_in_any_spelling(gateway: Pooled) -> None:
    pool = gateway.make(name="p", bundle="Default", gpus={"l4": 1}).json
    assert pool["spec"]["bundle"] == "default" and pool["status"]["state"] == "active"


def test_before_the_pools_were_read_none_is_said_to_be_unknown(gateway: Pooled) -> None:
    gateway.pools._shared.is_read = False
    answer = gateway.get(f"{POOLS}/bench")
    assert answer.status_code == 503 and answer.json["detail"]["code"] == "QUEUE_UNAVAILABLE"
    assert gateway.get(f"{POOLS}/default").status_code == 200


def test_a_body_over_the_limit_is_refused_before_it_is_read(gateway: Pooled) -> None:
    answer = gateway.client.simulate_post(POOLS, body=b"x" * (64 * 1024 + 1))
    assert answer.status_code == 413 and "the limit is 65536" in answer.json["message"]


def test_pools_that_were_not_read_yet_are_no_empty_list(gateway: Pooled) -> None:
    gateway.copy.is_read = False
    for path in (POOLS, f"{POOLS}/bench"):
        answer = gateway.get(path)
        assert answer.status_code == 503 and answer.json["detail"]["code"] == "QUEUE_UNAVAILABLE"
        assert answer.headers["retry-after"] == "1"
    gateway.copy.is_read = True
    assert [each["name"] for each in gateway.get(POOLS).json["pools"]] == ["default"]
