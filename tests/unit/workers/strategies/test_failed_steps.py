"""A batch of a model with sequences that raised: the guilty request alone, or all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipc.errors import UnexpectedOutput
from ipc.wire.messages import InferCall, ItemError
from workers.adapters.base import Adapter
from workers.adapters.onnx import OnnxAdapter
from workers.adapters.python_model import PythonModelAdapter
from workers.adapters.torch_export import TorchExportAdapter
from workers.adapters.torchscript import TorchScriptAdapter
from workers.strategies.sequence import Sequences

RAISED = ValueError("index 9 is out of range")


class Table:
    """Notes the error of each request, by the name of its job."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def complete(self, job: Any, count: int, errors: list[ItemError]) -> None:
        self.failed[job.work.request_id] = errors[0].message

    def wake_endpoint(self) -> None:
        """Nobody waits."""


class Passes:
    """Runs pieces of a model that raises on `bad`, or whose outputs raise where `came_to_end`."""

    def __init__(self, strategy: Sequences, bad: str, error: Exception, came_to_end: bool) -> None:
        self._strategy, self._bad, self._error, self.done = strategy, bad, error, []
        self.came_to_end = came_to_end

    def run(self, pieces: list[Any]) -> None:
        names = [piece.job.work.request_id for piece in pieces]
        if self._bad in names:
            self._strategy.recover(self, pieces, self._error)  # type: ignore[arg-type]
        else:
            self.done += names


def outcome(
    adapter: type[Adapter], error: Exception = RAISED, came_to_end: bool = False
) -> tuple[list[str], dict[str, str]]:
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
    passes = Passes(strategy, "c", error, came_to_end)
    passes.run(pieces)
    return passes.done, table.failed


@pytest.mark.parametrize("adapter", [OnnxAdapter, TorchExportAdapter])
def test_a_request_on_which_an_atomic_program_raises_fails_alone(adapter: type[Adapter]) -> None:
    done, failed = outcome(adapter)
    assert done == ["a", "b", "d"] and list(failed) == ["c"] and "index 9" in failed["c"]


@pytest.mark.parametrize("adapter", [PythonModelAdapter, TorchScriptAdapter])
def test_no_request_of_another_model_runs_twice(adapter: type[Adapter]) -> None:
    assert_all_failed(*outcome(adapter))


@pytest.mark.parametrize(
    ("error", "came_to_end"), [(UnexpectedOutput("shape [3]"), False), (ValueError("no such place"), True)]
)
def test_no_request_runs_twice_whose_state_an_atomic_program_has_changed(
    error: Exception, came_to_end: bool
) -> None:
    assert_all_failed(*outcome(TorchExportAdapter, error, came_to_end))


def assert_all_failed(done: list[str], failed: dict[str, str]) -> None:
    assert done == [] and set(failed) == set("abcd")
    assert all("what it keeps of the sequence is not certain" in text for text in failed.values())
