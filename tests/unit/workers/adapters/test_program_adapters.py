"""Programs of every backend give what direct torch, numpy or plain arithmetic give."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from ipc.catalog.entries import DirectorySource
from ipc.errors import InvalidInput, UnexpectedOutput
from ipc.memory.datatypes import DATATYPES
from ipc.settings import Repository
from ipc.wire.messages import InferCall, TensorInput, TensorOutput
from tests.tiny import onnx_files, programs
from tests.tiny.program_modules import LABELS, SIDE, Classifier, Counter
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.registry import resolve
from workers.adapters.shared.named_tensors import NamedBatch, NamedInputs
from workers.adapters.shared.program import ProgramAdapter
from workers.inputs import Payload
from workers.lifecycle.memory_budget import give_back, private_bytes
from workers.lifecycle.proof import call_of
from workers.loading.source import SourceError
from workers.operations import operation_of
from workers.repository import entries
from workers.repository.layout import ModelRefused

CPU = torch.device("cpu")


def load(directory: Path, name: str, version: int = 1) -> ProgramAdapter:
    """The adapter of a model in a repository."""
    chosen = Repository(dirs=(str(directory),), allow_python=True)
    [entry] = [each for each in entries.read(chosen) if each.id == f"{name}@{version}"]
    assert not entry.error, entry.error
    assert isinstance(entry.source, DirectorySource)
    context = LoadContext(
        directory=Path(entry.source.path),
        model_id=entry.id,
        device=CPU,
        dtype=torch.float32,
        max_sequence_length=None,
        options={},
        progress=lambda phase, fraction: None,
        repository=entry,
    )
    found = resolve(entry.adapter).load(context)
    assert isinstance(found, ProgramAdapter)
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return programs.write_repository(tmp_path_factory.mktemp("repository"), programs.PROGRAMS)


def request(rows: int, **arrays: np.ndarray) -> NamedInputs:
    """One request as the operation prepares it: its arrays cannot be written."""
    for array in arrays.values():
        array.flags.writeable = False
    return NamedInputs(arrays, rows, [], {})


def run(adapter: ProgramAdapter, *requests: NamedInputs) -> dict[str, np.ndarray]:
    """All outputs for these requests together."""
    for each in requests:
        each.outputs = [output.name for output in adapter.config.outputs]
    with torch.inference_mode():
        found: Mapping[str, Any] = adapter.infer(NamedBatch(requests, adapter.config))
        return {name: _array(value) for name, value in found.items()}


def _array(value: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
    return value


def numbers(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1000, 1000, (rows, 16), dtype=np.int32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["add_sub", "add_sub_inferred", "add_sub_script", "add_sub_onnx"])
def test_sum_and_difference_of_requests_that_run_together(repository: Path, name: str) -> None:
    adapter = load(repository, name)
    sent = [(numbers(rows, rows), numbers(rows, rows + 10)) for rows in (1, 3, 2)]
    found = run(adapter, *(request(len(a), INPUT0=a, INPUT1=b) for a, b in sent))
    first, second = (np.concatenate(each) for each in zip(*sent, strict=True))
    assert np.array_equal(found["OUTPUT0"], first + second) and found["OUTPUT0"].dtype == np.int32
    assert np.array_equal(found["OUTPUT1"], first - second)
    alone = run(adapter, request(1, INPUT0=sent[0][0], INPUT1=sent[0][1]))
    assert np.array_equal(alone["OUTPUT0"], sent[0][0] + sent[0][1])


def test_what_a_program_tells_of_itself_becomes_its_configuration(repository: Path) -> None:
    stated, exported = load(repository, "add_sub").config, load(repository, "add_sub_inferred").config
    onnx = load(repository, "add_sub_onnx").config
    assert exported.inputs == onnx.inputs == stated.inputs
    assert exported.outputs == onnx.outputs == stated.outputs
    assert exported.max_batch_size == onnx.max_batch_size == Repository().default_max_batch_size
    assert (exported.platform, onnx.backend, stated.backend) == ("torch_export", "onnx", "torch_export")


def test_without_a_batch_dimension(repository: Path) -> None:
    adapter = load(repository, "add_sub_unbatched")
    a, b = numbers(1, 1)[0], numbers(1, 2)[0]
    assert np.array_equal(run(adapter, request(1, INPUT0=a, INPUT1=b))["OUTPUT1"], a - b)


def test_strings_in_python(repository: Path) -> None:
    a, b = numbers(2, 1), numbers(2, 2)
    texts = [np.array([b"%d" % n for n in each.flat], object).reshape(each.shape) for each in (a, b)]
    found = run(load(repository, "add_sub_string"), request(2, INPUT0=texts[0], INPUT1=texts[1]))
    assert [int(each) for each in found["OUTPUT0"].flat] == list((a + b).flat)


@pytest.mark.sample
@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("size", [0, 1, 7])
def test_identity_of_every_datatype_and_size(repository: Path, datatype: str, size: int) -> None:
    adapter = load(repository, f"identity_{datatype.lower()}")
    raw = np.random.default_rng(size).integers(
        0, 256, 2 * size * max(1, DATATYPES[datatype].nbytes), np.uint8
    )
    if datatype == "BYTES":
        sent = np.array([bytes([each]) for each in raw], object).reshape(2, size)
    elif datatype == "BOOL":
        sent = (raw % 2).astype(bool).reshape(2, size)
    else:
        sent = raw.view(DATATYPES[datatype].array).reshape(2, size)
    found = run(adapter, request(2, INPUT=sent))["OUTPUT"]
    assert found.dtype == sent.dtype and found.shape == sent.shape
    assert list(found.flat) == list(sent.flat) if datatype == "BYTES" else found.tobytes() == sent.tobytes()


def test_variable_sizes_and_none(repository: Path) -> None:
    for shape in ((1, 1, 1), (2, 3, 5), (8, 1, 4), (1, 0, 3)):
        sent = np.random.default_rng(1).random(shape, np.float32)
        found = run(load(repository, "variable"), request(shape[0], INPUT=sent))["OUTPUT"]
        assert np.allclose(found, sent.sum(-1), atol=1e-5) and found.shape == shape[:2]
    sent = np.ones((2, 3), np.float32)
    assert run(load(repository, "zero_size"), request(2, INPUT=sent))["OUTPUT"].shape == (2, 0)
    assert run(load(repository, "range"), request(1, INPUT=np.array([5], np.int32)))["OUTPUT"].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_classifier_is_equal_to_direct_torch(repository: Path, channels_last: bool) -> None:
    adapter = load(repository, "classifier_nhwc" if channels_last else "classifier")
    shape = (4, SIDE, SIDE, 3) if channels_last else (4, 3, SIDE, SIDE)
    sent = np.random.default_rng(3).random(shape, np.float32) * 255
    with torch.inference_mode():
        expected = Classifier(channels_last).eval()(torch.from_numpy(sent.copy()))["scores"]
    found = run(adapter, request(4, image=sent))["scores"]
    assert np.allclose(found, expected.numpy(), atol=1e-6)
    assert len({int(row.argmax()) for row in found}) >= 1 and found.std() > 1e-3
    [output] = adapter.config.outputs
    assert output.labels == LABELS
    assert adapter.memory_bytes == sum(each.nbytes for each in Classifier(channels_last).parameters())


def test_versions_answer_differently(repository: Path) -> None:
    sent = np.array([[1, 2, 3, 4]], np.int32)
    for version in (1, 2, 3):
        adapter = load(repository, "versions_all", version)
        assert np.array_equal(run(adapter, request(1, INPUT=sent.copy()))["OUTPUT"], sent + version)


def write(
    directory: Path, config: str, module: torch.nn.Module, *examples: torch.Tensor, free: tuple[int, ...] = ()
) -> Path:
    place = directory / "m" / "1"
    programs.exported(module, examples, free, place / "model.pt2")
    if config:
        (directory / "m" / "config.pbtxt").write_text(config)
    return directory


def test_a_buffer_that_the_program_changes_keeps_its_value(tmp_path: Path) -> None:
    adapter = load(write(tmp_path, "", Counter(), torch.ones(4)), "m")
    sent = np.array([1, 2, 3, 4], np.float32)
    totals = [run(adapter, request(1, INPUT=sent))["OUTPUT"].tolist() for _ in range(3)]
    assert totals == [[1, 2, 3, 4], [2, 4, 6, 8], [3, 6, 9, 12]]


class InPlace(torch.nn.Module):
    """Changes its input."""

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        """The input plus one."""
        INPUT.add_(1)
        return INPUT * 1


@pytest.mark.parametrize("backend", ["model.pt2", "model.pt"])
def test_a_program_that_writes_into_its_input_writes_into_a_copy(tmp_path: Path, backend: str) -> None:
    config = programs.tensor("input", "INPUT", "FP32", [4]) + programs.tensor(
        "output", "OUTPUT__0", "FP32", [4]
    )
    write(tmp_path, config, InPlace(), torch.ones(4))
    if backend == "model.pt":
        (tmp_path / "m" / "1" / "model.pt2").unlink()
        torch.jit.save(torch.jit.script(InPlace()), tmp_path / "m" / "1" / "model.pt")
    sent = np.frombuffer(np.array([1, 2, 3, 4], np.float32).tobytes(), np.float32)
    found = run(load(tmp_path, "m"), request(1, INPUT=sent))["OUTPUT__0"]
    assert found.tolist() == [2, 3, 4, 5] and sent.tolist() == [1, 2, 3, 4]


class InPlaceInside(torch.nn.Module):
    """Changes its input in a graph of its own."""

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        """The input plus one."""
        with torch.no_grad():
            INPUT.add_(1)
        return INPUT * 1


def test_a_program_that_writes_into_its_input_in_an_inner_graph_writes_into_a_copy(tmp_path: Path) -> None:
    write(tmp_path, "", InPlaceInside(), torch.ones(4))
    sent = np.array([1, 2, 3, 4], np.float32)
    adapter = load(tmp_path, "m")
    assert run(adapter, request(1, INPUT=sent))["OUTPUT__0"].tolist() == [2, 3, 4, 5]
    assert sent.tolist() == [1, 2, 3, 4]


class Keeping(torch.nn.Module):
    """Gives what it was called with before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(4)

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        """The input of the last call."""
        before = self.before
        self.before = INPUT
        return before


