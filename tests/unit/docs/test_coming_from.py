"""The tables of docs/coming_from.md: a row that says same or different is a route, a row that says refused is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from frontend.protocols.registry import protocols
from tests.fakes.vector_server import VectorServer

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
SERVERS = {"Text Embeddings Inference": "tei", "vLLM": "vllm", "infinity": "infinity", "Cohere": ""}
_ROUTE = re.compile(r"`(?:(GET|POST) )?(/[^` ]*)`")
KNOWN = protocols()
DESCRIBED = [route for route in KNOWN.routes if route.summary]
_NO_OPERATION = {("POST", "/")}
"""The root stands for another route."""


class Row(NamedTuple):
    """A route of a server, and what the table says of it."""

    server: str
    method: str
    path: str
    said: str
    why: str


def rows() -> Iterator[Row]:
    server = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            server = line[3:]
        cells = [cell.strip() for cell in line.split("|")]
        if (
            server not in SERVERS
            or len(cells) != 5
            or cells[2] not in ("same", "different", "refused", "see")
        ):
            continue
        method = "POST"
        for found in _ROUTE.finditer(cells[1]):
            method = found[1] or method
            yield Row(server, method, found[2], cells[2], cells[3])


def test_every_row_is_a_route_or_is_refused() -> None:
    known = {(one.method.upper(), one.shown) for one in DESCRIBED}
    found = list(rows())
    assert {row.server for row in found} == set(SERVERS) and len(found) > 50
    for row in found:
        route = (row.method, row.path)
        assert (row.said == "refused") == (route not in known | _NO_OPERATION), row
        needs = row.path in KNOWN.owners and row.said == "same"
        assert not needs or re.search(r"needs? `server\.compatible`", row.why), row


def test_every_route_of_these_servers_has_a_row() -> None:
    told = {row.path for row in rows()}
    tags = ("tei", "vllm", "infinity")
    routes = {
        one.path for one in DESCRIBED if one.tag in tags or one.path.startswith(("/v1/embed", "/v2/embed"))
    }
    assert routes <= told


@pytest.mark.parametrize("name", sorted(set(SERVERS.values())))
def test_what_is_refused_is_not_found(name: str, tmp_path: Path) -> None:
    server = VectorServer(tmp_path, server__compatible=name)
    refused = [row for row in rows() if SERVERS[row.server] == name and row.said == "refused"]
    assert refused
    for row in refused:
        answer = server.client.simulate_request(row.method, row.path)
        assert answer.status_code == 404 and row.why.startswith("404"), row
