"""Results of searches are checked before a model reads them."""

from __future__ import annotations

import pytest

from frontend.agent.web import MAX_RESULTS, Result, checked, host_of
from frontend.web.child import Found


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Example.com/a", "example.com"),
        ("http://example.com.:8080/?a=b#c", "example.com"),
        ("https://a@example.com/", ""),
        ("https://a:b@example.com/", ""),
        ("javascript:alert(1)", ""),
        ("data:text/html,x", ""),
        ("//example.com/", ""),
        ("https://", ""),
        ("https://exa mple.com/", ""),
        ("https://example.com/\n", ""),
        ("https://[::1", ""),
        ("https://example.com/" + "x" * 2048, ""),
        ("", ""),
    ],
)
def test_only_urls_of_pages_have_a_host(url: str, host: str) -> None:
    assert host_of(url) == host


def test_results_are_unique_bounded_and_plain() -> None:
    found = [
        Found(f"https://a.example/{at // 2}", " A\0\n title " + "t" * 400, "x" * 9999) for at in range(60)
    ]
    results = checked(found, lambda host: True)
    assert len(results) == MAX_RESULTS == len({result.url for result in results})
    assert results[0] == Result(
        "https://a.example/0", "a.example", ("A title " + "t" * 400)[:300], "x" * 2000
    )


def test_results_of_other_hosts_are_dropped_before_they_count() -> None:
    found = [Found(f"https://{'ab'[at % 2]}.example/{at}") for at in range(40)]
    assert {result.host for result in checked(found, lambda host: host == "b.example")} == {"b.example"}
    assert len(checked(found, lambda host: host == "b.example")) == MAX_RESULTS