class Forking(torch.nn.Module):
    """Changes its input in a task of its own."""

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        """The input plus one."""
        return torch.jit.wait(torch.jit.fork(_add_one, INPUT))


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def scripted(directory: Path, module: torch.nn.Module) -> ProgramAdapter:
    """The adapter of a TorchScript module of FP32 [4]."""
    (directory / "m" / "1").mkdir(parents=True)
    config = "".join(
        programs.tensor(*each, "FP32", [4]) for each in (("input", "INPUT"), ("output", "OUTPUT"))
    )
    (directory / "m" / "config.pbtxt").write_text(config)
    torch.jit.save(torch.jit.script(module), directory / "m" / "1" / "model.pt")
    return load(directory, "m")


def test_what_a_script_keeps_is_its_own(tmp_path: Path) -> None:
    adapter, memory = scripted(tmp_path, Keeping()), np.array([1, 2, 3, 4], np.float32)
    assert run(adapter, request(1, INPUT=memory[:]))["OUTPUT"].tolist() == [0, 0, 0, 0]
    memory[:] = 9
    assert run(adapter, request(1, INPUT=memory[:]))["OUTPUT"].tolist() == [1, 2, 3, 4]


def test_what_a_script_forks_writes_into_a_copy(tmp_path: Path) -> None:
    sent = np.array([1, 2, 3, 4], np.float32)
    found = run(scripted(tmp_path, Forking()), request(1, INPUT=sent))["OUTPUT"]
    assert found.tolist() == [2, 3, 4, 5] and sent.tolist() == [1, 2, 3, 4]


