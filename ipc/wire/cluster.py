"""Messages between gateways and boxes, and nothing else: items, results, claims, words, signs of life.

1. An `Item` and an `ItemResult` are maps with SIE's fields, which any reader of a stream understands, and beside them
   `penstock` with our own part. All other messages are arrays.
2. Every message says its version `v`. `read_item` tells an item of another version from an unreadable one.
3. No instant crosses: deadlines are milliseconds that are left, times of a trace are nanoseconds since the box had the
   item.
4. Readers take bytes of anybody. They raise `ProtocolError`, and nothing else, for what is no message.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ipc.errors import DependencyConflict, PenstockError, ProtocolError, from_code
from ipc.wire.cluster_names import is_id, results
from ipc.wire.messages import Result, Work
from ipc.wire.stats import Stats

VERSION = 1
RUN, ENSURE, TEXT, STEP, PARTS = "run", "ensure", "text", "step", "parts"
"""Kinds of items: run the work; have the model of the work loaded; write text, told in pieces before the result; run a
request of a sequence; run work that is answered in parts, which come before the result."""
FIRST_KINDS, KINDS = (RUN, ENSURE), (RUN, ENSURE, TEXT, STEP, PARTS)
"""Kinds that each box of this version takes, and those that boxes of this program take."""
MOST_MESSAGE_NBYTES = 8 << 20
"""Messages above this are not looked at; brokers bound them, too."""
MOST_NBYTES = 1 << 30
"""Largest work or answer; both may come beside their message."""
MOST_CHUNK_NBYTES = 256 << 10
"""Largest part of the bytes of an offer in one message."""
MOST_RETRY_S = 86_400.0
MOST_IDS = 4096
"""Most ids that a word may have."""
IDS_EACH = 256
"""Ids that a word is sent with: each with the subject of its delivery, they fit into messages of 64 KiB."""

Millis = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
Ids = Annotated[list[str], msgspec.Meta(max_length=MOST_IDS)]
Counts = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]], msgspec.Meta(max_length=MOST_IDS)]
T = TypeVar("T")


class OtherVersion(ProtocolError):
    """An item of a version that this process does not speak; `reply` is the subject of its gateway, or empty."""

    def __init__(self, v: int, item: str, reply: str) -> None:
        super().__init__(f"the item has version {v} of the protocol between hosts, this box speaks {VERSION}")
        self.item, self.reply = item, reply


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Bytes too large for a message: a process that has `secret` may take them from the sender of this offer.

    `digest` is BLAKE2b-256 of the `nbytes` bytes. `address` (HOST:PORT) answers by HTTP; empty: chunks alone.
    """

    secret: str
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    digest: bytes
    address: str = ""


class RefusedVersion(ProtocolError):
    """The answer of a box that does not speak this version: another box may have the item `item`."""

    def __init__(self, v: int, item: str) -> None:
        super().__init__(f"a box of version {v} has refused an item, this gateway speaks {VERSION}")
        self.item = item


class Carried(msgspec.Struct, frozen=True):
    """Our own part of an item.

    `work` is the planned work as msgpack, without deadlines, and `payload` its raw tensors. With `large` both are
    empty: the bytes there are the work, of `work_nbytes`, and behind the work the payload. `kind` is one of `KINDS`.
    The payload of `TEXT` is a `Before`; `others` are models of which one will do for `ENSURE`. `stays_ms` of `STEP`:
    for how long the gateway has known the box as the home of the sequence, None for always.
    """

    v: int
    router: str
    kind: str
    attempt: int
    left_ms: Millis
    start_left_ms: Millis
    work: bytes = b""
    payload: bytes = b""
    work_nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    large: Offer | None = None
    others: list[str] = []
    stays_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Item(msgspec.Struct, frozen=True):
    """One piece of a request, in SIE's form. `timestamp`: Unix seconds, for readers; no program decides by it."""

    work_item_id: str
    request_id: str
    operation: str
    model_id: str
    pool_name: str
    router_id: str
    reply_subject: str
    item_index: int = 0
    total_items: int = 1
    profile_id: str = "default"
    machine_profile: str = ""
    bundle_config_hash: str = ""
    timestamp: float = 0.0
    penstock: Carried | None = None


