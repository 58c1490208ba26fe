"""The two tools of the web in a run: a search, and the text of a page.

1. A search gives at most ten results of permitted hosts. The model reads their titles, URLs and beginnings as far as
   the context of the request allows, in the order of the engine, or in that of a `Rank`.
2. A page is fetched by the server (`frontend.web.fetching`), from permitted hosts at each redirect. HTML becomes its
   main text, in a process of its own; other texts stay as they are. The model reads the beginning of a page. With a
   `Rank` and a query the model reads the passages of a long page that answer the query best, in the page's order.
3. `frontend.agent.results` gives the model `{"sources", "output"}`. Sources are hosts.

Pages and results are texts of strangers, and may try to instruct the model. Permissions of the other tools hold.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from frontend.agent import results, tools
from frontend.agent.ranking import Rank, passages
from frontend.agent.results import Answer
from frontend.generation.searching import SearchOptions
from frontend.web.child import Children, Extracted
from frontend.web.search import (
    MAX_RESULTS,
    MOST_ASKED,
    EngineSearch,
    SearchBackend,
    UrlSearch,
    checked,
    host_of,
)
from ipc.errors import InvalidInput
from ipc.settings import Agent, Fetch

if TYPE_CHECKING:
    from frontend.web.fetching import Fetched, Fetcher

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
        found = await self._backend.search(query, MOST_ASKED if is_narrow or rank else MAX_RESULTS)
        chosen = checked(found, options.permits, MOST_ASKED if rank else MAX_RESULTS)
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