class Plain(torch.nn.Module):
    """Has lists, branches and loops, and changes nothing."""

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        """Some sum."""
        first, second = INPUT[:2], INPUT[2:]
        for i in range(INPUT.shape[0]):
            if i > 2:
                first = first + torch.cat([second[:1], first[:1]])
        return torch.cat((first, second))


def test_a_script_that_changes_nothing_is_given_no_copy(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr("ipc.memory.copies.count", lambda kind, nbytes: counted.append(kind))
    sent = [numbers(1, seed) for seed in (1, 2)]
    run(load(repository, "add_sub_script"), request(1, INPUT0=sent[0], INPUT1=sent[1]))
    run(scripted(tmp_path, Plain()), request(1, INPUT=np.ones(4, np.float32)))
    assert counted == []


def test_a_request_whose_text_is_no_utf8_is_refused_before_it_joins_others(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(onnx_files.same_texts())
    adapter = load(tmp_path, "m")

    def prepared(text: bytes) -> NamedInputs:
        raw = len(text).to_bytes(4, "little") + text
        given = TensorInput("INPUT", "BYTES", [1, 1], 0, len(raw))
        call = InferCall([given], [TensorOutput("OUTPUT")])
        [found] = operation_of(call).prepare(adapter, call, 0, 1, Payload(memoryview(raw)))
        assert isinstance(found, Prepared)
        return cast(NamedInputs, found.payload)

    assert run(adapter, prepared("\u00e9".encode()))["OUTPUT"].tolist() == [["\u00e9"]]
    with pytest.raises(InvalidInput, match="input 'INPUT': an element is no UTF-8"):
        prepared(b"\xff")


class Pair(torch.nn.Module):
    """Takes two inputs of one free size."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum, and sum of the second."""
        return first + second, second.sum()


def test_sizes_that_the_program_holds_for_equal_must_be_equal(tmp_path: Path) -> None:
    size = torch.export.Dim("size", max=6)
    program = torch.export.export(
        Pair(), (torch.ones(3), torch.zeros(3)), dynamic_shapes=({0: size}, {0: size})
    )
    (tmp_path / "m" / "1").mkdir(parents=True)
    torch.export.save(program, tmp_path / "m" / "1" / "model.pt2")
    adapter = load(tmp_path, "m")
    assert adapter.config.max_batch_size == 0, "an output without a first dimension: it does not batch"
    assert [each.name for each in adapter.config.outputs] == ["OUTPUT__0", "OUTPUT__1"]
    four, one = np.ones(4, np.float32), np.ones(1, np.float32)
    assert run(adapter, request(1, first=four, second=four))["OUTPUT__0"].tolist() == [2, 2, 2, 2]
    with pytest.raises(
        InvalidInput, match="dimension 0 of input 'first' is 4 and dimension 0 of input 'second' is 1"
    ):
        run(adapter, request(1, first=four, second=one))
    with pytest.raises(InvalidInput, match="dimension 0 of input 'first' is 7; the program takes at most 6"):
        run(adapter, request(1, first=np.ones(7, np.float32), second=np.ones(7, np.float32)))


def test_what_is_no_program_fails_with_the_name_of_its_file_only(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^model\.pt2 is no program of torch\.export"):
        load(repository, "broken")
    for file, said in (
        ("model.pt", "no TorchScript module"),
        ("model.onnx", "cannot be loaded by onnxruntime"),
    ):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / file).write_bytes(b"nonsense")
        config = programs.tensor("input", "A", "FP32", [4]) + programs.tensor("output", "B", "FP32", [4])
        (tmp_path / "m" / "config.pbtxt").write_text(config)
        with pytest.raises(SourceError, match=f"^{file} .*{said}"):
            load(tmp_path, "m")


def test_torchscript_and_python_need_a_configuration(repository: Path, tmp_path: Path) -> None:
    for name, said in (
        ("add_sub_script", "TorchScript does not tell types"),
        ("add_sub_string", "model.py tells no types"),
    ):
        shutil.copytree(repository / name, tmp_path / name)
        (tmp_path / name / "config.pbtxt").unlink()
        with pytest.raises(ModelRefused, match=said):
            load(tmp_path, name)


def test_without_onnxruntime_the_extra_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"needs the package onnxruntime: the extra onnx "):
        load(repository, "add_sub_onnx")


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("x = 1", ModelRefused, "must have one subclass of penstock.model.Model; it has none"),
        (
            "from penstock.model import Model\nclass A(Model):\n    infer = 1\nclass B(Model):\n    infer = 1",
            ModelRefused,
            "it has A, B",
        ),
        ("from penstock.model import Model\nclass A(Model):\n    pass", TypeError, "abstract"),
        ("def f(:", SyntaxError, "invalid syntax"),
        ("raise ValueError('no weights')", ValueError, "no weights"),
    ],
)
def test_a_wrong_model_file_says_why(tmp_path: Path, source: str, error: type[Exception], said: str) -> None:
    programs.write_model(tmp_path, "slow")
    (tmp_path / "slow" / "1" / "model.py").write_text(source)
    before = set(sys.modules)
    with pytest.raises(error, match=said):
        load(tmp_path, "slow")
    assert not [name for name in set(sys.modules) - before if name.startswith("penstock_repository")]


