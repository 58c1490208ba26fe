"""The walk of a request: the modules that five requests pass through, in the order in which each is first entered.

1. Start a server whose processes record each module that they enter (`tools/recording`).
2. Send one text to encode, a KServe infer over HTTP and over gRPC, a chat with a streamed answer and a request to a
   decoupled model, several times each.
3. Print, for frontend and worker, the modules that every repetition has entered. Periodic work of the processes is in
   few repetitions, so most of that work drops out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ipc.protos import kserve_v2_pb2 as pb
from tests.harness import chat, decoupled
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import Server, make_server
from tests.tiny.programs import write_repository
from tools.source_tree import ROOT

REPETITIONS = 12
PAUSE_S = 0.01
READY_S = 600.0
"""The start of a server that records is slow, the more so on a machine with other work."""
MODELS = ("add_sub", decoupled.MODEL)
Entry = tuple[int, str]
"""CLOCK_MONOTONIC nanoseconds of an entry, and the module."""


@contextmanager
def recorded(place: Path) -> Iterator[Server]:
    """A server whose processes write their entries into files under `place`."""
    repository = write_repository(place / "models", MODELS)
    settings = grpc_settings() | {"repository.dirs": repository, "repository.allow_python": "true"}
    settings["catalog.dirs"] = chat.chat_catalogs(place)
    server = make_server(place, ("fake/noop", chat.MODEL), settings)
    entries = place / "entries"
    entries.mkdir()
    search = [str(ROOT / "tools" / "recording"), str(ROOT)]
    server.environment |= {
        "WALK_DIR": str(entries),
        "WALK_ROOT": str(ROOT),
        "PYTHONPATH": os.pathsep.join(search),
    }
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server
        server.stop()
    finally:
        server.kill_everything()


def infer_message() -> pb.ModelInferRequest:
    """Two INT32 tensors for `add_sub`."""
    raw = np.arange(16, dtype=np.int32).tobytes()
    message = pb.ModelInferRequest(model_name="add_sub", raw_input_contents=[raw, raw])
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return message


def infer_body() -> dict[str, object]:
    """The tensors of `infer_message` as the body of an infer over HTTP."""
    tensor = {"datatype": "INT32", "shape": [1, 16], "data": list(range(16))}
    return {"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]}


def chat_body() -> dict[str, object]:
    """A chat of two tokens, whose answer is streamed."""
    message = {"role": "user", "content": "hello"}
    return {"model": chat.MODEL, "messages": [message], "max_tokens": 2, "stream": True}


def entries_of(server: Server, pid: int) -> list[Entry]:
    """Entries that a process has recorded so far, by time."""
    lines = (Path(server.environment["WALK_DIR"]) / str(pid)).read_text(encoding="utf-8").splitlines()
    return sorted((int(at), name) for at, _, name in (line.partition(" ") for line in lines) if name)


def walk(server: Server, send: Callable[[], object]) -> dict[str, list[str]]:
    """Modules that every repetition of a request enters, by process, in the order of the first repetition."""
    send()
    spans = []
    for _ in range(REPETITIONS):
        time.sleep(PAUSE_S)
        began = time.monotonic_ns()
        send()
        time.sleep(PAUSE_S)
        spans.append((began, time.monotonic_ns()))
    pids = {"frontend": server.frontend_pids()[0], "worker": server.worker_pid() or 0}
    found = {}
    for process, pid in pids.items():
        entries = entries_of(server, pid)
        each = [
            list(dict.fromkeys(name for at, name in entries if began <= at <= ended))
            for began, ended in spans
        ]
        always = set.intersection(*map(set, each))
        found[process] = [name for name in each[0] if name in always]
    return found


def main() -> None:
    """Print the walks."""
    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as place, recorded(Path(place)) as server:
        rpc = Rpc(address_of(server))
        requests: dict[str, Callable[[], object]] = {
            "encode, one text": lambda: server.encode("fake/noop", ["a text"]),
            "KServe infer over HTTP": lambda: server.post("/v2/models/add_sub/infer", infer_body()),
            "KServe infer over gRPC": lambda: rpc.call("ModelInfer", infer_message()),
            "a stream of chat": lambda: server.post("/v1/chat/completions", chat_body()),
            "a stream of three parts over gRPC": lambda: list(rpc.stream(iter([decoupled.message(3)]))),
        }
        for title, send in requests.items():
            found = walk(server, send)
            print(f"{title}: {sum(map(len, found.values()))} modules")
            for process, names in found.items():
                print(f"  {process} ({len(names)}): {' '.join(names)}")
        rpc.channel.close()


if __name__ == "__main__":
    main()
