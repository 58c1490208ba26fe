"""How to find and start llama.cpp's own server, `llama-server`, on the processor."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from benchmarks.load import Address
from benchmarks.processes import Server, free_port
from benchmarks.serving import answers
from benchmarks.streaming import chat, read

PROGRAM = "LLAMA_SERVER"
"""The environment's variable that names the program where PATH has none."""


def program() -> Path | None:
    """The program `llama-server`: the one that the environment names, else the one on PATH; None without."""
    found = os.environ.get(PROGRAM) or shutil.which("llama-server")
    return Path(found) if found and os.access(found, os.X_OK) else None


def _chats(address: Address, model: str) -> bool:
    """Whether the server answers a real request now."""
    if not answers(address, "/health"):
        return False
    with contextlib.suppress(OSError, ValueError):
        [stream] = read(address, [chat(model, "ready", 2)])
        return stream.tokens > 0
    return False


def serve(binary: Path, weights: Path, model: str, *, threads: int, streams: int, context: int) -> Server:
    """A server of the GGUF file `weights`, called `model`, for `streams` texts of `context` tokens each at once."""
    port = free_port()
    address = ("127.0.0.1", port)
    options = ["--model", str(weights), "--alias", model, "--host", address[0], "--port", str(port)]
    options += ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(streams)]
    options += ["--ctx-size", str(streams * context), "--no-warmup", "--log-disable"]
    return Server("llama.cpp", [str(binary), *options], address, lambda: _chats(address, model))
