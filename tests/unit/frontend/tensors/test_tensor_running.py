"""Requests of named tensors on their way: the call, its payload, the result, and what is booked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from frontend.http.bodies import CALLBACK_KEY, note_disconnect, until_disconnect
from frontend.scope import RequestScope, plain_scope
from frontend.services import Services
from frontend.tensors.request import (
    InputTensor,
    RegionUse,
    Sequence,
    TensorRequest,
    TimeoutExpired,
    UnavailableModel,
    WantedOutput,
)
from frontend.tensors.result import TensorResult
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.model_config import ModelConfig, SequenceBatching
from ipc.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    QueueFull,
    RegionNotFound,
    ShmExhausted,
)
from ipc.memory.input_arena import InputBlock
from ipc.wire.messages import ModelStatus, Region, Step, TensorInfo, TensorInput, TensorOutput, Work
from tests.fakes.tensors import InferReply, elements, ending, entry, loaded, run, services_of, tensor

T = TypeVar("T")
MIB = 1 << 20
ADDER = ModelConfig(
    name="adder",
    max_batch_size=8,
    inputs=(tensor("A", "INT32", 3), tensor("S", "BYTES", 1)),
    outputs=(tensor("O", "FP32", 4, labels=("zero", "one")), tensor("P", "INT32", 1)),
)
WIDE = ModelConfig(
    name="wide",
    max_batch_size=0,
    inputs=(tensor("A", "UINT8", -1), tensor("B", "UINT8", -1, optional=True)),
    outputs=(tensor("O", "UINT8", -1),),
)
SEQUENCE = ModelConfig(
    name="steps",
    max_batch_size=1,
    inputs=(tensor("A", "INT32", 1),),
    outputs=(tensor("O", "INT32", 1),),
    sequence_batching=SequenceBatching(),
)
FLOW = ModelConfig(
    name="flow",
    max_batch_size=1,
    inputs=(tensor("A", "UINT8", -1),),
    outputs=(tensor("O", "UINT8", -1),),
    sequence_batching=SequenceBatching(),
)
CONFIGS = {"adder@1": ADDER, "adder@2": ADDER, "wide@1": WIDE, "steps@1": SEQUENCE, "flow@1": FLOW}
SCORES = np.array([[1, 9, 9, 2], [4, 3, 2, 1]], np.float32)


def answer(request: Work) -> InferReply:
    """O and P as they were asked for."""
    arrays = {"O": SCORES, "P": np.array([[7], [8]], np.int32)}
    return InferReply.of(**{output.name: arrays[output.name] for output in request.call.outputs})  # type: ignore[union-attr]


def services(root: Path, made: Any = answer, **settings: str) -> Services:
    """Services with these models, whose calls `made` answers."""
    statuses = [loaded(name, config) for name, config in CONFIGS.items()]
    settings = {"arena__input_bytes": str(4 * MIB), **settings}
    return services_of(root, [entry(name) for name in CONFIGS], statuses, made, **settings)


def fresh(timeout_s: float = 60) -> RequestScope:
    """The context of a request."""
    made = plain_scope()
    made.deadline_ns = deadline.after(timeout_s)
    return made


def adder(**more: Any) -> TensorRequest:
    """Two rows of numbers and texts."""
    numbers = np.arange(6, dtype=np.int32).tobytes()
    inputs = [
        InputTensor("S", "BYTES", [2, 1], elements("x", "yz")),
        InputTensor("A", "INT32", [2, 3], numbers),
    ]
    return TensorRequest("adder", None, inputs, None, **more)


def wide(*data: bytes | memoryview) -> TensorRequest:
    """Bytes, as they are."""
    names = zip("AB", data, strict=False)
    inputs = [InputTensor(name, "UINT8", [len(one)], one) for name, one in names]
    return TensorRequest("wide", None, inputs, None)


def on_loop(made: Services, work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop of its own, and look at the arena afterwards."""

    async def test() -> T:
        try:
            return await asyncio.wait_for(work, 60)
        finally:
            made.engine.client.inputs.verify()
            assert made.engine.client.inputs.used_nbytes == 0, "every block is given back"
            made.engine.client.inputs.close()

    return asyncio.run(test())