def test_a_changed_model_file_is_read_anew_and_nothing_is_written_beside_it(tmp_path: Path) -> None:
    programs.write_model(tmp_path, "slow")
    path = tmp_path / "slow" / "1" / "model.py"
    text = (
        "from penstock.model import Model\nclass A(Model):\n    def infer(self, batch):\n        return %d\n"
    )
    answers = []
    for number in (1, 2):
        path.write_text(text % number)
        with torch.inference_mode():
            answers.append(load(tmp_path, "slow").infer(None))  # type: ignore[arg-type]
    assert answers == [1, 2]
    assert [each.name for each in path.parent.iterdir()] == ["model.py"]


WARMUP = """
model_warmup { name: "w" batch_size: 2 count: 2
  inputs { key: "INPUT0" value { data_type: TYPE_INT32 dims: 16 random_data: true } }
  inputs { key: "INPUT1" value { data_type: TYPE_INT32 dims: 16 input_data_file: "ones.bin" } } }
"""


def warm(repository: Path, tmp_path: Path, more: str = WARMUP) -> ProgramAdapter:
    directory = Path(shutil.copytree(repository / "add_sub", tmp_path / "add_sub"))
    config = directory / "config.pbtxt"
    config.write_text(config.read_text() + more)
    (directory / "warmup").mkdir()
    (directory / "warmup" / "ones.bin").write_bytes(np.ones(16, np.int32).tobytes())
    return load(tmp_path, "add_sub")


