"""TorchScript programs (`model.pt`). These files have no types and shapes, so a configuration is required.

Load only trusted files: TorchScript cannot run Python, but its operators can read and write files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch

from ipc.catalog.model_config import ModelConfig
from ipc.memory.datatypes import BYTES
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.interface import Interface, ProgramTensor, fit
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import RepositoryProgram, entry_of
from workers.loading.source import SourceError
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


class TorchScriptAdapter(RepositoryProgram):
    """A TorchScript module."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="torchscript",
        operations=("infer",),
        inputs=(),
        outputs=(),
        needs_proof=False,
    )

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
        outputs = tuple(ProgramTensor(each.name) for each in entry.config.outputs)
        fitted = fit(entry, Interface(known, outputs))
        super().__init__(entry, fitted.config, self.device_of(context))
        self._module, self._outputs = module, [each.name for each in fitted.config.outputs]
        self._inputs = dict(zip((each.name for each in known), fitted.inputs, strict=True))
        self._owns = any(map(_changes_or_keeps, _nodes(module.inlined_graph)))

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Load the module onto the device."""
        path = context.directory / entry_of(context).program
        try:
            module = torch.jit.load(path, map_location=cls.device_of(context))
        except RuntimeError as error:
            line = str(error).strip().splitlines()[0][:200]
            raise SourceError(f"{path.name} is no TorchScript module: {line}", "UNKNOWN") from error
        context.progress("read", 1.0)
        return cls(module.eval(), context)

    @property
    def memory_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(each.nbytes for each in (*self._module.parameters(), *self._module.buffers()))

    def infer(self, batch: NamedBatch) -> Mapping[str, torch.Tensor]:
        """Call the module. A dictionary gives outputs by name, other results are in the order of the configuration."""
        names, owns = batch.names, self._owns
        given = {
            argument: batch.tensor(name, self.device, writable=owns)
            for argument, name in self._inputs.items()
            if name in names
        }
        found: Any = self._module(**given)
        if isinstance(found, dict):
            return found
        results = found if isinstance(found, (tuple, list)) else (found,)
        return dict(zip(self._outputs, results, strict=False))


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
    count = 0
    for given in [each.type for each in schema.returns]:
        elements = given.elements() if given.kind() == "TupleType" else [given]
        for element in elements:
            wrong = _wrong_output(element)
            if wrong:
                raise ModelRefused(f"the program gives {wrong}, and no tensor")
        count += len(elements)
        if given.kind() in ("ListType", "DictType"):
            return
    if count < len(config.outputs):
        raise ModelRefused(f"output: {len(config.outputs)} are configured, the program gives {count}")


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
