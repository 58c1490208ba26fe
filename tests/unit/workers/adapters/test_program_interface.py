"""How a configuration and what a program says of itself are put together."""

from __future__ import annotations

from typing import Any

import pytest

from ipc.catalog.entries import DirectorySource
from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching, TensorConfig
from workers.adapters.shared.interface import Fitted, Interface, ProgramTensor, fit
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused

A, B = ProgramTensor("A", "FP32", (-1, 4)), ProgramTensor("B", "INT64", (-1, -1))
PROGRAM = Interface((A,), (B,))


def fitted(interface: Interface = PROGRAM, **config: Any) -> Fitted:
    """The configuration of a model for a program."""
    entry = RepositoryEntry(
        id="m@1",
        source=DirectorySource("/nowhere"),
        model="m",
        version=1,
        config=ModelConfig("m", **config),
        directory="/nowhere",
        batch_stated="max_batch_size" in config,
        default_batch=16,
    )
    return fit(entry, interface)


def one(
    name: str, datatype: str = "FP32", dims: tuple[int, ...] = (4,), **more: Any
) -> tuple[TensorConfig, ...]:
    return (TensorConfig(name, datatype, dims, **more),)


def test_without_a_configuration_all_is_inferred() -> None:
    config = fitted().config
    assert config.max_batch_size == 16
    assert config.inputs == one("A") and config.outputs == one("B", "INT64", (-1,))


@pytest.mark.parametrize("shape", [(4,), (), (2, -1)])
def test_a_program_whose_first_dimension_has_a_size_does_not_batch(shape: tuple[int, ...]) -> None:
    config = fitted(Interface((A, ProgramTensor("C", "FP32", shape)), (B,))).config
    assert config.max_batch_size == 0
    assert [each.dims for each in config.inputs] == [(-1, 4), shape]


def test_the_batch_is_no_larger_than_the_program_takes() -> None:
    assert fitted(Interface((A,), (B,), most_rows=3)).config.max_batch_size == 3
    with pytest.raises(ModelRefused, match="max_batch_size: 4 is above 3"):
        fitted(Interface((A,), (B,), most_rows=3), max_batch_size=4)


def test_what_is_stated_stays_and_what_is_missing_is_added() -> None:
    found = fitted(max_batch_size=2, inputs=one("A", dims=(4,), format="NONE"))
    assert found.config.max_batch_size == 2 and found.config.outputs == one("B", "INT64", (-1,))
    assert fitted(inputs=one("A", dims=(7, 4)), outputs=one("B", "INT64", (-1, 2))).config.max_batch_size == 0


def test_a_stated_batch_size_of_0_is_obeyed() -> None:
    config = fitted(max_batch_size=0).config
    assert config.max_batch_size == 0 and config.inputs == one("A", dims=(-1, 4))


def test_names_are_matched_by_name_then_by_number_and_never_by_order() -> None:
    two = Interface((A, ProgramTensor("C", "FP32", (-1, 4))), (B,))
    inputs = (*one("C"), *one("A"))
    assert fitted(two, max_batch_size=2, inputs=inputs).inputs == ("A", "C")
    numbered = (*one("y__1"), *one("x__0"))
    assert fitted(two, max_batch_size=2, inputs=numbered).inputs == ("x__0", "y__1")
    assert fitted(two, max_batch_size=2, inputs=(*one("C"), *one("x__0"))).inputs == ("x__0", "C")
    assert fitted(PROGRAM, max_batch_size=2, inputs=one("x")).inputs == ("x",), "there is only one"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("x", "y"),
            "input 'x' is none of the program's, which are 'A', 'C'; write one of these, or a name that",
        ),
        (("x__0", "y__2"), "input 'y__2' is none of the program's.*__0 to __1"),
        (("x__1", "y__1"), "inputs 'x__1', 'y__1' are both the program's 'C'"),
        (("A", "y__0"), "inputs 'A', 'y__0' are both the program's 'A'"),
        (("y__1",), "input 'A' of the program is not configured"),
    ],
)
def test_what_names_and_numbers_do_not_match_is_refused(names: tuple[str, ...], said: str) -> None:
    two = Interface((A, ProgramTensor("C", "FP32", (-1, 4))), (B,))
    with pytest.raises(ModelRefused, match=said):
        fitted(two, max_batch_size=2, inputs=tuple(tensor for name in names for tensor in one(name)))


