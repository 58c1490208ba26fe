"""What the worker itself holds infer requests to: rows of a batch, elements of BYTES, alignment in device memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.wire.messages import InferCall, Region, TensorInput, TensorOutput
from tests.fakes.program import FakeProgram
from tests.fakes.tensors import tensor
from tests.unit.workers.scheduling.test_batcher import NOW_NS, filled, job
from workers import operations
from workers.adapters.base import Prepared
from workers.adapters.shared.named_tensors import NamedInputs
from workers.scheduling.job import Job


def program(rows: int, *datatypes: str) -> FakeProgram:
    """It gives its inputs X0, X1, ... back as Y0, Y1, ..., [-1] each."""
    inputs = tuple(tensor(f"X{n}", datatype, -1) for n, datatype in enumerate(datatypes))
    outputs = tuple(tensor(f"Y{n}", datatype, -1) for n, datatype in enumerate(datatypes))
    return FakeProgram(ModelConfig("m", max_batch_size=rows, inputs=inputs, outputs=outputs), "echo")


def prepared(rows: int) -> Prepared:
    """A request of so many rows, [rows, 1]."""
    return Prepared(NamedInputs({"X0": np.zeros((rows, 1), np.float32)}, rows, ["Y0"], {}), 16 * rows)


def jobs_of(adapter: FakeProgram, count: int) -> list[Job]:
    """Requests of one row each."""
    made = [job([16]) for _ in range(count)]
    for one in made:
        one.adapter = adapter
    return made


@pytest.mark.parametrize(("rows", "sizes"), [(0, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1]), (3, [3, 2])])
def test_no_batch_has_more_rows_than_the_program_of_its_jobs_takes(rows: int, sizes: list[int]) -> None:
    batcher = filled(*jobs_of(program(rows, "FP32"), 5))
    # The model is unloading, so its name says nothing of it: there is room for 128 rows.
    taken = [len(batcher.take(2048, 100, NOW_NS, room=lambda model: 2048)) for _ in sizes]
    assert taken == sizes and not batcher.items


@pytest.mark.parametrize(("rows", "given"), [(0, [1, 1]), (4, [3, 2])])
def test_requests_that_do_not_fit_a_batch_together_are_never_joined(rows: int, given: list[int]) -> None:
    adapter = program(rows, "FP32")
    with pytest.raises(ValueError, match=f"2 requests have {sum(given)} rows"):
        adapter.collate([prepared(each) for each in given])
    assert adapter.collate([prepared(given[0])]).rows == given[0]


def call(*inputs: TensorInput, **more: Any) -> InferCall:
    return InferCall(list(inputs), more.pop("outputs", [TensorOutput("Y0")]), **more)


def texts(name: str, count: int) -> TensorInput:
    return TensorInput(name, "BYTES", [count], 0, 4 * count)


def test_texts_of_a_request_are_counted_before_they_are_taken_apart() -> None:
    adapter, most = program(0, "BYTES", "BYTES"), datatypes.MOST_ELEMENTS
    operations.check(adapter, call(texts("X0", most - 1), texts("X1", 1)))
    with pytest.raises(InvalidInput, match=rf"^input 'X0': it has {most + 1} elements .* may have {most}$"):
        operations.check(adapter, call(texts("X0", most + 1), texts("X1", 0)))
    with pytest.raises(
        InvalidInput, match=rf"^input 'X1': it has 2 elements .* before it {most - 1}, .* {most}$"
    ):
        operations.check(adapter, call(texts("X0", most - 1), texts("X1", 2)))


def region(offset: int, nbytes: int, kind: str = "cuda") -> Region:
    return Region(kind, "00" * 64, offset, nbytes)


def test_a_call_is_held_against_the_model_whatever_was_allowed_before_it() -> None:
    adapter, other = program(4, "FP32"), program(4, "INT32")
    allowed = call(TensorInput("X0", "FP32", [2, 1], 0, 8), rows=2)
    refused = [
        call(TensorInput("X0", "FP32", [2, 1], 0, 12), rows=2),
        call(TensorInput("X0", "FP32", [2, 2], 0, 8), rows=2),
        call(TensorInput("X0", "FP32", [2, 1], 0, 8), rows=3),
        call(TensorInput("X0", "FP32", [2, 1], 0, 8), rows=2, outputs=[TensorOutput("Y1")]),
    ]
    for _ in range(2):
        operations.check(adapter, allowed)
        for each in refused:
            for _ in range(2):
                with pytest.raises(InvalidInput):
                    operations.check(adapter, each)
        with pytest.raises(InvalidInput):
            operations.check(other, allowed)


def test_what_a_program_does_to_the_parameters_of_a_request_is_not_seen_by_the_next() -> None:
    adapter, first = program(4, "FP32"), TensorInput("X0", "FP32", [1, 1], 0, 4)
    changed, after = (call(first, rows=1, parameters={"scale": 2.0}) for _ in range(2))
    operations.check(adapter, changed)
    changed.parameters["scale"] = np.zeros(2)  # type: ignore[assignment]
    operations.check(adapter, after)


def test_elements_in_device_memory_lie_at_multiples_of_their_size() -> None:
    adapter, inline = program(0, "FP32"), TensorInput("X0", "FP32", [2], 0, 8)

    def given(where: Region) -> TensorInput:
        return TensorInput("X0", "FP32", [2], 0, 8, where)

    operations.check(adapter, call(given(region(4, 8))))
    operations.check(adapter, call(given(region(1, 8, "system"))))
    with pytest.raises(InvalidInput, match=r"^input 'X0': offset 1 .* the 4 bytes of an element of FP32$"):
        operations.check(adapter, call(given(region(1, 8))))
    with pytest.raises(InvalidInput, match=r"^output 'Y0': offset 6 .* the 4 bytes of an element of FP32$"):
        operations.check(adapter, call(inline, outputs=[TensorOutput("Y0", region(6, 8))]))


def test_bytes_and_texts_may_lie_anywhere_in_device_memory() -> None:
    adapter = program(0, "UINT8")
    operations.check(adapter, call(TensorInput("X0", "UINT8", [3], 0, 3, region(1, 3))))
