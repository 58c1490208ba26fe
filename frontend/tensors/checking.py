"""Checks a request of named tensors, in the order and in the words of both tensor protocols.

1. batch size; 2. number and names of inputs; 3. each input: datatype, shape, batch, bytes; 4. outputs; 5. sequence.

The beginnings of the messages are those of the contracts; v1 wants `for model '<name>'` behind them, v2 does not mind.
Wire formats check what only they know: that bodies are as long as they say, that fields are there and have their types.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from frontend.scope import RequestScope
from frontend.tensors.models import ExpectedInput, TensorModel
from frontend.tensors.request import InputTensor, RegionUse, TensorRequest, WantedOutput
from frontend.tensors.result import check_ranked
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES, MAX_ELEMENTS
from ipc.store.regions import MOST_BYTES

MOST_DIMS = 64
"""Dimensions of one input; no model has as many."""
_MOST_NAMED = 8
"""Names of unexpected inputs that an error shows."""


@dataclass(slots=True, frozen=True)
class CheckedRequest:
    """A request over `rows` rows that `check` took, and the model that it goes to."""

    scope: RequestScope
    model: TensorModel
    request: TensorRequest
    rows: int


def check(model: TensorModel, request: TensorRequest) -> int:
    """The batch size of a request, 1 for a model that does not batch. Raises `InvalidInput` for what the model refuses.

    It does not look into BYTES tensors; whoever reads their elements does (`datatypes.split`).
    """
    rows = check_shapes(model, request)
    for tensor in request.inputs:
        _check_bytes(model, tensor, model.inputs[tensor.name])
    if request.outputs is not None:
        _check_outputs(model, request.outputs, rows)
    if model.config.sequence_batching is not None:
        _check_sequence(model, request, rows)
    return rows


def check_dimensions(count: int, where: str) -> None:
    """Raise `InvalidInput` for a shape of more dimensions than any model has."""
    if count > MOST_DIMS:
        raise InvalidInput(f"{where}: shape has {count} dimensions, the limit is {MOST_DIMS}")


def check_shapes(model: TensorModel, request: TensorRequest) -> int:
    """`check` without bytes, outputs and sequence, for wire formats that need shapes to find the bytes."""
    rows = _rows(model, request)
    _check_names(model, request.inputs)
    for tensor in request.inputs:
        _check_input(model, tensor, model.inputs[tensor.name], rows, request)
    datatypes.check_counts(
        (f"input '{tensor.name}' for model '{model.name}'", math.prod(tensor.shape))
        for tensor in request.inputs
        if tensor.datatype == BYTES
    )
    return rows


def _rows(model: TensorModel, request: TensorRequest) -> int:
    """The batch size that the request states, or the batch size of its first input."""
    most, rows = model.config.max_batch_size, request.batch_size
    if rows is None:
        shape = request.inputs[0].shape if most and request.inputs else ()
        rows = shape[0] if shape else 1
    if rows < 1:
        raise InvalidInput(
            f"inference request batch-size must be >= 1 for '{model.name}', got {_shown(rows)}"
        )
    if rows != 1 and rows > most:
        raise InvalidInput(
            f"inference request batch-size must be <= {most} for '{model.name}', got {_shown(rows)} "
            f"({_bound_of_rows(model)})"
        )
    return rows


def _bound_of_rows(model: TensorModel) -> str:
    """Where the bound of a model's rows is set."""
    most = model.config.max_batch_size
    if not most:
        return "max_batch_size 0: the model has no batch dimension, and its batch-size is 1"
    if model.kind != "infer":
        return "limits.max_items of the server"
    return (
        f"max_batch_size {most} of its configuration; where that states none, the setting "
        "repository.default_max_batch_size, or a bound of the program"
    )


