"""Items in SIE's form at a bridge: what they answer is what the routes of one server answer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from frontend.bridge.foreign import ForeignItems, may_hear
from frontend.bridge.intake import ACK, NAK, WORKING
from frontend.bridge.meter import Meter
from ipc.errors import InvalidInput, ProtocolError
from ipc.metrics.cluster import BridgeMetrics
from ipc.metrics.families import UNKNOWN
from ipc.wire.cluster import read_item
from ipc.wire.foreign_items import Foreign, body_of, read_foreign
from tests.fakes.vector_server import DENSE, SCORE, VectorServer
from tests.unit.frontend.bridge.test_meter import values

REPLY = "_INBOX.sie-gateway-1.q"


def item(**fields: Any) -> dict[str, Any]:
    """An item as SIE's gateway makes it."""
    return {
        "work_item_id": "q.0",
        "request_id": "q",
        "item_index": 0,
        "total_items": 1,
        "operation": "encode",
        "model_id": DENSE,
        "profile_id": "default",
        "pool_name": "default",
        "machine_profile": "l4",
        "bundle_config_hash": "abc",
        "item": {"id": "a", "text": "one"},
        "payload_ref": None,
        "output_types": ["dense"],
        "instruction": None,
        "is_query": False,
        "options": None,
        "router_id": "sie-gateway-1",
        "reply_subject": REPLY,
        "timestamp": 1.5,
        "deadline": 99.0,
        **fields,
    }


