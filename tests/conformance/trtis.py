"""A client of the TRTIS v1 HTTP API by hand: headers as text, bodies cut by the sizes that the answer states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from tests.harness.server import Answer, Server


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