class _HeadPart(msgspec.Struct, frozen=True):
    v: int


class _Head(msgspec.Struct, frozen=True):
    work_item_id: str
    reply_subject: str
    penstock: _HeadPart


class _ResultHead(msgspec.Struct, frozen=True):
    work_item_id: str
    error_code: str
    penstock: _HeadPart


class Outcome(msgspec.Struct, frozen=True):
    """Our own part of a result.

    `result` is the answer as msgpack, without a block. Its tensors lie in `data`, its loose tensors in `loose`. With
    `large` all three are empty: the bytes there are the result, of `result_nbytes`, the data, of `data_nbytes`, and the
    loose ones. Of an error there are `retry_after_s` and `detail` instead. `pieces`: of text or of
    an answer in parts, told before.
    """

    v: int
    box: str
    life: str
    attempt: int
    uuid: str = ""
    result: bytes = b""
    data: bytes = b""
    loose: bytes = b""
    result_nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    data_nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    large: Offer | None = None
    retry_after_s: float | None = None
    detail: dict[str, Any] = {}
    pieces: Annotated[int, msgspec.Meta(ge=0)] = 0


class ItemResult(msgspec.Struct, frozen=True):
    """The answer to an item, in SIE's form; times in milliseconds."""

    work_item_id: str
    request_id: str
    success: bool
    worker_id: str
    item_index: int = 0
    result_msgpack: bytes = b""
    error: str = ""
    error_code: str = ""
    inference_ms: float = 0.0
    queue_ms: float = 0.0
    processing_ms: float = 0.0
    tokenization_ms: float = 0.0
    postprocessing_ms: float = 0.0
    payload_fetch_ms: float = 0.0
    penstock: Outcome | None = None


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of the messages that only our own programs send."""

    v: int


class Claims(Message, frozen=True, tag="claims"):
    """The box has these items. `acks`: for each the subject that returns its delivery, empty without a queue."""

    box: str
    life: str
    ids: Ids
    acks: Ids


class Missing(Message, frozen=True, tag="missing"):
    """The box was asked for these items and does not have them; `lost`: it has heard that they are (`Drop.lost`)."""

    box: str
    life: str
    ids: Ids
    lost: bool = False


FromBox = Claims | Missing


class Got(Message, frozen=True, tag="got"):
    """The gateway has the answers to these items: the box may forget them."""

    router: str
    ids: Ids


class Drop(Message, frozen=True, tag="drop"):
    """Nobody waits for these items any more; also for items that have yet to come to the box.

    `lost`: clients were told that their requests are lost, each with the state of its sequence. Said until the box
    confirms by `Missing.lost`.
    """

    router: str
    ids: Ids
    lost: bool = False


class Ask(Message, frozen=True, tag="ask"):
    """What has become of these items? Their results are sent again, running ones are claimed, others are missing.

    Pieces of text that the gateway does not have by its last `Taken` are sent again as well.
    """

    router: str
    ids: Ids


class Taken(Message, frozen=True, tag="taken"):
    """Of each of these items the gateway has all pieces up to a number, and its client has taken so much so far.

    The unit of `amounts` is that of `ipc.wire.streams.Flow`: bytes of a text, or parts. Sums make a word that is lost
    harmless.
    """

    router: str
    ids: Ids
    numbers: Counts
    amounts: Counts


ToBox = Got | Drop | Ask | Taken


class Want(Message, frozen=True, tag="want"):
    """`peer` asks for `nbytes` of an offer, from `offset`. They come under `number`."""

    secret: str
    peer: str
    number: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHUNK_NBYTES)]


class BoxBeat(Message, frozen=True, tag="box"):
    """A box lives, in the life `life`. `room_s`, `wait_s`: of its workers together, as `Credits` have them."""

    box: str
    life: str
    pool: str
    number: int
    draining: bool
    room_s: float
    wait_s: float


class GatewayBeat(Message, frozen=True, tag="gateway"):
    """A gateway lives. `address` (HOST:PORT) is that of its large bytes, empty without one."""

    router: str
    number: int
    address: str = ""


class BoxHealth(Message, frozen=True, tag="health"):
    """The figures of a box, by the names of its workers, without batches. `address` as in `GatewayBeat`."""

    box: str
    life: str
    workers: dict[str, Stats]
    address: str = ""


class Letter(msgspec.Struct, frozen=True):
    """What was given up, as JSON for readers.

    `nbytes` are those of the message, `body` is its base64 where bodies are kept. `box` is empty in a letter of a
    gateway. `timestamp`: Unix seconds.
    """

    reason: str
    box: str
    timestamp: float
    nbytes: int
    work_item_id: str = ""
    request_id: str = ""
    model_id: str = ""
    operation: str = ""
    pool_name: str = ""
    error: str = ""
    body: str = ""


class JudgedInput(Message, frozen=True, tag="judged"):
    """An input on which workers or boxes died, under a digest of the input; the words of `frontend.engine.poison`."""

    verdict: Literal["suspect", "accused", "poison"]


_ACK = re.compile(r"\$JS\.ACK\.[^\s*>]{1,1024}")
_encoder = msgspec.msgpack.Encoder()
_UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
_item, _head = msgspec.msgpack.Decoder(Item), msgspec.msgpack.Decoder(_Head)
_result, _work = msgspec.msgpack.Decoder(ItemResult), msgspec.msgpack.Decoder(Work)
_result_head = msgspec.msgpack.Decoder(_ResultHead)
_answer = msgspec.msgpack.Decoder(Result)
_from_box: msgspec.msgpack.Decoder[FromBox] = msgspec.msgpack.Decoder(FromBox)
_to_box: msgspec.msgpack.Decoder[ToBox] = msgspec.msgpack.Decoder(ToBox)
_beat: msgspec.msgpack.Decoder[BoxBeat | GatewayBeat] = msgspec.msgpack.Decoder(BoxBeat | GatewayBeat)
_want = msgspec.msgpack.Decoder(Want)
_health = msgspec.msgpack.Decoder(BoxHealth)
_judged = msgspec.msgpack.Decoder(JudgedInput)


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of any of these messages, and of `Work` and `Result`. Raises what msgspec raises for other values."""
    return _encoder.encode(message)


