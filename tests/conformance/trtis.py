"""The models of the server that tests of TRTIS v1 share, and a client of its HTTP API by hand.

The client writes headers as text, and cuts bodies by the sizes that the answer states.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from tests.harness.server import Answer, Server
from tests.tiny.program_sources import ACCUMULATOR
from tests.tiny.programs import SCRIPTED, tensor, write_model, write_repository

NUMPY = {
    "BOOL": "?",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    **{
        f"{sign}INT{bits}": f"<{sign.lower() or 'i'}{bits // 8}"
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}
NAMED = {"BYTES": "TYPE_STRING", **{name: f"TYPE_{name}" for name in NUMPY}}
"""Every datatype of the contract, by the name that our models have for the type."""
MODELS = (
    "accumulator",
    "add_sub",
    "add_sub_string",
    "add_sub_unbatched",
    "classifier",
    *(f"identity_{name.lower()}" for name in NAMED),
    "raising",
    "reshape",
    "slow",
    "variable",
    "versions_all",
    "versions_latest",
    "versions_specific",
    "zero_size",
)
FADING = "fading"
"""A copy of `versions_all` that a test removes."""
KANA = "加算モデル"
STRICT = "strict"
"""A sequence model whose every tensor is FP16; it breaks its own configuration when its input begins with 9."""
_STRICT_SOURCE = (
    ACCUMULATOR.split("class ")[0]
    + '''class Strict(Model):
    """The first input, or one value too many."""

    def infer(self, batch):
        found = batch.array("A")
        return {"O": np.zeros((len(found), 3), np.float16) if (found == 9).any() else found}
'''
)


def write_models(repository: Path) -> Path:
    """Write the models of the shared server; returns `repository`."""
    write_repository(repository, MODELS, SCRIPTED)
    _write_strict(repository)
    write_model(repository, "add_sub", KANA, SCRIPTED)
    write_model(repository, "versions_all", FADING, SCRIPTED)
    return repository


def _write_strict(repository: Path) -> None:
    place = repository / STRICT / "1"
    place.mkdir(parents=True)
    controls = "".join(
        f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{name} int32_false_true: [0, 1] }} }}\n'
        for name in ("START", "READY")
    )
    sides = "".join(
        tensor(kind, name, "FP16", [2]) for kind, name in (("input", "A"), ("input", "B"), ("output", "O"))
    )
    (place.parent / "config.pbtxt").write_text(
        f"max_batch_size: 4\n{sides}sequence_batching {{\n{controls}}}\n"
    )
    (place / "model.py").write_text(_STRICT_SOURCE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer of infer: the HTTP answer, its status, its response header, and the raw bytes of its outputs."""

    answer: Answer
    status: pb.RequestStatus
    header: pb.InferResponseHeader
    raw: dict[str, bytes]

    def array(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        """One raw output with its dims, batch first."""
        output = next(output for output in self.header.output if output.name == name)
        return np.frombuffer(self.raw[name], dtype).reshape(self.header.batch_size, *output.raw.dims)


def status_of(answer: Answer) -> pb.RequestStatus:
    """The message in NV-Status."""
    line = answer.headers["nv-status"]
    assert line.isascii() and "\n" not in line
    return text_format.Parse(line, pb.RequestStatus())


def infer(
    server: Server,
    path: str,
    header: str | None,
    body: bytes = b"",
    query: str = "?format=binary",
    **more: str,
) -> Outcome:
    """POST /api/infer/<path>; the body of a good answer is cut by the rules of the contract."""
    sent = {"Content-Type": "application/octet-stream", **more}
    if header is not None:
        sent["NV-InferRequest"] = header
    answer = server.request("POST", f"/api/infer/{path}{query}", body, sent)
    short = text_format.Parse(answer.headers.get("nv-inferresponse", ""), pb.InferResponseHeader())
    if answer.status != 200:
        return Outcome(answer, status_of(answer), short, {})
    asked = text_format.Parse(header or "", pb.InferRequestHeader())
    elsewhere = {output.name for output in asked.output if output.HasField("shared_memory")}
    raw, at = {}, 0
    for output in short.output:
        if output.HasField("raw") and output.name not in elsewhere:
            raw[output.name] = answer.body[at : at + output.raw.batch_byte_size]
            at += output.raw.batch_byte_size
    assert at < len(answer.body), "the tail is missing"
    full = pb.InferResponseHeader()
    if query == "?format=binary":
        full.ParseFromString(answer.body[at:])
    else:
        text_format.Parse(answer.body[at:].decode("ascii"), full)
    return Outcome(answer, status_of(answer), full, raw)


def strings(*values: bytes) -> bytes:
    """STRING elements back to back, each behind its length."""
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)
