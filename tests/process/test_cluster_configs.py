"""`/v1/configs` over a real broker: two gateways, two boxes, and models that only their configurations name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import nats
import pytest
import yaml

from tests.harness.broker import Broker, broker
from tests.harness.cluster import Box, box, gateway, living, serves
from tests.harness.server import Answer, Server, wait_until

ADAPTER = "tests.fakes.adapter:FakeAdapter"
MODELS = "/v1/configs/models"


def document(model: str, adapter: str = ADAPTER, **profiles: Any) -> dict[str, Any]:
    """A model in SIE's layout, with the profile `default` and more."""
    default = {
        "adapter_path": adapter,
        "max_batch_tokens": 4096,
        "adapter_options": {"loadtime": {"dims": 8}},
    }
    return {
        "sie_id": model,
        "package_backed": True,
        "tasks": {"encode": {"dense": {"dim": 8}}},
        "profiles": {"default": default, **profiles},
    }


class Stage:
    """Two gateways over two boxes; box `b` follows no files."""

    def __init__(self, one: Server, two: Server, a: Box, broker: Broker) -> None:
        self.one, self.two, self.a, self.broker = one, two, a, broker

    def put(self, body: dict[str, Any] | bytes, key: str = "") -> Answer:
        raw = body if isinstance(body, bytes) else yaml.safe_dump(body).encode()
        headers = {"Content-Type": "application/x-yaml", **({"Idempotency-Key": key} if key else {})}
        return self.one.request("POST", MODELS, raw, headers)

    def status(self, model: str, server: Server | None = None) -> Any:
        return (server or self.two).get(f"{MODELS}/{model}/status").json()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    place = tmp_path_factory.mktemp("cluster")
    with (
        broker(place / "broker") as one_broker,
        box(place / "a", "a", [one_broker.url]) as a,
        box(place / "b", "b", [one_broker.url], settings={"catalog.watch": False}),
        gateway(place / "one", [one_broker.url]) as one,
        gateway(place / "two", [one_broker.url]) as two,
    ):
        for server in (one, two):
            wait_until(lambda server=server: serves(server), what="the first answer of a box")
            wait_until(lambda server=server: living(server) == {"a", "b"}, what="both boxes")
        yield Stage(one, two, a, one_broker)


def encoded(server: Server, model: str) -> Answer:
    return server.post(f"/v1/encode/{model}", {"items": [{"text": "x"}]}, accept="application/json")


def test_a_model_is_added_at_one_gateway_and_served_at_all_and_boxes_acknowledge(stage: Stage) -> None:
    before = stage.one.get("/v1/configs/epoch").json()["epoch"]
    made = stage.put(document("acme/vec"))
    assert made.status == 201, made.body
    assert made.json() | {"router_id": ""} == {
        "model_id": "acme/vec",
        "created_profiles": ["default"],
        "existing_profiles_skipped": [],
        "warnings": [],
        "routable_bundles_by_profile": {"default": ["default"]},
        "router_id": "",
    }
    # A request right after the change waits until a box has the model.
    answer = encoded(stage.one, "acme/vec")
    assert answer.status == 200, answer.body
    assert len(answer.json()["items"][0]["dense"]["values"]) == 8
    assert answer.headers["x-sie-worker"].startswith("a/")
    for server in (stage.one, stage.two):
        wait_until(
            lambda server=server: stage.status("acme/vec", server)["bundles"][0]["acked_workers"] == ["a"],
            what="the acknowledgement of the box",
        )
    [bundle] = stage.status("acme/vec")["bundles"]
    assert bundle["unsupported_workers"][0]["name"] == "b" and "catalog.watch" in str(bundle)
    assert (bundle["acked"], bundle["pending_workers"], bundle["total_eligible_workers"]) == (False, [], 2)
    assert stage.two.get("/v1/configs/epoch").json()["epoch"] > before
    found = {each["model_id"]: each["source"] for each in stage.two.get(MODELS).json()["models"]}
    assert found == found | {"acme/vec": "api", "fake/echo": "filesystem"}
    wait_until(lambda: stage.two.metric("sie_gateway_config_epoch") > before, what="the metric")
    assert stage.two.metric("sie_gateway_config_deltas_total", kind="model", result="applied") >= 1
    assert stage.two.metric("sie_gateway_config_bootstrap_degraded") == 0


