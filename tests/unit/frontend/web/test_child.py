"""Searches and hostile pages in processes of their own; the libraries are those of tests/fakes/extras."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from frontend.agent.web import EngineSearch
from frontend.web import child
from frontend.web.child import ChildFailed, Children, Extracted, Found
from tests import fakes
from tests.conformance.required_tool import lacking
from tests.harness.server import eventually, wait_until

EXTRAS = str(Path(fakes.__file__).parent / "extras")
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import the packages of tests."""
    monkeypatch.setenv("PYTHONPATH", EXTRAS)


def extracted(page: bytes, timeout_s: float = PATIENCE_S) -> Extracted:
    """The text of a page."""
    return asyncio.run(Children().ask("extract", page, Extracted, timeout_s))


def refusal(page: bytes, timeout_s: float = PATIENCE_S) -> str:
    """Why a page has no text."""
    with pytest.raises(ChildFailed) as caught:
        extracted(page, timeout_s)
    return caught.value.message


def children_of_ours() -> list[str]:
    """Command lines of the children of this process that run jobs."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = [
        Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in found if Path(f"/proc/{pid}").exists()
    ]
    return [line for line in lines if "frontend.web.child" in line]


def test_a_page_becomes_its_text_and_its_title() -> None:
    page = extracted("<html><title>Rom</title><body>Sieben Hügel</body></html>".encode())
    assert page.title == "Rom" and "Sieben Hügel" in page.text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (b"#raise", "the extract gave nothing"),
        (b"#crash", "the extract failed"),
        (b"#memory", "the extract gave nothing"),
        (b"#much", "the answer has more than 4194304 bytes"),
    ],
)
def test_a_page_that_breaks_the_library_costs_one_call(page: bytes, text: str) -> None:
    assert refusal(page) == text
    assert children_of_ours() == []


def test_a_child_that_says_more_than_anybody_reads_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unread(stream: Any) -> bytes:
        async def is_full() -> bool:
            return bool(stream._paused)

        await eventually(is_full, "a full stream")
        raise ChildFailed("enough")

    monkeypatch.setattr(child, "_bounded", unread)
    assert refusal(b"#much") == "enough"
    assert children_of_ours() == []


def test_a_page_is_read_without_a_network() -> None:
    allowed = subprocess.run(["unshare", "--user", "--net", "true"], check=False, capture_output=True)
    if allowed.returncode:
        lacking(f"no namespaces here: {allowed.stderr.decode().strip()}")
    network = extracted(b"#net").text
    assert network.startswith("net:[") and network != str(Path("/proc/self/ns/net").readlink())


def test_a_page_that_never_ends_is_ended() -> None:
    assert refusal(b"#hang", 0.3) == "the extract took more than 0.3 s"
    assert children_of_ours() == []


def test_the_kernel_ends_a_child_that_computes_for_too_long() -> None:
    async def run() -> int:
        _, code = await Children()._run("extract", b"#spin", 0.5)
        return code

    assert asyncio.run(run()) < 0


def test_a_page_without_text_has_none() -> None:
    assert extracted(b"#nothing") == Extracted("", "")


def test_what_a_library_prints_is_no_answer() -> None:
    assert extracted(b"<p>#print</p>").text == "#print"


def test_a_library_writes_no_file() -> None:
    assert extracted(b"#write").text == "no file"


def test_a_caller_that_goes_away_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def run() -> None:
        started = asyncio.Event()

        async def starting(*given: Any, **options: Any) -> Any:
            process = await start(*given, **options)
            started.set()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
        asked = asyncio.ensure_future(Children().ask("extract", b"#hang", Extracted, PATIENCE_S))
        await started.wait()
        # NOTE: the kernel shows the command line a moment after the start.
        wait_until(children_of_ours)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(run())
    assert children_of_ours() == []


def test_further_calls_wait_for_a_place_within_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_AT_ONCE", 1)

    async def run() -> list[Any]:
        children = Children()
        first = asyncio.ensure_future(children.ask("extract", b"#hang", Extracted, 5))
        await asyncio.sleep(0)
        second = children.ask("extract", b"<p>x</p>", Extracted, 0.2)
        told = await asyncio.gather(second, return_exceptions=True)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return told

    [told] = asyncio.run(run())
    assert isinstance(told, ChildFailed) and told.message == "the extract took more than 0.2 s"


def test_a_search_asks_the_engine_for_so_many_results() -> None:
    found = asyncio.run(EngineSearch(Children(), PATIENCE_S).search("rome", 3))
    assert found == [Found(f"https://example.com/{at}", f"rome {at}", "within 60 s") for at in range(3)]


def test_a_search_without_results_says_so() -> None:
    with pytest.raises(ChildFailed, match="the search gave nothing"):
        asyncio.run(EngineSearch(Children(), PATIENCE_S).search("#raise", 3))


def test_a_child_gets_neither_keys_nor_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_KEY", "HF_TOKEN", "HTTPS_PROXY", "DDGS_PROXY", "HOME"):
        monkeypatch.setenv(name, "secret")
    names = {
        each.title for each in asyncio.run(EngineSearch(Children(), PATIENCE_S).search("#environment", 3))
    }
    assert names <= {*child._PASSED, "PYTHONSAFEPATH", "SPT_NOENV", "LC_CTYPE"}


@pytest.mark.parametrize("answer", [b"", b"{", b"[1]", b'{"text": 3}'])
def test_an_answer_that_is_none_is_a_failure(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any) -> tuple[bytes, int]:
        return answer, 0

    monkeypatch.setattr(Children, "_run", run)
    assert refusal(b"") == "the extract failed"


@pytest.mark.parametrize(("needs_engine", "missing"), [(True, "ddgs"), (False, "trafilatura")])
def test_a_missing_package_is_named_with_its_extra(
    needs_engine: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None if name == missing else name)
    text = child.missing(needs_engine)
    assert text.startswith(f"the package {missing} is missing: the extra search (pip install")


def test_the_engine_is_needed_only_without_a_url_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None if name == "ddgs" else name)
    assert child.missing(needs_engine=False) == "" and "ddgs" in child.missing(needs_engine=True)


def test_the_real_library_finds_the_text_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    if text := child.missing(needs_engine=False):
        lacking(text)
    words = "<p>The quick brown fox jumps over the lazy dog, and goes home in the evening.</p>" * 20
    page = (
        f"<html><head><title>Fox</title></head><body><nav>Menu</nav><article>{words}</article></body></html>"
    )
    found = extracted(page.encode())
    assert found.title == "Fox" and "brown fox" in found.text and "Menu" not in found.text
