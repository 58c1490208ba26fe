"""Whether a server is as it was: processes, descriptors, memory, shared memory, log, answers."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass

import numpy as np
import psutil
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as trtis
from tests.fuzz.http2 import kserve_infer, trtis_infer
from tests.fuzz.valid import PAIR, REQUESTS, A, B, strings
from tests.harness.quiet import wait_quiet
from tests.harness.rpc import Rpc, address_of
from tests.harness.server import PATIENCE_S, Server, alive, wait_until

MOST_DESCRIPTORS = 8
MOST_GROWTH_BYTES = 48 << 20
"""More descriptors, and more memory of its own, than a process had before."""
DOCUMENTED = frozenset(("501", "503", "504"))
"""Answers above 499 that requests may get: what is not offered, what passes with time, deadlines."""
_TROUBLE = re.compile(
    r"Traceback \(most recent call last\)|\bERROR\b|\bCRITICAL\b|was never awaited|Fatal Python error"
)
_FAILED = re.compile(r'^penstock_requests_total\{.*code="(5[0-9]{2})".*\} ([0-9.e+]+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one process: open descriptors, and bytes of memory that are its own (USS)."""

    descriptors: int
    own_bytes: int


class Watch:
    """Remembers a server that has come to rest; `check` compares."""

    def __init__(self, server: Server) -> None:
        self._server = server
        wait_quiet(server)
        self.names = self._names()
        self.base = self.figures()
        self._read_nbytes = len(server.log)

    def _names(self) -> dict[int, str]:
        server = self._server
        known = {
            server.process.pid: "arbiter",
            server.supervisor_pid(): "supervisor",
            server.worker_pid(): "worker",
        }
        known |= {pid: f"frontend {number}" for number, pid in enumerate(server.frontend_pids())}
        return {pid: known.get(pid, "other") for pid in server.pids()}

    def figures(self) -> dict[int, Figures]:
        """By pid."""
        found = {}
        for pid in self.names:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found[pid] = Figures(process.num_fds(), process.memory_full_info().uss)
        return found

    def check(self) -> None:
        """Raise `AssertionError` for the first thing that is not as it was."""
        server = self._server
        assert all(map(alive, self.names)), (
            f"died: {[name for pid, name in self.names.items() if not alive(pid)]}"
        )
        good(server)
        assert not (logged := self.trouble()), f"in the log: {logged}"
        failed = {code: count for code, count in _FAILED.findall(server.get("/metrics").body.decode())
                  if code not in DOCUMENTED and float(count)}  # fmt: skip
        assert not failed, f"answers that no request may get: {failed}"
        wait_quiet(server)
        assert self._names() == self.names, "a process was replaced"
        wait_until(lambda: not self.grown(), what="descriptors and memory of before")

    def trouble(self) -> str:
        """What was logged since the last look and should not be; "" when nothing was."""
        new, self._read_nbytes = self._server.log[self._read_nbytes :], len(self._server.log)
        found = _TROUBLE.search(new)
        return "" if found is None else new[max(0, found.start() - 600) : found.start() + 4000]

    def grown(self) -> list[str]:
        """Processes that hold too much."""
        now = self.figures()
        return [
            f"{name}: {self.base[pid]} to {now.get(pid)}"
            for pid, name in self.names.items()
            if pid not in now
            or now[pid].descriptors > self.base[pid].descriptors + MOST_DESCRIPTORS
            or now[pid].own_bytes > self.base[pid].own_bytes + MOST_GROWTH_BYTES
        ]

    def report(self) -> str:
        """Descriptors and memory of every process, before and now."""
        now = self.figures()
        return "; ".join(
            f"{name} {self.base[pid].descriptors} to {now[pid].descriptors} descriptors, "
            f"{self.base[pid].own_bytes >> 20} to {now[pid].own_bytes >> 20} MiB"
            for pid, name in self.names.items()
            if pid in now
        )


def good(server: Server) -> None:
    """Good requests of every protocol, each on a fresh connection, answered right and in time."""
    _kserve(server)
    _trtis(server)
    answer = server.encode("fake/echo", ["still here"], PATIENCE_S)
    assert answer.status == 200, answer.body
    with Rpc(address_of(server)) as rpc:
        found = rpc.call("ModelInfer", kserve_infer("good"), PATIENCE_S)
        assert found.id == "good" and found.raw_output_contents[0] == (A + A).tobytes()
        infer = rpc.channel.unary_unary(
            "/nvidia.inferenceserver.GRPCService/Infer",
            trtis.InferRequest.SerializeToString,
            trtis.InferResponse.FromString,
        )
        classes = infer(trtis_infer(9), timeout=PATIENCE_S)
        assert classes.request_status.code == trtis.SUCCESS and classes.meta_data.id == 9


def _kserve(server: Server) -> None:
    for name in ("kserve-json", "kserve-binary"):
        valid = REQUESTS[name]
        answer = server.request(valid.method, valid.path, valid.body, valid.headers, PATIENCE_S)
        assert answer.status == 200, answer.body
        length = int(answer.headers["inference-header-content-length"])
        assert answer.body[length : length + 64] == (A + B).tobytes()
    numbers = strings(*(b"%d" % n for n in range(16)))
    head = json.dumps(
        {"inputs": [{"name": name, "shape": [1, 16], "datatype": "BYTES",
                     "parameters": {"binary_data_size": len(numbers)}} for name in ("INPUT0", "INPUT1")]}
    ).encode()  # fmt: skip
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = server.request(
        "POST", "/v2/models/add_sub_string/infer", head + numbers * 2, headers, PATIENCE_S
    )
    assert answer.status == 200, answer.body
    assert answer.json()["outputs"][0]["data"] == [str(2 * n) for n in range(16)]


def _trtis(server: Server) -> None:
    valid = REQUESTS["trtis-infer"]
    answer = server.request(valid.method, valid.path, PAIR, valid.headers, PATIENCE_S)
    assert answer.status == 200, answer.headers
    assert np.array_equal(np.frombuffer(answer.body[:128], "<i4"), np.concatenate([A + B, A - B]))
    status = text_format.Parse(answer.headers["nv-status"], trtis.RequestStatus())
    assert status.code == trtis.SUCCESS
