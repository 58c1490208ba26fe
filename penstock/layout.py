"""`penstock layout MODEL`: the header and the bytes of a request to a model of named tensors, for both protocols.

The command asks a running server for the model, and shows what a client without a library sends for one row.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import urllib.error
import urllib.parse
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.settings import Settings
from penstock import target, terminal

UNKNOWN_SIZE = 2
"""Size shown for a dimension of any size."""
_TEXT = b"text"
T = TypeVar("T")


class Declared(msgspec.Struct, frozen=True):
    """An input or output as the model's metadata declares the tensor; -1 is a dimension of any size."""

    name: str
    datatype: str
    shape: list[int]

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown datatype."""
        if self.datatype != BYTES and self.datatype not in DATATYPES:
            raise ValueError(f"datatype {self.datatype!r} is unknown")


class Metadata(msgspec.Struct, frozen=True):
    """What the layouts need of a model's metadata."""

    inputs: list[Declared]
    outputs: list[Declared]


class _Transactions(msgspec.Struct, frozen=True):
    decoupled: bool = False


class _Config(msgspec.Struct, frozen=True):
    max_batch_size: int = 0
    model_transaction_policy: _Transactions = _Transactions()


class Tensor(msgspec.Struct, frozen=True):
    """The bytes of one input, little-endian; elements of BYTES stand behind their length in 4 bytes."""

    name: str
    datatype: str
    shape: list[int]
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """A POST for one row in one protocol. The body is `head`, then the bytes of the inputs in their order."""

    protocol: str
    url: str
    headers: dict[str, str]
    head: str
    inputs: list[Tensor]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "layout", help="show the header and the bytes of a request of tensors to a model"
    )
    parser.add_argument("model", type=target.text, help="name of the model")
    terminal.with_json(parser)
    target.add_arguments(parser)
    terminal.with_examples(parser, ("layout my-model", "the request of a model that takes tensors"))


def run(options: argparse.Namespace, config: Settings) -> int:
    """Print the layouts; 1 when the server or the model cannot be asked."""
    url, key = target.url_of(options, config), target.key_of(options)
    address = f"{url}/v2/models/{urllib.parse.quote(options.model)}"
    try:
        metadata = _fetch(address, key, Metadata)
        stated = _fetch(f"{address}/config", key, _Config)
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        sys.stderr.write(f"penstock: {_why(error, url)}\n")
        return 1
    decoupled, batches = stated.model_transaction_policy.decoupled, stated.max_batch_size > 0
    layouts = (
        []
        if decoupled
        else [_kserve(url, options.model, metadata), _trtis(url, options.model, metadata, batches)]
    )
    if options.json:
        print(terminal.as_json({"model": options.model, "decoupled": decoupled, "requests": layouts}))
    elif decoupled:
        print(f"{options.model} gives any number of responses to a request: POST {address}/generate_stream")
    else:
        print("\n\n".join("\n".join(_lines(layout)) for layout in layouts))
    return 0


def _fetch(address: str, key: str, kind: type[T]) -> T:
    return msgspec.json.decode(target.fetched(address, key, 30), type=kind)


def _why(error: Exception, url: str) -> str:
    """Why the server gave no layout, in one line."""
    why = target.failure(error)
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {why}"
    if isinstance(error, OSError):
        return f"{url} cannot be asked: {why}; start a server, or name another with --url"
    if isinstance(error, http.client.HTTPException):
        return f"{url} gave no whole answer: {why}; is another server running there?"
    return f"{url} gave an answer that is no description of a model: {why}; is another server running there?"


def shape_of(tensor: Declared) -> list[int]:
    """The shape of one row; dimensions of any size are shown as 2, the batch dimension as 1."""
    first = [1] if tensor.shape and tensor.shape[0] == -1 else tensor.shape[:1]
    return [*first, *(UNKNOWN_SIZE if dim == -1 else dim for dim in tensor.shape[1:])]


def nbytes_of(tensor: Declared) -> int:
    """Raw bytes of `shape_of`. An element of BYTES is shown as the length and the text `text`."""
    size = 4 + len(_TEXT) if tensor.datatype == BYTES else DATATYPES[tensor.datatype].nbytes
    return math.prod(shape_of(tensor)) * size


def _kserve(url: str, model: str, metadata: Metadata) -> Layout:
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": shape_of(tensor),
            "parameters": {"binary_data_size": nbytes_of(tensor)},
        }
        for tensor in metadata.inputs
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}, separators=(",", ":"))
    tensors = _tensors(metadata)
    headers = {
        "Inference-Header-Content-Length": str(len(head.encode())),
        "Content-Length": str(len(head.encode()) + _nbytes(tensors)),
    }
    return Layout("KServe v2", f"{url}/v2/models/{model}/infer", headers, head, tensors)


def _trtis(url: str, model: str, metadata: Metadata, batches: bool) -> Layout:
    fields = ["batch_size: 1"]
    for tensor in metadata.inputs:
        dims = "".join(f" dims: {dim}" for dim in (shape_of(tensor)[1:] if batches else shape_of(tensor)))
        size = f" batch_byte_size: {nbytes_of(tensor)}" if tensor.datatype == BYTES else ""
        fields.append(f'input {{ name: "{tensor.name}"{dims}{size} }}')
    fields += [f'output {{ name: "{tensor.name}" }}' for tensor in metadata.outputs]
    tensors = _tensors(metadata)
    headers = {"NV-InferRequest": " ".join(fields), "Content-Length": str(_nbytes(tensors))}
    return Layout("TRTIS v1", f"{url}/api/infer/{model}", headers, "", tensors)


def _tensors(metadata: Metadata) -> list[Tensor]:
    return [
        Tensor(tensor.name, tensor.datatype, shape_of(tensor), nbytes_of(tensor))
        for tensor in metadata.inputs
    ]


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _lines(layout: Layout) -> Iterator[str]:
    """The layout for people."""
    yield layout.protocol
    yield f"  POST {layout.url}"
    yield from (f"  {name}: {value}" for name, value in layout.headers.items())
    yield "  body:"
    if layout.head:
        yield f"    {layout.head}"
    for tensor in layout.inputs:
        length = ", each element behind its length in 4 bytes" if tensor.datatype == BYTES else ""
        shown = f"{tensor.name}: {tensor.datatype} {tensor.shape}, little-endian{length}"
        yield f"    <{tensor.nbytes} bytes of {shown}>"
