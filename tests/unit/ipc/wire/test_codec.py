"""Frames between our processes: round trips, garbage, and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.catalog.entries import AdapterSource, HubSource, ModelEntry
from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching
from ipc.catalog.repository import VersionEntry, Wish
from ipc.errors import ProtocolError
from ipc.wire import codec, messages
from ipc.wire.catalogs import Entries, Heard, Replied, Reread, Spread, Told
from ipc.wire.messages import (
    BlockRef,
    Cancel,
    Credits,
    EncodeCall,
    Failure,
    Goodbye,
    Hello,
    InputItem,
    ItemError,
    Leaving,
    Models,
    ModelStatus,
    Ping,
    Pong,
    Release,
    Result,
    Submit,
    TensorRef,
    Timing,
    Welcome,
    Work,
)
from ipc.wire.stats import Look, Looked, SessionState, Stats

CALL = EncodeCall([InputItem("hé"), InputItem(ids=[1, 2])], ["dense"], "ask", True)
STATUS = ModelStatus("m", "loaded", "cpu", 1, 512, {"dense": 4}, 1.0, 0.5)
ENTRIES = Entries(
    7,
    ["org/m", "a b@3"],
    [ModelEntry("org/m", HubSource("org/m"), runtime={"x": [1, "a"]})],
    [
        VersionEntry(
            id="a b@3",
            source=AdapterSource(),
            model="a b",
            version=3,
            config=ModelConfig("a b"),
            error="wrong",
        )
    ],
    ["org/m", "org/other"],
)
TO_WORKER = [
    Hello(1, "frontend-0", 2**62 - 1, 10, 11),
    Submit(1, Work("m", CALL, 2**62, 9, "req_1", "00-a-b-01"), True, BlockRef(64, 8, 3)),
    Cancel(1),
    Release(4096, 7),
    Ping(3),
    Reread(1, "m", Wish(True, "{}", "f")),
    Spread(2),
    Heard(3),
    Look(),
    Goodbye(),
]
TO_FRONTEND = [
    Welcome(1, "e", 1, 2, "/dev/shm/x", "cpu", 2, [STATUS], Credits(1, 2, 3.0)),
    Result(
        1,
        BlockRef(4096, 16, 7),
        [TensorRef("dense", "float32", [1, 4], 0)],
        [3],
        [0],
        [ItemError(0, "INFERENCE_ERROR", "x")],
        Timing(1, 2, 3, 4, 5),
    ),
    Failure(1, "QUEUE_FULL", "full", 1.5, {"a": 1}),
    Credits(1, 2, 3.0),
    Models([STATUS]),
    ENTRIES,
    Replied(1, True, "INVALID_INPUT", "x"),
    Told(2),
    Leaving(),
    Pong(3),
    Looked(
        Welcome(1, "e", 1, 2, "/dev/shm/x", "cpu", 2, [STATUS], Credits(1, 2, 3.0)),
        Stats(1, 2, 3, 0.5, 0.25, None, None, 4, 5, 6, 7, 8, 9, [], []),
        [SessionState("frontend-0", 10, 2, 30, 0.5)],
        True,
    ),
    Goodbye(),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_messages_to_the_worker_come_back_equal(message: messages.ToWorker) -> None:
    assert codec.decode_to_worker(codec.encode(message)) == message


@pytest.mark.parametrize("message", TO_FRONTEND, ids=lambda m: type(m).__name__)
def test_messages_to_the_frontend_come_back_equal(message: messages.ToFrontend) -> None:
    assert codec.decode_to_frontend(codec.encode(message)) == message


@pytest.mark.parametrize("message", TO_FRONTEND[:-1], ids=lambda m: type(m).__name__)
def test_a_message_of_the_other_direction_is_refused(message: messages.ToFrontend) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_to_worker(codec.encode(message))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(raw: bytes) -> None:
    for decode in (codec.decode_to_worker, codec.decode_to_frontend):
        try:
            decode(raw)
        except ProtocolError:
            continue


@given(st.sampled_from(TO_WORKER), st.data())
def test_a_damaged_message_is_refused_or_still_well_typed(
    message: messages.ToWorker, data: st.DataObject
) -> None:
    raw = bytearray(codec.encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode_to_worker(bytes(raw))
    except ProtocolError:
        return
    assert codec.decode_to_worker(codec.encode(decoded)) == decoded


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_a_cut_message_is_refused(message: messages.ToWorker) -> None:
    raw = codec.encode(message)
    for length in range(len(raw)):
        with pytest.raises(ProtocolError):
            codec.decode_to_worker(raw[:length])


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x92\xa6submit" + b"\x91" * 100_000,
        msgspec.msgpack.encode(["pickle", b"cos\nsystem\n"]),
        msgspec.msgpack.encode(["cancel", "one"]),
        msgspec.msgpack.encode(["cancel", 2**64 - 1, 3]) + b"\x00",
        b"\x92\xa4ping\xc7\x04\x01abcd",
        b"",
    ],
    ids=[
        "array",
        "map",
        "bin",
        "depth",
        "depth-in-submit",
        "unknown",
        "type",
        "trailing",
        "extension",
        "empty",
    ],
)
def test_bombs_and_strangers_are_refused(raw: bytes) -> None:
    for decode in (codec.decode_to_worker, codec.decode_to_frontend):
        with pytest.raises(ProtocolError):
            decode(raw)


def test_deep_nesting_inside_free_form_detail_is_refused() -> None:
    head = codec.encode(Failure(1, "c", "m"))
    assert head[-1:] == b"\x80"
    with pytest.raises(ProtocolError):
        codec.decode_to_frontend(head[:-1] + b"\x81\xa1a" + b"\x91" * 1_000_000)


def bundle(*told: tuple[messages.ToWorker, bytes | None]) -> list[codec.Payload]:
    """Messages with their payloads as the frames that travel."""
    waiting = codec.Bundle()
    for message, payload in told:
        waiting.add(message, payload)
    return waiting.take()


def head(*parts: Any) -> bytes:
    """A first frame of these parts."""
    return msgspec.msgpack.encode(parts)


def test_messages_of_one_bundle_come_back_in_order_each_with_its_own_payload() -> None:
    told = [
        (Ping(1), None),
        (TO_WORKER[1], b"first"),
        (TO_WORKER[1], b"large" * 1000),
        (Cancel(2), None),
        (TO_WORKER[1], b""),
        (Release(1, 2), None),
    ]
    frames = bundle(*told)
    assert len(frames) == 2, "a large payload has a frame of its own, small ones lie with the messages"
    arrived = [(codec.decode_to_worker(text), payload) for text, payload in codec.unpack(frames)]
    assert arrived == [(message, payload or b"") for message, payload in told]


def test_a_bundle_is_empty_once_it_was_taken_and_full_at_its_limits() -> None:
    waiting = codec.Bundle()
    waiting.add(Ping(1), b"x" * (1 << 20))
    assert waiting.full and len(waiting.take()) == 2
    for number in range(codec.MAX_MESSAGES):
        assert not waiting.full and len(waiting) == number
        waiting.add(Ping(number))
    assert waiting.full
    assert len(codec.unpack(waiting.take())) == codec.MAX_MESSAGES
    assert len(waiting) == 0 and not waiting.full


def test_a_message_that_cannot_be_told_leaves_the_bundle_as_it_was() -> None:
    waiting = codec.Bundle()
    waiting.add(Ping(1))
    with pytest.raises(OverflowError):
        waiting.add(Cancel(1 << 70), b"payload")
    assert [codec.decode_to_worker(text) for text, _ in codec.unpack(waiting.take())] == [Ping(1)]


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", codec.encode(Pong(1)), b"\x92\xa4ping\xa1\xff", b"\x91" * 10_000]
)
def test_a_bad_message_does_not_harm_its_neighbours(bad: bytes) -> None:
    frames = [head([codec.encode(Ping(1)), bad, codec.encode(Cancel(2))], [1, 2]), b"lost", b"kept"]
    first, second, third = codec.unpack(frames)
    assert codec.decode_to_worker(first[0]) == Ping(1)
    with pytest.raises(ProtocolError):
        codec.decode_to_worker(second[0])
    assert (codec.decode_to_worker(third[0]), third[1]) == (Cancel(2), b"kept")


@pytest.mark.parametrize("count", [0, codec.MAX_MESSAGES + 2])
def test_the_number_of_frames_is_limited(count: int) -> None:
    with pytest.raises(ProtocolError, match="frames"):
        codec.unpack(bundle((Ping(1), None)) * count)


def test_the_number_of_messages_is_limited() -> None:
    with pytest.raises(ProtocolError, match="messages"):
        codec.unpack([head([codec.encode(Ping(1))] * (codec.MAX_MESSAGES + 1), [])])


@pytest.mark.parametrize("carriers", [[], [0, 1], [1, 0], [0, 0], [-1, 0], [0, 2], [0, 1, 1]])
def test_payloads_that_do_not_fit_their_messages_are_refused(carriers: list[int]) -> None:
    frames = [head([codec.encode(Ping(1))] * 2, carriers), b"a", b"b"]
    if carriers == [0, 1]:
        assert [payload for _, payload in codec.unpack(frames)] == [b"a", b"b"]
    else:
        with pytest.raises(ProtocolError, match="payload"):
            codec.unpack(frames)


@pytest.mark.parametrize("small", [{2: b"a"}, {-1: b"a"}, {0: b"a"}, {0: "a"}])
def test_small_payloads_that_do_not_fit_their_messages_are_refused(small: dict[int, Any]) -> None:
    texts = [codec.encode(Ping(1))] * 2
    assert [payload for _, payload in codec.unpack([head(texts, [], {1: b"a"})])] == [b"", b"a"]
    with pytest.raises(ProtocolError):
        codec.unpack([head(texts, [0], small), b"large"])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        head(["text"], []),
        head([b""], ["0"]),
        head(1, 2),
    ],
)
def test_frames_that_are_no_bundle_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.unpack([raw])


def test_the_size_of_a_bundle_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = bundle((Ping(1), None))
    monkeypatch.setattr(codec, "MAX_MESSAGE_NBYTES", len(frames[0]))
    assert len(codec.unpack(frames)) == 1
    monkeypatch.setattr(codec, "MAX_MESSAGE_NBYTES", len(frames[0]) - 1)
    with pytest.raises(ProtocolError, match="bytes"):
        codec.unpack(frames)


UNSAYABLE = [
    (msgspec.structs.replace(STATUS, dims={"dense": np.int64(4)}), "dims: "),
    (msgspec.structs.replace(STATUS, attempts=1 << 70), "attempts: "),
    (msgspec.structs.replace(STATUS, error_message="\udcff"), "error_message: "),
    (msgspec.structs.replace(STATUS, config=ModelConfig("m", max_batch_size="8")), "config.max_batch_size: "),  # type: ignore[arg-type]
    (
        msgspec.structs.replace(
            STATUS,
            config=ModelConfig(
                "m",
                sequence_batching=SequenceBatching(controls=(Control("S", "START", "BOOL", (False, True)),)),
            ),
        ),
        "config.sequence_batching.controls[0].off_on[0]: Expected `float`, got `bool`",
    ),
]


@pytest.mark.parametrize(("status", "field"), UNSAYABLE)
def test_a_state_that_breaks_the_schema_is_told_as_failed_with_the_name_of_the_field(
    status: ModelStatus, field: str
) -> None:
    with pytest.raises(ProtocolError):
        codec.check_status(status)
    told = codec.sayable(status)
    assert (told.name, told.state, told.permanent) == ("m", "failed", True)
    assert f"cannot be told: {field}" in told.error_message
    assert codec.decode_to_frontend(codec.encode(Models([STATUS, told]))) == Models([STATUS, told])
    assert codec.sayable(STATUS) is STATUS


@pytest.mark.parametrize(
    "wrap", [Models, lambda states: Welcome(1, "e", 1, 2, "/x", "cpu", 2, states, Credits(1, 2, 3.0))]
)
def test_a_frontend_that_cannot_read_one_state_keeps_the_others_and_names_the_state(
    wrap: Callable[[list[ModelStatus]], Models | Welcome], caplog: pytest.LogCaptureFixture
) -> None:
    other = msgspec.structs.replace(STATUS, name="other")
    told = codec.decode_to_frontend(
        codec.encode(wrap([STATUS, msgspec.structs.replace(UNSAYABLE[4][0], name="bad"), other]))
    )
    assert isinstance(told, Models | Welcome)
    first, bad, last = told.models
    assert (first, last) == (STATUS, other)
    assert (bad.name, bad.state) == ("bad", "failed")
    assert "config.sequence_batching.controls[0].off_on[0]" in bad.error_message
    assert "'bad'" in caplog.text


def test_what_is_wrong_besides_states_is_refused() -> None:
    parts = ["models", [["m", 5]], "yes", 0]
    with pytest.raises(ProtocolError):
        codec.decode_to_frontend(msgspec.msgpack.encode(parts))
    with pytest.raises(ProtocolError):
        codec.decode_to_frontend(msgspec.msgpack.encode(["models", [[5]], True, 0]))


@pytest.mark.parametrize("levels", [0, 3, 100_000])
def test_an_integer_beyond_64_bits_is_found_with_its_path_however_deep(levels: int) -> None:
    value: Any = 1 << 64
    for _ in range(levels):
        value = [value]
    long = codec.long_integer_in({"a": [1, -(1 << 63), "b"], "c": Cancel(5), "d": {"e": value}})
    assert long == (f".d.e{'[0]' * levels}", 1 << 64)
    said = str(codec.unsendable(EncodeCall([], [], options={"x": value}), OverflowError()))
    assert said.startswith("options.x") and len(said) < 1000
    assert said.endswith(f": {1 << 64} is beyond 64 bits: integers go from {-(1 << 63)} to {(1 << 64) - 1}")
