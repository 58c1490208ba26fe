"""Searches the web: an interface, and what is behind it.

1. `SearchBackend.search` gives results of a query in the order of their engine.
2. `EngineSearch` asks a public search engine by the library `ddgs`, in a process of its own (`frontend.web.child`).
3. `UrlSearch` asks a URL of the operator that answers with JSON, in the form of SearXNG:
   `GET URL?q=QUERY&format=json` gives `{"results": [{"url", "title", "content"}]}`.

Results are hostile texts: `checked` drops those without a URL of http, and cuts what is long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from frontend.web.child import ChildFailed, Children, Found, SearchJob

if TYPE_CHECKING:
    from frontend.web.fetching import Fetcher

MAX_RESULTS = 10
"""Results that a search gives."""
MOST_ASKED = 50
"""Results that an engine is asked for where some will be dropped."""
MAX_ANSWER_NBYTES = 2 << 20
MAX_TITLE_CHARS, MAX_TEXT_CHARS, MAX_URL_CHARS = 300, 2000, 2048


class Result(NamedTuple):
    """One result."""

    url: str
    host: str
    title: str
    text: str


class SearchBackend(ABC):
    """Finds pages for a query."""

    @abstractmethod
    async def search(self, query: str, most: int) -> list[Found]:
        """Up to about `most` results. Raises `ChildFailed` or `FetchFailed`, with a message for the model."""

    async def close(self) -> None:
        """Close what is held open."""
        return


class EngineSearch(SearchBackend):
    """A public search engine."""

    def __init__(self, children: Children, timeout_s: float) -> None:
        self._children, self._timeout_s = children, timeout_s

    async def search(self, query: str, most: int) -> list[Found]:
        """Ask the engine."""
        job = SearchJob(query, most, max(1, int(self._timeout_s)))
        return await self._children.ask("search", msgspec.json.encode(job), list[Found], self._timeout_s)


class _Entry(msgspec.Struct):
    url: str = ""
    title: str | None = None
    content: str | None = None


class _Answer(msgspec.Struct):
    results: list[_Entry] = []


class UrlSearch(SearchBackend):
    """A URL of the operator. The `fetcher` reaches all addresses."""

    def __init__(self, fetcher: Fetcher, url: str) -> None:
        self._fetcher = fetcher
        self._begin = f"{url}{'&' if urlsplit(url).query else '?'}"

    async def search(self, query: str, most: int) -> list[Found]:
        """Ask the URL."""
        url = self._begin + urlencode({"q": query, "format": "json"})
        async with self._fetcher.open(url, most_nbytes=MAX_ANSWER_NBYTES) as page:
            body = await page.read()
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ChildFailed("the search answered with something else than results") from None
        return [Found(each.url, each.title or "", each.content or "") for each in answer.results]

    async def close(self) -> None:
        """Close the connections."""
        await self._fetcher.close()


def checked(found: Iterable[Found], permits: Callable[[str], bool], most: int = MAX_RESULTS) -> list[Result]:
    """At most `most` results of permitted hosts, each with a URL of its own."""
    results: dict[str, Result] = {}
    for each in found:
        host = host_of(each.url)
        if host and permits(host) and each.url not in results:
            texts = _plain(each.title, MAX_TITLE_CHARS), _plain(each.text, MAX_TEXT_CHARS)
            results[each.url] = Result(each.url, host, *texts)
        if len(results) == most:
            break
    return list(results.values())


def host_of(url: str) -> str:
    """The host of a URL of http or https in lower case; empty for all other texts."""
    if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
        return ""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return ""
    return host.rstrip(".") if parts.scheme in ("http", "https") and parts.username is None else ""


def _plain(text: str, most: int) -> str:
    return " ".join(text.replace("\0", "").split())[:most]
