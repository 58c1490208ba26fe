"""Requests to the tiny decoupled model `countdown`, over gRPC and as Server-Sent Events."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ipc.protos import kserve_v2_pb2 as pb
from tests.harness.server import Server

MODEL = "countdown"
FINAL = "triton_final_response"


def message(
    count: int, request_id: str = "", empty_final: bool = False, **asked: Any
) -> pb.ModelInferRequest:
    """A message of ModelStreamInfer that asks for so many responses."""
    made = pb.ModelInferRequest(
        model_name=MODEL, id=request_id, raw_input_contents=[np.int32(count).tobytes()]
    )
    made.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    if empty_final:
        made.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in asked.items():
        if isinstance(value, str | Path):
            made.parameters[name].string_param = str(value)
        else:
            made.parameters[name].int64_param = value
    return made


def number_of(answer: pb.ModelStreamInferResponse) -> int:
    """The number that a response has in all its elements; -1 for an empty final one."""
    assert not answer.error_message, answer.error_message
    found = answer.infer_response
    assert found.model_name == MODEL and found.model_version == "1"
    final = found.parameters[FINAL].bool_param
    if not found.outputs:
        assert final
        return -1
    assert not final and found.outputs[0].name == "OUTPUT"
    values = np.frombuffer(found.raw_output_contents[0], np.int32)
    assert list(found.outputs[0].shape) == [len(values)]
    assert (values == values[0]).all()
    return int(values[0])


class Events:
    """One request to generate_stream, and its events as they come."""

    def __init__(
        self, server: Server, count: int, path: str = f"/v2/models/{MODEL}/generate_stream", **asked: Any
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {
            "COUNT": count,
            **{name: str(value) if isinstance(value, Path) else value for name, value in asked.items()},
        }
        self._connection.request("POST", path, json.dumps(body))
        self._answer = self._connection.getresponse()
        self.status, self.content_type = self._answer.status, self._answer.getheader("Content-Type")

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            line = self._answer.readline()
            if not line:
                return
            assert line.startswith(b"data: ") and self._answer.readline() == b"\n", line
            yield json.loads(line[6:])

    def numbers(self) -> list[int]:
        """The numbers of all events that are left."""
        return [event["OUTPUT"] for event in self]

    def close(self) -> None:
        """Hang up."""
        self._answer.close()
        self._connection.close()