def test_inputs_travel_in_the_message_and_outputs_come_back_as_views(tmp_path: Path) -> None:
    made = services(tmp_path)
    result = on_loop(made, run(made, fresh(), adder(parameters={"k": 2.5}, priority=3)))
    call, payload = made.engine.client.last, made.engine.client.payloads[0]  # type: ignore[attr-defined]
    assert call.inputs == [
        TensorInput("S", "BYTES", [2, 1], 0, 11),
        TensorInput("A", "INT32", [2, 3], 16, 24),
    ]
    assert payload[:11] == elements("x", "yz")
    assert np.frombuffer(payload[16:40], np.int32).tolist() == [*range(6)]
    assert call.outputs == [TensorOutput("O"), TensorOutput("P")]
    assert (call.rows, call.step, call.parameters, call.priority) == (2, None, {"k": 2.5}, 3)
    assert (result.model, result.version, result.rows) == ("adder", 2, 2)
    assert [(one.name, one.datatype, one.shape, one.nbytes) for one in result.outputs] == [
        ("O", "FP32", [2, 4], 32),
        ("P", "INT32", [2, 1], 8),
    ]
    assert bytes(result.outputs[1].data or b"") == np.array([7, 8], np.int32).tobytes()
    assert made.extensions.counters.booked == [("adder", 2, 2)]  # type: ignore[attr-defined]


def test_the_version_that_is_named_answers_under_its_entry(tmp_path: Path) -> None:
    made, known = services(tmp_path), fresh()
    request = adder()
    request.version = 1
    assert on_loop(made, run(made, known, request)).version == 1
    assert made.engine.client.requests[0].model == known.model == "adder@1"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("priority", "rows", "lane"),
    [(0, 1, "interactive"), (0, 8, "bulk"), (1, 8, "interactive"), (2, 1, "bulk")],
)
def test_priority_chooses_the_lane_and_else_the_cost_does(
    priority: int, rows: int, lane: str, tmp_path: Path
) -> None:
    made = services(tmp_path, batch__bulk_tokens="100")
    inputs = [
        InputTensor("A", "INT32", [rows, 3], bytes(12 * rows)),
        InputTensor("S", "BYTES", [rows, 1], bytes(4 * rows)),
    ]
    on_loop(made, run(made, fresh(), TensorRequest("adder", None, inputs, None, priority=priority)))
    sent = made.engine.client.requests[0]  # type: ignore[attr-defined]
    assert (sent.lane, sent.cost) == (lane, 16 * rows)


def test_large_inputs_go_into_a_block_that_is_given_back(tmp_path: Path) -> None:
    kinds: list[type] = []

    def watch(request: Work) -> InferReply:
        kinds.append(type(made.engine.client.given[-1]))  # type: ignore[attr-defined]
        return InferReply.of(O=SCORES)

    made = services(tmp_path, watch)
    first, second = bytes(range(256)) * 4099, b"\x07" * 1234567
    on_loop(made, run(made, fresh(), wide(first, second)))
    call, payload = made.engine.client.last, made.engine.client.payloads[0]  # type: ignore[attr-defined]
    found = [payload[one.start : one.start + one.nbytes] for one in call.inputs]
    assert (kinds, found) == ([InputBlock], [first, second])


def test_without_a_place_for_them_large_inputs_travel_in_the_message(tmp_path: Path) -> None:
    for settings in ({"arena__input_bytes": "0"}, {"run__shm_dir": str(tmp_path / "missing")}):
        made = services(tmp_path, lambda request: InferReply.of(O=SCORES), **settings)
        data = b"\x05" * (2 * MIB)
        on_loop(made, run(made, fresh(), wide(data)))
        assert isinstance(made.engine.client.given[0], bytes)  # type: ignore[attr-defined]
        assert made.engine.client.payloads == [data]  # type: ignore[attr-defined]


def test_a_request_waits_for_room_and_gets_it(tmp_path: Path) -> None:
    made = services(tmp_path, lambda request: InferReply.of(O=SCORES))

    async def test() -> None:
        block = await made.engine.client.inputs.reserve(3 * MIB)
        assert block is not None
        waiting = asyncio.ensure_future(run(made, fresh(), wide(bytes(2 * MIB))))
        await asyncio.sleep(0)
        assert not waiting.done()
        block.release()
        await waiting

    on_loop(made, test())


