"""`penstock layout MODEL`: the header and the bytes of a request to a model of named tensors, for both protocols.

The command asks a running server for the model, and shows what a client without a library sends for one row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec

from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.settings import Settings
from penstock import asking, terminal

UNKNOWN_SIZE = 2
"""Size shown for a dimension of any size."""
_TEXT = b"text"


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
    parser.add_argument("model", type=asking.text, help="name of the model")
    terminal.with_json(parser)
    asking.add_arguments(parser)
    terminal.with_examples(parser, ("layout my-model", "the request of a model that takes tensors"))


def run(options: argparse.Namespace, config: Settings) -> int:
    """Print the layouts; 1 when the server or the model cannot be asked."""
    url, key = asking.url_of(options, config), asking.key_of(options)
    address = f"{url}/v2/models/{urllib.parse.quote(options.model)}"
    try:
        metadata, stated = (_fetch(address + tail, key) for tail in ("", "/config"))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"penstock: {_why(error, url)}\n")
        return 1
    decoupled = bool(stated.get("model_transaction_policy", {}).get("decoupled"))
    batches = int(stated.get("max_batch_size", 0)) > 0
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


def _fetch(address: str, key: str) -> dict[str, Any]:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _why(error: Exception, url: str) -> str:
    """The server's own sentence where the server sent one."""
    if isinstance(error, ValueError):
        return f"{url} gave an answer that is no JSON; is another server running there?"
    if not isinstance(error, urllib.error.HTTPError):
        reason = getattr(error, "reason", error)
        return f"{url} cannot be asked: {reason}; start a server, or name another with --url"
    text = error.read(100_000).decode(errors="replace")
    try:
        text = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        pass
    return f"the server answered {error.code}: {terminal.one_line(text[:300])}"


def shape_of(tensor: dict[str, Any]) -> list[int]:
    """The shape of one row; dimensions of any size are shown as 2, the batch dimension as 1."""
    first = [1] if tensor["shape"] and tensor["shape"][0] == -1 else tensor["shape"][:1]
    return [*first, *(UNKNOWN_SIZE if dim == -1 else dim for dim in tensor["shape"][1:])]


def nbytes_of(tensor: dict[str, Any]) -> int:
    """Raw bytes of `shape_of`. An element of BYTES is shown as the length and the text `text`."""
    size = 4 + len(_TEXT) if tensor["datatype"] == BYTES else DATATYPES[tensor["datatype"]].nbytes
    return math.prod(shape_of(tensor)) * size


def _kserve(url: str, model: str, metadata: dict[str, Any]) -> Layout:
    inputs = [
        {
            "name": tensor["name"],
            "datatype": tensor["datatype"],
            "shape": shape_of(tensor),
            "parameters": {"binary_data_size": nbytes_of(tensor)},
        }
        for tensor in metadata["inputs"]
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}, separators=(",", ":"))
    tensors = _tensors(metadata)
    headers = {
        "Inference-Header-Content-Length": str(len(head.encode())),
        "Content-Length": str(len(head.encode()) + _nbytes(tensors)),
    }
    return Layout("KServe v2", f"{url}/v2/models/{model}/infer", headers, head, tensors)


def _trtis(url: str, model: str, metadata: dict[str, Any], batches: bool) -> Layout:
    fields = ["batch_size: 1"]
    for tensor in metadata["inputs"]:
        dims = "".join(f" dims: {dim}" for dim in (shape_of(tensor)[1:] if batches else shape_of(tensor)))
        size = f" batch_byte_size: {nbytes_of(tensor)}" if tensor["datatype"] == BYTES else ""
        fields.append(f'input {{ name: "{tensor["name"]}"{dims}{size} }}')
    fields += [f'output {{ name: "{tensor["name"]}" }}' for tensor in metadata["outputs"]]
    tensors = _tensors(metadata)
    headers = {"NV-InferRequest": " ".join(fields), "Content-Length": str(_nbytes(tensors))}
    return Layout("TRTIS v1", f"{url}/api/infer/{model}", headers, "", tensors)


def _tensors(metadata: dict[str, Any]) -> list[Tensor]:
    return [
        Tensor(tensor["name"], tensor["datatype"], shape_of(tensor), nbytes_of(tensor))
        for tensor in metadata["inputs"]
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
