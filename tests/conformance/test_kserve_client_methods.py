"""The public clients offer no call that the tests of this directory do not make."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.harness.apart import ROOT

CLIENTS = ("http", "http_aio", "grpc", "grpc_aio")
OFFERED = """
import importlib, json, sys
client = importlib.import_module(sys.argv[1]).InferenceServerClient
print(json.dumps([name for name in dir(client) if name[0] != "_" and callable(getattr(client, name))]))
"""


def called(source: str) -> set[str]:
    """Names of methods that a module calls."""
    nodes = ast.walk(ast.parse(source))
    return {
        node.func.attr
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


@pytest.mark.parametrize("client", CLIENTS)
def test_every_method_of_the_public_client_is_called(client: str) -> None:
    # In a process of its own: its protobuf modules cannot live beside ours.
    module = f"tritonclient.{client.replace('_', '.')}"
    found = subprocess.run(
        [sys.executable, "-c", OFFERED, module], check=True, capture_output=True, text=True
    )
    offered = set(json.loads(found.stdout))
    assert {"infer", "load_model", "get_trace_settings"} <= offered
    source = (ROOT / "tests" / "conformance" / f"triton_{client}.py").read_text(encoding="utf-8")
    assert offered <= called(source), sorted(offered - called(source))
