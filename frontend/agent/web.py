"""The two tools of the web in a run: a search, and the text of a page.

1. A search gives at most ten results of permitted hosts. The model reads their titles, URLs and beginnings as far as
   the context of the request allows, in the order of the engine, or in that of a `Rank`.
2. A page is fetched by the server (`frontend.web.fetching`), from permitted hosts at each redirect. HTML becomes its
   main text, in a process of its own; other texts stay as they are. The model reads the beginning of a page. With a
   `Rank` and a query the model reads the passages of a long page that answer the query best, in the page's order.
3. `frontend.agent.results` gives the model `{"sources", "output"}`. Sources are hosts.

4. `SearchBackend.search` gives results of a query in the order of their engine. `EngineSearch` asks a public search
   engine by the library `ddgs`, in a process of its own (`frontend.web.child`). `UrlSearch` asks a URL of the operator
   that answers with JSON, in the form of SearXNG: `GET URL?q=QUERY&format=json` gives
   `{"results": [{"url", "title", "content"}]}`. `checked` drops results without a URL of http, and cuts what is long.

Pages and results are texts of strangers, and may try to instruct the model. Permissions of the other tools hold.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from frontend.agent import results, tools
from frontend.agent.ranking import Rank, passages
from frontend.agent.results import Answer
from frontend.generation.searching import SearchOptions
from frontend.web.child import ChildFailed, Children, Extracted, Found, SearchJob
from ipc.errors import InvalidInput
from ipc.settings import Agent, Fetch

if TYPE_CHECKING:
    from frontend.web.fetching import Fetched, Fetcher
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


PAGE_NBYTES = 1 << 20
"""Bytes of a page that are read."""
_MARKUP = ("text/html", "application/xhtml+xml")
_TEXTS = ("application/json", "application/xml", "application/javascript", "application/yaml")

_NOT_OF_PAGES = ("idna", "punycode")
"""Encodings of host names, which take minutes to decode a page."""


class Web:
    """The web as runs of one frontend see it."""

    def __init__(
        self, backend: SearchBackend, fetcher: Fetcher, children: Children, timeout_s: float
    ) -> None:
        """`timeout_s` bounds the text of a page, beside the time of its fetch."""
        self._backend, self._fetcher, self._children = backend, fetcher, children
        self._timeout_s = timeout_s

    async def close(self) -> None:
        """Close what the search holds open."""
        await self._backend.close()

    async def search(
        self, given: tools.SearchArguments, options: SearchOptions, uses: int, rank: Rank | None
    ) -> Answer:
        """Results of a query, after `uses` searches of the run. Raises `InvalidInput` with a text for the model."""
        if options.max_uses is not None and uses >= options.max_uses:
            raise InvalidInput(tools.MAX_USES)
        is_narrow = bool(options.allowed or options.blocked)
        query = given.query
        if len(options.allowed) == 1:
            query = f"{query} site:{options.allowed[0]}"
        answers = await self._backend.search(query, MOST_ASKED if is_narrow or rank else MAX_RESULTS)
        chosen = checked(answers, options.permits, MOST_ASKED if rank else MAX_RESULTS)
        if rank is not None:
            order = await rank(given.query, [f"{result.title}\n{result.text}" for result in chosen])
            chosen = [chosen[at] for at in order[:MAX_RESULTS]]
        output, sources, left = list[dict[str, Any]](), list[dict[str, str]](), options.context_chars
        hosts = []
        for result in chosen:
            text = result.text[: max(left, 0)]
            left -= len(result.title) + len(result.url) + len(text)
            output.append({"title": result.title, "url": result.url, "description": text})
            sources.append({"url": result.url, "title": result.title})
            hosts.append(result.host)
        return results.found(output, hosts, sources)

    async def extract(
        self, given: tools.ExtractArguments, options: SearchOptions, query: str, rank: Rank | None
    ) -> Answer:
        """The text of a page, after a search for `query`. Raises `InvalidInput` with a text for the model."""
        async with self._fetcher.open(given.url, permits=options.permits) as page:
            body = await page.beginning(PAGE_NBYTES)
        if page.media_type in ("", *_MARKUP):
            extracted = await self._children.ask("extract", body, Extracted, self._timeout_s)
        else:
            extracted = Extracted(_text_of(body, page))
        text = extracted.text.replace("\0", "")
        if not text:
            raise InvalidInput("the page has no text")
        source = {"url": page.url, "title": extracted.title.replace("\0", "")}
        if rank is not None and query and len(text) > options.context_chars:
            text = await _fitting(text, query, rank, options.context_chars)
        return results.found(text[: options.context_chars], [host_of(page.url)], [source])


async def _fitting(text: str, query: str, rank: Rank, chars: int) -> str:
    """The passages of a text that answer a query best, in the order of the text, up to about `chars` characters."""
    parts = passages(text)
    taken, left = list[int](), chars
    for at in await rank(query, parts):
        if left <= 0:
            break
        taken.append(at)
        left -= len(parts[at]) + 1
    return "\n".join(parts[at] for at in sorted(taken))


def _text_of(body: bytes, page: Fetched) -> str:
    """The text of a page that is no HTML. Raises `InvalidInput` for a page that is no text."""
    kind = page.media_type
    if not (kind.startswith("text/") or kind in _TEXTS or kind.endswith(("+json", "+xml"))):
        raise InvalidInput(f"the page is no text, but {kind[:64]!a}")
    try:
        name = codecs.lookup(page.charset or "utf-8").name
        name = "utf-8" if name in _NOT_OF_PAGES else name
        return body.decode(name, errors="replace")
    except (LookupError, ValueError):
        return body.decode(errors="replace")


def web_of(agent: Agent, fetch: Fetch, fetcher: Fetcher) -> Web:
    """The web of the settings."""
    # PERF: only servers that search import the client library.
    from frontend.web.fetching import Fetcher

    children = Children()
    backend: SearchBackend = EngineSearch(children, agent.search_timeout_s)
    if agent.search_url:
        backend = UrlSearch(Fetcher(fetch, is_trusted=True), agent.search_url)
    return Web(backend, fetcher, children, agent.search_timeout_s)
