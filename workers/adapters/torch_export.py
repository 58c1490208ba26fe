"""Programs of `torch.export` (`model.pt2`): a graph of torch operators, called with its weights and the inputs.

1. The file is opened without executing its content (`workers.loading.program_files`) and moved to the device.
2. The graph is called directly, without trees of inputs and guards. Sizes that the program assumes equal or bounded are
   checked here, all other shapes are checked against the configuration.
3. Buffers that the program changes keep their new values. A program that changes tensors in place is rewritten, so that
   the program never writes into its inputs. A program that cannot be rewritten gets copies of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule

from ipc.errors import InvalidInput
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.interface import DATATYPE_OF, Interface, ProgramTensor, fit
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import RepositoryProgram, entry_of, marks
from workers.loading.program_files import open_program
from workers.repository.layout import ModelRefused

_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True)
class SizeRule:
    """One size that the program leaves free: its places as (input, dimension), and its largest value."""

    places: tuple[tuple[int, int], ...]
    most: int | None


class TorchExportAdapter(RepositoryProgram):
    """A program of `torch.export`."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="torch_export",
        operations=("infer",),
        inputs=(),
        outputs=(),
        needs_proof=False,
    )
    tells_errors: ClassVar[bool] = True
    atomic: bool = True

    def __init__(self, program: torch.export.ExportedProgram, context: LoadContext) -> None:
        """Raises `ModelRefused` for a program that does not fit its configuration, or has more than tensors."""
        entry = entry_of(context)
        self._state = _state(program)
        self._forward = program.graph_module.forward
        interface, rules = _describe(program)
        fitted = fit(entry, interface)
        super().__init__(entry, fitted.config, self.device_of(context))
        self._inputs, self._outputs = fitted.inputs, fitted.outputs
        first = 1 if fitted.config.batches else 0
        self._rules = [rule for rule in rules if _matters(rule, first)]
        self._changed = _changed_buffers(program)
        self._writes = _changes_in_place(program)
        # NOTE: such a program may have changed a buffer before it raises.
        self.atomic = not self._writes

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Open the program, move it to the device."""
        entry = entry_of(context)
        program = open_program(context.directory / entry.program)
        context.progress("read", 1.0)
        if _changes_in_place(program):
            program = program.run_decompositions({})
        device = cls.device_of(context)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        return cls(program, context)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, buffers and constants."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._state}.values())

    def kept_state(self) -> object:
        """Marks of the buffers that the program changes."""
        return marks(self._changed)

    def infer(self, batch: NamedBatch) -> Mapping[str, torch.Tensor]:
        """Run the graph once."""
        given = [batch.tensor(name, self.device, writable=self._writes) for name in self._inputs]
        if self._rules:
            self._refuse_sizes(given)
        results_of_program = self._forward(*self._state, *given)
        for buffer, value in zip(self._changed, results_of_program, strict=False):
            if buffer is not None:
                buffer.copy_(value)
        results = results_of_program[len(self._changed) :]
        return {name: value for name, value in zip(self._outputs, results, strict=True) if name}

    def _refuse_sizes(self, given: Sequence[torch.Tensor]) -> None:
        for rule in self._rules:
            sizes = [given[at].shape[dim] for at, dim in rule.places]
            at, dim = rule.places[0]
            where = f"dimension {dim} of input {self._inputs[at]!a}"
            if rule.most is not None and sizes[0] > rule.most:
                raise InvalidInput(f"{where} is {sizes[0]}; the program takes at most {rule.most}")
            for (other, other_dim), size in zip(rule.places, sizes, strict=True):
                if size != sizes[0]:
                    more = f"dimension {other_dim} of input {self._inputs[other]!a}"
                    raise InvalidInput(
                        f"{where} is {sizes[0]} and {more} is {size}; the program takes equal ones"
                    )


def _changes_in_place(program: torch.export.ExportedProgram) -> bool:
    """Whether an operator changes a tensor in place, in the program or in a graph inside (a branch, a block)."""
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    return any(isinstance(each, torch._ops.OpOverload) and each._schema.is_mutable for each in targets)


def _state(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """Weights, buffers and constants in the order of the graph's first arguments."""
    specs = program.graph_signature.input_specs
    kinds = [spec.kind for spec in specs]
    count = sum(kind != InputKind.USER_INPUT for kind in kinds)
    if any(kind not in _STATE for kind in kinds[:count]) or InputKind.USER_INPUT in kinds[:count]:
        raise ModelRefused("the program takes more than tensors")
    held = {**program.state_dict, **program.constants}
    return [held[str(spec.target)].detach() for spec in specs[:count]]


def _changed_buffers(program: torch.export.ExportedProgram) -> list[torch.Tensor | None]:
    """The buffer whose new value each output before the user's outputs is; None for the new value of an input."""
    buffers: list[torch.Tensor | None] = []
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.BUFFER_MUTATION:
            buffers.append(held[str(spec.target)])
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            buffers.append(None)
        elif spec.kind != OutputKind.USER_OUTPUT:
            raise ModelRefused("the program gives more than tensors")
    return buffers


def _describe(program: torch.export.ExportedProgram) -> tuple[Interface, list[SizeRule]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [_tensor(values, name) for name in signature.user_inputs]
    outputs = [_tensor(values, name) for name in signature.user_outputs]
    rules = _size_rules(program, inputs)
    rows = next((rule.most for rule in rules if (0, 0) in rule.places), None)
    interface = Interface(
        tuple(map(_facts, _input_names(program, len(inputs)), inputs)),
        tuple(map(_facts, _output_names(program, len(outputs)), outputs)),
        rows,
    )
    return interface, rules


def _tensor(values: Mapping[str, object], name: object) -> torch.Tensor:
    value = values.get(name) if isinstance(name, str) else None
    if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPE_OF:
        kind = str(value.dtype) if isinstance(value, torch.Tensor) else "no tensor"
        raise ModelRefused(f"{str(name)[:200]!a} of the program is {kind}, which no named tensor is")
    return value


def _facts(name: str, value: torch.Tensor) -> ProgramTensor:
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return ProgramTensor(name, DATATYPE_OF[value.dtype], shape)


def _input_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Names of the arguments of `forward`, or names in the graph where an argument holds several tensors."""
    called = program.module_call_graph[0].signature
    names = called.forward_arg_names if called is not None else None
    if names is not None and len(names) == count:
        return list(names)
    return [str(name) for name in program.graph_signature.user_inputs]


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """The keys of a module that returns a dictionary of tensors; else OUTPUT__0, OUTPUT__1, ..."""
    tree = program.call_spec.out_spec
    if tree is not None and tree.type is dict and len(tree.context) == count:
        return [str(key) for key in tree.context]
    return [f"OUTPUT__{i}" for i in range(count)]


def _size_rules(program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]) -> list[SizeRule]:
    places: dict[object, list[tuple[int, int]]] = {}
    for at, value in enumerate(inputs):
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                places.setdefault(size.node.expr, []).append((at, dim))
    bounds = {str(symbol): known.upper for symbol, known in program.range_constraints.items()}
    return [SizeRule(tuple(found), _whole(bounds.get(str(symbol)))) for symbol, found in places.items()]


def _whole(bound: object) -> int | None:
    """A bound as a number; None for infinity."""
    try:
        return int(str(bound))
    except ValueError:
        return None


def _matters(rule: SizeRule, first: int) -> bool:
    """Whether a rule says more than that all inputs have the same rows."""
    if all(dim < first for _, dim in rule.places):
        return False
    return len(rule.places) > 1 or rule.most is not None
