"""How to start `transformers serve` with continuous batching, in float32 on the processor."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from benchmarks.load import Address
from benchmarks.peers.environments import ensure
from benchmarks.processes import Server, free_port
from benchmarks.streaming import chat, read

PEER = "transformers"


def _chats(address: Address, model: str) -> bool:
    """Whether the server answers a real request now."""
    with contextlib.suppress(OSError, ValueError):
        [stream] = read(address, [chat(model, "ready", 2)])
        return stream.tokens == 2
    return False


def serve(directory: Path, threads: int) -> Server:
    """A server of the model in `directory`, whose name in requests is the path of `directory`.

    Its cache may take a tenth of the memory, as ours does by default.
    """
    python, port = ensure(PEER), free_port()
    options = ["--continuous-batching", "--device", "cpu", "--dtype", "float32", "--log-level", "error"]
    options += ["--host", "127.0.0.1", "--port", str(port), "--cb-max-memory-percent", "0.1"]
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": "",
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
    }
    address = ("127.0.0.1", port)
    return Server(
        "transformers serve",
        [str(python.with_name("transformers")), "serve", str(directory), *options],
        address,
        lambda: _chats(address, str(directory)),
        environment,
        Path(tempfile.gettempdir()),
    )
