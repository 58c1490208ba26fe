"""Infer calls through a real worker: every datatype, batches by rows, failures, large inputs and outputs, copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.engine.local.client import Client
from frontend.engine.local.outstanding import Sent
from ipc.errors import (
    InferenceFailed,
    InvalidInput,
    LeaseRevoked,
    ProtocolError,
    ShmExhausted,
    UnexpectedOutput,
    Unsupported,
)
from ipc.memory import copies
from ipc.memory.datatypes import DATATYPES
from ipc.wire.messages import BlockRef, InferCall, Inputs, Region, Submit, TensorInput, TensorOutput
from tests.harness.tensors import call_of, infer, infer_large, raw_of, read, request_of
from tests.harness.worker import ADD_SUB, Workers, program, tensor, workers

MIB = 1 << 20


def echo(datatype: str, *dims: int, rows: int = 8, **facts: Any) -> dict[str, Any]:
    """A program that gives its input back."""
    return program(
        "echo", [tensor("INPUT0", datatype, *dims)], [tensor("OUTPUT0", datatype, *dims, **facts)], rows
    )


MODELS = {
    "add": ADD_SUB,
    "alone": ADD_SUB | {"config": ADD_SUB["config"] | {"max_batch_size": 0}},
    "repeat": program("repeat", [tensor("INPUT0", "INT32", 2)], [tensor("OUTPUT0", "INT32", -1)]),
    "wrong": program("wrong", [tensor("INPUT0", "INT32", 2)], [tensor("OUTPUT0", "INT32", 2)]),
    "reshaped": program(
        "echo",
        [tensor("INPUT0", "FP32", -1, 2, 3, reshape=[3, -1, 2])],
        [tensor("OUTPUT0", "FP32", -1, 6, reshape=[3, -1, 2])],
    ),
    "mixed": program(
        "echo",
        [
            tensor("FLAG", "BOOL", 3),
            tensor("VALUES", "FP64", 4),
            tensor("EXTRA_HOST", "INT16", 1, optional=True),
        ],
        [tensor("FLAG_OUT", "BOOL", 3), tensor("VALUES_OUT", "FP64", 4), tensor("EXTRA_OUT", "INT16", 1)],
    ),
    "large": echo("FP32", -1, rows=4),
    "large_fixed": echo("FP32", MIB, rows=4),
} | {f"echo_{datatype}": echo(datatype, -1, -1) for datatype in DATATYPES}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """One worker with all of them; its batches are recorded."""
    directory = tmp_path_factory.mktemp("infer")
    models = {name: options | {"record": str(directory / name)} for name, options in MODELS.items()}
    with workers(directory, models) as found:
        yield found


def batches_of(running: Workers, model: str) -> list[list[int]]:
    """The rows of each request, for every batch of a model so far."""
    lines = (running.log_path.parent / model).read_text().splitlines()
    return [[int(rows) for rows in line.split()] for line in lines]


def use(running: Workers, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Do `work` with a client; at the end nothing of its arena is in use."""

    async def run() -> None:
        async with running.client() as client:
            await work(client)
            await client.wait(lambda: not client.inputs.used_nbytes, 2**62)
            client.inputs.verify()

    asyncio.run(run())


