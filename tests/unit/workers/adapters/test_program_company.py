"""Requests of programs at once: alone equals in company equals the program run directly, in every format.

Programs are loaded as a worker does, and requests are put into batches by what the loaded program says of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch

from ipc.catalog.entries import AdapterSource, ModelEntry
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.settings import Repository, Run, Settings
from tests.tiny import onnx_files, programs
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import ProgramAdapter
from workers.device.devices import Device
from workers.inputs import Payload
from workers.lifecycle import loading
from workers.lifecycle.instance import Instance
from workers.lifecycle.proof import call_of
from workers.operations.infer import Infer
from workers.repository import entries

INFER = Infer()
Direct = Callable[[np.ndarray], np.ndarray]
BATCHES = (
    "max_batch_size: 16\n"
    + programs.tensor("input", "x", "FP32", [4])
    + programs.tensor("output", "y__0", "FP32", [4])
)
DYNAMIC = BATCHES + "dynamic_batching { }\n"


def load(entry: ModelEntry, home: Path) -> ProgramAdapter:
    """The program of an entry, loaded as in a worker."""

    def run(work: Callable[[], Any]) -> Any:
        with torch.inference_mode():
            return work()

    settings = Settings(run=Run(state_dir=str(home / "state")))
    loader = loading.Loader(settings, Device(torch.device("cpu"), "cpu", "", 1), run)
    found = loader.load(Instance([entry]), lambda *_: None, lambda: None).adapter
    assert isinstance(found, ProgramAdapter)
    return found


def program(home: Path, config: str, file: str, write: Callable[[Path], Any]) -> ProgramAdapter:
    """The model `m` of a repository, of one file."""
    place = home / "repository" / "m" / "1"
    place.mkdir(parents=True)
    write(place / file)
    if config:
        (place.parent / "config.pbtxt").write_text(config)
    [entry] = entries.read(Repository(dirs=(str(place.parent.parent),), allow_python=True))
    assert not entry.error, entry.error
    return load(entry, home)


def batches(adapter: ProgramAdapter, requests: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Requests in their order, in batches as large as the program says. Those of other shapes never share one."""
    found: list[list[np.ndarray]] = []
    most = (adapter.batch_tokens or 0) // 16
    for array in requests:
        joined = found[-1] if found else []
        rows = sum(map(len, joined)) + len(array)
        if joined and adapter.config.batches and rows <= most and joined[0].shape[1:] == array.shape[1:]:
            joined.append(array)
        else:
            found.append([array])
    return found


def answers(adapter: ProgramAdapter, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The first output of each request of a batch."""
    [name, *_], [output, *_] = (
        [each.name for each in side] for side in (adapter.config.inputs, adapter.config.outputs)
    )
    prepared = []
    for array in batch:
        call, raw = call_of(adapter, {name: array})
        prepared += INFER.prepare(adapter, call, 0, 1, Payload(memoryview(raw)))
    with torch.inference_mode():
        values = np.asarray(INFER.run(adapter, adapter.collate(prepared), call).named[output].values)
    return np.split(values, np.cumsum([len(array) for array in batch])[:-1]) if len(batch) > 1 else [values]


def requests(count: int = 24) -> list[np.ndarray]:
    """FP32 [1 to 3, 4] of very different size, some with zeros, NaN and infinities."""
    source = np.random.default_rng(7)
    found = []
    for number in range(count):
        values = source.standard_normal((source.integers(1, 4), 4)) * 10.0 ** source.integers(-3, 4)
        if number % 8 == 5:
            values[0, source.integers(4)] = source.choice([0, np.nan, np.inf])
        found.append(values.astype(np.float32))
    return found


def hold(adapter: ProgramAdapter, direct: Direct, sent: Sequence[np.ndarray] | None = None) -> int:
    """Hold what requests at once get against the program run directly for each; returns the number of batches."""
    together = batches(adapter, sent or requests())
    for batch in together:
        for array, found in zip(batch, answers(adapter, batch), strict=True):
            right = direct(array)
            scale = float(np.abs(right[np.isfinite(right)]).max(initial=0)) or 1.0
            assert np.allclose(found, right, rtol=0, atol=1e-5 * scale, equal_nan=True), (array, found, right)
            alone = answers(adapter, [array])[0]
            assert np.allclose(alone, found, rtol=0, atol=1e-5 * scale, equal_nan=True), (array, found, alone)
    return len(together)


class Network(torch.nn.Module):
    """Rows that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Some numbers."""
        return self.layers(torch.tanh(x))


class Steps(torch.nn.Module):
    """In steps of a scale that follows the largest value of all rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded."""
        scale = x.abs().max() / 127
        return torch.round(x / scale) * scale


class OverTime(torch.nn.Module):
    """The first dimension is time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sums so far."""
        return torch.cumsum(x, 0)


class Norm(torch.nn.Module):
    """Batch normalization that was left in training mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """By the mean of all rows."""
        return (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)


class Share(torch.nn.Module):
    """By the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A part."""
        return x / x.shape[0]


class Clean(torch.nn.Module):
    """Nothing where anything is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All or nothing."""
        return torch.where(torch.isfinite(x).all(), x, torch.zeros_like(x))


def of(module: torch.nn.Module) -> Direct:
    """The module itself."""

    def direct(array: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(array.copy())).numpy()

    return direct


@pytest.mark.parametrize(
    ("module", "joined"),
    [(Network(), True), *((module, False) for module in (Steps(), OverTime(), Norm(), Share(), Clean()))],
)
def test_torchscript(tmp_path: Path, module: torch.nn.Module, joined: bool) -> None:
    adapter = program(
        tmp_path, BATCHES, "model.pt", lambda path: torch.jit.save(torch.jit.script(module.eval()), path)
    )
    assert (hold(adapter, of(module)) < 8) == joined
    assert adapter.config.max_batch_size == 16, "the configuration's number of rows stays"
    told = adapter.told_config.parameters.get("joining", "")
    assert ("requests run one at a time" in told) != joined


def test_dynamic_batching_is_obeyed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = program(
        tmp_path, DYNAMIC, "model.pt", lambda path: torch.jit.save(torch.jit.script(OverTime()), path)
    )
    assert len(batches(adapter, requests())) < 8
    words = "requests are joined as dynamic_batching says, and change each other's results"
    assert words in adapter.told_config.parameters["joining"] and words in caplog.text


@pytest.mark.parametrize(("module", "joined"), [(Network(), True), (Steps(), False)])
def test_torch_export_without_a_configuration(tmp_path: Path, module: torch.nn.Module, joined: bool) -> None:
    adapter = program(
        tmp_path, "", "model.pt2", lambda path: programs.exported(module, [torch.ones(2, 4)], [0], path)
    )
    assert (hold(adapter, of(module)) < 8) == joined == adapter.config.batches


def session(content: bytes) -> Direct:
    """onnxruntime itself."""
    made = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    [name] = [each.name for each in made.get_inputs()]

    def direct(array: np.ndarray) -> np.ndarray:
        given = array if array.dtype.kind != "O" else np.vectorize(bytes.decode, otypes=[object])(array)
        return made.run(None, {name: given})[0]

    return direct


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        (onnx_files.same(onnx_files.FP32, ["batch", 4]), True),
        (onnx_files.over_time(), False),
        (onnx_files.quantized(), False),
    ],
)
def test_onnx_without_a_configuration(tmp_path: Path, content: bytes, joined: bool) -> None:
    adapter = program(tmp_path, "", "model.onnx", lambda path: path.write_bytes(content))
    sent = [array for array in requests() if np.isfinite(array).all()]
    assert (hold(adapter, session(content), sent) < 8) == joined == adapter.config.batches
    if not joined:
        assert "as no configuration states a max_batch_size" in adapter.told_config.parameters["joining"]


