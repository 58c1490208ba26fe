"""ONNX programs (`model.onnx`), run by onnxruntime on the CPU, or on the worker's GPU with a build for CUDA.

1. onnxruntime writes no lines of its own: errors reach the log and the client as exceptions.
2. The memory of a run is given back. On the CPU a session has no arena and takes memory of the C heap, which
   `workers.lifecycle.memory_budget` bounds. On CUDA the arena takes what is asked for, and shrinks after each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.extras import require
from ipc.memory.datatypes import BYTES
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.interface import Interface, ProgramTensor, fit
from workers.adapters.shared.named_tensors import Array, NamedBatch
from workers.adapters.shared.program import RepositoryProgram, entry_of
from workers.foreign import line_of
from workers.loading.program_files import external_files, nbytes_of
from workers.loading.source import SourceError
from workers.repository.layout import ModelRefused

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": BYTES,
    **{
        f"tensor({sign}int{size})": f"{sign.upper()}INT{size}"
        for sign in ("u", "")
        for size in (8, 16, 32, 64)
    },
}
_QUIET = 4
"""Log only what ends the process. Lines of onnxruntime go to stderr directly, in colours, and break a log of JSON."""
_CUDA = "CUDAExecutionProvider"
_SHRINK = "memory.enable_memory_arena_shrinkage"


class OnnxAdapter(RepositoryProgram):
    """A session of onnxruntime."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="onnx",
        operations=("infer",),
        inputs=(),
        outputs=(),
        needs_proof=False,
        builds_alone=False,
    )
    tells_errors: ClassVar[bool] = True
    atomic: bool = True

    def __init__(self, session: Any, context: LoadContext, nbytes: int, run_options: Any) -> None:
        """Raises `ModelRefused` for a program that does not fit its configuration."""
        entry = entry_of(context)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        taken = tuple(_facts(each, bool(entry.config.inputs)) for each in inputs)
        given = tuple(_facts(each, bool(entry.config.outputs)) for each in outputs)
        fitted = fit(entry, Interface(taken, given))
        super().__init__(entry, fitted.config, self.device_of(context))
        self._session, self._nbytes, self._run_options = session, nbytes, run_options
        self._inputs = {name: each.name for each, name in zip(inputs, fitted.inputs, strict=True) if name}
        self._outputs = {name: each.name for each, name in zip(outputs, fitted.outputs, strict=True) if name}
        facts = self.signature.outputs.values()
        self._single = {
            each.name: each.program for each in facts if not each.batches and {*each.program} <= {1}
        }

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Open the file. Raises ImportError that names the extra when onnxruntime is missing."""
        runtime = require("onnxruntime", "onnx")
        runtime.set_default_logger_severity(_QUIET)
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        options.log_severity_level = _QUIET
        options.enable_cpu_mem_arena = False
        path = context.directory / entry_of(context).program
        outside = external_files(path)
        try:
            session = open_session(
                runtime, path, outside, options, _providers(runtime, cls.device_of(context))
            )
        except Exception as error:
            # NOTE: the errors of onnxruntime have no common base.
            text = f"{path.name} cannot be loaded by onnxruntime: {line_of(error)}"
            raise SourceError(text, "UNKNOWN") from error
        context.progress("read", 1.0)
        return cls(session, context, nbytes_of(path, outside), run_options(runtime, session))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the program and of the files with its data, which are mostly weights."""
        return self._nbytes

    def refuse_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Refuse texts that are not UTF-8."""
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                _fed(name, array)

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray]:
        """Run the session for the outputs of the batch."""
        given = {self._inputs[name]: _fed(name, batch.array(name)) for name in batch.names}
        names = [name for name in self._outputs if name in batch.outputs]
        output_names = [self._outputs[name] for name in names]
        arrays = dict(zip(names, self._session.run(output_names, given, self._run_options), strict=True))
        for name, shape in self._single.items():
            if name in arrays and arrays[name].ndim == 0:
                arrays[name] = arrays[name].reshape(shape)
        return arrays


def open_session(
    runtime: Any, program: Path, outside: Mapping[str, Path], options: Any, providers: list[Any]
) -> Any:
    """A session that has the content of the files `outside` in memory of its own; onnxruntime would map the files."""
    contents = [path.read_bytes() for path in outside.values()]
    lengths = [len(content) for content in contents]
    options.add_external_initializers_from_files_in_memory(list(outside), contents, lengths)
    # NOTE: the session copies `contents` while it is made, so they must live until then.
    return runtime.InferenceSession(program, options, providers=providers)


def run_options(runtime: Any, session: Any) -> Any:
    """Options of each run of a session: quiet, and on CUDA the arena gives back what the run has taken."""
    options = runtime.RunOptions()
    options.log_severity_level = _QUIET
    if _CUDA in session.get_providers():
        device = session.get_provider_options()[_CUDA]["device_id"]
        options.add_run_config_entry(_SHRINK, f"gpu:{device}")
    return options


def _providers(runtime: Any, device: torch.device) -> list[Any]:
    if device.type == "cuda" and _CUDA in runtime.get_available_providers():
        exact = {"device_id": device.index or 0, "arena_extend_strategy": "kSameAsRequested"}
        return [(_CUDA, exact), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def _facts(tensor: Any, stated: bool) -> ProgramTensor:
    """A tensor of the program. onnxruntime shows [] for rank 0 and for any rank, so `stated` dims of the configuration
    count.
    """
    if tensor.type not in _DATATYPES:
        raise ModelRefused(f"{tensor.name[:200]!a} of the program is {tensor.type}, which no named tensor is")
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.shape)
    return ProgramTensor(tensor.name, _DATATYPES[tensor.type], None if stated and not shape else shape)


def _fed(name: str, array: np.ndarray) -> np.ndarray:
    """The array in the form of onnxruntime. Raises `InvalidInput` for a text that is not UTF-8."""
    if array.dtype.kind != "O":
        return array
    try:
        texts = [bytes(each).decode("utf-8") for each in array.flat]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input {name!a}: an element is no UTF-8, which this model needs") from error
    return np.array(texts, dtype=object).reshape(array.shape)