def test_a_change_of_a_configuration_service_is_kept_by_gateways_and_served_by_boxes(stage: Stage) -> None:
    """Contract, section 4.1: `sie.config.models._all` and `sie.config.models.{bundle}`."""
    told = {"model_config": yaml.safe_dump(document("acme/told")), "epoch": 4, "producer_id": "sie-config"}
    before = stage.two.metric("sie_gateway_config_deltas_total", kind="message", result="unreadable")

    async def tell() -> None:
        client = await nats.connect(stage.broker.url)
        for subject in ("default", "_all"):
            for data in (b"\x00", msgspec.json.encode({"model_id": "acme/told", **told})):
                await client.publish(f"sie.config.models.{subject}", data)
        await client.close()

    asyncio.run(tell())
    for server in (stage.one, stage.two):
        wait_until(lambda server=server: encoded(server, "acme/told").status == 200, what="the model")
        # A box may tell the gateway of the model before the bucket does.
        wait_until(
            lambda server=server: (
                yaml.safe_load(server.get(f"{MODELS}/acme/told").body) == document("acme/told")
            ),
            what="the document",
        )
    wait_until(
        lambda: stage.status("acme/told")["bundles"][0]["acked_workers"] == ["a"],
        what="the acknowledgement of the box",
    )
    name = "sie_gateway_config_deltas_total"
    wait_until(
        lambda: stage.two.metric(name, kind="message", result="unreadable") == before + 1, what="the metric"
    )

    def done() -> float:
        return sum(
            server.metric(name, kind="message", result=result)
            for server in (stage.one, stage.two)
            for result in ("applied", "repeated")
        )

    # A gateway may serve the model that the other one wrote before its own message comes to an end.
    wait_until(lambda: done() == 2, what="the end of the message at both gateways")


def test_profiles_are_added_and_what_is_there_never_changes(stage: Stage) -> None:
    assert stage.put(document("acme/more")).status == 201
    fast = {"extends": "default", "max_batch_tokens": 64}
    added = stage.put({"sie_id": "acme/more", "profiles": {"fast": fast}})
    assert added.status == 201 and added.json()["created_profiles"] == ["fast"]
    again = stage.put(document("acme/more", fast=fast))
    assert again.status == 200
    assert sorted(again.json()["existing_profiles_skipped"]) == ["default", "fast"]
    for other in (
        document("acme/more", fast={"extends": "default"}),
        document("acme/more") | {"hf_id": "a/b"},
    ):
        refused = stage.put(other)
        assert refused.status == 409, refused.body
        assert refused.json()["detail"]["error"] == "content_conflict"
    wait_until(lambda: encoded(stage.two, "acme/more:fast").status == 200, what="the new profile")

    def profiles() -> set[str]:
        shown = stage.two.get(f"{MODELS}/acme/more")
        assert shown.headers["content-type"] == "application/x-yaml"
        return set(yaml.safe_load(shown.body).get("profiles", ()))

    # A box may tell the gateway of the profile before the bucket does.
    wait_until(lambda: profiles() == {"default", "fast"}, what="both profiles in the document")


def test_a_model_of_the_files_of_boxes_is_known_and_stays(stage: Stage) -> None:
    assert yaml.safe_load(stage.one.get(f"{MODELS}/fake/echo").body)["source"] == "filesystem"
    refused = stage.put(document("fake/echo"))
    assert refused.status == 409 and "profiles" in refused.json()["message"]
    resolved = stage.one.post("/v1/configs/resolve", {"model": "fake/echo"}).json()
    assert resolved == {
        "model": "fake/echo",
        "resolved_bundle": "default",
        "compatible_bundles": ["default"],
        "profiles": ["default"],
    }
    unknown = stage.one.post("/v1/configs/resolve", {"model": "acme/unknown"})
    assert unknown.status == 404 and unknown.json()["detail"]["error"] == "model_not_found"
    missing = stage.one.post("/v1/configs/resolve", {"model": "other:/fake/echo"})
    assert missing.status == 409 and missing.json()["detail"]["compatible_bundles"] == ["default"]


def test_a_key_has_one_body_at_all_gateways(stage: Stage) -> None:
    first = stage.put(document("acme/keyed"), key="k1")
    assert first.status == 201
    raw = yaml.safe_dump(document("acme/keyed")).encode()
    headers = {"Content-Type": "application/x-yaml", "Idempotency-Key": "k1"}
    again = stage.two.request("POST", MODELS, raw, headers)
    assert (again.status, again.body) == (201, first.body), "the first answer, not that of a repeat"
    other = stage.two.request("POST", MODELS, raw + b"\n", headers)
    assert other.status == 422 and other.json()["detail"]["error"] == "idempotency_mismatch"
    # A refused body does not take the key.
    assert stage.put(b"[", key="k2").status == 400
    assert stage.put(document("acme/keyed"), key="k2").status == 200


def test_code_that_no_box_has_is_refused_by_name(stage: Stage) -> None:
    for adapter in ("os:system", "sie_server.adapters.docling:Docling", "/tmp/adapter.py:Adapter"):
        refused = stage.put(document("acme/code", adapter))
        assert refused.status == 422, refused.body
        assert refused.json()["detail"]["error"] == "validation_error"
        assert "adapter" in refused.json()["message"]
    assert stage.one.get(f"{MODELS}/acme/code").status == 404