SCALED = """
from penstock.model import Model
class M(Model):
    def infer(self, batch):
        return {"y__0": batch.array("x") * 2}
"""


def test_python_models_run_as_they_declare(tmp_path: Path) -> None:
    adapter = program(tmp_path, BATCHES, "model.py", lambda path: path.write_text(SCALED))
    assert hold(adapter, lambda array: array * 2) < 8


class OfOthers(ProgramAdapter):
    """A family of another package, which declares that rows are joined; `mean` takes the mean over them."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="of_others", operations=("infer",), inputs=(), outputs=(), options=("mean",), needs_proof=False
    )
    memory_bytes = 0

    def __init__(self, mean: bool) -> None:
        tensors = [(TensorConfig(name, "FP32", (4,)),) for name in ("x", "y")]
        self._mean, self._config = (
            mean,
            ModelConfig("m", max_batch_size=16, inputs=tensors[0], outputs=tensors[1]),
        )

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Nothing is read."""
        return cls(bool(context.options["mean"]))

    @property
    def config(self) -> ModelConfig:
        """Up to 16 rows."""
        return self._config

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray]:
        """By numpy."""
        return {"y": of_others(batch.array("x"), self._mean)}


def of_others(array: np.ndarray, mean: bool) -> np.ndarray:
    """What the family computes."""
    return array - array.mean(0, keepdims=True) if mean else array + 1


@pytest.mark.parametrize("mean", [False, True])
def test_adapters_of_other_packages(tmp_path: Path, mean: bool) -> None:
    entry = ModelEntry(
        "m",
        AdapterSource(str(tmp_path)),
        adapter=f"{__name__}:OfOthers",
        inputs=(),
        outputs={},
        loadtime={"mean": mean},
    )
    adapter = load(entry, tmp_path)
    assert (hold(adapter, lambda array: of_others(array, mean)) < 8) == (not mean)


class Counter(torch.nn.Module):
    """Adds how often it was called, and keeps the number in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One more."""
        self.calls += 1
        self.total.add_(1)
        return x + self.total + self.calls


def test_a_trial_leaves_no_trace_in_a_program_that_keeps_state(tmp_path: Path) -> None:
    adapter = program(
        tmp_path, BATCHES, "model.pt", lambda path: torch.jit.save(torch.jit.script(Counter()), path)
    )
    ones = np.ones((1, 4), np.float32)
    assert [answers(adapter, [ones])[0][0, 0] for _ in range(2)] == [3, 5]
    assert "the program keeps state of its own" in adapter.told_config.parameters["joining"]
    assert len(batches(adapter, [ones, ones])) == 2


class Total(torch.nn.Module):
    """Adds up, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All so far."""
        self.total.add_(1)
        return x + self.total


def test_an_exported_program_that_keeps_state_begins_with_that_of_the_file(tmp_path: Path) -> None:
    adapter = program(
        tmp_path, "", "model.pt2", lambda path: programs.exported(Total(), [torch.ones(2, 4)], [0], path)
    )
    ones = np.ones((1, 4), np.float32)
    assert not adapter.config.batches and [answers(adapter, [ones])[0][0, 0] for _ in range(2)] == [2, 3]


def test_a_finding_is_told_once_and_never_kept_from_a_configuration(tmp_path: Path) -> None:
    stale = BATCHES + 'parameters { key: "joining" value { string_value: "old" } }\n'
    adapter = program(
        tmp_path, stale, "model.pt", lambda path: torch.jit.save(torch.jit.script(Network()), path)
    )
    assert "joining" not in adapter.told_config.parameters
    assert msgspec.structs.replace(adapter.told_config, parameters={"joining": "old"}) == adapter.config
