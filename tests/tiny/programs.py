"""A model repository of tiny programs: `write_repository(path, ["add_sub", "classifier"])`.

add_sub           INPUT0, INPUT1 INT32 [16] to OUTPUT0 (sum), OUTPUT1 (difference); also add_sub_unbatched,
                  add_sub_string (decimal strings), add_sub_inferred (no configuration), add_sub_script, add_sub_onnx
identity_<type>   INPUT [-1] to OUTPUT, one for each datatype: identity_bool ... identity_bytes
variable          sums of [-1, -1] over the last dimension
zero_size         [-1] to [0]
reshape           [2, 2], which the program sees as [4], to [1], which it gives as []
range             as many numbers as INPUT [1] says; does not batch
accumulator       totals of sequences, by START and READY; accumulator_by_id has END and CORRID besides;
                  accumulator_exported and accumulator_script keep them in a buffer
classifier        image FP32 [3, 32, 32] to scores [10] with labels; classifier_nhwc takes [32, 32, 3]
versions_latest   versions 1 to 3, which add their number to INT32 [4]; versions_all, versions_specific (1 and 3)
countdown         decoupled: COUNT INT32 [1] responses OUTPUT INT32 [-1] of `width` elements, the numbers from 0 on
raising, slow     FP32 [1]: fails for negative values; takes as many milliseconds as it is told, or waits for a file
broken            a program that is none; broken_config: a configuration that is none; empty: no version

Programs of torch are files of `torch.export`, or of TorchScript for tests to which the kind of file does not matter:
the first use of `torch.export` costs a worker as much time as the rest of its start.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from ipc.memory.datatypes import BYTES, DATATYPES
from tests.tiny import onnx_files, program_sources
from tests.tiny.program_modules import (
    LABELS,
    SIDE,
    Accumulator,
    AddSub,
    Classifier,
    FlatSum,
    Identity,
    Nothing,
    Plus,
    RowSums,
)

BATCH = 8
SLOTS = 4
EXPORTED, SCRIPTED = "model.pt2", "model.pt"
Dims = Sequence[int]
_TORCH = {
    "BOOL": torch.bool,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    **{
        f"{sign}INT{size}": getattr(torch, f"{sign}int{size}".lower())
        for sign in ("U", "")
        for size in (8, 16, 32, 64)
    },
}


def write_repository(path: Path, names: Iterable[str], program: str = EXPORTED) -> Path:
    """Write models into the directory `path`, which is made, and return it. Raises `KeyError` for an unknown name."""
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_model(path, name, program=program)
    return path


def write_model(path: Path, name: str, as_name: str = "", program: str = EXPORTED) -> Path:
    """Write one model into the repository `path`, under another name if one is given; returns its directory."""
    directory = path / (as_name or name)
    directory.mkdir(parents=True, exist_ok=True)
    if name in _OF_TORCH:
        _OF_TORCH[name](directory, program)
    else:
        _OTHERS[name](directory)
    return directory


def tensor(kind: str, name: str, datatype: str, dims: Dims, more: str = "") -> str:
    """An `input` or `output` of a configuration; `more` is text inside it."""
    config = DATATYPES[datatype].config
    return f'{kind} {{ name: "{name}" data_type: {config} dims: {list(dims)} {more} }}\n'


def exported(
    module: torch.nn.Module, examples: Sequence[torch.Tensor], free: Sequence[int], path: Path
) -> None:
    """Export a module into a file; the dimensions `free` of all inputs may have any size."""
    names = list(module.forward.__code__.co_varnames[1 : 1 + len(examples)])  # type: ignore[operator]
    shapes = {name: dict.fromkeys(free, torch.export.Dim.DYNAMIC) for name in names}
    program = torch.export.export(module.eval(), tuple(examples), dynamic_shapes=shapes if free else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)


def _save(module: torch.nn.Module, examples: Sequence[torch.Tensor], free: Sequence[int], path: Path) -> None:
    """Write a module in the form that the file's name says."""
    if path.name == SCRIPTED:
        with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
            torch.jit.save(torch.jit.script(module.eval()), path)
    else:
        exported(module, examples, free, path)


