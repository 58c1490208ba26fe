"""Each promise of a cluster (`promises.yaml`) has tests, which are there."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.harness.server import ROOT

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
