"""The scope of a path that several rows name: what the strictest of them needs, as the gate looks at no method."""

from __future__ import annotations

from itertools import permutations

import pytest

from frontend.route_rows import Need, Route, Scopes


def _row(method: str, path: str, need: Need) -> Route:
    return Route(method, path, lambda _: None, need=need)  # type: ignore[arg-type]


ROWS = (
    _row("get", "/v2/files", ""),
    _row("post", "/v2/files", "admin"),
    _row("delete", "/v2/files", "infer"),
)


@pytest.mark.parametrize("rows", list(permutations(ROWS)))
def test_a_path_needs_the_strictest_of_its_rows_in_every_order(rows: tuple[Route, ...]) -> None:
    assert Scopes(rows).of("/v2/files") == "admin"
    assert Scopes([row for row in rows if row.need != "admin"]).of("/v2/files") == "infer"


@pytest.mark.parametrize("closed", ["/pages/{name}", "/pages/secret/{name}"])
@pytest.mark.parametrize("need", ["infer", "admin"])
def test_a_closed_row_closes_a_folder_that_another_row_opens(closed: str, need: Need) -> None:
    rows = [_row("get", "/pages/{name}", ""), _row("post", closed, need)]
    for table in (rows, rows[::-1]):
        assert Scopes(table).of(closed.replace("{name}", "x")) == need
    assert Scopes(rows[:1]).of("/pages/x") == ""
