"""What a fresh process loads: a frontend starts without any model library. `make check` holds the rule of imports."""

from __future__ import annotations

import json
import subprocess
import sys

from tools.source_tree import ROOT

HEAVY = ["torch", "transformers", "tokenizers", "sentence_transformers", "workers"]


def loaded_by(module: str, names: list[str]) -> list[str]:
    """Which of `names` are in `sys.modules` of a fresh interpreter that has imported `module`."""
    code = (
        f"import sys, json, {module}; print(json.dumps([name for name in {names!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_the_frontend_application_loads_no_model_library() -> None:
    assert loaded_by("frontend.app", HEAVY) == []


def test_a_server_of_one_host_loads_nothing_of_a_cluster() -> None:
    of_clusters = ["nats", "frontend.cluster", "frontend.bridge"]
    assert loaded_by("frontend.app, frontend.assembly, penstock.cli, workers.main", of_clusters) == []
    assert loaded_by("frontend.cluster.gateway", ["nats"]) == ["nats"]


def test_the_worker_package_loads_torch_only_when_it_runs() -> None:
    assert loaded_by("workers", ["torch", "falcon", "frontend"]) == []


def test_a_worker_reads_settings_and_catalog_before_torch() -> None:
    """`workers.main` sets variables which libgomp reads once, when torch is loaded."""
    assert loaded_by("workers.main", ["torch", "transformers"]) == []


def test_a_worker_loads_transformers_and_the_compiler_of_torch_with_the_first_model_that_needs_one() -> None:
    needless = ["transformers", "torch._dynamo", "sympy"]
    assert loaded_by("workers.runtime, workers.images", needless) == []


def test_a_loaded_module_is_noticed() -> None:
    assert loaded_by("falcon", ["falcon", "torch"]) == ["falcon"]