def test_the_samples_are_those_of_the_warm_up(repository: Path, tmp_path: Path) -> None:
    adapter = warm(repository, tmp_path)
    samples = adapter.samples()
    assert len(samples) == 2 and adapter.samples_must_run
    assert samples[0]["INPUT0"].shape == (2, 16) and samples[0]["INPUT0"].any()
    assert np.array_equal(samples[0]["INPUT1"], np.ones((2, 16), np.int32))
    found = run(adapter, request(2, **{name: array.copy() for name, array in samples[0].items()}))
    assert np.array_equal(found["OUTPUT0"], samples[0]["INPUT0"] + 1)


def test_without_a_warm_up_the_sample_is_one_row_of_zeros(repository: Path) -> None:
    adapter = load(repository, "identity_fp16")
    assert not adapter.samples_must_run
    [sample] = adapter.samples()
    assert sample["INPUT"].shape == (1, 1) and sample["INPUT"].dtype == np.float16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("dims: 16 random_data", "dims: 15 random_data"), None),
        (("INPUT1", "INPUT7"), "there is no input 'INPUT7' of INT32"),
        (("TYPE_INT32 dims: 16 random", "TYPE_FP32 dims: 16 random"), "there is no input 'INPUT0' of FP32"),
        (("ones.bin", "../config.pbtxt"), "is no path below the model's directory"),
        (("ones.bin", "twos.bin"), "there is no file 'twos.bin'"),
        (("dims: 16 input", "dims: 17 input"), "ones.bin has 64 bytes, expected 68"),
        (("dims: 16 random", "dims: 1600000000 random"), "bytes are above"),
        (('inputs { key: "INPUT0"', 'inputs { key: "INPUT1"'), "input 'INPUT0' is missing"),
    ],
)
def test_a_wrong_warm_up_is_told(
    repository: Path, tmp_path: Path, change: tuple[str, str], said: str | None
) -> None:
    adapter = warm(repository, tmp_path, WARMUP.replace(*change))
    if said is None:
        assert adapter.samples()[0]["INPUT0"].shape == (2, 15), "its shape is refused when it runs"
        return
    with pytest.raises(ModelRefused, match=said):
        adapter.samples()


