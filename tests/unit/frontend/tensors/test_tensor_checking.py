"""Requests of named tensors that the model refuses, by the tables of both contracts."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontend.tensors.checking import check, check_shapes, default_dims, expected_nbytes
from frontend.tensors.models import TensorModel
from frontend.tensors.request import InputTensor, RegionUse, Sequence, TensorRequest, WantedOutput
from ipc.catalog.model_config import ModelConfig, SequenceBatching
from ipc.errors import InvalidInput
from tests.fakes.tensors import elements, entry, loaded, services_of, tensor

CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    inputs=(tensor("A", "FP32", 2), tensor("B", "INT32", -1, 3), tensor("S", "BYTES", 1, optional=True)),
    outputs=(
        tensor("O", "FP32", 3),
        tensor("H", "FP16", 3),
        tensor("T", "BYTES", 1),
        tensor("WIDE", "FP32", 1_000_001),
    ),
)
PLAIN = ModelConfig(name="m", inputs=(tensor("A", "FP32", 2, 2),), outputs=(tensor("O", "FP32", 2),))
SEQUENCE = ModelConfig(
    name="m",
    max_batch_size=4,
    inputs=(tensor("A", "FP32", 2),),
    outputs=(tensor("O", "FP32", 2),),
    sequence_batching=SequenceBatching(),
)


def served_of(root: Path, config: ModelConfig) -> TensorModel:
    """A loaded version of a repository model."""
    return services_of(root, [entry("m@1")], [loaded("m@1", config)]).tensor_models.find("m")


def request(rows: int = 2, **more: Any) -> TensorRequest:
    """A request that `CONFIG` allows."""
    inputs = [
        InputTensor("A", "FP32", [rows, 2], bytes(rows * 8)),
        InputTensor("B", "INT32", [rows, 5, 3], bytes(rows * 60)),
    ]
    return TensorRequest("m", None, inputs, None, **more)


Change = Callable[[TensorRequest], None]


def first(**values: Any) -> Change:
    """Set fields of the first input."""

    def change(made: TensorRequest) -> None:
        for name, value in values.items():
            setattr(made.inputs[0], name, value)

    return change


def field(**values: Any) -> Change:
    """Set fields of the request."""

    def change(made: TensorRequest) -> None:
        for name, value in values.items():
            setattr(made, name, value)

    return change


def outputs(*wanted: WantedOutput) -> Change:
    """Want these."""
    return field(outputs=list(wanted))


def another(*more: InputTensor) -> Change:
    """Further inputs."""
    return lambda made: made.inputs.extend(more)


HUGE = 1 << 70
STRING = InputTensor("S", "BYTES", [2, 1], elements("a", "bc"))

REFUSED: dict[str, tuple[Change, str]] = {
    "batch of none": (field(batch_size=0), "inference request batch-size must be >= 1 for 'm'"),
    "batch of none, by shape": (
        first(shape=[0, 2], data=b""),
        "inference request batch-size must be >= 1 for 'm'",
    ),
    "negative batch": (first(shape=[-1, 2]), "inference request batch-size must be >= 1 for 'm'"),
    "batch too large": (field(batch_size=5), "inference request batch-size must be <= 4 for 'm'"),
    "batch too large, by shape": (first(shape=[5, 2]), "inference request batch-size must be <= 4 for 'm'"),
    "huge batch": (first(shape=[HUGE, 2]), "inference request batch-size must be <= 4 for 'm'"),
    "no inputs": (
        field(inputs=[], batch_size=1),
        "expected 2 inputs but got 0 inputs for model 'm' (missing: 'A', 'B')",
    ),
    "an input missing": (
        lambda made: made.inputs.pop(),
        "expected 2 inputs but got 1 inputs for model 'm' (missing: 'B')",
    ),
    "too many inputs": (
        another(STRING, InputTensor("X", "FP32", [2, 1], bytes(8))),
        "expected 3 inputs but got 4 inputs for model 'm' (unexpected: 'X')",
    ),
    "unknown input": (first(name="X"), "unexpected inference input 'X' for model 'm'"),
    "unknown input of a long name": (first(name="X" * 9999), "unexpected inference input 'XXX"),
    "required input missing beside an optional one": (
        lambda made: made.inputs.__setitem__(0, STRING),
        "missing inference input 'A' for model 'm'",
    ),
    "input twice": (another(InputTensor("A", "FP32", [2, 2], bytes(16))), "input 'A' occurs more than once"),
    "other datatype": (
        first(datatype="INT32"),
        "inference input 'A' data-type is 'INT32', but model 'm' expects 'FP32'",
    ),
    "unknown datatype": (
        first(datatype="FLOAT"),
        "input 'A' for model 'm': datatype 'FLOAT' is not one of BOOL",
    ),
    "other rank": (
        first(shape=[2, 2, 1]),
        "unexpected shape for input 'A' for model 'm': expected [-1, 2], got [2, 2, 1]",
    ),
    "other dim": (
        first(shape=[2, 3]),
        "unexpected shape for input 'A' for model 'm': expected [-1, 2], got [2, 3]",
    ),
    "other dim of a request with its batch apart": (
        lambda made: (first(shape=[2, 3])(made), field(batch_size=2)(made)),
        "unexpected shape for input 'A' for model 'm': expected [2], got [3]",
    ),
    "no batch dimension": (
        first(shape=[]),
        "unexpected shape for input 'A' for model 'm': [] has no batch dimension",
    ),
    "batches differ": (
        lambda made: setattr(made.inputs[1], "shape", [3, 5, 3]),
        "input 'B' for model 'm' has batch-size 3, but other inputs have 2",
    ),
    "negative dim": (
        lambda made: setattr(made.inputs[1], "shape", [2, -5, 3]),
        "unexpected shape for input 'B' for model 'm': dimension -5 of its shape is outside 0..2^59",
    ),
    "huge dim": (
        lambda made: setattr(made.inputs[1], "shape", [2, HUGE, 3]),
        f"unexpected shape for input 'B' for model 'm': dimension {HUGE} of its shape is outside 0..2^59",
    ),
    "dim of a million digits": (
        lambda made: setattr(made.inputs[1], "shape", [2, 10**5000, 3]),
        "unexpected shape for input 'B' for model 'm': dimension a number of thousands of digits",
    ),
    "product that overflows": (
        lambda made: setattr(made.inputs[1], "shape", [2, 1 << 62, 3]),
        "unexpected shape for input 'B' for model 'm': dimension 4611686018427387904 of its shape is outside 0..2^59",
    ),
    "product that overflows without a large dim": (
        lambda made: setattr(made.inputs[1], "shape", [2, 1 << 58, 3]),
        "unexpected shape for input 'B' for model 'm': shape [2, 288230376151711744, 3] is too large: the product of "
        "its dimensions is above 2^59",
    ),
    "product that overflows beside a dim of 0": (
        lambda made: setattr(made.inputs[1], "shape", [2, 0, 1 << 59]),
        "unexpected shape for input 'B' for model 'm': shape [2, 0, 576460752303423488] is too large: the product of "
        "its dimensions is above 2^59",
    ),
    "too few bytes": (
        first(data=bytes(12)),
        "unexpected size 12 for input 'A' for model 'm', expecting 16 bytes (4 elements of FP32 for shape [2, 2], got",
    ),
    "too many bytes": (
        first(data=bytes(20)),
        "unexpected size 20 for input 'A' for model 'm', expecting 16 bytes",
    ),
    "bytes beside no elements": (
        lambda made: setattr(made.inputs[1], "shape", [2, 0, 3]),
        "unexpected size 120 for input 'B' for model 'm', expecting 0 bytes",
    ),
    "too few bytes of texts": (
        another(InputTensor("S", "BYTES", [2, 1], bytes(7))),
        "unexpected size 7 for input 'S' for model 'm': shape [2, 1] has 2 elements of BYTES",
    ),
    "neither data nor region": (
        first(data=None),
        "input 'A' for model 'm': expected data or a shared memory region",
    ),
    "data and region": (
        first(region=RegionUse("r", 0, 16)),
        "input 'A' for model 'm': expected data or a shared memory region, and not both",
    ),
    "region of another size": (
        first(data=None, region=RegionUse("r", 0, 15)),
        "unexpected size 15 for input 'A' for model 'm', expecting 16 bytes",
    ),
    "region at a negative offset": (
        first(data=None, region=RegionUse("r", -1, 16)),
        "input 'A' for model 'm': shared memory offset -1 is outside 0..2^62",
    ),
    "region at a huge offset": (
        first(data=None, region=RegionUse("r", HUGE, 16)),
        f"input 'A' for model 'm': shared memory offset {HUGE} is outside 0..2^62",
    ),
    "unknown output": (outputs(WantedOutput("X")), "unexpected inference output 'X' for model 'm'"),
    "output twice": (outputs(WantedOutput("O"), WantedOutput("O")), "output 'O' occurs more than once"),
    "classes of half floats": (
        outputs(WantedOutput("H", 1)),
        "class result not available for output 'H' for model 'm'",
    ),
    "classes of texts": (
        outputs(WantedOutput("T", 1)),
        "class result not available for output 'T' for model 'm'",
    ),
    "classes of a huge tensor": (
        outputs(WantedOutput("WIDE", 1)),
        "class result not available for output 'WIDE' for model 'm': 2000002 elements, the limit is 1000000",
    ),
    "negative classes": (
        outputs(WantedOutput("O", -1)),
        "output 'O' for model 'm': classification -1 must be >= 0",
    ),
    "classes into a region": (
        outputs(WantedOutput("O", 1, RegionUse("r", 0, 16))),
        "output 'O' for model 'm': classification and a shared memory region",
    ),
    "output region of negative size": (
        outputs(WantedOutput("O", None, RegionUse("r", 0, -1))),
        "output 'O' for model 'm': shared memory byte size -1 is outside 0..2^62",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_refuses_is_named(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    made = request()
    change(made)
    with pytest.raises(InvalidInput) as refused:
        check(served_of(tmp_path, CONFIG), made)
    assert refused.value.message.startswith(message)
    assert len(refused.value.message) < 600


ALLOWED: dict[str, tuple[Change, int]] = {
    "as it is": (lambda made: None, 2),
    "batch stated": (field(batch_size=2), 2),
    "all inputs": (another(STRING), 2),
    "no elements in a variable dim": (
        lambda made: made.inputs.__setitem__(1, InputTensor("B", "INT32", [2, 0, 3], b"")),
        2,
    ),
    "regions": (first(data=None, region=RegionUse("r", 8, 16)), 2),
    "no outputs": (outputs(), 2),
    "outputs in another order": (outputs(WantedOutput("H"), WantedOutput("O", 2)), 2),
    "memoryview": (first(data=memoryview(bytes(16))), 2),
    "sequence of a model without": (field(sequence=Sequence(7, True)), 2),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_model_allows_gives_its_rows(case: str, tmp_path: Path) -> None:
    change, rows = ALLOWED[case]
    made = request()
    change(made)
    assert check(served_of(tmp_path, CONFIG), made) == rows


def test_earlier_checks_go_before_later_ones(tmp_path: Path) -> None:
    served, made = served_of(tmp_path, CONFIG), request(batch_size=9)
    made.inputs[0] = InputTensor("X", "FLOAT", [7], b"")
    made.outputs = [WantedOutput("X")]
    found = []
    mends: list[Change] = [
        field(batch_size=2),
        first(name="A"),
        first(datatype="FP32"),
        first(shape=[2, 2]),
        first(data=bytes(16)),
        outputs(),
    ]
    for mend in mends:
        with pytest.raises(InvalidInput) as refused:
            check(served, copy.deepcopy(made))
        found.append(refused.value.message)
        mend(made)
    parts = (
        "batch-size",
        "unexpected inference input",
        "datatype",
        "batch-size 7",
        "unexpected size",
        "output 'X'",
    )
    assert check(served, made) == 2
    assert all(part in message for part, message in zip(parts, found, strict=True)), found


def test_names_are_counted_before_they_are_compared(tmp_path: Path) -> None:
    made = request()
    names = [str(at) for at in range(20_000)]
    made.inputs = [InputTensor(name, "FP32", [2, 2], bytes(16)) for name in [*names, names[-1]]]
    with pytest.raises(InvalidInput, match="expected 3 inputs but got 20001 inputs") as refused:
        check(served_of(tmp_path, CONFIG), made)
    assert len(refused.value.message) < 400


def test_a_name_given_twice_is_found_in_one_pass(tmp_path: Path) -> None:
    compared = 0

    class Name(str):
        """Counts how often it is compared."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    tensors = tuple(tensor(f"I{at}", "FP32", 1) for at in range(200))
    config = ModelConfig(name="m", max_batch_size=4, inputs=tensors, outputs=CONFIG.outputs)
    names = [*(f"I{at}" for at in range(199)), "I198"]
    made = request()
    made.inputs = [InputTensor(Name(name), "FP32", [1, 1], bytes(4)) for name in names]
    with pytest.raises(InvalidInput, match="input 'I198' occurs more than once"):
        check(served_of(tmp_path, config), made)
    assert compared < 4 * len(names)


