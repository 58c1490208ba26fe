"""The shipped samples of proxies, read as text: what they close, compared with the scopes that routes need.

`tests/process/test_proxies.py` and `test_proxy_tries.py` run the samples. Here a route of administration that a sample
forgets is named at once.
"""

from __future__ import annotations

import re

import pytest

from frontend.protocols.registry import protocols
from tests.harness.proxies import SAMPLES
from tests.harness.server import ROOT

KNOWN = protocols()
RULES = {
    "haproxy": re.compile(r"^ *acl closed var\(txn\.path\) -m reg (\S+)$", re.MULTILINE),
    "nginx": re.compile(r"^ *location ~\* (\S+) \{ return 404; \}$", re.MULTILINE),
}
"""How each sample writes a pattern of closed paths. Both compare without regard to case."""
CLOSED_FOR_ALL = {
    "/metrics",
    "/v2/repository/index",
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/x/status",
    "/v2/cudasharedmemory/status",
    "/v2/cudasharedmemory/region/x/status",
    "/api/sharedmemorycontrol/status",
    "/v1/config",
}
"""Paths of the state of one server, closed although a key for inference may read them."""


def closes(name: str, path: str) -> bool:
    """Whether the sample denies a path."""
    text = (ROOT / "deploy" / "proxy" / SAMPLES[name]).read_text(encoding="utf-8")
    return any(re.search(rule, path, re.IGNORECASE) for rule in RULES[name].findall(text))


def paths(need: str) -> set[str]:
    """The paths of all operations that need a scope, with names filled in."""
    filled = {re.sub(r"\{[^}]*\}", "x", route.path) for route in KNOWN.routes if route.summary}
    return {path for path in filled if KNOWN.need_of(path, open_metrics=False) == need}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_path_of_administration_is_closed(name: str) -> None:
    named = {f"{folder}x" for folder in KNOWN.scopes.admin_folders}
    assert {path for path in paths("admin") | named if not closes(name, path)} == set()


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_else_is_closed_but_the_state_of_one_server(name: str) -> None:
    assert {path for path in paths("infer") | paths("") if closes(name, path)} == CLOSED_FOR_ALL