@pytest.mark.parametrize("rank", [[], None])
@pytest.mark.parametrize(
    ("dims", "datatype"), [([1], "FP32"), ([1, 1], "FP32"), ([], "FP32"), ([1], "BYTES"), (None, "FP32")]
)
def test_onnx_programs_of_rank_0_and_of_any_rank(
    tmp_path: Path, rank: list[int | str] | None, dims: list[int] | None, datatype: str
) -> None:
    place = tmp_path / "m" / "1"
    place.mkdir(parents=True)
    number = {"FP32": onnx_files.FP32, "BYTES": onnx_files.STRING}[datatype]
    (place / "model.onnx").write_bytes(onnx_files.same(number, rank))
    if dims is not None:
        sides = ("input", "INPUT"), ("output", "OUTPUT")
        (place.parent / "config.pbtxt").write_text(
            "".join(programs.tensor(kind, name, datatype, dims) for kind, name in sides)
        )
    adapter = load(tmp_path, "m")
    assert adapter.config.inputs[0].dims == tuple(dims or ())
    call, payload = call_of(adapter, adapter.samples()[0])
    inputs = operation_of(call).prepare(adapter, call, 0, 1, Payload(memoryview(payload)))
    found = (
        operation_of(call).run(adapter, adapter.collate(cast("list[Prepared]", inputs)), call).named["OUTPUT"]
    )
    assert found.rest == list(dims or ())


def test_onnxruntime_gives_the_memory_of_a_run_back(tmp_path: Path) -> None:
    place = tmp_path / "m" / "1"
    place.mkdir(parents=True)
    (place / "model.onnx").write_bytes(onnx_files.positions(512))
    adapter = load(tmp_path, "m")
    before = private_bytes()
    found = run(adapter, request(1, INPUT=np.ones((1 << 16, 512), np.float32)))
    assert found["OUTPUT"].shape == (1 << 16, 512)
    del found
    give_back()
    assert private_bytes() - before < 64 << 20


def test_an_onnx_program_that_makes_a_scalar_gives_the_configured_dims(tmp_path: Path) -> None:
    place = tmp_path / "m" / "1"
    place.mkdir(parents=True)
    (place / "model.onnx").write_bytes(onnx_files.same(onnx_files.FP32, None))
    sides = ("input", "[ 1 ] reshape { shape: [ ] }"), ("output", "[ 1, 1 ]")
    (place.parent / "config.pbtxt").write_text(
        "".join(
            f'{kind} {{ name: "{kind.upper()}" data_type: TYPE_FP32 dims: {dims} }}\n' for kind, dims in sides
        )
    )
    adapter = load(tmp_path, "m")
    found = run(adapter, request(1, INPUT=np.array(3, np.float32)))
    assert found["OUTPUT"].tolist() == [[3.0]]


class Texts(torch.nn.Module):
    """Takes and gives a list of texts."""

    def forward(self, INPUT: list[str]) -> list[str]:
        """The same."""
        return INPUT


class Numbers(torch.nn.Module):
    """Gives a number, and no tensor."""

    def forward(self, INPUT: torch.Tensor) -> int:
        """How many elements there are."""
        return INPUT.numel()


@pytest.mark.parametrize(
    ("module", "datatypes", "outputs", "message"),
    [
        (Texts(), ("FP32", "FP32"), 1, r"input 'INPUT' of the program is List\[str\], and no tensor"),
        (Texts(), ("BYTES", "BYTES"), 1, "'INPUT' is BYTES, which no tensor of TorchScript holds"),
        (Numbers(), ("FP32", "FP32"), 1, "the program gives int, and no tensor"),
        (Plain(), ("FP32", "BYTES"), 1, "'OUTPUT' is BYTES"),
        (Plain(), ("FP32", "FP32"), 2, "output: 2 are configured, the program gives 1"),
    ],
)
def test_a_torchscript_program_whose_interface_cannot_answer_is_refused_at_load(
    tmp_path: Path, module: torch.nn.Module, datatypes: tuple[str, str], outputs: int, message: str
) -> None:
    place = tmp_path / "m" / "1"
    place.mkdir(parents=True)
    torch.jit.save(torch.jit.script(module), place / "model.pt")
    names = ["OUTPUT", "SECOND"][:outputs]
    (place.parent / "config.pbtxt").write_text(
        programs.tensor("input", "INPUT", datatypes[0], [-1])
        + "".join(programs.tensor("output", name, datatypes[1], [-1]) for name in names)
    )
    with pytest.raises(ModelRefused, match=message):
        load(tmp_path, "m")


class Several(torch.nn.Module):
    """Two results, in the form that is asked for."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Difference and sum."""
        return a - b, a + b


class Named(NamedTuple):
    """Results with names."""

    low: torch.Tensor
    high: torch.Tensor