def _write(directory: Path, config: str, version: int = 1, source: str = "") -> Path:
    """Write config.pbtxt and, if there is a source, model.py; returns the directory of the version."""
    place = directory / str(version)
    place.mkdir(parents=True, exist_ok=True)
    if config:
        (directory / "config.pbtxt").write_text(config)
    if source:
        (place / "model.py").write_text(source)
    return place


def _pair(datatype: str, batch: int) -> str:
    inputs = "".join(tensor("input", name, datatype, [16]) for name in ("INPUT0", "INPUT1"))
    outputs = "".join(tensor("output", name, datatype, [16]) for name in ("OUTPUT0", "OUTPUT1"))
    return f"max_batch_size: {batch}\n{inputs}{outputs}" + ("dynamic_batching { }\n" if batch else "")


def _two(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int32) for _ in range(2)]


def _add_sub(directory: Path, program: str) -> None:
    _save(AddSub(), _two(2, 16), [0], _write(directory, _pair("INT32", BATCH)) / program)


def _add_sub_inferred(directory: Path) -> None:
    exported(AddSub(), _two(2, 16), [0], _write(directory, "") / EXPORTED)


def _add_sub_unbatched(directory: Path, program: str) -> None:
    _save(AddSub(), _two(16), [], _write(directory, _pair("INT32", 0)) / program)


def _add_sub_string(directory: Path) -> None:
    _write(directory, _pair(BYTES, BATCH), source=program_sources.STRINGS)


def _add_sub_onnx(directory: Path) -> None:
    (_write(directory, "") / "model.onnx").write_bytes(onnx_files.add_sub())


def _single(
    directory: Path, datatype: str, dims: Dims, out: Dims, batch: int = BATCH, more: str = ""
) -> Path:
    config = f"max_batch_size: {batch}\n" + tensor("input", "INPUT", datatype, dims)
    config += tensor("output", "OUTPUT", datatype, out) + more
    return _write(directory, config)


def _identity(directory: Path, program: str, datatype: str) -> None:
    place = _single(directory, datatype, [-1], [-1], more="dynamic_batching { }\n")
    if datatype == BYTES:
        (place / "model.py").write_text(program_sources.IDENTITY)
        return
    _save(Identity(), [torch.zeros(2, 3, dtype=_TORCH[datatype])], [0, 1], place / program)


def _variable(directory: Path, program: str) -> None:
    place = _single(directory, "FP32", [-1, -1], [-1])
    _save(RowSums(), [torch.zeros(2, 3, 5)], [0, 1, 2], place / program)


def _zero_size(directory: Path, program: str) -> None:
    _save(Nothing(), [torch.zeros(2, 3)], [0, 1], _single(directory, "FP32", [-1], [0]) / program)


def _reshape(directory: Path, program: str) -> None:
    config = f"max_batch_size: {BATCH}\n" + tensor("input", "INPUT", "FP32", [2, 2], "reshape { shape: [4] }")
    place = _write(directory, config + tensor("output", "OUTPUT", "FP32", [1], "reshape { shape: [] }"))
    _save(FlatSum(), [torch.zeros(2, 4)], [0], place / program)


def _range(directory: Path) -> None:
    _single(directory, "INT32", [1], [-1], batch=0).joinpath("model.py").write_text(program_sources.RANGE)


def _countdown(directory: Path) -> None:
    config = tensor("input", "COUNT", "INT32", [1]) + tensor("output", "OUTPUT", "INT32", [-1])
    _write(
        directory, config + "model_transaction_policy { decoupled: true }\n", source=program_sources.COUNTDOWN
    )


def _python(directory: Path, source: str) -> None:
    place = _single(directory, "FP32", [1], [1], more="dynamic_batching { }\n")
    (place / "model.py").write_text(source)


def _sequences(directory: Path, controls: Sequence[str], source: str = "") -> Path:
    inputs = "".join(
        f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{name} '
        + ("data_type: TYPE_UINT64" if name == "CORRID" else "int32_false_true: [0, 1]")
        + " } }\n"
        for name in controls
    )
    more = f"sequence_batching {{\nmax_sequence_idle_microseconds: 5000000\n{inputs}}}\n"
    place = _single(directory, "INT32", [1], [1], batch=SLOTS, more=more)
    if source:
        (place / "model.py").write_text(source)
    return place


