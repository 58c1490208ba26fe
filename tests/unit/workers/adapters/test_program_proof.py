"""What a program must do before it counts as loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch

from ipc.catalog.model_config import ModelConfig, SequenceBatching, TensorConfig
from ipc.errors import UnexpectedOutput
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import ProgramAdapter, Sample
from workers.lifecycle.proof import prove_program


class Program(ProgramAdapter):
    """X plus one; COUNT is the number of calls so far; texts in the hope of no fingerprint."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(family="p", operations=("infer",), inputs=(), outputs=())

    def __init__(self, must_run: bool = False, error: Exception | None = None, **facts: Any) -> None:
        self.calls, self._must, self._error = 0, must_run, error
        inputs = (
            TensorConfig(name="X", datatype="FP32", dims=(-1, 2)),
            TensorConfig(name="T", datatype="BYTES", dims=(1,)),
        )
        outputs = (
            TensorConfig(name="Y", datatype="FP32", dims=(-1, 2)),
            TensorConfig(name="COUNT", datatype="INT64", dims=()),
            TensorConfig(name="T2", datatype="BYTES", dims=(1,)),
        )
        self._config = ModelConfig(name="m", **{"inputs": inputs, "outputs": outputs} | facts)

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Not used here."""
        raise NotImplementedError

    @property
    def config(self) -> ModelConfig:
        """One row."""
        return self._config

    @property
    def memory_bytes(self) -> int:
        """None to speak of."""
        return 0

    @property
    def samples_must_run(self) -> bool:
        """As told."""
        return self._must

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Count, fail or answer."""
        self.calls += 1
        if self._error is not None:
            raise self._error
        values = batch.array("X") + 1
        values[0, 0] = np.nan
        return {"Y": values, "COUNT": np.array(self.calls), "T2": batch.array("T")}


class Warm(Program):
    """A program with samples of its own."""

    def samples(self) -> list[Sample]:
        """Two."""
        texts = np.array([b"warm"], object)
        return [{"X": np.full((n, 2), n, np.float32), "T": texts} for n in (1, 2)]


def test_zeros_run_twice_and_only_what_is_the_same_counts() -> None:
    program = Program()
    assert prove_program(program, "m") == {"infer.0.Y": [0.0, 1.0]}
    assert program.calls == 2


def test_samples_of_a_warm_up_all_run() -> None:
    program = Warm(must_run=True)
    assert prove_program(program, "m") == {"infer.0.Y": [0.0, 2.0], "infer.1.Y": [0.0, 3.0, 3.0, 3.0]}
    assert program.calls == 4


def test_zeros_need_not_suit_a_program_but_its_own_samples_must() -> None:
    assert prove_program(Program(error=ZeroDivisionError()), "m") == {}
    with pytest.raises(ZeroDivisionError):
        prove_program(Warm(must_run=True, error=ZeroDivisionError()), "m")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (TensorConfig(name="Y", datatype="INT32", dims=(-1, 2)), "'Y': the model gave float32.*INT32"),
        (TensorConfig(name="Y", datatype="FP32", dims=(3,)), r"'Y': the model gave shape \[1, 2\].*\[3\]"),
        (TensorConfig(name="Z", datatype="FP32", dims=(-1,)), "no tensor for output 'Z'"),
    ],
)
def test_outputs_that_contradict_the_configuration_fail_the_load(output: TensorConfig, words: str) -> None:
    with pytest.raises(UnexpectedOutput, match=words):
        prove_program(Program(outputs=(output,)), "m")
    optional = TensorConfig(name="X", datatype="FP32", dims=(-1, 2), optional=True)
    assert prove_program(Program(outputs=(output,), inputs=(optional,)), "m") == {}


def test_lack_of_memory_is_no_matter_of_zeros() -> None:
    with pytest.raises(MemoryError):
        prove_program(Program(error=MemoryError()), "m")


def test_a_program_that_keeps_sequences_is_asked_like_every_other() -> None:
    program = Program(sequence_batching=SequenceBatching())
    assert prove_program(program, "m") and program.calls