def test_outputs_by_number_may_stand_in_any_order_and_be_some_of_the_programs() -> None:
    three = Interface((A,), tuple(ProgramTensor(f"OUTPUT__{at}", "FP32", (-1, 1)) for at in range(3)))
    outputs = (*one("sum__2", dims=(1,)), *one("mean__1", dims=(1,)))
    assert fitted(three, max_batch_size=2, outputs=outputs).outputs == ("", "mean__1", "sum__2")
    with pytest.raises(ModelRefused, match="output 'sum' is none of the program's"):
        fitted(three, max_batch_size=2, outputs=one("sum", dims=(1,)))


def test_an_output_may_be_left_out_and_an_input_only_when_it_is_optional() -> None:
    two = Interface(
        (A, ProgramTensor("C", "FP32", (-1, 4), optional=True)), (B, ProgramTensor("D", "FP32", (-1, 1)))
    )
    found = fitted(two, max_batch_size=2, inputs=one("A"), outputs=one("D", dims=(1,)))
    assert (found.inputs, found.outputs) == (("A", ""), ("", "D"))
    needed = Interface((A, ProgramTensor("C", "FP32", (-1, 4))), (B,))
    with pytest.raises(ModelRefused, match="input 'C' of the program is not configured"):
        fitted(needed, max_batch_size=2, inputs=one("A"))


def test_a_name_that_only_one_side_has_is_told_and_never_taken_by_order() -> None:
    two = Interface((A, ProgramTensor("C", "FP32", (-1, 4))), (B,))
    with pytest.raises(ModelRefused, match="input 'X' is none of the program's, which are 'A', 'C'"):
        fitted(two, max_batch_size=2, inputs=(*one("C"), *one("X")))
    many = [ProgramTensor(f"I{number}", "FP32", (-1, 4)) for number in range(20)]
    names = [*many[:19], ProgramTensor("LAST")]
    with pytest.raises(ModelRefused, match="input 'LAST' is none of the program's"):
        fitted(
            Interface(tuple(many), (B,)),
            max_batch_size=2,
            inputs=tuple(tensor for each in names for tensor in one(each.name)),
        )


def test_controls_of_sequences_are_inputs_of_the_program_and_none_of_requests() -> None:
    sequence = SequenceBatching(1, (Control("START", "START", "INT32"),))
    program = Interface((A, ProgramTensor("START", "INT32", (-1,))), (B,))
    found = fitted(program, max_batch_size=2, sequence_batching=sequence)
    assert found.config.inputs == one("A") and found.inputs == ("A", "START")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"inputs": one("A", "INT32")}, "input 'A': data_type is INT32, the program's is FP32"),
        ({"inputs": one("A", dims=(5,))}, r"input 'A': shape is \[-1, 5\], the program's is \[-1, 4\]"),
        ({"inputs": one("A", dims=(-1,))}, r"input 'A': shape is \[-1, -1\]"),
        ({"inputs": one("A", dims=(4, 1))}, r"input 'A': shape is \[-1, 4, 1\]"),
        ({"inputs": one("A", dims=(2, 2), reshape=(5,))}, r"shape is \[-1, 5\]"),
        ({"outputs": one("B", "FP32", (-1,))}, "output 'B': data_type is FP32, the program's is INT64"),
        (
            {"outputs": (*one("B", "INT64", (-1,)), *one("E"))},
            "output 'E' is none of the program's, which are 'B'",
        ),
    ],
)
def test_contradictions_name_the_tensor(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelRefused, match=said):
        fitted(max_batch_size=2, **config)


def test_a_reshape_is_what_the_program_takes() -> None:
    assert fitted(max_batch_size=2, inputs=one("A", dims=(2, 2), reshape=(4,)))


def test_a_program_with_fixed_rows_does_not_batch() -> None:
    with pytest.raises(ModelRefused, match=r"shape is \[-1, 4\], the program's is \[1, 4\]"):
        fitted(Interface((ProgramTensor("A", "FP32", (1, 4)),), (B,)), max_batch_size=2, inputs=one("A"))


def test_what_a_program_does_not_tell_must_be_stated() -> None:
    with pytest.raises(ModelRefused, match="does not tell type and shape of input 'A'"):
        fitted(Interface((ProgramTensor("A"),), (B,)), max_batch_size=2)