def _sequence_inputs() -> list[torch.Tensor]:
    flags = torch.zeros(SLOTS, dtype=torch.int32)
    return [torch.zeros(SLOTS, 1, dtype=torch.int32), flags, flags.clone()]


def _accumulator_exported(directory: Path) -> None:
    exported(
        Accumulator(SLOTS), _sequence_inputs(), [], _sequences(directory, ("START", "READY")) / "model.pt2"
    )


def _accumulator_script(directory: Path) -> None:
    traced = torch.jit.trace(Accumulator(SLOTS), tuple(_sequence_inputs()))
    torch.jit.save(traced, _sequences(directory, ("START", "READY")) / "model.pt")


def _classifier(directory: Path, program: str, channels_last: bool) -> None:
    shape = [SIDE, SIDE, 3] if channels_last else [3, SIDE, SIDE]
    layout = "FORMAT_NHWC" if channels_last else "FORMAT_NCHW"
    config = f"max_batch_size: {BATCH}\n" + tensor("input", "image", "FP32", shape, f"format: {layout}")
    config += tensor("output", "scores", "FP32", [len(LABELS)], 'label_filename: "labels.txt"')
    place = _write(directory, config + "dynamic_batching { }\n")
    (directory / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    _save(Classifier(channels_last), [torch.zeros(2, *shape)], [0], place / program)


def _versions(directory: Path, program: str, policy: str) -> None:
    for version in (1, 2, 3):
        write_version(directory, version, policy, program)


def write_version(directory: Path, version: int, policy: str = "", program: str = EXPORTED) -> None:
    """Write a version of the versions models into their directory: it adds its number; for tests of hot reload."""
    config = f"max_batch_size: {BATCH}\n{policy}\n" + tensor("input", "INPUT", "INT32", [4])
    place = _write(directory, config + tensor("output", "OUTPUT", "INT32", [4]), version)
    _save(Plus(version), [torch.zeros(2, 4, dtype=torch.int32)], [0], place / program)


def _broken(directory: Path, program: str) -> None:
    (_write(directory, _pair("INT32", BATCH)) / program).write_bytes(b"this is no program")


def _broken_config(directory: Path, program: str) -> None:
    _add_sub(directory, program)
    (directory / "config.pbtxt").write_text(
        'max_batch_size: 8\ninput { name: "INPUT0" data_typ: TYPE_INT32 }\n'
    )


def _empty(directory: Path, program: str) -> None:
    _add_sub(directory, program)
    shutil.rmtree(directory / "1")


_OF_TORCH: dict[str, Callable[[Path, str], None]] = {
    "add_sub": _add_sub,
    "add_sub_unbatched": _add_sub_unbatched,
    **{f"identity_{name.lower()}": partial(_identity, datatype=name) for name in DATATYPES},
    "variable": _variable,
    "zero_size": _zero_size,
    "reshape": _reshape,
    "classifier": partial(_classifier, channels_last=False),
    "classifier_nhwc": partial(_classifier, channels_last=True),
    "versions_latest": partial(_versions, policy=""),
    "versions_all": partial(_versions, policy="version_policy { all { } }"),
    "versions_specific": partial(_versions, policy="version_policy { specific { versions: [1, 3] } }"),
    "broken": _broken,
    "broken_config": _broken_config,
    "empty": _empty,
}
"""Writers of a model's directory that take the name of the program's file, by name."""
_OTHERS: dict[str, Callable[[Path], None]] = {
    "add_sub_string": _add_sub_string,
    "add_sub_inferred": _add_sub_inferred,
    "add_sub_script": partial(_add_sub, program=SCRIPTED),
    "add_sub_onnx": _add_sub_onnx,
    "range": _range,
    "accumulator": partial(_sequences, controls=("START", "READY"), source=program_sources.ACCUMULATOR),
    "accumulator_by_id": partial(
        _sequences, controls=("START", "READY", "END", "CORRID"), source=program_sources.ACCUMULATOR_BY_ID
    ),
    "accumulator_exported": _accumulator_exported,
    "accumulator_script": _accumulator_script,
    "countdown": _countdown,
    "raising": partial(_python, source=program_sources.RAISING),
    "slow": partial(_python, source=program_sources.SLOW),
}
PROGRAMS = (*_OF_TORCH, *_OTHERS)
"""Names of all models."""
