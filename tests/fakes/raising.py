"""Code of models that raises on command whatever code of models can raise, in every place where such code runs.

A command is `#throw NAME PLACE`: the code raises `EXCEPTIONS[NAME]` once it comes to `PLACE`. `#kill NAME PLACE` ends
the process by `KILLS[NAME]` there. A text, or the parameter `do` of a request with named tensors, may hold a command.

Places of `RaisingAdapter`: load, proof (both by the option `fail`), check, group, prepare, collate, padding, run.
`write_python` makes a Python model with the places import, make, proof, infer and end, or, for a stream, call, start,
middle and close.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import greenlet
import torch
from msgspec.structs import replace

from ipc.errors import Draining, InvalidInput, WorkerLost
from ipc.wire.messages import Call, InputItem
from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared


class OwnError(BaseException):
    """No `Exception`."""


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit("the text of an error")

    __repr__ = __str__


class UnprintableExit(Unprintable, SystemExit):  # type: ignore[misc]
    """The same, and no `Exception` by one of its bases."""


class Untrue(Exception):
    """Is neither true nor false, so that no stack can be made of the error."""

    def __bool__(self) -> bool:
        raise KeyboardInterrupt


def _circle() -> BaseException:
    """An error that is the cause of its own cause."""
    first, second = TypeError("first"), TypeError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def _panic() -> BaseException:
    """A panic of the Rust code of the tokenizers library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    encoding = tokenizer.encode("a a a a")
    try:
        encoding.truncate(1, stride=3)
    except BaseException as panic:
        return panic
    raise AssertionError("tokenizers does not panic any more")


def _deep() -> BaseException:
    try:
        return _deep()
    except RecursionError as error:
        return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "GreenletExit": greenlet.GreenletExit,
    "OwnError": lambda: OwnError("no Exception"),
    "Panic": _panic,
    "Group": lambda: BaseExceptionGroup("several", [SystemExit(1), KeyboardInterrupt()]),
    "Unprintable": Unprintable,
    "UnprintableExit": UnprintableExit,
    "Untrue": Untrue,
    "Circle": _circle,
    "StopIteration": StopIteration,
    "RecursionError": _deep,
    "Draining": lambda: Draining("the model says so"),
    "WorkerLost": lambda: WorkerLost("the model says so"),
}
"""All are answered with 500. A frontend that obeyed the last two would take the request to another worker."""
LOGGED = [name for name in EXCEPTIONS if name != "Untrue"]
"""Those of which every handler of a log, that of pytest too, can make a line."""
WORDS: dict[str, Callable[[], BaseException]] = {
    "Surrogate": lambda: InvalidInput("half a character: \udc80"),
    "NoText": lambda: InvalidInput(5),  # type: ignore[arg-type]
    "NoDetail": lambda: InvalidInput("words", thing=object()),
}
"""Errors for clients that no message between processes can hold as they are; answered with 400."""
KILLS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def obey(command: str, place: str) -> None:
    """Raise, or end the process, if the command says so of this place."""
    words = command.split()
    for at, word in enumerate(words):
        if word == "#throw" and words[at + 2] == place:
            raise (EXCEPTIONS | WORDS)[words[at + 1]]()
        if word == "#kill" and words[at + 2] == place:
            KILLS[words[at + 1]]()
            time.sleep(10)


class RaisingAdapter(FakeAdapter):
    """Vectors by hash."""

    spec: ClassVar[AdapterSpec] = replace(
        FakeAdapter.spec, family="raising", options=(*FakeAdapter.spec.options, "fail")
    )

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        super().__init__(options, longest)
        self._fail = str(options.get("fail", ""))

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """As the option `fail` says."""
        obey(str(context.options.get("fail", "")), "load")
        return super().load(context)

    def refuse_unsupported(self, call: Call) -> None:
        """As the texts say."""
        super().refuse_unsupported(call)
        self._look(call, "check")

    def group(self, call: Call) -> None:
        """As the texts say."""
        self._look(call, "group")

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """As the texts say."""
        self._look(call, "prepare")
        return super().prepare(items, call)

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """As the texts say."""
        for item in prepared:
            obey(item.payload[0], "collate")
        return super().collate(prepared)

    def padding_ratio(self, batch: Any) -> float:
        """As the texts say."""
        for text, _ in batch[0]:
            obey(text, "padding")
        return 0.0

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, Any]:
        """As the texts say, or, in the proof, the option."""
        assert torch.is_inference_mode_enabled()
        obey(self._fail, "proof")
        for text, _ in batch[0]:
            obey(text, "run")
        return super().encode(batch, outputs)

    @staticmethod
    def _look(call: Call, place: str) -> None:
        for item in call.items:
            obey(item.text or "", place)


_MODEL = """
import atexit, threading, time, warnings
from penstock.model import DecoupledModel, Model
from tests.fakes.raising import obey

LOAD = {load!r}
obey(LOAD, "import")


def command(batch):
    return str(batch.parameters[0].get("do", ""))


class One(Model):
    def __init__(self, context):
        obey(LOAD, "make")
        if LOAD == "#litter":
            warnings.simplefilter("error")
            threading.Thread(target=exit).start()
            threading.Thread(target=time.sleep, args=(3600,)).start()
            atexit.register(exit, 1)
        super().__init__(context)

    def infer(self, batch):
        obey(LOAD, "proof")
        for parameters in batch.parameters:
            obey(str(parameters.get("do", "")), "infer")
        return {{"Y": batch.array("X") + 1}}

    def __del__(self):
        obey(LOAD, "end")


class Many(DecoupledModel):
    def stream(self, batch):
        obey(command(batch), "call")
        return self.steps(batch)

    def steps(self, batch):
        try:
            obey(command(batch), "start")
            for number in range(int(batch.array("X").max())):
                yield {{"Y": batch.array("X") * 0 + number}}
                obey(command(batch), "middle")
        finally:
            obey(command(batch), "close")
"""
_SIDES = 'input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }'
SEQUENCES = (
    "max_batch_size: 4 sequence_batching { control_input [ "
    '{ name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] } '
)
STREAM = "max_batch_size: 0 model_transaction_policy { decoupled: true } "


def write_python(repository: Path, name: str, load: str = "", facts: str = "max_batch_size: 4 ") -> str:
    """A Python model that does `load` in its load, and then what requests say; returns its name."""
    place = repository / name / "1"
    place.mkdir(parents=True)
    (place / "model.py").write_text(_MODEL.format(load=load))
    (place.parent / "config.pbtxt").write_text(facts + _SIDES)
    return name
