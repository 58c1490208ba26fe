"""schemathesis against a running server: no answer is an error of the server, and every answer is in the schema."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.protocols.registry import protocols
from tests.fakes.kinds import write_kinds
from tests.harness.server import ROOT, serving

OPERATIONS = ("encode", "score", "extract", "embeddings", "rerank")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
PHASES = ("examples", "coverage", "fuzzing")
EXAMPLES = int(os.environ.get("TEST_FUZZ_SCHEMA_EXAMPLES", "150"))
"""Generated requests of each operation."""
LEAST_SUCCESSES = min(10, EXAMPLES // 15)
"""Answers 200 that each operation must have given, or its schema of success was hardly tried."""
LIMIT_S = 1800
LEFT_OUT = "^/v1/admin/|/(un)?load/?|^/v2/cudasharedmemory/"
"""A load of a broken model is answered 502, CUDA memory without a GPU 501, and an unload harms the others."""
SETTINGS = {
    "shared_memory.enabled": "true",
    "repository.control": "explicit",
    "server.compatible": "tei,vllm:/classify",
}


def examples() -> dict[str, str]:
    """Models that the examples of the document name, and the kind of fake that answers for them.

    Some phases send the examples as they are, so without these models their requests would end with 404.
    """
    kinds = {"/v1/embeddings": "plain", "/v1/rerank": "ranker"}
    named = {
        one.shown: one.example["model"] for one in protocols().routes if one.example and one.shown in kinds
    }
    return {model: kinds[path] for path, model in named.items()}


@pytest.mark.fuzz
@pytest.mark.timeout(LIMIT_S + 120)
def test_no_request_gives_a_server_error_or_an_answer_that_the_schema_does_not_know(tmp_path: Path) -> None:
    names = write_kinds(tmp_path / "catalog", examples())
    with serving(tmp_path, names, SETTINGS, catalog=tmp_path / "catalog") as server:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
        command += [
            "--checks",
            ",".join(CHECKS),
            "--phases",
            ",".join(PHASES),
            "--seed",
            "1",
            "--workers",
            "2",
        ]
        command += [
            "--max-examples",
            str(EXAMPLES),
            "--warnings",
            "off",
            "--exclude-path-regex",
            LEFT_OUT,
            "--no-color",
            "--continue-on-failure",
        ]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
        succeeded = {
            name: server.metric("penstock_requests_total", operation=name, code="200") for name in OPERATIONS
        }
        assert min(succeeded.values()) >= LEAST_SUCCESSES, succeeded
        print(succeeded, done.stdout[-300:])
        assert server.encode("plain", ["still here"]).status == 200