def test_a_box_serves_what_was_configured_before_its_bridge_began_and_without_brokers(stage: Stage) -> None:
    assert stage.put(document("acme/lasting")).status == 201
    wait_until(lambda: encoded(stage.one, "acme/lasting").status == 200, what="the model")
    stage.a.end()
    stage.a.start_bridge()
    wait_until(lambda: living(stage.one) == {"a", "b"}, what="the next life of the bridge")
    wait_until(lambda: encoded(stage.two, "acme/lasting").status == 200, what="the model after a restart")
    stage.broker.kill()
    wait_until(lambda: stage.put(document("acme/lost")).status == 503, what="the loss of the broker")
    lost = stage.put(document("acme/lost"))
    assert lost.json()["detail"]["error"] == "nats_unavailable" and lost.headers["retry-after"] == "1"
    assert stage.two.get(f"{MODELS}/acme/lasting").status == 200, "what was read is still known"
    stage.broker.start()
    # A broker may keep what it had no time to confirm, so the second try may find the model.
    wait_until(lambda: stage.put(document("acme/back")).status in (200, 201), what="the broker's return")
    wait_until(lambda: encoded(stage.two, "acme/back").status == 200, what="the model")


@pytest.mark.parametrize(
    ("body", "status", "error", "words"),
    [
        (b"", 400, "parse_error", "map"),
        (b"- 1", 400, "parse_error", "map"),
        (b"sie_id: &a [x]\nb: *a", 400, "parse_error", "alias"),
        (b"a: 1\na: 2", 400, "parse_error", "twice"),
        (b"[" * 10_000, 400, "parse_error", "nested"),
        (b"\xff\xfe\x00", 400, "parse_error", "YAML"),
        (b"sie_id: ../x\nprofiles: {default: {}}", 400, "invalid_model_id", "sie_id"),
        (b"sie_id: a/status\nprofiles: {default: {}}", 400, "invalid_model_id", "/status"),
        (b"sie_id: 'a\x00b'\nprofiles: {default: {}}", 400, "parse_error", ""),
        (b"profiles: {default: {}}", 422, "validation_error", "sie_id"),
        (b"sie_id: a/b\nprofiles: {}", 422, "validation_error", "profiles"),
        (b"sie_id: a/b\nprofiles: {'a:b': {}}", 422, "validation_error", "a:b"),
        (
            b"sie_id: a/b\nhf_id: a/b\nprofiles: {fast: {adapter_path: dense}}",
            422,
            "validation_error",
            "default",
        ),
        (b"sie_id: a/b\nx: 1\nprofiles: {default: {}}", 422, "validation_error", "x"),
        (b"sie_id: a/b\nx: 2020-01-01\nprofiles: {default: {}}", 422, "validation_error", "x"),
        (b"sie_id: a/b" + b" " * (1 << 20), 413, None, "1048576"),
    ],
)
def test_what_is_no_document_is_refused_by_name(
    stage: Stage, body: bytes, status: int, error: str | None, words: str
) -> None:
    epoch = stage.one.get("/v1/configs/epoch").json()["epoch"]
    refused = stage.put(body)
    assert refused.status == status, refused.body
    answer = refused.json()
    assert (
        answer["detail"].get("error") == error and words in answer["message"] == answer["detail"]["message"]
    )
    assert len(answer["message"]) < 400
    assert stage.one.get("/v1/configs/epoch").json()["epoch"] == epoch


def test_bundles_epoch_and_export_tell_the_same_at_all_gateways(stage: Stage) -> None:
    assert stage.put(document("acme/shown")).status in (200, 201)
    wait_until(
        lambda: stage.one.get("/v1/configs/epoch").body == stage.two.get("/v1/configs/epoch").body,
        what="one epoch at both gateways",
    )

    def bundle() -> Any:
        [found] = stage.two.get("/v1/configs/bundles").json()["bundles"]
        assert found["bundle_id"] == "default"
        return found

    wait_until(lambda: bundle()["connected_workers"] == 2, what="both boxes at the other gateway")
    shown = yaml.safe_load(stage.two.get("/v1/configs/bundles/default").body)
    assert {"dense", ADAPTER} <= set(shown["adapters"]) and len(shown["adapters"]) == bundle()[
        "adapter_count"
    ]
    assert stage.two.get("/v1/configs/bundles/none").json()["detail"]["error"] == "bundle_not_found"
    export = stage.two.get("/v1/configs/export").json()
    found = {each["model_id"]: each for each in export["models"]}
    assert found["acme/shown"]["model_config"] == document("acme/shown")
    assert found["acme/shown"]["affected_bundles"] == ["default"]
    assert stage.two.get("/v1/configs/other").status == 404
    # KServe's own path answers in KServe's form.
    assert stage.two.request("POST", "/v1/config/reload", b"{}").status != 404
