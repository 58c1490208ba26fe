"""A search engine without a network: the query says what happens."""

from __future__ import annotations

import os
from typing import Any


class DDGS:
    """Stands for the class of the package `ddgs`."""

    def __init__(self, timeout: int) -> None:
        self._timeout = timeout

    def text(self, query: str, *, max_results: int) -> list[dict[str, Any]]:
        """`#raise` fails, `#environment` gives the names of variables; all else is found in numbered pages."""
        if query == "#raise":
            raise RuntimeError("no results")
        if query == "#environment":
            return [{"href": "https://a.example/", "title": name, "body": ""} for name in sorted(os.environ)]
        return [
            {
                "href": f"https://example.com/{at}",
                "title": f"{query} {at}",
                "body": f"within {self._timeout} s",
            }
            for at in range(max_results)
        ]
