"""What a request asks of web search: the field `web_search_options`, and the tools of Responses and Anthropic.

1. `options_of` reads the object of any of them: domains, location, size of the context, budget, descriptions.
2. Domains are host names, and a domain stands for its sub-domains too. `SearchOptions.permits` decides about a host; a
   blocked domain wins over an allowed one. Both hold for results of searches and for pages that are read.
3. What is no search of texts is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.generation.errors import InvalidField

MAX_DOMAINS = 100
MAX_TEXT = 1024
MAX_PLACE = 128
CONTEXT_CHARS = {"low": 8_000, "medium": 16_000, "high": 32_000}
"""Characters that the model reads of one search or one page, by `search_context_size`."""
UNLIMITED_CHARS = 256_000
"""The same without a budget."""
_BUDGETS = ("default", "unlimited")
_DOMAIN = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9-]{2,63}")
_PLACES = ("city", "region", "country", "timezone")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a request searches. `location` is a text for the model, `max_uses` None any number of searches.

    Empty descriptions leave those of the server.
    """

    context_chars: int = CONTEXT_CHARS["medium"]
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    location: str = ""
    max_uses: int | None = None
    search_description: str = ""
    extract_description: str = ""

    def permits(self, host: str) -> bool:
        """Whether results and pages of a host may be shown; the host is in lower case."""
        if any(_is_within(host, domain) for domain in self.blocked):
            return False
        return not self.allowed or any(_is_within(host, domain) for domain in self.allowed)


def _is_within(host: str, domain: str) -> bool:
    return host == domain or host.endswith(f".{domain}")


def options_of(given: Any, where: str) -> SearchOptions | None:
    """The options of an object; None where the request wants no access to the web. Raises `InvalidField`.

    Anthropic has the domains in the object itself, OpenAI in `filters`.
    """
    if not isinstance(given, dict):
        raise InvalidField(where, "expected an object")
    _check_kinds(given, where)
    filters, place = given.get("filters"), f"{where}.filters"
    if filters is None:
        filters, place = given, where
    elif not isinstance(filters, dict):
        raise InvalidField(place, "expected an object")
    uses = given.get("max_uses")
    if uses is not None and (isinstance(uses, bool) or not isinstance(uses, int) or not 0 < uses < 1 << 31):
        raise InvalidField(f"{where}.max_uses", "expected a whole number from 1")
    access = given.get("external_web_access")
    if not isinstance(access, bool | None):
        raise InvalidField(f"{where}.external_web_access", "expected true or false")
    options = SearchOptions(
        _context_chars(given, where),
        _domains(filters, "allowed_domains", place),
        _domains(filters, "blocked_domains", place),
        _location(given.get("user_location"), f"{where}.user_location"),
        uses,
        _text(given, "search_description", where, MAX_TEXT),
        _text(given, "extract_description", where, MAX_TEXT),
    )
    return None if access is False else options


def _check_kinds(given: Mapping[str, Any], where: str) -> None:
    kinds = given.get("search_content_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "text" for kind in kinds)):
        raise InvalidField(f"{where}.search_content_types", 'expected ["text"]: only texts are searched')


def _context_chars(given: Mapping[str, Any], where: str) -> int:
    size, budget = given.get("search_context_size"), given.get("return_token_budget")
    for name, value, known in (
        ("search_context_size", size, CONTEXT_CHARS),
        ("return_token_budget", budget, _BUDGETS),
    ):
        if value is not None and (not isinstance(value, str) or value not in known):
            raise InvalidField(f"{where}.{name}", f"expected one of {', '.join(known)}")
    return UNLIMITED_CHARS if budget == "unlimited" else CONTEXT_CHARS[size or "medium"]


def _domains(given: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value, place = given.get(name), f"{where}.{name}"
    if not isinstance(value, list | None):
        raise InvalidField(place, "expected a list of domains")
    domains = value or []
    if len(domains) > MAX_DOMAINS:
        raise InvalidField(place, f"{len(domains)} domains, the limit is {MAX_DOMAINS}")
    return tuple(_domain(each, f"{place}[{index}]") for index, each in enumerate(domains))


def _domain(given: Any, where: str) -> str:
    text = given.strip().rstrip(".").lower() if isinstance(given, str) else ""
    if not text.isascii():
        try:
            text = text.encode("idna").decode()
        except UnicodeError:
            text = ""
    if not _DOMAIN.fullmatch(text):
        raise InvalidField(where, "expected a domain, such as example.com, without scheme and path")
    return text


def _location(given: Any, where: str) -> str:
    """The place of the user as a text; `approximate` may stand inside, as chat has it."""
    if given is None:
        return ""
    if not isinstance(given, dict):
        raise InvalidField(where, "expected an object")
    if given.get("type") not in (None, "approximate"):
        raise InvalidField(f"{where}.type", "expected 'approximate'")
    inner = given.get("approximate")
    if inner is not None:
        given, where = inner, f"{where}.approximate"
        if not isinstance(given, dict):
            raise InvalidField(where, "expected an object")
    return ", ".join(filter(None, (_text(given, name, where, MAX_PLACE) for name in _PLACES)))


def _text(given: Mapping[str, Any], name: str, where: str, most: int) -> str:
    """A text of an object, which may be absent."""
    value = given.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise InvalidField(f"{where}.{name}", "expected a string without NUL characters")
    if len(value) > most:
        raise InvalidField(f"{where}.{name}", f"{len(value)} characters, the limit is {most}")
    return value
