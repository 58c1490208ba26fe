"""Decoupled models before any request: what their configuration may say, their class, their proof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ipc.catalog.entries import DirectorySource
from ipc.settings import Repository
from tests.tiny import programs
from workers.adapters.base import LoadContext
from workers.adapters.python_model import PythonModelAdapter
from workers.lifecycle import proof
from workers.repository import entries
from workers.repository.layout import ModelRefused

DECOUPLED = "model_transaction_policy { decoupled: true }"
SIDES = programs.tensor("input", "INPUT", "INT32", [1]) + programs.tensor("output", "OUTPUT", "INT32", [1])
ENDLESS = """
import itertools
import numpy as np
from penstock.model import DecoupledModel

class Endless(DecoupledModel):
    closed = 0

    def stream(self, batch):
        try:
            for number in itertools.count(int(batch.array("INPUT")[0])):
                yield {"OUTPUT": np.array([number], np.int32)}
        finally:
            Endless.closed += 1
"""


def entry_of(root: Path, config: str, program: str = "model.py", source: str = "") -> entries.RepositoryEntry:
    """The entry of the model `m`."""
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "config.pbtxt").write_text(f"{SIDES}{config}")
    (root / "m" / "1" / program).write_text(source)
    [entry] = entries.read(Repository(dirs=(str(root),), allow_python=True))
    return entry


def load(entry: entries.RepositoryEntry) -> PythonModelAdapter:
    """The adapter of an entry."""
    assert not entry.error and isinstance(entry.source, DirectorySource)
    context = LoadContext(
        directory=Path(entry.source.path),
        model_id=entry.id,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=None,
        options={},
        progress=lambda phase, fraction: None,
        repository=entry,
    )
    return PythonModelAdapter.load(context)


@pytest.mark.parametrize(
    ("config", "program", "said"),
    [
        ("max_batch_size: 2 sequence_batching { }", "model.py", "sequence_batching: not supported with"),
        (
            "max_batch_size: 2 dynamic_batching { preserve_ordering: true }",
            "model.py",
            "dynamic_batching.preserve_ordering: not supported with",
        ),
        ("", "model.pt2", "model_transaction_policy.decoupled: only a model.py can give several responses"),
        ("", "model.onnx", "model_transaction_policy.decoupled: only a model.py can give several responses"),
    ],
)
def test_what_cannot_be_decoupled_is_refused_by_its_field(
    tmp_path: Path, config: str, program: str, said: str
) -> None:
    assert entry_of(tmp_path, "", "model.py").error == ""
    (tmp_path / "m" / "1" / "model.py").unlink()
    assert said in entry_of(tmp_path, f"{config} {DECOUPLED}", program).error


def test_requests_run_alone_and_are_never_run_again(tmp_path: Path) -> None:
    config = f"max_batch_size: 8 dynamic_batching {{ max_queue_delay_microseconds: 1000 }} {DECOUPLED}"
    adapter = load(entry_of(tmp_path, config, source=ENDLESS))
    assert adapter.streams
    assert adapter.gathering is None and adapter.batch_tokens == 1


@pytest.mark.parametrize(
    ("policy", "source", "said"),
    [
        ("", ENDLESS, "must have one subclass of penstock.model.Model; it has none"),
        (
            DECOUPLED,
            "from penstock.model import Model\nclass A(Model):\n    infer = 1",
            "must have one subclass of penstock.model.DecoupledModel; it has none",
        ),
    ],
)
def test_the_class_is_of_the_kind_that_the_configuration_says(
    tmp_path: Path, policy: str, source: str, said: str
) -> None:
    with pytest.raises(ModelRefused, match=said):
        load(entry_of(tmp_path, policy, source=source))


def test_a_decoupled_class_without_its_method_cannot_be_made(tmp_path: Path) -> None:
    source = "from penstock.model import DecoupledModel\nclass A(DecoupledModel):\n    pass"
    with pytest.raises(TypeError, match="abstract"):
        load(entry_of(tmp_path, DECOUPLED, source=source))


def test_the_proof_of_a_stream_without_an_end_takes_its_first_part_and_closes_it(tmp_path: Path) -> None:
    adapter = load(entry_of(tmp_path, DECOUPLED, source=ENDLESS))
    assert proof.prove_program(adapter, "m@1") == {"infer.0.OUTPUT": [0.0]}
    assert type(adapter._model).closed == 2  # type: ignore[attr-defined]