def test_a_request_that_finds_no_room_in_time_says_so(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        with await made.engine.client.inputs.reserve(3 * MIB):  # type: ignore[union-attr]
            with pytest.raises(ShmExhausted) as refused:
                await run(made, fresh(0.1), wide(bytes(2 * MIB)))
            assert refused.value.retry_after_s

    on_loop(made, test())
    assert made.extensions.counters.booked == [("wide", 1, 1, "SHM_EXHAUSTED")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [QueueFull("full"), InvalidInput("no"), asyncio.CancelledError()])
def test_blocks_are_given_back_however_the_call_ends(error: BaseException, tmp_path: Path) -> None:
    made = services(tmp_path, lambda request: error)
    with pytest.raises(type(error)):
        on_loop(made, run(made, fresh(), wide(bytes(2 * MIB))))


def test_regions_are_named_and_not_read(tmp_path: Path) -> None:
    info = [TensorInfo("O", "FP32", [2, 4], 32)]
    held: list[list[str]] = []

    def answer(request: Work) -> InferReply:
        held.append(list(made.extensions.regions.held))  # type: ignore[attr-defined]
        return InferReply(info, {})

    made = services(tmp_path, answer)
    request = adder()
    request.inputs[0].data, request.inputs[0].region = None, RegionUse("known", 64, 11)
    request.outputs = [WantedOutput("O", None, RegionUse("known", 128, 32))]
    result = on_loop(made, run(made, fresh(), request))
    call = made.engine.client.last  # type: ignore[attr-defined]
    assert call.inputs[0] == TensorInput("S", "BYTES", [2, 1], 0, 11, Region("system", "/known", 64, 11))
    assert call.outputs == [TensorOutput("O", Region("system", "/known", 128, 32))]
    assert (result.outputs[0].data, result.outputs[0].nbytes) == (None, 32)
    assert held == [["known", "known"]] and not made.extensions.regions.held  # type: ignore[attr-defined]
    request.outputs = [WantedOutput("O", None, RegionUse("other", 0, 32))]
    with pytest.raises(RegionNotFound):
        asyncio.run(run(made, fresh(), request))


def test_a_request_is_checked_against_the_model_as_it_is_when_its_body_has_come(tmp_path: Path) -> None:
    """The model was loaded again with another configuration, or a newer version, while the body was on its way."""
    made, scope = services(tmp_path), fresh()
    [channel] = made.engine.client.channels  # type: ignore[attr-defined]
    first = {"adder@1": loaded("adder@1", ADDER)}
    narrow = msgspec.structs.replace(ADDER, inputs=(tensor("A", "INT32", 2), ADDER.inputs[1]))

    async def late(later: dict[str, ModelStatus]) -> TensorResult:
        channel.models = first
        model = await made.tensor_inference.find(scope, "adder", None)
        channel.models = later
        return await made.tensor_inference.run(scope, model, adder())

    with pytest.raises(InvalidInput):
        asyncio.run(late({"adder@1": loaded("adder@1", narrow)}))
    assert asyncio.run(late(first | {"adder@2": loaded("adder@2", ADDER)})).version == 2
    assert made.engine.client.requests[-1].model == "adder@2"  # type: ignore[attr-defined]


def test_no_outputs_are_wanted_where_the_request_lists_none(tmp_path: Path) -> None:
    made = services(tmp_path)
    assert on_loop(made, run(made, fresh(), _none())).outputs == []
    assert made.engine.client.last.outputs == []  # type: ignore[attr-defined]


def _none() -> TensorRequest:
    request = adder()
    request.outputs = []
    return request


def test_classes_take_the_place_of_the_data(tmp_path: Path) -> None:
    made, request = services(tmp_path), adder()
    request.outputs = [WantedOutput("P"), WantedOutput("O", 3)]
    result = on_loop(made, run(made, fresh(), request))
    plain, ranked = result.outputs
    assert plain.classes is None
    assert ranked.data is None
    assert [[tuple(one) for one in row] for row in ranked.classes or ()] == [
        [(9.0, 1, "one"), (9.0, 2, ""), (2.0, 3, "")],
        [(4.0, 0, "zero"), (3.0, 1, "one"), (2.0, 2, "")],
    ]


def test_a_result_that_cannot_be_ranked_gives_its_lease_back(tmp_path: Path) -> None:
    reply = InferReply([TensorInfo("O", "FP16", [2, 4], 16)], {"O": bytes(16)})
    made, request = services(tmp_path, lambda sent: reply), adder()
    request.outputs = [WantedOutput("O", 1)]
    with pytest.raises(InvalidInput):
        on_loop(made, run(made, fresh(), request))
    assert reply.releases == 1


def test_sequences_go_with_their_step_where_the_model_has_any(tmp_path: Path) -> None:
    made = services(tmp_path, lambda request: InferReply.of(O=np.zeros((1, 1), np.int32)))
    given = InputTensor("A", "INT32", [1, 1], bytes(4))
    request = TensorRequest("steps", None, [given], None, sequence=Sequence("seven", True, False))
    on_loop(made, run(made, fresh(), request))
    assert made.engine.client.last.step == Step("seven", True, False)  # type: ignore[attr-defined]
    plain = services(tmp_path)
    on_loop(plain, run(plain, fresh(), adder(sequence=Sequence(7, True))))
    assert plain.engine.client.last.step is None  # type: ignore[attr-defined]


def test_the_timeout_of_a_request_ends_its_waiting_and_is_no_deadline_of_its_client(tmp_path: Path) -> None:
    made = services(tmp_path, lambda request: DeadlineExceeded("the deadline passed in the queue"))
    known = fresh()
    deadline_ns = known.deadline_ns
    with pytest.raises(TimeoutExpired, match="Request timeout expired") as expired:
        on_loop(made, run(made, known, adder(timeout_us=1)))
    assert (expired.value.status, expired.value.code) == (503, "DEADLINE_EXCEEDED")
    assert expired.value.retry_after_s
    sent = made.engine.client.requests[0]  # type: ignore[attr-defined]
    assert sent.deadline_ns == known.deadline_ns == deadline_ns and 0 < sent.start_by_ns < time.monotonic_ns()


def test_a_timeout_counts_from_the_arrival_of_its_request(tmp_path: Path) -> None:
    made, known, began_ns = services(tmp_path), fresh(), time.monotonic_ns()
    known.started -= 3
    on_loop(made, run(made, known, adder(timeout_us=5_000_000)))
    sent = made.engine.client.requests[0]  # type: ignore[attr-defined]
    assert sent.waits_until_ns == sent.start_by_ns < began_ns + 5_000_000_000


def test_a_deadline_that_passes_before_the_timeout_does_is_the_clients(tmp_path: Path) -> None:
    made = services(tmp_path, lambda request: DeadlineExceeded("the deadline passed"))
    with pytest.raises(DeadlineExceeded) as passed:
        on_loop(made, run(made, fresh(), adder(timeout_us=10_000_000)))
    assert not isinstance(passed.value, TimeoutExpired)


@pytest.mark.parametrize("timeout_us", [0, 30_000_000])
def test_a_deadline_that_comes_before_the_timeout_is_the_clients(timeout_us: int, tmp_path: Path) -> None:
    made = services(tmp_path, lambda request: DeadlineExceeded("the deadline passed"))
    with pytest.raises(DeadlineExceeded) as passed:
        on_loop(made, run(made, fresh(20), adder(timeout_us=timeout_us)))
    assert not isinstance(passed.value, TimeoutExpired)


@pytest.mark.parametrize(
    ("name", "version", "booked"),
    [
        ("adder", None, ("adder", None, 0, "MODEL_NOT_FOUND")),
        ("adder", 1, ("adder", 1, 0, "MODEL_NOT_FOUND")),
        ("adder", 9, ("adder", None, 0, "MODEL_NOT_FOUND")),
        ("unknown", None, None),
    ],
)
def test_a_failure_before_the_model_is_found_is_booked_where_its_name_is_known(
    name: str, version: int | None, booked: tuple[Any, ...] | None, tmp_path: Path
) -> None:
    made, scope = services(tmp_path), fresh()
    with pytest.raises(UnavailableModel), ending(made, scope):
        made.tensor_inference.begin(scope, name, version)
        raise UnavailableModel(name, version, "version")
    assert made.extensions.counters.booked == ([booked] if booked else [])  # type: ignore[attr-defined]


def test_refused_requests_are_booked_with_what_is_known(tmp_path: Path) -> None:
    made, wrong, unknown = services(tmp_path), adder(), adder()
    wrong.outputs, unknown.version = [WantedOutput("X")], 7
    for request, error in ((wrong, InvalidInput), (unknown, UnavailableModel)):
        with pytest.raises(error):
            asyncio.run(run(made, fresh(), request))
    booked = made.extensions.counters.booked  # type: ignore[attr-defined]
    assert booked == [("adder", 2, 0, "INVALID_INPUT"), ("adder", None, 0, "MODEL_NOT_FOUND")]
    assert made.engine.client.requests == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("left_s", "code"), [(20, "CANCELLED"), (0, "DEADLINE_EXCEEDED")])
