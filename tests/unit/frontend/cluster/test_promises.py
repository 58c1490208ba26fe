"""Each promise of a cluster (`promises.yaml`) has tests, which are there."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.harness.server import ROOT

ROWS = {
    "6": [*(str(number) for number in range(1, 12)), "promises"],
    "7": ["messages", "results", "inputs", "chunks", "payload_ref", "listener"],
    "8": ["home", "sequences", "generation", "cancel", "affinity", "parts", "slow clients"],
    "11.1": [
        "encode",
        "embeddings",
        "bodies",
        "healthz",
        "health",
        "status",
        "models",
        "pools",
        "configs",
        "page",
    ],
    "11.2": [
        *("bundle", "profile", "pool", "unknown profile", "unknown model", "no box", "loading", "full"),
        *("no broker", "late", "items", "large", "form", "keys"),
    ],
    "11.3": ["body", "errors", "answer", "lease", "assignment", "pinned"],
    "11.4": ["frame", "capacity"],
    "11.5": [
        *("post", "append-only", "refusals", "Idempotency-Key", "brokers gone", "resolve", "status", "hash"),
    ],
    "11.6": ["headers", "gateways", "bridges"],
}
"""Rows of the contract's sections 6 to 8 and 11."""
PROMISES = yaml.safe_load((Path(__file__).parent / "promises.yaml").read_text())


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the test functions of a file below `tests`."""
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def lacking(tests: Sequence[str]) -> list[str]:
    """What keeps a promise with these tests from being tested."""
    gone = [test for test in tests if test.partition("::")[2] not in functions_of(test.partition("::")[0])]
    return gone if tests else ["no test"]


def test_each_promise_has_words_and_tests_which_are_there() -> None:
    assert {name: found for name, each in PROMISES.items() if (found := lacking(each["tests"]))} == {}
    assert all(each["says"] for each in PROMISES.values())


def test_each_row_of_the_contract_has_a_promise() -> None:
    rows = {
        f"{section}.{row}" if row.isdigit() else f"{section} {row}"
        for section, own in ROWS.items()
        for row in own
    }
    named = {each["row"] for each in PROMISES.values() if "row" in each}
    assert named - {"4.1", "9", "10"} == rows


@pytest.mark.parametrize(
    "tests",
    [
        [],
        ["unit/frontend/cluster/test_promises.py::test_that_has_gone"],
        ["unit/frontend/cluster/test_promises.py::lacking"],
        ["unit/no/such.py::test_each_promise_has_words_and_tests_which_are_there"],
    ],
)
def test_a_promise_without_a_test_is_noticed(tests: list[str]) -> None:
    assert lacking(tests)