class SeveralNamed(torch.nn.Module):
    """As a named tuple."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Named:
        """Difference and sum."""
        return Named(a - b, a + b)


class SeveralListed(torch.nn.Module):
    """As a list."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        """Difference and sum."""
        return [a - b, a + b]


class SeveralByKey(torch.nn.Module):
    """As a dictionary."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """Difference and sum."""
        return {"low": a - b, "high": a + b}


def several(directory: Path, module: torch.nn.Module, inputs: str, outputs: str) -> dict[str, list[float]]:
    """What a module gives for a = 5 and b = 1, by the names of a configuration."""
    place = directory / "m" / "1"
    place.mkdir(parents=True)
    torch.jit.save(torch.jit.script(module), place / "model.pt")
    tensors = [("input", name) for name in inputs.split()] + [("output", name) for name in outputs.split()]
    (place.parent / "config.pbtxt").write_text(
        "".join(programs.tensor(kind, name, "FP32", [1]) for kind, name in tensors)
    )
    adapter, values = load(directory, "m"), {"a": 5.0, "b": 1.0, "x__0": 5.0, "x__1": 1.0}
    arrays = {each.name: np.array([values[each.name]], np.float32) for each in adapter.config.inputs}
    return {
        name: found.tolist() for name, found in run(adapter, request(1, **arrays)).items() if name in outputs
    }


@pytest.mark.parametrize(
    ("module", "inputs", "outputs", "right"),
    [
        (Several(), "a b", "OUTPUT__1", {"OUTPUT__1": [6]}),
        (Several(), "b a", "y__1 x__0", {"y__1": [6], "x__0": [4]}),
        (Several(), "x__1 x__0", "y__0", {"y__0": [4]}),
        (Several(), "x__1 a", "y__0", {"y__0": [4]}),
        (SeveralNamed(), "a b", "high low", {"high": [6], "low": [4]}),
        (SeveralNamed(), "a b", "high", {"high": [6]}),
        (SeveralNamed(), "a b", "OUTPUT__1 low", {"OUTPUT__1": [6], "low": [4]}),
        (SeveralListed(), "a b", "y__1", {"y__1": [6]}),
        (SeveralByKey(), "a b", "high", {"high": [6]}),
    ],
)
def test_results_of_a_script_go_by_name_or_number_and_never_by_place(
    tmp_path: Path, module: torch.nn.Module, inputs: str, outputs: str, right: dict[str, list[float]]
) -> None:
    assert several(tmp_path, module, inputs, outputs) == right


@pytest.mark.parametrize(
    ("module", "inputs", "outputs", "error", "said"),
    [
        (
            Several(),
            "a b",
            "sum",
            ModelRefused,
            "output 'sum' is none of .*'OUTPUT__0', 'OUTPUT__1'; write one of",
        ),
        (Several(), "a b", "sum difference", ModelRefused, "output 'sum' is none of"),
        (Several(), "a b", "OUTPUT__2", ModelRefused, "a name that ends with its number, __0 to __1"),
        (
            Several(),
            "a b",
            "x__1 y__1",
            ModelRefused,
            "outputs 'x__1', 'y__1' are both the program's 'OUTPUT__1'",
        ),
        (Several(), "a x__0", "x__1", ModelRefused, "inputs 'a', 'x__0' are both the program's 'a'"),
        (Several(), "first second", "x__1", ModelRefused, "input 'first' is none of the program's.*'a', 'b'"),
        (Several(), "x__0 x__2", "x__1", ModelRefused, "input 'x__2' is none of the program's"),
        (Several(), "x__1", "x__1", ModelRefused, "input 'a' of the program is not configured"),
        (
            SeveralNamed(),
            "a b",
            "middle",
            ModelRefused,
            "'middle' is none of the program's, which are 'low', 'high'",
        ),
        (SeveralListed(), "a b", "sum", ModelRefused, "'sum' is none of the program's"),
        (
            SeveralListed(),
            "a b",
            "x__5",
            UnexpectedOutput,
            "'x__5': the program gives 2 results, numbered from 0",
        ),
        (SeveralByKey(), "a b", "x__1", UnexpectedOutput, "output 'x__1': the program gives 'low', 'high'"),
    ],
)
def test_results_of_a_script_that_no_name_or_number_matches_are_refused_in_words(
    tmp_path: Path, module: torch.nn.Module, inputs: str, outputs: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        several(tmp_path, module, inputs, outputs)
