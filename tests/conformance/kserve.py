"""A client of KServe v2 over HTTP by hand: binary requests composed and answers cut by their header, as a test says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.harness.server import Answer, Server

LENGTH = "Inference-Header-Content-Length"
ADD_SUB = "/v2/models/add_sub/infer"
A = np.arange(16, dtype="<i4").reshape(1, 16)
B = np.full((1, 16), 3, "<i4")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer: its JSON, and the bytes behind it."""

    answer: Answer
    head: dict[str, Any]
    tail: bytes

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.answer.status

    @property
    def error(self) -> str:
        """The error text."""
        assert self.answer.headers["content-type"] == "application/json"
        text = self.head["error"]
        assert isinstance(text, str)
        return text


def tensor(name: str, values: np.ndarray[Any, Any], datatype: str = "INT32", **more: Any) -> dict[str, Any]:
    """An input without data; `more` are further fields."""
    return {"name": name, "shape": list(values.shape), "datatype": datatype, **more}


def pair(**more: Any) -> list[dict[str, Any]]:
    """Both inputs of add_sub, to be carried in binary."""
    return [tensor("INPUT0", A, **more), tensor("INPUT1", B, **more)]


def json_pair() -> list[dict[str, Any]]:
    """Both inputs of add_sub in JSON."""
    return [tensor("INPUT0", A, data=A.tolist()), tensor("INPUT1", B, data=B.ravel().tolist())]


def post(
    server: Server, path: str, head: Any, tail: bytes | None = None, length: str | None = None, **headers: str
) -> Outcome:
    """POST of JSON (or bytes as they are) and, with `tail`, a binary request; `length` replaces the true one."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if tail is not None or length is not None:
        sent[LENGTH] = str(len(text)) if length is None else length
    return cut(server.request("POST", path, text + (tail or b""), sent))


def cut(answer: Answer) -> Outcome:
    """The parts of an answer."""
    length = answer.headers.get(LENGTH.lower())
    if length is None:
        return Outcome(answer, json.loads(answer.body) if answer.body else {}, b"")
    assert answer.headers["content-type"] == "application/octet-stream"
    return Outcome(answer, json.loads(answer.body[: int(length)]), answer.body[int(length) :])