def values_of(datatype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values, with all bit patterns of the type (NaN payloads and infinities among them)."""
    rng = np.random.default_rng(seed)
    if datatype == "BYTES":
        array = np.empty(shape, dtype=object)
        flat = [rng.bytes(int(rng.integers(0, 40))) for _ in range(array.size)]
        array.reshape(-1)[:] = flat
        return array
    dtype = np.dtype(DATATYPES[datatype].array)
    if datatype == "BOOL":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(nbytes), dtype).reshape(shape)


@pytest.mark.sample(6)
@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_every_datatype_comes_back_bit_by_bit_also_with_no_elements(running: Workers, datatype: str) -> None:
    async def work(client: Client) -> None:
        for seed, shape in enumerate([(1, 3, 5), (8, 1, 1), (2, 0, 7), (3, 40, 50)]):
            sent = values_of(datatype, shape, seed)
            for ask in (infer, infer_large):
                found = await ask(client, f"echo_{datatype}", {"INPUT0": (datatype, sent)}, ["OUTPUT0"])
                assert found["OUTPUT0"].shape == shape
                assert raw_of(found["OUTPUT0"]) == raw_of(sent)

    use(running, work)


def test_requests_share_batches_by_rows_and_each_gets_its_own_rows(running: Workers) -> None:
    async def work(client: Client) -> None:
        rng = np.random.default_rng(1)
        given = [
            rng.integers(-(2**31), 2**31, (2, rows, 16)).astype(np.int32) for rows in (1, 3, 8, 2, 1, 5) * 8
        ]
        slow = call_of({"INPUT0": ("INT32", given[0][0]), "INPUT1": ("INT32", given[0][1])}, ["OUTPUT0"])
        first = msgspec.structs.replace(slow[0], parameters={"sleep_ms": 200})
        blocker = asyncio.create_task(client.call(*request_of("add", first, slow[1])))
        await asyncio.sleep(0)
        found = await asyncio.gather(
            *(
                infer(client, "add", {"INPUT0": ("INT32", a), "INPUT1": ("INT32", b)}, ["OUTPUT1", "OUTPUT0"])
                for a, b in given
            )
        )
        read(await blocker)
        for (a, b), outputs in zip(given, found, strict=True):
            assert list(outputs) == ["OUTPUT1", "OUTPUT0"]
            assert np.array_equal(outputs["OUTPUT0"], a + b) and np.array_equal(outputs["OUTPUT1"], a - b)

    use(running, work)
    batches = batches_of(running, "add")
    assert all(sum(rows) <= 8 for rows in batches), "a batch has more rows than max_batch_size"
    assert any(len(rows) > 1 for rows in batches), "no two requests shared a batch"


def test_a_model_that_does_not_batch_runs_every_request_alone(running: Workers) -> None:
    async def work(client: Client) -> None:
        a = np.arange(16, dtype=np.int32)
        inputs = {"INPUT0": ("INT32", a), "INPUT1": ("INT32", 2 * a)}
        found = await asyncio.gather(
            *(infer(client, "alone", inputs, ["OUTPUT0"], batches=False) for _ in range(20))
        )
        assert all(np.array_equal(outputs["OUTPUT0"], 3 * a) for outputs in found)
        with pytest.raises(InvalidInput, match="unexpected shape"):
            await infer(client, "alone", {"INPUT0": ("INT32", a[None]), "INPUT1": ("INT32", a)}, ["OUTPUT0"])

    use(running, work)
    assert {tuple(rows) for rows in batches_of(running, "alone")} == {(1,)}


def test_one_bad_request_does_not_fail_its_neighbours(running: Workers) -> None:
    async def work(client: Client) -> None:
        a = np.arange(16, dtype=np.int32)[None]
        inputs = {"INPUT0": ("INT32", a), "INPUT1": ("INT32", a)}
        orders = [{"sleep_ms": 100}, {}, {"do": "raise"}, {}, {"do": "refuse"}, {}]
        found = await asyncio.gather(
            *(infer(client, "add", inputs, ["OUTPUT0"], parameters=order) for order in orders),
            return_exceptions=True,
        )
        for order, outputs in zip(orders, found, strict=True):
            if order.get("do") == "raise":
                assert isinstance(outputs, InferenceFailed) and "fake" not in outputs.message
            elif order.get("do") == "refuse":
                assert isinstance(outputs, InvalidInput) and "refuses this" in outputs.message
            else:
                assert isinstance(outputs, dict) and np.array_equal(outputs["OUTPUT0"], 2 * a)

    use(running, work)


def test_outputs_of_a_size_that_only_the_program_tells(running: Workers) -> None:
    async def work(client: Client) -> None:
        for width in (0, 1, 5, 20_000, 500_000):
            values = np.array([[width, 0], [0, -4]], np.int32)
            found = await infer(client, "repeat", {"INPUT0": ("INT32", values)}, ["OUTPUT0"])
            expected = np.repeat([[width], [-4]], width, axis=1).astype(np.int32)
            assert np.array_equal(found["OUTPUT0"], expected)

    use(running, work)


def test_a_result_without_room_fails_and_holds_nobody_up(running: Workers) -> None:
    async def work(client: Client) -> None:
        values = np.array([[3_500_000, 0]], np.int32)
        call, payload = call_of({"INPUT0": ("INT32", values)}, ["OUTPUT0"])
        held = [await client.call(*request_of("repeat", call, payload)) for _ in range(2)]
        with pytest.raises(ShmExhausted):
            await client.call(*request_of("repeat", call, payload))
        too_large = np.array([[40_000_000, 0]], np.int32)
        with pytest.raises(InvalidInput, match=r"arena\.bytes"):
            await infer(client, "repeat", {"INPUT0": ("INT32", too_large)}, ["OUTPUT0"])
        small = np.array([[2, 3]], np.int32)
        found = await infer(client, "repeat", {"INPUT0": ("INT32", small)}, ["OUTPUT0"])
        assert np.array_equal(found["OUTPUT0"], [[5, 5, 5]])
        for reply in held:
            assert read(reply)["OUTPUT0"].shape == (1, 3_500_000)

    use(running, work)


def test_outputs_that_the_configuration_forbids_are_an_error(running: Workers) -> None:
    async def work(client: Client) -> None:
        with pytest.raises(UnexpectedOutput, match=r"OUTPUT0.*\[1, 3\].*\[1, 2\]"):
            await infer(client, "wrong", {"INPUT0": ("INT32", np.ones((1, 2), np.int32))}, ["OUTPUT0"])

    use(running, work)


def test_programs_see_their_own_shapes_and_requests_theirs(running: Workers) -> None:
    async def work(client: Client) -> None:
        sent = np.random.default_rng(2).standard_normal((2, 4, 2, 3)).astype(np.float32)
        found = await infer(client, "reshaped", {"INPUT0": ("FP32", sent)}, ["OUTPUT0"])
        assert found["OUTPUT0"].shape == (2, 4, 6)
        assert np.array_equal(found["OUTPUT0"].reshape(-1), sent.reshape(-1))

    use(running, work)


def test_inputs_that_lie_unaligned_and_optional_ones(running: Workers) -> None:
    async def work(client: Client) -> None:
        flags, values = np.array([[True, False, True]]), np.random.default_rng(3).standard_normal((1, 4))
        inputs = {"FLAG": ("BOOL", flags), "VALUES": ("FP64", values)}
        for ask in (infer, infer_large):
            found = await ask(client, "mixed", inputs, ["VALUES_OUT", "FLAG_OUT"])
            assert np.array_equal(found["VALUES_OUT"], values) and np.array_equal(found["FLAG_OUT"], flags)
            extra = inputs | {"EXTRA_HOST": ("INT16", np.array([[7]], np.int16))}
            assert (await ask(client, "mixed", extra, ["EXTRA_OUT"]))["EXTRA_OUT"] == 7

    use(running, work)


def test_large_tensors_are_copied_once_on_the_way_out_and_never_on_the_way_in(running: Workers) -> None:
    async def work(client: Client) -> None:
        sent = np.random.default_rng(4).standard_normal((1, 2 * MIB)).astype(np.float32)
        for model, array in (("large", sent), ("large_fixed", sent[:, :MIB])):
            call, payload = call_of({"INPUT0": ("FP32", array)}, ["OUTPUT0"])
            block = await client.inputs.reserve(len(payload))
            assert block is not None
            with block:
                block.buffer[:] = payload
                before = copies.copied()
                reply = await client.call(*request_of(model, call, block))
                assert copies.copied() == before, "the client's process copied tensors"
                assert reply.leased
                with reply:
                    assert np.array_equal(np.frombuffer(reply.raw("OUTPUT0"), np.float32), array[0])

    async def loaded(client: Client) -> None:
        """Models copy their samples when they are loaded."""

    use(running, loaded)
    before = running.copied()
    use(running, work)
    moved = {place: nbytes - before[place] for place, nbytes in running.copied().items()}
    expected = 4 * (2 * MIB + MIB)
    assert moved == {place: expected if place == "place" else 0 for place in copies.PLACES}


A = np.arange(16, dtype=np.int32)[None]
GOOD, PAYLOAD = call_of({"INPUT0": ("INT32", A), "INPUT1": ("INT32", A)}, ["OUTPUT0"])


def changed(at: int = 0, call: InferCall = GOOD, **facts: Any) -> InferCall:
    """The good call with other facts of one input."""
    inputs = list(call.inputs)
    inputs[at] = msgspec.structs.replace(inputs[at], **facts)
    return msgspec.structs.replace(call, inputs=inputs)


TEXTS = InferCall([TensorInput("INPUT0", "BYTES", [1, 1, 3], 0, 15)], [TensorOutput("OUTPUT0")])
HOSTILE = {
    "too few bytes in all": (GOOD, PAYLOAD[:-1], "128 of a payload of 127"),
    "no payload": (GOOD, b"", "of a payload of 0"),
    "a start below zero": (changed(start=-64), PAYLOAD, "bytes -64 to 0"),
    "a start behind the end": (changed(start=1 << 62), PAYLOAD, "of a payload of 128"),
    "bytes that contradict the shape": (changed(nbytes=60), PAYLOAD, "expected 64 bytes, got 60"),
    "negative bytes": (changed(nbytes=-64), PAYLOAD, "expected 64 bytes, got -64"),
    "rows that contradict the shape": (changed(shape=[2, 16], nbytes=128), PAYLOAD, r"expected \[1, 16\]"),
    "other dims": (changed(shape=[1, 4, 4]), PAYLOAD, r"got \[1, 4, 4\]"),
    "no dims at all": (changed(shape=[]), PAYLOAD, "unexpected shape"),
    "another datatype": (changed(datatype="FP32"), PAYLOAD, "expected INT32, got 'FP32'"),
    "an unknown input": (changed(name="INPUT9"), PAYLOAD, "unexpected input 'INPUT9'"),
    "an input given twice": (changed(name="INPUT1"), PAYLOAD, "unexpected input 'INPUT1'"),
    "a missing input": (
        msgspec.structs.replace(GOOD, inputs=GOOD.inputs[:1]),
        PAYLOAD,
        "missing: .'INPUT1'",
    ),
    "no rows": (msgspec.structs.replace(GOOD, rows=0), PAYLOAD, "1 to 8 rows"),
    "too many rows": (msgspec.structs.replace(GOOD, rows=9), PAYLOAD, "1 to 8 rows"),
    "an unknown output": (
        msgspec.structs.replace(GOOD, outputs=[TensorOutput("OUTPUT7")]),
        PAYLOAD,
        "unexpected outputs",
    ),
    "an output wanted twice": (
        msgspec.structs.replace(GOOD, outputs=[TensorOutput("OUTPUT0")] * 2),
        PAYLOAD,
        "unexpected outputs",
    ),
    "a prefix that lies": (
        TEXTS,
        raw_of(np.array([b"a", b"b", b"c"], object))[:-5] + b"\xff" * 5,
        "element 2",
    ),
    "too few texts": (TEXTS, bytes(4) * 3 + b"abc", "left|more"),
    "more texts than bytes": (changed(call=TEXTS, shape=[1, 1 << 10, 3]), bytes(15), "cannot hold"),
    "more texts than may be": (changed(call=TEXTS, shape=[1, 1 << 40, 3]), bytes(15), "may have 1048576"),
    "a product over 2^59": (changed(call=TEXTS, shape=[1, 1 << 62, 1 << 62]), bytes(15), "above 2.59"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_frontend_is_not_trusted(running: Workers, case: str) -> None:
    call, payload, message = HOSTILE[case]
    model = "echo_BYTES" if call.inputs[0].datatype == "BYTES" else "add"

    async def work(client: Client) -> None:
        with pytest.raises(InvalidInput, match=message):
            await client.call(*request_of(model, call, payload))
        found = await infer(client, "add", {"INPUT0": ("INT32", A), "INPUT1": ("INT32", A)}, ["OUTPUT0"])
        assert np.array_equal(found["OUTPUT0"], 2 * A)

    use(running, work)


async def _submit_block(client: Client, ref: BlockRef) -> None:
    """Send a request whose payload is said to lie in a block, whatever the frontend has there."""
    channel = client.channels[0]
    number, work = next(channel._ids), request_of("add", GOOD, None)[0]
    future = asyncio.get_running_loop().create_future()
    message = Submit(number, work, False, ref)
    channel._pending[number] = Sent(future, message, None)
    channel._outstanding.begin(message)
    assert channel._send(message)
    await future


def test_blocks_that_are_not_there_and_files_that_are_no_arena_are_refused(running: Workers) -> None:
    async def work(client: Client) -> None:
        # A payload that is a block of no arena of the client's.
        with pytest.raises(ProtocolError, match="before the arena"):
            await _submit_block(client, BlockRef(65536, 128, 1))
        for path in ("/etc/passwd", f"{running.paths.shm}/penstock.{running.paths.instance}.f7.0"):
            client.channels[0]._send(Inputs(path, "0" * 16))
        inputs = {"INPUT0": ("INT32", A), "INPUT1": ("INT32", A)}
        await infer_large(client, "add", inputs, ["OUTPUT0"])
        for ref in (
            BlockRef(65536, 128, 99),
            BlockRef(1 << 40, 128, 1),
            BlockRef(65536, -1, 1),
            BlockRef(1, 1, 1),
        ):
            with pytest.raises((ProtocolError, LeaseRevoked)):
                await _submit_block(client, ref)
        await infer_large(client, "add", inputs, ["OUTPUT0"])

    use(running, work)


def test_regions_are_refused_where_they_are_not_offered(running: Workers) -> None:
    async def work(client: Client) -> None:
        region = Region("system", "/client_x", 0, 64)
        for call in (
            changed(region=region),
            msgspec.structs.replace(GOOD, outputs=[TensorOutput("OUTPUT0", region)]),
        ):
            with pytest.raises(Unsupported):
                await client.call(*request_of("add", call, PAYLOAD))

    use(running, work)
