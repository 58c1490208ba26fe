"""Requests of the tensor protocols as bytes, and a repository of programs to send them to."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import Server
from benchmarks.serving import penstock
from tests.tiny.programs import write_repository

Request = tuple[str, dict[str, str], bytes]
"""Path, header fields, body."""
_PAIR = np.arange(32, dtype="<i4").tobytes()


@contextlib.contextmanager
def tensor_server(models: Sequence[str], **settings: str | int) -> Iterator[Server]:
    """Penstock with one frontend, one worker and these programs; further settings are named `section__field`."""
    with tempfile.TemporaryDirectory(prefix="penstock-programs-") as place:
        repository = write_repository(Path(place), models)
        values: dict[str, str | int] = {
            "server.frontends": 1,
            "worker.count": 1,
            "worker.torch_threads": 1,
            "repository.dirs": str(repository),
            "grpc.enabled": "false",
        }
        named = {name.replace("__", ".", 1): value for name, value in settings.items()}
        with penstock("fake/noop", values | named, fakes=True) as server:
            yield server


def binary(
    model: str, inputs: Sequence[dict[str, Any]], data: bytes, outputs: Sequence[dict[str, Any]]
) -> Request:
    """A KServe v2 request whose tensors follow its JSON."""
    head = json.dumps({"inputs": inputs, "outputs": outputs}, separators=(",", ":")).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return f"/v2/models/{model}/infer", headers, head + data


def add_sub() -> Request:
    """Two INT32 [16] tensors in, two out, all binary."""
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
        for name in ("INPUT0", "INPUT1")
    ]
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("OUTPUT0", "OUTPUT1")]
    return binary("add_sub", inputs, _PAIR, outputs)


def add_sub_v1() -> Request:
    """The same in TRTIS v1."""
    text = (
        'batch_size: 1 input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 } '
        'output { name: "OUTPUT0" } output { name: "OUTPUT1" }'
    )
    headers = {"Content-Type": "application/octet-stream", "NV-InferRequest": text}
    return "/api/infer/add_sub?format=binary", headers, _PAIR


def identity(elements: int) -> Request:
    """FP32 [1, elements] in and out, binary."""
    inputs = [{"name": "INPUT", "datatype": "FP32", "shape": [1, elements]}]
    outputs = [{"name": "OUTPUT", "parameters": {"binary_data": True}}]
    return binary("identity_fp32", inputs, np.zeros(elements, "<f4").tobytes(), outputs)
