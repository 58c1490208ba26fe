"""Programs over named tensors that need no files, chosen and told what to do by options and parameters.

Options: `config` is the model configuration (as of `ipc.catalog.model_config`), `program` one of

    add_sub   OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1
    echo      every output is the input of the same place in the configuration
    repeat    OUTPUT0 [rows, n] with n = the largest value of INPUT0, filled with the sum of each row
    wrong     OUTPUT0 has a column too many
    totals    OUTPUT0 INT32 [1] is the total of INPUT0 over each sequence, by START and READY, kept by row
    parts     decoupled: as many parts as INPUT0 INT32 [1] says; OUTPUT0 INT32 [-1] of each has `width` elements (1),
              which are the number of the part

Parameters of a request: `do` is `crash` (the process kills itself on the device thread), `raise`, `refuse` (raises
`InvalidInput`) or `hang`; `sleep_ms` is the time of the batch, and `hold` a file that the batch waits for the end of,
while a file beside tells that the batch has begun. Of a stream `sleep_ms` is the time of a step, and `at` the number of
the part before which it waits and does so; its `record` has a line with the number of each part, and `closed` where it
was closed before its end. `record` names a file that gets a line for every batch: the rows of each request in it, or
for sequences the id in each row (`-` where there is no request).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput
from tests.fakes.holding import BEGUN, wait_for_end_of
from workers.adapters.base import AdapterSpec, LoadContext, Pause
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import ProgramAdapter

Outputs = Mapping[str, np.ndarray | torch.Tensor]


def _add_sub(config: ModelConfig, batch: NamedBatch) -> Outputs:
    a, b = batch.array("INPUT0"), batch.array("INPUT1")
    return {"OUTPUT0": a + b, "OUTPUT1": a - b}


def _echo(config: ModelConfig, batch: NamedBatch) -> Outputs:
    found: dict[str, np.ndarray | torch.Tensor] = {}
    for given, output in zip(config.inputs, config.outputs, strict=True):
        if given.name in batch.names:
            tensors = given.datatype != "BYTES" and not given.name.endswith("_HOST")
            found[output.name] = batch.tensor(given.name) if tensors else batch.array(given.name)
    return found


def _repeat(config: ModelConfig, batch: NamedBatch) -> Outputs:
    values = batch.array("INPUT0")
    width = int(values.max()) if values.size else 0
    return {"OUTPUT0": np.repeat(values.sum(axis=1, keepdims=True, dtype=values.dtype), width, axis=1)}


def _wrong(config: ModelConfig, batch: NamedBatch) -> Outputs:
    more = int(batch.array("INPUT0").any())
    return {"OUTPUT0": np.zeros((batch.rows, config.outputs[0].dims[0] + more), np.int32)}


def _totals(config: ModelConfig) -> Callable[[ModelConfig, NamedBatch], Outputs]:
    totals = np.zeros((max(1, config.max_batch_size), 1), np.int32)

    def run(config: ModelConfig, batch: NamedBatch) -> Outputs:
        start, ready = (batch.array(name).reshape(-1, 1) for name in ("START", "READY"))
        added = batch.array("INPUT0").reshape(-1, 1) + np.where(start, 0, totals)
        totals[:] = np.where(ready, added, totals)
        return {"OUTPUT0": totals.reshape(-1).copy() if not config.batches else totals.copy()}

    return run


PROGRAMS: dict[str, Callable[[ModelConfig, NamedBatch], Outputs]] = {
    "add_sub": _add_sub,
    "echo": _echo,
    "repeat": _repeat,
    "wrong": _wrong,
}


_WRONG_PARTS: dict[str, Any] = {"wrong": [1, 2], "missing": {"OTHER": np.zeros(1, np.int32)}}
"""What `do` puts in the place of a part."""


class FakeProgram(ProgramAdapter):
    """One of `PROGRAMS`."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="fake_program",
        operations=("infer",),
        inputs=(),
        outputs=(),
        options=("config", "program", "record"),
        needs_proof=False,
    )
    tries_rows: ClassVar[bool] = False
    """Tests count the batches of a program, and some programs depend on their company."""

    def __init__(self, config: ModelConfig, program: str, record: str = "") -> None:
        self._config, self._record = config, record
        self._program = _totals(config) if program == "totals" else PROGRAMS.get(program)

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Nothing is read."""
        options: dict[str, Any] = dict(context.options)
        config = msgspec.convert(options["config"], ModelConfig)
        return cls(config, options["program"], options.get("record", ""))

    @property
    def config(self) -> ModelConfig:
        """As the options say."""
        return self._config

    @property
    def memory_bytes(self) -> int:
        """A made-up size."""
        return 1 << 20

    def infer(self, batch: NamedBatch) -> Outputs:
        """Obey, take time, run."""
        if self._record:
            with Path(self._record).open("a") as file:
                rows = batch.sizes if self._config.sequence_batching is None else _ids(batch)
                file.write(" ".join(map(str, rows)) + "\n")
        for parameters in batch.parameters:
            _obey(str(parameters.get("do", "")))
            if parameters:
                time.sleep(float(parameters.get("sleep_ms", 0)) / 1e3)
            if "hold" in parameters:
                Path(f"{parameters['hold']}{BEGUN}").touch()
                wait_for_end_of(str(parameters["hold"]))
        assert self._program is not None
        return self._program(self._config, batch)

    def stream(self, batch: NamedBatch) -> Iterator[Outputs]:
        """As many parts as the input says; with a `record`, a file beside it tells that a stream has begun."""
        if self._record:
            Path(f"{self._record}{BEGUN}").touch()
        count, parameters = int(batch.array("INPUT0").max(initial=0)), batch.parameters[0]
        for number in range(count):
            time.sleep(float(parameters.get("sleep_ms", 0)) / 1e3)
            if number == parameters.get("at", 0):
                if "hold" in parameters:
                    wait_for_end_of(str(parameters["hold"]))
                _obey(str(parameters.get("do", "")))
            if number == parameters.get("at", 0) and parameters.get("do") in _WRONG_PARTS:
                yield _WRONG_PARTS[str(parameters["do"])]
                continue
            if "pause_s" in parameters:
                yield Pause(float(parameters["pause_s"]))
            self._note(f"{number}")
            try:
                yield {"OUTPUT0": np.full(int(parameters.get("width", 1)), number, np.int32)}
            except GeneratorExit:
                self._note("closed")
                raise

    def _note(self, line: str) -> None:
        if self._record:
            with Path(self._record).open("a") as file:
                file.write(line + "\n")


def _ids(batch: NamedBatch) -> list[int | str]:
    return ["-" if step is None else step.id for step in batch.steps]


def _obey(command: str) -> None:
    if command == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)
    if command == "hang":
        time.sleep(3600)
    if command == "raise":
        raise RuntimeError("fake model failure")
    if command == "refuse":
        raise InvalidInput("the fake model refuses this")
