"""What a request says of web search."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.generation.errors import InvalidField
from frontend.generation.searching import MAX_DOMAINS, SearchOptions, options_of


def read(**given: Any) -> SearchOptions:
    """The options of an object."""
    options = options_of(given, "w")
    assert options is not None
    return options


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"search_context_size": "huge"}, "w.search_context_size: expected one of low, medium, high"),
        ({"search_context_size": 3}, "w.search_context_size: expected one of"),
        ({"search_context_size": []}, "w.search_context_size: expected one of"),
        ({"return_token_budget": "none"}, "w.return_token_budget: expected one of default, unlimited"),
        ({"search_content_types": ["text", "image"]}, "w.search_content_types: expected"),
        ({"search_content_types": "text"}, "w.search_content_types: expected"),
        ({"external_web_access": "no"}, "w.external_web_access: expected true or false"),
        ({"filters": []}, "w.filters: expected an object"),
        ({"filters": {"allowed_domains": "example.com"}}, "w.filters.allowed_domains: expected a list"),
        ({"allowed_domains": {}}, "w.allowed_domains: expected a list"),
        (
            {"filters": {"blocked_domains": ["a.example"] * (MAX_DOMAINS + 1)}},
            "w.filters.blocked_domains: 101 domains, the limit is 100",
        ),
        (
            {"filters": {"blocked_domains": ["a.example", 3]}},
            "w.filters.blocked_domains[1]: expected a domain",
        ),
        ({"allowed_domains": ["https://example.com"]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": ["example.com/path"]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": ["*.example.com"]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": ["com"]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": [""]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": ["x" * 300 + ".example"]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": ["a..example"]}, "w.allowed_domains[0]: expected a domain"),
        ({"allowed_domains": ["a b.example"]}, "w.allowed_domains[0]: expected a domain"),
        ({"max_uses": 0}, "w.max_uses: expected a whole number from 1"),
        ({"max_uses": True}, "w.max_uses: expected a whole number from 1"),
        ({"max_uses": 1.5}, "w.max_uses: expected a whole number from 1"),
        ({"max_uses": 1 << 40}, "w.max_uses: expected a whole number from 1"),
        ({"user_location": "Rome"}, "w.user_location: expected an object"),
        ({"user_location": {"type": "exact"}}, "w.user_location.type: expected 'approximate'"),
        ({"user_location": {"approximate": "Rome"}}, "w.user_location.approximate: expected an object"),
        ({"user_location": {"city": 3}}, "w.user_location.city: expected a string"),
        ({"user_location": {"approximate": {"city": "x" * 129}}}, "w.user_location.approximate.city: 129"),
        ({"user_location": {"city": "a\0"}}, "w.user_location.city: expected a string without NUL"),
        ({"search_description": "x" * 1025}, "w.search_description: 1025 characters, the limit is 1024"),
        ({"extract_description": []}, "w.extract_description: expected a string"),
    ],
)
def test_mistakes_name_their_field(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidField) as caught:
        options_of(given, "w")
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize("given", [None, 3, True, "medium", [1]])
def test_options_are_an_object(given: Any) -> None:
    with pytest.raises(InvalidField, match="w: expected an object"):
        options_of(given, "w")


def test_without_access_there_is_no_search_though_mistakes_are_told() -> None:
    assert options_of({"external_web_access": False}, "w") is None
    assert options_of({"external_web_access": True}, "w") is not None
    with pytest.raises(InvalidField):
        options_of({"external_web_access": False, "max_uses": 0}, "w")


def test_null_is_absence() -> None:
    names = ("filters", "user_location", "search_context_size", "return_token_budget", "max_uses")
    more = ("search_content_types", "external_web_access", "search_description", "allowed_domains")
    assert read(**dict.fromkeys((*names, *more))) == SearchOptions()


@pytest.mark.parametrize(
    ("host", "permitted"),
    [
        ("example.com", True),
        ("news.example.com", True),
        ("a.b.example.com", True),
        ("badexample.com", False),
        ("example.com.evil.net", False),
        ("com", False),
        ("ads.example.com", False),
        ("x.ads.example.com", False),
        ("xn--mnchen-3ya.de", True),
        ("127.0.0.1", False),
    ],
)
def test_a_domain_stands_for_its_sub_domains_and_blocked_ones_win(host: str, permitted: bool) -> None:
    options = read(allowed_domains=["Example.COM.", "münchen.de"], blocked_domains=["ads.example.com"])
    assert options.permits(host) is permitted


def test_blocked_domains_alone_leave_all_others() -> None:
    options = read(filters={"blocked_domains": ["example.com"]})
    assert options.permits("example.org") and not options.permits("www.example.com")


def test_a_place_may_be_flat_or_inside() -> None:
    place = {"city": "Rome", "region": None, "country": "IT"}
    assert read(user_location={"type": "approximate", **place}).location == "Rome, IT"
    assert read(user_location={"approximate": place}).location == "Rome, IT"