class Stage:
    """A bridge's foreign items over models in this process."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.server = VectorServer(root, cluster__box="a", **settings)
        services = self.server.services
        self.said: list[tuple[str, bytes]] = []
        self.metrics = BridgeMetrics()
        meter = Meter(self.metrics, services.catalog)
        self.items = ForeignItems(services.settings, services.engine, services.directory, self._send, meter)

    def _send(self, subject: str, data: bytes) -> bool:
        self.said.append((subject, data))
        return True

    def take(self, fields: dict[str, Any], ack: str = "", most_nbytes: int = 1 << 20) -> None:
        data = msgpack.packb(fields)
        found, carried = read_item(data)
        assert carried is None
        self.items.take(found, data, ack, 0.25, most_nbytes)

    def run(self, *items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """The results of items, in the order of their answers."""

        async def scene() -> None:
            for each in items:
                self.take(each, **more)
            await self.items.ended(60)

        asyncio.run(scene())
        return self.results

    @property
    def results(self) -> list[dict[str, Any]]:
        return [msgpack.unpackb(data) for subject, data in self.said if subject == REPLY]

    def http(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.server.client.simulate_post(
            path, body=msgpack.packb(body), headers={"Content-Type": "application/msgpack"}
        )
        assert answer.status_code == 200, answer.text
        return msgpack.unpackb(answer.content)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_an_encode_item_has_the_result_of_the_route_and_is_acknowledged_behind_it(stage: Stage) -> None:
    (result,) = stage.run(item(), ack="$JS.ACK.1")
    assert result["success"] is True and result["work_item_id"] == "q.0" and result["request_id"] == "q"
    route = stage.http(f"/v1/encode/{DENSE}", {"items": [{"id": "a", "text": "one"}]})
    assert msgpack.unpackb(result["result_msgpack"]) == route["items"][0]
    assert result["queue_ms"] >= 250 and result["worker_id"].startswith("a")
    assert [subject for subject, _ in stage.said] == [REPLY, "$JS.ACK.1"] and stage.said[1][1] == ACK
    assert result["penstock"] is None and not len(stage.items)


def test_a_score_item_has_the_ranked_list(stage: Stage) -> None:
    candidates = [{"id": "x", "text": "aa"}, {"text": "b"}]
    query = {"text": "q"}
    fields = item(operation="score", model_id=SCORE, item=None, query_item=query, score_items=candidates)
    (result,) = stage.run(fields)
    route = stage.http(f"/v1/score/{SCORE}", {"query": query, "items": candidates})
    assert msgpack.unpackb(result["result_msgpack"]) == route["scores"]


def test_an_item_that_only_loads_is_answered_without_a_result(stage: Stage) -> None:
    (result,) = stage.run(item(operation="load", item=None))
    assert result["success"] and result["result_msgpack"] == b""


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"model_id": "no/such"}, "MODEL_NOT_FOUND", "no/such"),
        ({"profile_id": "none"}, "MODEL_NOT_FOUND", "none"),
        ({"operation": "generate"}, "INVALID_INPUT", "operation"),
        ({"operation": "x" * 500}, "INVALID_INPUT", "operation"),
        ({"item": None}, "INVALID_INPUT", "item"),
        ({"item": None, "payload_ref": "s3://x"}, "INVALID_INPUT", "payload_ref"),
        ({"item": {"text": 1}}, "INVALID_INPUT", "items[0].text"),
        ({"item": {}}, "INVALID_INPUT", "items[0]"),
        ({"output_types": ["none"]}, "INVALID_INPUT", "output_types"),
        ({"options": {"profile": "none"}}, "INVALID_INPUT", "profile"),
        ({"operation": "extract"}, "INVALID_INPUT", "extract"),
        ({"operation": "score", "query_item": {"text": "q"}}, "INVALID_INPUT", "score_items"),
    ],
)
def test_what_is_wrong_is_told_in_the_form_of_sie_and_the_item_is_done(
    stage: Stage, fields: dict[str, Any], code: str, words: str
) -> None:
    (result,) = stage.run(item(**fields), ack="$JS.ACK.1")
    assert (result["success"], result["error_code"]) == (False, code)
    assert words in result["error"] and len(result["error"]) < 300 and result["result_msgpack"] == b""
    assert stage.said[-1] == ("$JS.ACK.1", ACK)


PAYLOADS = {
    "encode": (
        {"payload_ref": "q_0.bin", "item": None},
        {"item": {"id": "a", "text": "one"}},
        {"id": "a", "text": "one"},
    ),
    "score": (
        {"operation": "score", "model_id": SCORE, "item": None, "query_payload_ref": "q_0.bin"},
        {"query_item": {"text": "q"}, "score_items": [{"id": "x", "text": "aa"}, {"text": "b"}]},
        {"query": {"text": "q"}, "items": [{"id": "x", "text": "aa"}, {"text": "b"}]},
    ),
}


@pytest.mark.parametrize("operation", PAYLOADS)
@pytest.mark.parametrize("in_full", [False, True])
def test_inputs_are_read_from_the_store_of_payloads(tmp_path: Path, operation: str, in_full: bool) -> None:
    reference, inline, payload = PAYLOADS[operation]
    stage = Stage(tmp_path, cluster__payload_store=str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "q_0.bin").write_bytes(msgpack.packb(payload))
    named = {
        name: f"{tmp_path}/store/{value}" if in_full and value == "q_0.bin" else value
        for name, value in reference.items()
    }
    base = {**reference, "payload_ref": None, "query_payload_ref": None}
    wanted, found = stage.run(item(**{**base, **inline})), stage.run(item(**named))
    assert found[1]["success"] is True, found[1]["error"]
    assert found[1]["result_msgpack"] == wanted[0]["result_msgpack"] != b""
    assert found[1]["payload_fetch_ms"] > 0 == wanted[0]["payload_fetch_ms"]


@pytest.mark.parametrize(
    "reference",
    ["../secret", "/etc/passwd", "s3://bucket/q_0.bin", "none.bin", "..", "a\x00b", "x" * 300, "link", "folder",
     "pipe", "large", "broken", "store/q_0.bin", "a\\b"],
)  # fmt: skip
def test_a_reference_reaches_nothing_but_files_of_the_store(tmp_path: Path, reference: str) -> None:
    store = tmp_path / "store"
    stage = Stage(tmp_path, cluster__payload_store=str(store), limits__max_body_bytes=1024)
    for place in (store, store / "folder"):
        place.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(msgpack.packb({"text": "secret"}))
    (store / "link").symlink_to(secret)
    os.mkfifo(store / "pipe")
    (store / "large").write_bytes(msgpack.packb({"text": "x" * 1024}))
    (store / "broken").write_bytes(b"\xc1")
    (result,) = stage.run(item(item=None, payload_ref=reference), ack="$JS.ACK.1")
    assert (result["success"], result["error_code"]) == (False, "INVALID_INPUT")
    assert "payload" in result["error"] and len(result["error"]) < 300
    assert stage.said[-1] == ("$JS.ACK.1", ACK)


def test_a_result_that_no_message_holds_is_an_error(stage: Stage) -> None:
    (result,) = stage.run(item(), most_nbytes=2048)
    assert result["error_code"] == "RESOURCE_EXHAUSTED"


def test_a_second_delivery_of_an_item_that_runs_is_acknowledged_with_the_first(stage: Stage) -> None:
    async def scene() -> None:
        stage.take(item(), "$JS.ACK.1")
        stage.take(item(), "$JS.ACK.2")
        assert len(stage.items) == 1
        stage.items.extend()
        await stage.items.ended(60)

    asyncio.run(scene())
    assert len(stage.results) == 1
    words = [(subject, data) for subject, data in stage.said if subject != REPLY]
    assert words == [
        ("$JS.ACK.1", WORKING),
        ("$JS.ACK.2", WORKING),
        ("$JS.ACK.1", ACK),
        ("$JS.ACK.2", ACK),
    ]


def test_items_of_two_producers_with_one_id_are_both_answered(stage: Stage) -> None:
    other = "_INBOX.sie-gateway-2.q"

    async def scene() -> None:
        for reply in (REPLY, other):
            stage.take(item(reply_subject=reply, work_item_id=""), "$JS.ACK.1")
        assert len(stage.items) == 2
        await stage.items.ended(60)

    asyncio.run(scene())
    assert sorted(subject for subject, _ in stage.said if subject != "$JS.ACK.1") == [REPLY, other]
    assert len(stage.said) == 4 and not len(stage.items)


def test_items_of_other_producers_are_counted_as_ours_are(stage: Stage) -> None:
    stage.run(item(), item(work_item_id="q.1", model_id="no/such"), ack="$JS.ACK.1")
    stage.items.draining = True
    stage.take(item(), "$JS.ACK.2")
    found = values(stage.metrics)
    assert found["sie_worker_messages_acked_total"] == 2 and found["sie_worker_messages_naked_total"] == 1
    assert found["sie_worker_inflight_batches"] == 0
    labels = f'{{model="{DENSE}",operation="encode"}}'
    assert found[f"sie_pull_loop_batch_process_seconds_count{labels}"] == 1
    assert found[f'sie_pull_loop_nak_unloaded_total{{model="{UNKNOWN}"}}'] == 1


def test_a_box_that_leaves_gives_items_back(stage: Stage) -> None:
    stage.items.draining = True
    stage.take(item(), "$JS.ACK.1")
    assert stage.said == [("$JS.ACK.1", NAK)]


@pytest.mark.parametrize(
    "reply",
    [
        "sie.work.m.p",
        "penstock.beat.box.a",
        "_INBOX",
        "_INBOX.>",
        "_INBOX.*.x",
        "_INBOX.a b",
        "_INBOX.a\x00",
        "_INBOX." + "a" * 600,
        "",
    ],
)
def test_nobody_is_answered_outside_of_an_inbox(stage: Stage, reply: str) -> None:
    assert not may_hear(reply)
    stage.take(item(reply_subject=reply), "$JS.ACK.1")
    assert stage.said == [("$JS.ACK.1", ACK)] and not len(stage.items)


def test_an_error_of_the_bridge_itself_ends_the_item_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stage.items, "_answer", fail)
    (result,) = stage.run(item(), ack="$JS.ACK.1")
    assert result["error_code"] == "INTERNAL_ERROR" and "bug" not in result["error"]
    assert stage.said[-1] == ("$JS.ACK.1", ACK) and not len(stage.items)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x81" * 5000, msgpack.packb({"operation": 1})])
def test_bytes_that_are_no_item_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_foreign(data)


def test_labels_and_schema_belong_to_extract_and_output_types_to_encode() -> None:
    def params(**fields: Any) -> dict[str, Any]:
        asked = read_foreign(msgpack.packb({"model_id": "m", "item": {"text": "x"}, **fields}))
        return dict(msgpack.unpackb(body_of(asked))["params"])

    given = {"labels": ["a"], "output_schema": {"b": 1}, "output_types": ["dense"], "is_query": True}
    assert params(operation="extract", **given) == {"labels": ["a"], "output_schema": {"b": 1}}
    assert params(operation="encode", **given) == {"output_types": ["dense"], "is_query": True}
    with pytest.raises(InvalidInput, match="operation"):
        body_of(Foreign("none", "m", item=msgspec.Raw(b"\x80")))