def test_a_request_that_is_cancelled_is_booked(left_s: float, code: str, tmp_path: Path) -> None:
    known = fresh()

    def cancel(request: Work) -> BaseException:
        known.deadline_ns = deadline.after(left_s)
        return asyncio.CancelledError()

    made = services(tmp_path, cancel)
    with pytest.raises(asyncio.CancelledError):
        on_loop(made, run(made, known, wide(b"\1")))
    assert made.extensions.counters.booked == [("wide", 1, 1, code)]  # type: ignore[attr-defined]


def test_a_request_is_booked_once_and_as_it_ended(tmp_path: Path) -> None:
    made, scope = services(tmp_path), fresh()

    async def answered(error: Exception | None) -> None:
        with ending(made, scope):
            model = await made.tensor_inference.find(scope, "adder", None)
            result = await made.tensor_inference.run(scope, model, adder())
            assert made.extensions.counters.booked == []  # type: ignore[attr-defined]
            with result.answer:
                if error is not None:
                    raise error

    with pytest.raises(InvalidInput):
        on_loop(made, answered(InvalidInput("no")))
    assert made.extensions.counters.booked == [("adder", 2, 2, "INVALID_INPUT")]  # type: ignore[attr-defined]


def test_a_model_whose_place_another_version_took_meanwhile_is_asked_there(tmp_path: Path) -> None:
    made, scope, request = services(tmp_path), fresh(), adder()

    async def asked() -> TensorResult:
        model = await made.tensor_inference.find(scope, "adder", None)
        assert model.id == "adder@2"
        channel = made.engine.client.channels[0]
        channel.models = {name: status for name, status in channel.models.items() if name != "adder@2"}
        made.catalog.replace(Catalog([entry(name) for name in CONFIGS if name != "adder@2"]))
        return await made.tensor_inference.run(scope, model, request)

    assert on_loop(made, asked()).version == 1


