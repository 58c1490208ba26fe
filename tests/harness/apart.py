"""Runs functions of one module in a process of its own, for clients whose protobuf modules cannot live beside ours.

    with Apart("tests.conformance.triton_grpc") as apart:
        apart.call("infers_add_sub", address="127.0.0.1:8001")

What a function raises fails the caller with the text of the other side; what it returns comes back as JSON.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Apart:
    """The other process; it imports the module once and ends with the context."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", "tests.harness.apart", module]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """Run a function there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the other process ended with {self._process.wait()}"
        failure, value = json.loads(line)
        assert not failure, f"in the other process:\n{failure}"
        return value

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def functions_of(module: str, prefix: str) -> list[str]:
    """Names of the functions of a module that begin so, without importing it."""
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith(prefix)]


def serve(module: str, lines: Iterable[str]) -> None:
    """The other side: one JSON line in, one out."""
    answers, sys.stdout = sys.stdout, sys.stderr
    found = importlib.import_module(module)
    for line in lines:
        name, arguments = json.loads(line)
        failure, value = "", None
        try:
            value = getattr(found, name)(**arguments)
        except Exception:
            failure = traceback.format_exc()
        answers.write(json.dumps([failure, value]) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin)
