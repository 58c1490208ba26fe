"""Named tensors of a batch: what is joined, what is only viewed, and what shapes a configuration admits."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput, UnexpectedOutput
from ipc.memory.datatypes import DATATYPES
from workers.adapters.shared.named_tensors import NamedBatch, NamedInputs, Signature, TensorFacts
from workers.adapters.shared.program import zeros
from workers.operations.items import checked


def config_of(*datatypes: str, rows: int = 4) -> ModelConfig:
    """Inputs X0, X1, ... of these datatypes, [-1] each."""
    inputs = tuple(TensorConfig(name=f"X{n}", datatype=d, dims=(-1,)) for n, d in enumerate(datatypes))
    return ModelConfig(name="m", max_batch_size=rows, inputs=inputs)


def batch_of(datatype: str, *arrays: np.ndarray) -> NamedBatch:
    """One request per array."""
    requests = [NamedInputs({"X0": array}, len(array), ["Y"], {"n": n}) for n, array in enumerate(arrays)]
    return NamedBatch(requests, config_of(datatype))


def read_only(array: np.ndarray) -> np.ndarray:
    """The same values in memory that cannot be written."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def test_a_lone_request_is_viewed_and_several_are_joined() -> None:
    one, two = read_only(np.arange(6, dtype=np.float32).reshape(2, 3)), np.ones((1, 3), np.float32)
    alone = batch_of("FP32", one)
    assert np.shares_memory(alone.array("X0"), one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = alone.tensor("X0")
    assert tensor.data_ptr() == one.ctypes.data
    both = batch_of("FP32", one, two)
    assert both.rows == 3 and both.sizes == [2, 1] and [p["n"] for p in both.parameters] == [0, 1]
    assert np.array_equal(both.array("X0"), np.concatenate([one, two]))
    assert torch.equal(both.tensor("X0"), torch.cat([torch.tensor(one.tolist()), torch.ones(1, 3)]))


def test_who_asks_for_it_may_write() -> None:
    one = read_only(np.arange(3, dtype=np.int64)[None])
    batch = batch_of("INT64", one)
    batch.tensor("X0", writable=True).add_(1)
    batch.array("X0", writable=True)[:] = 9
    assert np.array_equal(one, [[0, 1, 2]]) and not batch.array("X0").flags.writeable


def test_arrays_are_read_only_alone_and_in_company() -> None:
    memory = np.ones((1, 3), np.float32)
    for arrays in ([memory], [memory, memory], [read_only(memory)]):
        found = batch_of("FP32", *arrays).array("X0")
        with pytest.raises(ValueError, match="read-only"):
            found[:] = 0
    assert memory.flags.writeable and np.shares_memory(batch_of("FP32", memory).array("X0"), memory)


def test_what_lies_unaligned_is_copied_before_it_becomes_a_tensor() -> None:
    raw = b"\0" + np.arange(5, dtype=np.float64).tobytes()
    unaligned = np.ndarray((1, 5), np.float64, raw, offset=1)
    assert not unaligned.flags.aligned
    tensor = batch_of("FP64", unaligned).tensor("X0")
    assert tensor.data_ptr() % 8 == 0 and tensor.tolist() == [[0, 1, 2, 3, 4]]


def test_bf16_is_its_bits_on_the_host_and_a_type_in_torch() -> None:
    values = torch.tensor([[1.5, -2.0, 3.25]], dtype=torch.bfloat16)
    bits = values.view(torch.uint16).numpy()
    for arrays in ((bits,), (bits, bits)):
        batch = batch_of("BF16", *arrays)
        assert batch.array("X0").dtype == np.uint16
        assert torch.equal(batch.tensor("X0"), values.repeat(len(arrays), 1))


def test_texts_are_no_tensor() -> None:
    with pytest.raises(TypeError, match="BYTES"):
        batch_of("BYTES", np.array([[b"a"]], object)).tensor("X0")


@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_zeros_of_every_datatype_are_a_request_of_one_row(datatype: str) -> None:
    for rows, shape in ((4, (1, 1)), (0, (1,))):
        [array] = zeros(config_of(datatype, rows=rows)).values()
        assert array.shape == shape and not any(array.reshape(-1))


def facts(dims: tuple[int, ...], reshape: tuple[int, ...] | None = None, **more: Any) -> TensorFacts:
    """An FP32 tensor of a model that batches."""
    return TensorFacts(
        TensorConfig(name="X", datatype="FP32", dims=dims, reshape=reshape), more.get("batches", True)
    )


def test_free_sizes_go_over_in_their_order() -> None:
    found = facts((-1, 2, -1), (4, -1, -1))
    assert list(found.to_program([7, 3, 2, 5])) == [7, 4, 3, 5]
    assert found.from_program([4, 3, 5]) == [3, 2, 5]
    assert found.from_program([5, 3, 5]) is None and found.from_program([4, 3]) is None
    assert list(facts((1,), (), batches=False).to_program([1])) == []
    assert facts((1,), ()).from_program([]) == [1]


@pytest.mark.parametrize(
    ("shape", "rows", "nbytes"),
    [
        ([1, 3], 1, 12),
        ([2, 2], 1, 16),
        ([1, 2, 1], 1, 8),
        ([], 1, 8),
        ([1, 2], 1, 7),
        ([1, -2], 1, -8),
        ([1, 1 << 62], 1, 8),
    ],
)
def test_inputs_that_a_configuration_does_not_admit(shape: list[int], rows: int, nbytes: int) -> None:
    known = facts((2,)) if 1 << 62 not in shape else facts((-1,))
    with pytest.raises(InvalidInput):
        known.check_input(shape, rows, nbytes)


def test_a_fixed_row_has_a_size_and_others_have_none() -> None:
    assert (
        facts((2, 3)).row_nbytes == 24 and facts((2, -1)).row_nbytes is None and facts((2, 0)).row_nbytes == 0
    )
    texts = TensorConfig(name="X", datatype="BYTES", dims=(2,))
    assert TensorFacts(texts, batches=True).row_nbytes is None


def test_requests_are_held_against_all_inputs_of_the_configuration() -> None:
    inputs = (
        TensorConfig(name="A", datatype="INT8", dims=(1,)),
        TensorConfig(name="B", datatype="INT8", dims=(1,), optional=True),
    )
    signature = Signature(ModelConfig(name="m", inputs=inputs))
    assert signature.required == {"A"} and signature.max_rows == 1 and not signature.batches


@pytest.mark.parametrize(
    "values",
    [
        None,
        [1.0],
        np.zeros((2, 3), np.float64),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 4),
        np.zeros((3, 3), np.float32),
        torch.zeros(3),
    ],
)
def test_outputs_of_another_type_or_shape_are_refused(values: Any) -> None:
    with pytest.raises(UnexpectedOutput, match="'X'"):
        checked(facts((3,)), {"X": values} if values is not None else {}, 2)


def test_outputs_are_accepted_as_arrays_and_tensors_even_those_that_require_gradients() -> None:
    for values in (np.ones((2, 3), np.float32), torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)):
        assert np.array_equal(np.asarray(checked(facts((3,)), {"X": values}, 2).values), np.ones((2, 3)))
    bits = TensorFacts(TensorConfig(name="X", datatype="BF16", dims=(2,)), batches=False)
    found = checked(bits, {"X": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, None)
    assert np.asarray(found.values).tolist() == [0x3F80, 0x4000]
    with pytest.raises(UnexpectedOutput):
        checked(bits, {"X": torch.zeros(2, dtype=torch.uint16)}, None)
