"""A server with the model of `make run-chat`: its answers, and what page, metrics and command line show of them.

With TEST_SCREENSHOTS naming a directory, a picture of the page is put there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock import tiny_chat
from penstock.tiny_chat import MODEL
from tests.harness.browser import Browser
from tests.harness.server import ROOT, Server, serving, wait_until

TEXT = "a question " * 20
"""Longer than a block of the cache, so that a second turn finds the first."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker; the model is written as `make run-chat` writes the model."""
    place = tmp_path_factory.mktemp("chat")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert tiny_chat.main([str(place / "catalog")]) == 0
    assert said.getvalue() == f"{MODEL} is in {place / 'catalog'}; {tiny_chat.NOTE}\n"
    with serving(place, (MODEL,), catalog=place / "catalog", supervised=False) as started:
        yield started


def ask(server: Server, text: str = TEXT, max_tokens: int = 24) -> str:
    """An answer of exactly `max_tokens` tokens."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body, timeout_s=60)
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["completion_tokens"] == max_tokens
    return str(answer.json()["choices"][0]["message"]["content"])


def test_the_same_question_has_the_same_answer_in_company(server: Server) -> None:
    alone = ask(server)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: ask(server), range(4))) == {alone}


def test_metrics_tell_tokens_cache_and_prefixes(server: Server) -> None:
    labels = {"model": MODEL, "worker": "worker-0"}
    before = server.metric("penstock_tokens_total", model=MODEL, direction="out")
    for _ in range(2):
        ask(server)
    wait_until(
        lambda: server.metric("penstock_tokens_total", model=MODEL, direction="out") >= before + 48,
        what="the tokens",
    )
    assert server.metric("penstock_prefix_cache_hits_total", **labels) > 0
    assert server.metric("penstock_kv_cache_blocks", **labels) > 0
    assert server.metric("mistralrs_sequences_capacity") == 32
    assert server.metric("mistralrs_sequences_completed_total", reason="length") >= 2
    assert server.metric("mistralrs_tokens_processed_total") > before + 48
    wait_until(lambda: server.metric("penstock_kv_cache_blocks_used", **labels) == 0, what="free blocks")


@contextlib.contextmanager
def asking(server: Server) -> Iterator[None]:
    """Two clients ask again and again meanwhile."""
    enough = threading.Event()

    def client() -> None:
        while not enough.is_set():
            ask(server, TEXT * 3, 60)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client) for _ in range(2)]
        try:
            yield
        finally:
            enough.set()
        for each in clients:
            each.result()


@pytest.mark.timeout(120)
def test_the_live_page_shows_what_the_engine_does(server: Server, chromium: Browser) -> None:
    with chromium.page() as page:
        page.look(1440, 1200, "light")
        page.open(f"{server.url}/")
        page.until("!document.getElementById('generation').hidden")
        cell = "document.querySelector('#generations [data-label=\"{}\"]').innerText"
        assert page.text("#generations .model-name") == MODEL
        with asking(server):
            page.until(f"parseFloat({cell.format('Running')}) > 0")
            page.until(f"parseFloat({cell.format('Tokens/s out')}) > 1")
            page.until(f"parseFloat({cell.format('Cache blocks')}) > 0")
            page.until(f"parseFloat({cell.format('First token')}) > 0")
            place = os.environ.get("TEST_SCREENSHOTS")
            if place:
                page.picture(Path(place) / "generation.png")
        page.until(f"{cell.format('Running')} === '0 of 32'")
        assert page.evaluate(cell.format("Prefix hits")).endswith(" %")
        shown = page.evaluate("document.getElementById('example').textContent")
        address, body = shown.split("'")[1], shown.split("-d ")[1].strip("'")
        assert address == f"{server.url}/v1/chat/completions"
        answer = server.post("/v1/chat/completions", json.loads(body), timeout_s=60)
        assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
        assert page.console == []


def test_the_command_line_talks_to_it(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "chat", "--url", server.url, "--max-tokens", "8"],
        cwd=ROOT, input="hello\nand again\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()


def test_a_load_of_streams_gives_times_of_tokens(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "bench", "--protocol", "chat", "--url", server.url,
         "--requests", "2", "--connections", "1", "--max-tokens", "8", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["succeeded"] == 2 and found["tokens_per_s"] > 0
    assert 0 < found["first_token_ms"]["p50"] <= found["latency_ms"]["max"]