def test_too_many_rows_name_the_setting_of_the_bound(tmp_path: Path) -> None:
    served = served_of(tmp_path, CONFIG)
    words = "got 9 (max_batch_size 4 of its configuration; where that states none, the setting repository.default_max"
    for model, said in (
        (served, words),
        (dataclasses.replace(served, kind="encode"), "got 9 (limits.max_items of the server)"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(said)):
            check_shapes(model, TensorRequest("m", None, request().inputs, None, batch_size=9))


def test_shapes_can_be_checked_before_the_bytes_are_there(tmp_path: Path) -> None:
    made = request()
    for given in made.inputs:
        given.data = None
    assert check_shapes(served_of(tmp_path, CONFIG), made) == 2


def test_a_model_that_does_not_batch_has_one_row_and_no_batch_dimension(tmp_path: Path) -> None:
    served = served_of(tmp_path, PLAIN)
    given = InputTensor("A", "FP32", [2, 2], bytes(16))
    assert check(served, TensorRequest("m", None, [given], None)) == 1
    assert check(served, TensorRequest("m", None, [given], None, batch_size=1)) == 1
    words = r"^inference request batch-size must be <= 0 for 'm', got 2 \(max_batch_size 0: the model has no batch"
    with pytest.raises(InvalidInput, match=words):
        check(served, TensorRequest("m", None, [given], None, batch_size=2))
    with pytest.raises(InvalidInput, match=r"expected \[2, 2\], got \[4\]"):
        check(served, TensorRequest("m", None, [InputTensor("A", "FP32", [4], bytes(16))], None))


def test_sequences_have_one_row_and_an_id(tmp_path: Path) -> None:
    served = served_of(tmp_path, SEQUENCE)

    def asked(rows: int, number: int | str) -> TensorRequest:
        given = InputTensor("A", "FP32", [rows, 2], bytes(rows * 8))
        return TensorRequest("m", None, [given], None, sequence=Sequence(number))

    words = r"^inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher, got"
    with pytest.raises(InvalidInput, match=words):
        check(served, asked(2, 0))
    for none in (0, ""):
        with pytest.raises(
            InvalidInput, match=r"^inference request to model 'm' must specify a non-zero correlation ID"
        ):
            check(served, asked(1, none))
    assert check(served, asked(1, 7)) == check(served, asked(1, "seven")) == 1


def test_the_bytes_of_a_shape() -> None:
    assert expected_nbytes("FP16", [2, 3], "x") == 12
    assert expected_nbytes("INT64", [], "x") == 8
    assert expected_nbytes("BOOL", [4, 0], "x") == 0
    assert expected_nbytes("BYTES", [4], "x") is None


def test_dims_are_those_of_the_configuration_unless_they_vary() -> None:
    assert default_dims(CONFIG, CONFIG.inputs[0]) == [2]
    with pytest.raises(InvalidInput, match="input 'B' of model 'm' has a variable size"):
        default_dims(CONFIG, CONFIG.inputs[1])


def test_texts_of_a_request_are_counted_before_anything_is_taken_apart(tmp_path: Path) -> None:
    config = ModelConfig(name="m", inputs=(tensor("S", "BYTES", -1),), outputs=(tensor("O", "FP32", 2),))
    served, most = served_of(tmp_path, config), 1 << 20
    for count, refused in ((most, False), (most + 1, True)):
        made = TensorRequest("m", None, [InputTensor("S", "BYTES", [count], bytes(4 * count))], None)
        if not refused:
            assert check(served, made) == 1
            continue
        for way in (check, check_shapes):
            with pytest.raises(
                InvalidInput, match=f"^input 'S' for model 'm': it has {count} .* may have {most}$"
            ):
                way(served, made)