def test_a_client_that_goes_away_ends_the_wait_for_room(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        scope: dict[str, Any] = {CALLBACK_KEY: None}
        with await made.engine.client.inputs.reserve(3 * MIB):  # type: ignore[union-attr]
            waiting = asyncio.ensure_future(until_disconnect(run(made, fresh(), wide(bytes(2 * MIB))), scope))
            while scope[CALLBACK_KEY] is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            note_disconnect(scope)
            with pytest.raises(Cancelled):
                await waiting

    on_loop(made, test())


def test_requests_of_a_sequence_go_in_their_order_although_large_inputs_take_longer(tmp_path: Path) -> None:
    made = services(tmp_path)
    sizes = [2 * MIB, 10, MIB, 1]

    def flow(name: int, nbytes: int) -> TensorRequest:
        given = InputTensor("A", "UINT8", [1, nbytes], bytes(nbytes))
        return TensorRequest("flow", None, [given], None, sequence=Sequence(name, True))

    def sent(name: int) -> list[int]:
        steps = [
            (request.call.step, nbytes)
            for request, nbytes in zip(made.engine.client.requests, given, strict=True)
        ]  # type: ignore[attr-defined,union-attr]
        return [nbytes for step, nbytes in steps if step is not None and step.id == name]

    async def work() -> None:
        tasks = [asyncio.create_task(run(made, fresh(), flow(1, nbytes))) for nbytes in sizes]
        tasks.append(asyncio.create_task(run(made, fresh(), flow(2, 5))))
        await asyncio.gather(*tasks)

    made.engine.client.answer = lambda request: InferReply.of(O=np.zeros((1, 1), np.int32))  # type: ignore[attr-defined]
    on_loop(made, work())
    given = [len(payload) for payload in made.engine.client.payloads]  # type: ignore[attr-defined]
    assert sent(1) == sizes
    assert given[0] == 5, "another sequence waits for none of them"