def _read(
    decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str, most: int = MOST_MESSAGE_NBYTES
) -> T:
    if len(data) > most:
        raise ProtocolError(f"{what} of {len(data)} bytes is over {most}")
    try:
        return decoder.decode(data)
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable {what}: {error}") from error


def read_message(
    decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str, most: int = MOST_MESSAGE_NBYTES
) -> T:
    """A message that only our own programs send. Raises `ProtocolError`, also for another version."""
    message = _read(decoder, data, what, most)
    if message.v != VERSION:  # type: ignore[attr-defined]
        raise ProtocolError(f"{what} of version {message.v}, expected {VERSION}")  # type: ignore[attr-defined]
    return message


def read_item(data: bytes) -> tuple[Item, Carried | None]:
    """An item and our own part, None for an item of another producer.

    Raises `OtherVersion`, and `ProtocolError` for bytes that are no item or name a reply that is not their gateway's.
    """
    try:
        item = _read(_item, data, "item")
    except ProtocolError:
        _check_version(data)
        raise
    carried = item.penstock
    if carried is None:
        return item, None
    if carried.v != VERSION:
        _check_version(data)
    if not is_id(carried.router) or item.reply_subject != results(carried.router):
        raise ProtocolError("the reply subject of the item is not the inbox of its gateway")
    if not item.work_item_id.startswith(f"{carried.router}."):
        raise ProtocolError("the id of the item is not one of its gateway")
    return item, carried


def _check_version(data: bytes) -> None:
    """Raise `OtherVersion` where the head of an item can be read and says so."""
    try:
        head = _head.decode(data)
    except _UNDECODABLE:
        return
    if head.penstock.v != VERSION:
        router = head.work_item_id.partition(".")[0]
        known = is_id(router) and head.reply_subject == results(router)
        raise OtherVersion(head.penstock.v, head.work_item_id, head.reply_subject if known else "")


