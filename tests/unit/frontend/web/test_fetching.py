"""Fetching by URL from a site that runs here, and from hosts that must not be reached."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from frontend.web import fetching
from frontend.web.addresses import FetchFailed
from frontend.web.fetching import Fetcher, any_host
from ipc.settings import Fetch
from tests.fakes.web import HERE, Site, answer, names, to

ALLOWED = Fetch(allowed_networks=(HERE,))
NOT_PUBLIC = "is not on the internet"


def with_site(
    work: Callable[[Site, Fetcher], Coroutine[Any, Any, Any]], pages: dict[str, Any], bounds: Fetch = ALLOWED
) -> Any:
    """What `work` gives with a site of these pages."""

    async def run() -> Any:
        async with Site(pages).running() as site:
            fetcher = Fetcher(bounds)
            try:
                return await work(site, fetcher), site
            finally:
                await fetcher.close()

    return asyncio.run(run())


def fetched(
    pages: dict[str, Any], path: str = "/", bounds: Fetch = ALLOWED, **options: Any
) -> tuple[Any, Site]:
    """(URL, media type, charset, name, body) of a page."""

    async def work(site: Site, fetcher: Fetcher) -> Any:
        async with fetcher.open(site.url(path), **options) as page:
            return page.url, page.media_type, page.charset, page.name, await page.read()

    found: tuple[Any, Site] = with_site(work, pages, bounds)
    return found


def refusal(url: str, pages: dict[str, Any] | None = None, bounds: Fetch = ALLOWED, **options: Any) -> str:
    """Why a URL is refused; `{port}` is that of the site."""

    async def work(site: Site, fetcher: Fetcher) -> str:
        with pytest.raises(FetchFailed) as caught:
            async with fetcher.open(url.replace("{port}", str(site.port)), **options) as page:
                await page.read()
        return caught.value.message

    text: str = with_site(work, pages or {}, bounds)[0]
    return text


def test_a_page_is_fetched_with_its_type_and_its_name() -> None:
    pages = {"/a/r%C3%A9sum%C3%A9.txt": answer(b"hello", kind="Text/Plain; charset=latin-1")}
    (url, *rest), site = fetched(pages, "/a/r%C3%A9sum%C3%A9.txt")
    assert url == site.url("/a/r%C3%A9sum%C3%A9.txt")
    assert rest == ["text/plain", "latin-1", "résumé.txt", b"hello"]


def test_a_name_in_the_head_of_the_answer_wins() -> None:
    page = answer(b"1", Content_Disposition='attachment; filename="report.csv"')
    assert fetched({"/x": page}, "/x")[0][3] == "report.csv"


def test_a_request_has_no_cookies_and_no_credentials_and_asks_for_gzip() -> None:
    pages = {"/": to("/b"), "/b": answer(b"x", Set_Cookie="a=b")}
    pages["/"] = pages["/"].replace(b"\r\n\r\n", b"\r\nSet-Cookie: secret=1\r\n\r\n")
    _, site = fetched(pages)
    assert site.paths == ["/", "/b"]
    for head in site.heads:
        lines = {line.partition(":")[0].lower() for line in head.split("\r\n")[1:] if line}
        assert lines == {"host", "user-agent", "accept", "accept-encoding", "connection"}


def test_the_environment_names_no_proxy_and_no_netrc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert fetched({"/": answer(b"x")})[0][4] == b"x"


@pytest.mark.parametrize("body", [b"x" * 300_000, b""])
def test_gzip_is_inflated(body: bytes) -> None:
    assert fetched({"/": answer(gzip.compress(body), Content_Encoding="gzip")})[0][4] == body


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (answer(b"no gzip", Content_Encoding="gzip"), "no valid gzip"),
        (answer(gzip.compress(b"x" * 9999)[:-9], Content_Encoding="gzip"), "broke off"),
        (answer(b"x", Content_Encoding="br"), "content encoding 'br'"),
        (answer(b"x", status=404), "status 404"),
        (answer(b"x", status=418), "status 418"),
        (answer(status=302), "redirect to nowhere"),
        (to("http://[::1"), "no valid URL"),
        (to("ftp://example.com/"), "scheme http or https"),
        (to("file:///etc/passwd"), "scheme http or https"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP"),
        (answer(b"short").replace(b"Length: 5", b"Length: 500"), "broke off"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "does not speak HTTP"),
    ],
)
def test_answers_that_give_no_page_are_refused_by_their_reason(page: bytes, text: str) -> None:
    assert text in refusal("http://127.0.0.1:{port}/", {"/": page})


@pytest.mark.parametrize("nbytes", [9_999, 10_000, 10_001])
@pytest.mark.parametrize("form", ["length", "gzip", "chunked"])
def test_the_bound_on_bytes_holds_to_the_byte(nbytes: int, form: str) -> None:
    body, bounds = b"x" * nbytes, Fetch(allowed_networks=(HERE,), max_bytes=10_000)
    page = {
        "length": answer(body),
        "gzip": answer(gzip.compress(body), Content_Encoding="gzip"),
        "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (nbytes, body),
    }[form]
    if nbytes <= 10_000:
        assert fetched({"/": page}, bounds=bounds)[0][4] == body
    else:
        assert "bytes" in refusal("http://127.0.0.1:{port}/", {"/": page}, bounds)


def test_a_bomb_is_never_inflated_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    inflater = zlib.decompressobj

    class Watched:
        def __init__(self, *given: Any) -> None:
            self._inner = inflater(*given)

        def decompress(self, *given: Any) -> bytes:
            piece = self._inner.decompress(*given)
            sizes.append(len(piece))
            return piece

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    bomb = answer(gzip.compress(bytes(64 << 20)), Content_Encoding="gzip")
    monkeypatch.setattr(fetching.zlib, "decompressobj", Watched)
    bounds = Fetch(allowed_networks=(HERE,), max_bytes=1 << 20)
    assert "more than 1048576 bytes" in refusal("http://127.0.0.1:{port}/", {"/": bomb}, bounds)
    assert max(sizes) <= fetching.PIECE_NBYTES and sum(sizes) <= (1 << 20) + fetching.PIECE_NBYTES


def test_the_beginning_of_a_page_may_be_enough() -> None:
    async def work(site: Site, fetcher: Fetcher) -> bytes:
        async with fetcher.open(site.url()) as page:
            return await page.beginning(7)

    assert with_site(work, {"/": answer(b"0123456789")})[0] == b"0123456"


def test_an_answer_that_does_not_come_ends_at_the_bound_on_time() -> None:
    bounds = Fetch(allowed_networks=(HERE,), timeout_s=0.05)
    assert "within 0.05 s (fetch.timeout_s)" in refusal("http://127.0.0.1:{port}/", {"/": None}, bounds)


@pytest.mark.parametrize("hops", [3, 4])
def test_redirects_are_counted(hops: int) -> None:
    pages = {f"/{k}": to(f"/{k + 1}", (301, 302, 303, 307, 308)[k]) for k in range(hops)} | {
        f"/{hops}": answer(b"end")
    }
    if hops == 3:
        (url, *_, body), site = fetched(pages, "/0")
        assert (body, url) == (b"end", site.url("/3"))
    else:
        text = "more than 3 redirects (fetch.max_redirects)"
        assert text in refusal("http://127.0.0.1:{port}/0", pages)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:{port}/",
        "http://2130706434:{port}/",
        "http://0x7f000002:{port}/",
        "http://0x7f.0.0.2:{port}/",
        "http://0177.0.0.2:{port}/",
        "http://127.2:{port}/",
        "http://[::1]:{port}/",
        "http://[::]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://[::127.0.0.1]:{port}/",
        "http://[64:ff9b::7f00:1]:{port}/",
        "http://[2002:7f00:1::]:{port}/",
        "http://[fe80::1%25lo]:{port}/",
        "http://0.0.0.0:{port}/",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "https://192.168.0.1/",
    ],
)
def test_addresses_outside_of_the_internet_are_not_connected_to(url: str) -> None:
    # NOTE: the client library refuses some odd forms of addresses by itself.
    reasons = (NOT_PUBLIC, "no valid URL")
    assert any(reason in refusal(url, {"/": answer(b"secret")}) for reason in reasons)
    hop = {"/": to(url.replace("{port}", "1"))}
    assert any(reason in refusal("http://127.0.0.1:{port}/", hop) for reason in reasons)


def test_the_own_host_is_refused_unless_its_network_is_allowed() -> None:
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1"):
        assert "secret" not in refusal(f"http://{host}:{{port}}/", {"/": answer(b"secret")}, Fetch())


@pytest.mark.parametrize(
    "addresses", [["127.0.0.2"], ["10.0.0.1"], ["127.0.0.1 127.0.0.2"], ["::ffff:127.0.0.1"], ["fe80::1%1"]]
)
def test_a_name_of_the_internet_with_a_private_address_is_refused(
    addresses: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.socket, "getaddrinfo", names({"evil.example": addresses}))
    assert NOT_PUBLIC in refusal("http://evil.example:{port}/", {"/": answer(b"secret")})


def test_a_name_that_changes_its_address_is_connected_to_where_it_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fetching.socket, "getaddrinfo", names({"rebind.example": ["127.0.0.1", "127.0.0.2", "127.0.0.1"]})
    )
    pages = {"/": to("/again"), "/again": answer(b"secret")}
    # NOTE: the second hop resolves anew, and its address is the one that is checked.
    assert NOT_PUBLIC in refusal("http://rebind.example:{port}/", pages)


def test_a_resolver_that_lies_to_the_check_leads_to_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.socket, "getaddrinfo", names({"evil.example": ["127.0.0.2"]}))
    monkeypatch.setattr("frontend.web.addresses.Guard.check_name", lambda *_: None)
    assert NOT_PUBLIC in refusal("http://evil.example:{port}/", {"/": answer(b"secret")})


def test_an_allowed_network_is_reached_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.socket, "getaddrinfo", names({"site.example": ["127.0.0.1"]}))

    async def work(site: Site, fetcher: Fetcher) -> bytes:
        async with fetcher.open(site.url("/", "site.example")) as page:
            return await page.read()

    body, site = with_site(work, {"/": answer(b"x")})
    assert body == b"x" and f"Host: site.example:{site.port}" in site.heads[0]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://example.com/", "scheme http or https"),
        ("file:///etc/passwd", "scheme http or https"),
        ("data:text/plain,hello", "scheme http or https"),
        ("//example.com/", "scheme http or https"),
        ("example.com", "scheme http or https"),
        ("", "scheme http or https"),
        ("http://", "names no host"),
        ("http:///x", "names no host"),
        ("http://a:b@127.0.0.1:{port}/", "user name or a password"),
        ("http://a@127.0.0.1:{port}/", "user name or a password"),
        ("http://[::1", "no valid URL"),
        ("http://a:99999/", "no valid URL"),
        ("http://127.0.0.1:{port}/" + "x" * 5000, "the limit is 4096"),
        ("http://nowhere.invalid/", "cannot be reached"),
        ("http://127.0.0.1:1/", "cannot be reached"),
    ],
)
def test_urls_that_are_not_fetched(url: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.socket, "getaddrinfo", names({}))
    assert text in refusal(url, {"/": answer(b"secret")})


def test_whoever_calls_narrows_the_hosts_of_all_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fetching.socket, "getaddrinfo", names({"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]})
    )
    asked = []

    def permits(host: str) -> bool:
        asked.append(host)
        return host == "a.example"

    async def work(site: Site, fetcher: Fetcher) -> None:
        site.pages["/"] = to(site.url("/x", "b.example"))
        with pytest.raises(FetchFailed, match=r"'b\.example' is outside of the domains"):
            async with fetcher.open(site.url("/", "A.example."), permits=permits):
                pass

    _, site = with_site(work, {"/x": answer(b"secret")})
    assert asked == ["a.example", "b.example"] and site.paths == ["/"] and any_host("anything")


def test_a_trusted_fetcher_reaches_the_operators_own_hosts() -> None:
    async def run() -> bytes:
        async with Site({"/": answer(b"x")}).running() as site:
            fetcher = Fetcher(Fetch(), is_trusted=True)
            try:
                async with fetcher.open(site.url()) as page:
                    return await page.read()
            finally:
                await fetcher.close()

    assert asyncio.run(run()) == b"x"