def _check_names(model: TensorModel, inputs: Sequence[InputTensor]) -> None:
    names = [tensor.name for tensor in inputs]
    if names == model.input_names:
        return
    rules, given = model.inputs, set(names)
    too_many, too_few = len(names) > len(rules), len(names) < model.required
    if not too_many:
        _check_once("input", names)
    missing = [repr(name) for name, rule in rules.items() if not rule.optional and name not in given]
    unknown = [_name(name) for name in islice((name for name in names if name not in rules), _MOST_NAMED)]
    if too_many or too_few:
        words = [("missing", missing), ("unexpected", unknown)]
        named = "; ".join(f"{word}: {', '.join(shown)}" for word, shown in words if shown)
        expected = model.required if too_few else len(rules)
        raise InvalidInput(
            f"expected {expected} inputs but got {len(names)} inputs for model '{model.name}'"
            + (f" ({named})" if named else "")
        )
    if unknown:
        raise InvalidInput(
            f"unexpected inference input {unknown[0]} for model '{model.name}', "
            f"whose inputs are {', '.join(map(repr, rules))}"
        )
    if missing:
        raise InvalidInput(f"missing inference input {', '.join(missing)} for model '{model.name}'")


def _check_once(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInput(f"{kind} {_name(name)} occurs more than once in the request")
        seen.add(name)


def _check_input(
    model: TensorModel, tensor: InputTensor, rule: ExpectedInput, rows: int, request: TensorRequest
) -> None:
    if tensor.datatype != rule.datatype:
        _check_datatype(tensor.datatype, f"input '{tensor.name}' for model '{model.name}'")
        raise InvalidInput(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
            f"but model '{model.name}' expects '{rule.datatype}'"
        )
    shape, batches = tensor.shape, model.config.max_batch_size > 0
    _check_batch(model, tensor, rows)
    fits = _fits(model, rule, shape[1:] if batches else shape)
    # NOTE: the model leaves the same dimensions open as the recipe.
    if (rule.variable and tensor.recipe is None) or not fits:
        _check_dims(shape, f"unexpected shape for input '{tensor.name}' for model '{model.name}'")
    if not fits:
        dims = list(rule.dims)
        # NOTE: a protocol that states the batch size apart has no batch dimension in its shapes.
        whole = batches and request.batch_size is None
        expected, got = ([-1, *dims], shape) if whole else (dims, shape[1:] if batches else shape)
        raise InvalidInput(
            f"unexpected shape for input '{tensor.name}' for model '{model.name}': "
            f"expected {expected}, got {_shown(got)}"
        )


def _fits(model: TensorModel, rule: ExpectedInput, dims: list[int]) -> bool:
    """Whether the model takes these dims. A catalog model takes n elements as [n, 1] too, as MLServer's codecs do."""
    if rule.fits(dims):
        return True
    return model.kind != "infer" and dims[-1:] == [1] and rule.fits(dims[:-1])


def _check_batch(model: TensorModel, tensor: InputTensor, rows: int) -> None:
    """All inputs of a model that batches have as many rows."""
    if not model.config.max_batch_size:
        return
    if not tensor.shape:
        raise InvalidInput(
            f"unexpected shape for input '{tensor.name}' for model '{model.name}': [] has no batch dimension"
        )
    if tensor.shape[0] != rows:
        raise InvalidInput(
            f"input '{tensor.name}' for model '{model.name}' has batch-size {_shown(tensor.shape[0])}, "
            f"but other inputs have {rows}"
        )


def _check_bytes(model: TensorModel, tensor: InputTensor, rule: ExpectedInput) -> None:
    where = f"input '{tensor.name}' for model '{model.name}'"
    if (tensor.data is None) == (tensor.region is None):
        raise InvalidInput(f"{where}: expected data or a shared memory region, and not both")
    if tensor.recipe is not None:
        return
    # PERF: the usual request needs no look at each dim.
    known = rule.nbytes and not rule.variable and tensor.data is not None
    if known and len(tensor.data or b"") == math.prod(tensor.shape) * rule.nbytes:
        return
    expected = expected_nbytes(rule.datatype, tensor.shape, where)
    if tensor.data is not None:
        got = len(tensor.data)
    else:
        assert tensor.region is not None
        _check_region(tensor.region, where)
        got = tensor.region.nbytes
    if expected is None:
        _check_room(tensor, got, where)
    elif got != expected:
        raise InvalidInput(
            f"unexpected size {got} for {where}, expecting {expected} bytes "
            f"({math.prod(tensor.shape)} elements of {rule.datatype} for shape {tensor.shape}, "
            f"got {got / rule.nbytes:g})"
        )


def _check_room(tensor: InputTensor, nbytes: int, where: str) -> None:
    """The lengths of BYTES elements alone take 4 bytes each; no element means no byte."""
    count = math.prod(tensor.shape)
    if nbytes < 4 * count or (not count and nbytes):
        raise InvalidInput(
            f"unexpected size {nbytes} for {where}: shape {tensor.shape} has {count} elements of BYTES"
        )


def _check_region(region: RegionUse, where: str) -> None:
    for field, value in (("offset", region.offset), ("byte size", region.nbytes)):
        if not 0 <= value <= MOST_BYTES:
            raise InvalidInput(f"{where}: shared memory {field} {_shown(value)} is outside 0..2^62")


def _check_outputs(model: TensorModel, wanted: Sequence[WantedOutput], rows: int) -> None:
    for output in wanted:
        tensor = model.outputs.get(output.name)
        if tensor is None:
            raise InvalidInput(
                f"unexpected inference output {_name(output.name)} for model '{model.name}', "
                f"whose outputs are {', '.join(map(repr, model.outputs))}"
            )
        if output.region is not None:
            _check_region(output.region, f"output '{output.name}' for model '{model.name}'")
        if output.classes is not None:
            _check_classes(model, output, output.classes, tensor, rows)
    _check_once("output", (output.name for output in wanted))


def _check_classes(
    model: TensorModel, output: WantedOutput, count: int, tensor: TensorConfig, rows: int
) -> None:
    where = f"output '{output.name}' for model '{model.name}'"
    if count < 0:
        raise InvalidInput(f"{where}: classification {_shown(count)} must be >= 0")
    if output.region is not None:
        raise InvalidInput(f"{where}: classification and a shared memory region cannot be asked for together")
    check_ranked(tensor.datatype, rows * math.prod(dim for dim in tensor.dims if dim > 0), where)


def _check_sequence(model: TensorModel, request: TensorRequest, rows: int) -> None:
    if rows != 1:
        raise InvalidInput(
            f"inference request to model '{model.name}' must specify batch-size 1 due to requirements of sequence "
            f"batcher, got {rows}"
        )
    if not request.sequence.id:
        raise InvalidInput(
            f"inference request to model '{model.name}' must specify a non-zero correlation ID"
        )


def expected_nbytes(datatype: str, shape: Sequence[int], where: str) -> int | None:
    """Raw bytes of a tensor of this shape; None for BYTES, whose shape does not tell.

    `where` names it in errors ("input 'A' for model 'm'"). Raises `InvalidInput` for an unknown datatype, a negative
    dim, and dimensions whose product is above 2^59.
    """
    _check_datatype(datatype, where)
    _check_dims(shape, where)
    return None if datatype == BYTES else math.prod(shape) * DATATYPES[datatype].nbytes


def _check_datatype(datatype: str, where: str) -> None:
    if datatype not in DATATYPES:
        raise InvalidInput(f"{where}: datatype {_name(datatype)} is not one of {', '.join(DATATYPES)}")


def _check_dims(shape: Sequence[int], where: str) -> None:
    for dim in shape:
        if not 0 <= dim <= MAX_ELEMENTS:
            raise InvalidInput(f"{where}: dimension {_shown(dim)} of its shape is outside 0..2^59")
    if math.prod(dim or 1 for dim in shape) > MAX_ELEMENTS:
        raise InvalidInput(
            f"{where}: shape {_shown(list(shape))} is too large: the product of its dimensions is above 2^59"
        )


def default_dims(config: ModelConfig, tensor: TensorConfig) -> list[int]:
    """The dims of an input whose request gives none. Raises `InvalidInput` when the model has them variable (v1, 7)."""
    if -1 in tensor.dims:
        raise InvalidInput(
            f"input '{tensor.name}' of model '{config.name}' has a variable size: the request must give its shape"
        )
    return list(tensor.dims)


def _name(given: str) -> str:
    """A name from the request, cut and in ASCII."""
    return ascii(given[:200])


def _shown(value: object) -> str:
    """A number or shape from the request, of bounded length."""
    try:
        text = str(value)
    except ValueError:
        # NOTE: Python refuses to print integers of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."