def read_work(data: bytes | memoryview) -> Work:
    """The work of an item. Raises `ProtocolError`."""
    return _read(_work, data, "work", MOST_NBYTES)


def read_result(data: bytes) -> tuple[ItemResult, Outcome]:
    """A result and our own part.

    Raises `ProtocolError`, also for a result without our part, and `RefusedVersion` where a box of another version says
    that it does not speak that of the item.
    """
    try:
        result = _read(_result, data, "result")
    except ProtocolError:
        _check_refusal(data)
        raise
    outcome = result.penstock
    if outcome is None or outcome.v != VERSION:
        _check_refusal(data)
        raise ProtocolError(f"a result of version {outcome and outcome.v}, expected {VERSION}")
    return result, outcome


def error_of(result: ItemResult, outcome: Outcome) -> PenstockError:
    """The error of a failed result; without a time or fields that no client can be told."""
    wait_s, detail = outcome.retry_after_s, outcome.detail
    if wait_s is not None and not 0 <= wait_s <= MOST_RETRY_S:
        wait_s = None
    try:
        msgspec.json.encode(detail)
        return from_code(result.error_code, result.error, retry_after_s=wait_s, detail=detail)
    except (OverflowError, RecursionError, TypeError, ValueError):
        return from_code(result.error_code, result.error, retry_after_s=wait_s)


def _check_refusal(data: bytes) -> None:
    """Raise `RefusedVersion` where the head of a result can be read and says so."""
    try:
        head = _result_head.decode(data)
    except _UNDECODABLE:
        return
    if head.penstock.v != VERSION and head.error_code == DependencyConflict.code:
        raise RefusedVersion(head.penstock.v, head.work_item_id)


def read_answer(data: bytes | memoryview) -> Result:
    """The answer in an `Outcome`. Raises `ProtocolError`, also for an answer that names a place of another host."""
    answer = _read(_answer, data, "answer", MOST_NBYTES)
    if answer.block is not None:
        raise ProtocolError("an answer names a block of another host")
    return answer


def read_from_box(data: bytes) -> FromBox:
    """A word of a box. Raises `ProtocolError`, also for a claim whose subject is none of a queue's deliveries."""
    word = read_message(_from_box, data, "word of a box")
    if isinstance(word, Claims) and len(word.ids) != len(word.acks):
        raise ProtocolError(f"{len(word.ids)} claims with {len(word.acks)} subjects")
    if isinstance(word, Claims) and not all(ack == "" or _ACK.fullmatch(ack) for ack in word.acks):
        raise ProtocolError("a claim names a subject that is none of a delivery")
    return word


def read_to_box(data: bytes) -> ToBox:
    """A word of a gateway. Raises `ProtocolError`."""
    word = read_message(_to_box, data, "word of a gateway")
    if isinstance(word, Taken) and not len(word.ids) == len(word.numbers) == len(word.amounts):
        raise ProtocolError(
            f"{len(word.ids)} texts with {len(word.numbers)} numbers and {len(word.amounts)} sums"
        )
    return word


def read_want(data: bytes) -> Want:
    """A word that asks for a chunk. Raises `ProtocolError`."""
    return read_message(_want, data, "word about large bytes")


def read_beat(data: bytes) -> BoxBeat | GatewayBeat:
    """A sign of life. Raises `ProtocolError`, also for a name that cannot be one."""
    beat = read_message(_beat, data, "sign of life")
    names = (beat.box, beat.life) if isinstance(beat, BoxBeat) else (beat.router,)
    if not all(map(is_id, names)):
        raise ProtocolError("a sign of life of a name that cannot be one")
    return beat


def read_health(data: bytes) -> BoxHealth:
    """The figures of a box. Raises `ProtocolError`."""
    return read_message(_health, data, "figures of a box")


def read_judged(data: bytes) -> JudgedInput:
    """A verdict in the bucket of inputs. Raises `ProtocolError`."""
    return read_message(_judged, data, "verdict")
