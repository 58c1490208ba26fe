"""TorchScript programs (`model.pt`). These files have no types and shapes, so a configuration is required.

1. Inputs are named as the arguments of `forward`, or numbered (`INPUT__0`).
2. Outputs are numbered (`OUTPUT__0`), by the place in a tuple or list of results. The fields of a named tuple and the
   keys of a dictionary are names. Keys and the length of a list are known only once the program has run.

Load only trusted files: TorchScript cannot run Python, but its operators can read and write files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from ipc.catalog.model_config import ModelConfig
from ipc.errors import UnexpectedOutput
from ipc.memory.datatypes import BYTES
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.interface import Interface, ProgramTensor, fit, number_of
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import RepositoryProgram, entry_of, marks
from workers.foreign import line_of
from workers.loading.source import SourceError
from workers.repository.configuration import MOST_TENSORS
from workers.repository.layout import ModelRefused

_HARMLESS = frozenset(
    f"prim::{kind}"
    for kind in (
        *("Constant", "GetAttr", "Return", "Uninitialized", "If", "Loop", "NumToTensor", "isinstance"),
        *("ListConstruct", "TupleConstruct", "DictConstruct", "ListUnpack", "TupleUnpack", "TupleIndex"),
        *("TupleSlice", "unchecked_cast"),
    )
)
"""Operators without a schema that neither change nor keep their arguments."""


_ATTRIBUTES = ("prim::GetAttr", "prim::SetAttr")
_FIELD = re.compile(r"(\w+) : ")
"""Fields in the description of a named tuple."""


class TorchScriptAdapter(RepositoryProgram):
    """A TorchScript module."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="torchscript",
        operations=("infer",),
        inputs=(),
        outputs=(),
        needs_proof=False,
    )
    tells_errors: ClassVar[bool] = True

    def __init__(self, module: torch.jit.ScriptModule, context: LoadContext) -> None:
        """Raises `ModelRefused` for a module that does not fit its configuration."""
        entry = entry_of(context)
        if not (entry.config.inputs and entry.config.outputs):
            raise ModelRefused(
                "TorchScript does not tell types and shapes; config.pbtxt must give input and output"
            )
        forward: Any = module.forward
        arguments = forward.schema.arguments[1:]
        _refuse_types(entry.config, forward.schema)
        known = tuple(ProgramTensor(each.name, optional=each.has_default_value()) for each in arguments)
        names = [each.name for each in entry.config.outputs]
        numbered = _numbered_outputs(forward.schema, names)
        outputs = tuple(map(ProgramTensor, numbered or names))
        fitted = fit(entry, Interface(known, outputs))
        super().__init__(entry, fitted.config, self.device_of(context))
        self._module = module
        self._outputs = {name: at for at, name in enumerate(fitted.outputs) if name and numbered}
        self._inputs = dict(zip((each.name for each in known), fitted.inputs, strict=True))
        nodes = list(_nodes(module.inlined_graph))
        self._owns = any(map(_changes_or_keeps, nodes))
        self._attributes = sorted({node.s("name") for node in nodes if node.kind() in _ATTRIBUTES})

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Load the module onto the device."""
        path = context.directory / entry_of(context).program
        try:
            module = torch.jit.load(path, map_location=cls.device_of(context))
        except RuntimeError as error:
            text = f"{path.name} is no TorchScript module: {line_of(error)}"
            raise SourceError(text, "UNKNOWN") from error
        context.progress("read", 1.0)
        return cls(module.eval(), context)

    @property
    def memory_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(each.nbytes for each in (*self._module.parameters(), *self._module.buffers()))

    def kept_state(self) -> object:
        """Marks of parameters, buffers and attributes, of lists and numbers too."""
        places: list[Any] = [each._c for each in self._module.modules()]
        held = [place.getattr(name) for place in places for name in self._attributes if place.hasattr(name)]
        return marks([*self._module.parameters(), *self._module.buffers(), *held])

    def infer(self, batch: NamedBatch) -> Mapping[str, torch.Tensor]:
        """Call the module. Raises `UnexpectedOutput` for a dictionary or a list that lacks an output of the batch."""
        names, owns = batch.names, self._owns
        given = {
            argument: batch.tensor(name, self.device, writable=owns)
            for argument, name in self._inputs.items()
            if name in names
        }
        returned: Any = self._module(**given)
        if isinstance(returned, dict):
            results = returned
        else:
            several = returned if isinstance(returned, (tuple, list)) else (returned,)
            results = {name: several[at] for name, at in self._outputs.items() if at < len(several)}
        for name in batch.outputs:
            if name not in results:
                raise UnexpectedOutput(f"output {name!a}: the program gives {_given(returned)}")
        return results


def _refuse_types(config: ModelConfig, schema: Any) -> None:
    """Raise `ModelRefused` for inputs or outputs that are no tensors, and for too few outputs."""
    for tensor in (*config.inputs, *config.outputs):
        if tensor.datatype == BYTES:
            raise ModelRefused(f"{tensor.name[:200]!a} is {BYTES}, which no tensor of TorchScript holds")
    for argument in schema.arguments[1:]:
        taken = argument.type
        if taken.kind() == "OptionalType":
            taken = taken.getElementType()
        if taken.kind() != "TensorType" and not argument.has_default_value():
            raise ModelRefused(f"input {argument.name[:200]!a} of the program is {taken}, and no tensor")
    given = _results(schema)
    for each in given:
        if wrong := _wrong_output(each):
            raise ModelRefused(f"the program gives {wrong}, and no tensor")
    if not _is_open(given) and len(given) < len(config.outputs):
        raise ModelRefused(f"output: {len(config.outputs)} are configured, the program gives {len(given)}")


def _results(schema: Any) -> list[Any]:
    """Types of the results; those of a tuple one by one."""
    [given] = [each.type for each in schema.returns]
    return given.elements() if given.kind() == "TupleType" else [given]


def _is_open(results: Sequence[Any]) -> bool:
    """Whether only a run tells how many results there are, or their names."""
    return len(results) == 1 and results[0].kind() in ("ListType", "DictType", "AnyType")


def _numbered_outputs(schema: Any, configured: Sequence[str]) -> list[str]:
    """Names of the results by their places; none for a dictionary, or for whatever may be a dictionary."""
    results = _results(schema)
    if not _is_open(results):
        fields = _FIELD.findall(schema.returns[0].type.str())
        return fields if len(fields) == len(results) else [f"OUTPUT__{at}" for at in range(len(results))]
    numbers = [number_of(name) for name in configured]
    if results[0].kind() == "DictType" or (results[0].kind() == "AnyType" and None in numbers):
        return []
    # NOTE: a list may be long, so that a name without a number is refused even if it is the only one.
    most = max((number for number in numbers if number is not None), default=0)
    return [f"OUTPUT__{at}" for at in range(2 + min(most, MOST_TENSORS))]


def _given(found: Any) -> str:
    """The results of a run, for a message."""
    if isinstance(found, dict):
        return ", ".join(ascii(str(key)[:64]) for key in list(found)[:16]) or "nothing"
    return f"{len(found) if isinstance(found, (tuple, list)) else 1} results, numbered from 0"


def _wrong_output(given: Any) -> str:
    """The type of an output that is neither a tensor nor a list or dictionary of tensors; else ""."""
    held = given
    if given.kind() == "ListType":
        held = given.getElementType()
    elif given.kind() == "DictType":
        held = given.getValueType()
    return "" if held.kind() in ("TensorType", "AnyType") else str(given)


def _nodes(block: Any) -> Iterator[Any]:
    """All operators of a graph."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _changes_or_keeps(node: Any) -> bool:
    """Whether an operator may change or keep its arguments. Then the module gets inputs in memory of their own.

    NOTE: "!" in a schema marks changed arguments. Setting attributes, calling methods and forking have no schema.
    """
    schema = node.schema()
    return "!" in schema or (schema == "(no schema)" and node.kind() not in _HARMLESS)
