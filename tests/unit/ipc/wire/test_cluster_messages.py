"""Messages between hosts: what is written is read again, and bytes of anybody raise one named error."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from ipc.errors import ProtocolError, QueueFull
from ipc.memory.tensors import view
from ipc.wire import cluster, cluster_rows, kept_rows
from ipc.wire.cluster import (
    VERSION,
    Ask,
    BoxBeat,
    Carried,
    Claims,
    Item,
    ItemResult,
    OtherVersion,
    Outcome,
    RefusedVersion,
    encode,
    read_result,
)
from ipc.wire.messages import BlockRef, EncodeCall, InputItem, Result, TensorRef, Timing, Work

ROUTER = "r0uter"
WORK = Work("org/model", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")


def item(**changes: Any) -> Item:
    carried = Carried(VERSION, ROUTER, cluster.RUN, 1, 1000, 1000, encode(WORK))
    whole = Item(
        f"{ROUTER}.1",
        "req_1",
        "encode",
        "org/model",
        "default",
        ROUTER,
        f"_INBOX.{ROUTER}.results",
        penstock=carried,
    )
    return msgspec.structs.replace(whole, **changes)


READERS = [
    cluster.read_item,
    cluster.read_work,
    cluster.read_result,
    cluster.read_answer,
    cluster.read_from_box,
    cluster.read_to_box,
    cluster.read_beat,
    cluster_rows.read_row,
    kept_rows.read_row,
    kept_rows.read_large,
]


def test_an_item_is_read_as_it_was_written() -> None:
    whole = item()
    read, carried = cluster.read_item(encode(whole))
    assert read == whole and carried == whole.penstock
    assert carried is not None and cluster.read_work(carried.work) == WORK


def test_any_reader_of_a_stream_finds_the_fields_of_sie() -> None:
    plain = msgspec.msgpack.decode(encode(item()))
    assert plain["model_id"] == "org/model" and plain["reply_subject"] == f"_INBOX.{ROUTER}.results"
    assert {"work_item_id", "request_id", "item_index", "total_items", "operation", "router_id"} <= set(plain)


def test_an_item_of_another_producer_has_no_part_of_ours() -> None:
    fields = msgspec.msgpack.decode(encode(item()))
    del fields["penstock"]
    read, carried = cluster.read_item(msgspec.msgpack.encode(fields | {"unknown": 1}))
    assert carried is None and read.model_id == "org/model"


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdf\x3f\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 10_000,
        b"\x81\xa1a" * 10_000,
        b"\xa4\xff\xff\xff\xff",
        msgspec.msgpack.encode({"penstock": 1}),
        msgspec.msgpack.encode(["claims", 1, "b", "l", ["x"], []]),
        b"\x00" * (cluster.MOST_MESSAGE_NBYTES + 1),
    ],
    ids=range(10),
)
def test_bytes_that_are_no_message_raise_a_protocol_error(read: Any, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data)


def test_changed_bytes_raise_nothing_but_protocol_errors() -> None:
    whole, chance = bytearray(encode(item())), random.Random(29)
    refused = 0
    for _ in range(3000):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            cluster.read_item(bytes(changed))
        except ProtocolError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("reply", ["work", "sie.work.a.default", "_INBOX.other.results", "_INBOX.r0uter.>"])
def test_an_item_can_name_no_subject_but_the_inbox_of_its_gateway(reply: str) -> None:
    with pytest.raises(ProtocolError, match="reply subject"):
        cluster.read_item(encode(item(reply_subject=reply)))


def test_an_item_has_an_id_of_its_gateway() -> None:
    with pytest.raises(ProtocolError, match="id of the item"):
        cluster.read_item(encode(item(work_item_id="other.1")))


def test_another_version_is_told_from_nonsense() -> None:
    fields = msgspec.msgpack.decode(encode(item()))
    fields["penstock"] = {"v": 2, "work": {"not": "bytes"}}
    with pytest.raises(OtherVersion) as raised:
        cluster.read_item(msgspec.msgpack.encode(fields))
    assert raised.value.item == f"{ROUTER}.1" and raised.value.reply == f"_INBOX.{ROUTER}.results"


@pytest.mark.parametrize("reply", ["sie.work.m.default", "_INBOX.other.results", "_INBOX.>", ""])
def test_an_item_of_another_version_can_name_no_subject_but_the_inbox_of_its_gateway(reply: str) -> None:
    fields = msgspec.msgpack.decode(encode(item()))
    fields |= {"penstock": {"v": 2}, "reply_subject": reply}
    with pytest.raises(OtherVersion) as raised:
        cluster.read_item(msgspec.msgpack.encode(fields))
    assert raised.value.reply == ""


def refusal(v: int, code: str = "DEPENDENCY_CONFLICT", **more: Any) -> bytes:
    outcome = msgspec.to_builtins(Outcome(v, "b", "b1", 1)) | more
    result = ItemResult("r.1", "q", False, "b", error="no", error_code=code)
    return msgspec.msgpack.encode(msgspec.to_builtins(result) | {"penstock": outcome})


@pytest.mark.parametrize("more", [{}, {"box": 7, "pieces": "of another kind"}])
def test_a_box_of_another_version_that_refuses_an_item_is_understood(more: dict[str, Any]) -> None:
    with pytest.raises(RefusedVersion) as caught:
        read_result(refusal(VERSION + 1, **more))
    assert caught.value.item == "r.1"
    for data in (refusal(VERSION + 1, "NO_REPLICA", **more), refusal(VERSION, box=7)):
        with pytest.raises(ProtocolError) as other:
            read_result(data)
        assert not isinstance(other.value, RefusedVersion)


def test_another_version_of_words_and_beats_is_refused() -> None:
    for read, message in (
        (cluster.read_to_box, Ask(2, ROUTER, [])),
        (cluster.read_beat, BoxBeat(2, "a", "l", "default", 1, False, 0.0, 0.0)),
        (cluster.read_result, ItemResult("i", "r", True, "w", penstock=Outcome(2, "a", "l", 1))),
    ):
        with pytest.raises(ProtocolError, match="version 2"):
            read(encode(message))  # type: ignore[operator]


@pytest.mark.parametrize(
    "ack", ["penstock.box.b.l.word", "$JS.ACK.", "$JS.ACK.a b", "$JS.ACK.>", "$JS.ACK.a\r\nPUB x 0"]
)
def test_a_claim_names_no_subject_but_that_of_a_delivery(ack: str) -> None:
    with pytest.raises(ProtocolError, match="none of a delivery"):
        cluster.read_from_box(encode(Claims(VERSION, "a", "l", ["x"], [ack])))
    cluster.read_from_box(encode(Claims(VERSION, "a", "l", ["x"], ["$JS.ACK.WORK.default.1.2.3.4.5"])))


def test_claims_have_a_subject_each() -> None:
    with pytest.raises(ProtocolError, match="2 claims with 1 subjects"):
        cluster.read_from_box(encode(Claims(VERSION, "a", "l", ["x", "y"], [""])))


@pytest.mark.parametrize("box", ["", "a.b", "*", ">", "a b", "x" * 65])
def test_a_name_that_would_be_several_tokens_is_no_name_of_a_box(box: str) -> None:
    with pytest.raises(ProtocolError, match="cannot be one"):
        cluster.read_beat(encode(BoxBeat(VERSION, box, "l", "default", 1, False, 0.0, 0.0)))


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, 1e300, 7.0])
@pytest.mark.parametrize(
    "detail",
    [{"message": 1}, {"self": 1}, {"retry_after_s": 1}, {"x": msgspec.msgpack.Ext(1, b"")}, {"x": [1]}],
)
def test_an_error_of_a_box_is_one_that_a_client_can_be_told(wait_s: float, detail: dict[str, Any]) -> None:
    outcome = Outcome(VERSION, "a", "life", 1, retry_after_s=wait_s, detail=detail)
    sent = ItemResult(f"{ROUTER}.1", "q", False, "a", error="full", error_code="QUEUE_FULL", penstock=outcome)
    error = cluster.error_of(*read_result(encode(sent)))
    assert isinstance(error, QueueFull) and error.message == "full"
    assert error.retry_after(3.0) == ("7" if wait_s == 7.0 else "3")
    assert error.detail == ({"x": [1]} if detail == {"x": [1]} else {})


def test_a_tensor_that_no_array_can_be_is_none() -> None:
    for shape in ([0, 1 << 62], [1 << 62, 0], [0, -1], [1 << 33, 1 << 33]):
        with pytest.raises(ProtocolError):
            view(b"", TensorRef("O", "float32", shape, 0))


def test_an_answer_names_no_memory_of_another_host() -> None:
    answer = Result(0, BlockRef(0, 8, 1), [], [], [], [], Timing())
    with pytest.raises(ProtocolError, match="block"):
        cluster.read_answer(encode(answer))
