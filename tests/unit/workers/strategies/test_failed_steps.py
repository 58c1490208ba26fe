"""A batch of a model with sequences that raised: the guilty request alone, or all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipc.wire.messages import InferCall, ItemError
from workers.adapters.base import Adapter
from workers.adapters.onnx import OnnxAdapter
from workers.adapters.python_model import PythonModelAdapter
from workers.adapters.torch_export import TorchExportAdapter
from workers.adapters.torchscript import TorchScriptAdapter
from workers.strategies.sequence import Sequences


class Table:
    """Notes the error of each request, by the name of its job."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def complete(self, job: Any, count: int, errors: list[ItemError]) -> None:
        self.failed[job.work.request_id] = errors[0].message

    def wake_endpoint(self) -> None:
        """Nobody waits."""


class Passes:
    """Runs pieces of a model that raises on `bad`."""

    def __init__(self, strategy: Sequences, bad: str) -> None:
        self._strategy, self._bad, self.done = strategy, bad, []

    def run(self, pieces: list[Any]) -> None:
        names = [piece.job.work.request_id for piece in pieces]
        if self._bad in names:
            self._strategy.recover(self, pieces, ValueError("index 9 is out of range"))  # type: ignore[arg-type]
        else:
            self.done += names


def outcome(adapter: type[Adapter]) -> tuple[list[str], dict[str, str]]:
    """The requests that were answered, and the errors of the others, of a batch in which "c" is bad."""
    strategy = object.__new__(Sequences)
    table = Table()
    context: Any = SimpleNamespace(jobs=table)
    strategy.context = context
    jobs = [
        SimpleNamespace(adapter=adapter, work=SimpleNamespace(request_id=name, call=InferCall([], [])))
        for name in "abcd"
    ]
    pieces = [SimpleNamespace(job=job, index=0) for job in jobs]
    passes = Passes(strategy, "c")
    passes.run(pieces)
    return passes.done, table.failed


@pytest.mark.parametrize("adapter", [OnnxAdapter, TorchExportAdapter])
def test_a_request_on_which_an_atomic_program_raises_fails_alone(adapter: type[Adapter]) -> None:
    done, failed = outcome(adapter)
    assert done == ["a", "b", "d"] and list(failed) == ["c"] and "index 9" in failed["c"]


@pytest.mark.parametrize("adapter", [PythonModelAdapter, TorchScriptAdapter])
def test_no_request_of_another_model_runs_twice(adapter: type[Adapter]) -> None:
    done, failed = outcome(adapter)
    assert done == [] and set(failed) == set("abcd")
    assert all("what it keeps of the sequence is not certain" in text for text in failed.values())
