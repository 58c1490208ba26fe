"""The live page as it looks: idle, under load, with a dead worker, loading, with runs, trying, on a phone, dark.

Each look must fit its window. With TEST_SCREENSHOTS naming a directory, each look is kept there as a small PNG: `make
pictures` renews the pictures of the documents. The models are the fakes of the tests under names of a shop, and the
chat model of `make run`: SmolLM2 where its package is installed, else the tiny model, whose words mean nothing. Load,
death and restart are real.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from PIL import Image

from penstock import demo_chat, tiny_chat
from tests.conformance.required_tool import required_tool
from tests.harness.browser import Browser, Page
from tests.harness.load import Load
from tests.harness.server import ROOT, Server, serving, stopped
from tests.process.test_agent_server import MODEL, Run
from tests.tiny import chat_models

pytestmark = pytest.mark.long
KEPT_S = 84
"""How long the load goes on before a picture that is kept, so that the charts are full."""
TAKEN: list[Path] = []
"""Pictures of this run."""
ENTRY = """id: {name}
source: {{kind: directory, path: {weights}}}
adapter: tests.fakes.{adapter}
outputs: {outputs}
max_sequence_length: 512
loadtime: {{dims: 16, batch_ms: {batch_ms}, load_s: {load_s}}}
profiles:
  default: {{}}
  query: {{}}
  archive: {{}}
"""
CHAT = demo_chat.MODEL if importlib.util.find_spec(demo_chat.PACKAGE) else tiny_chat.MODEL
QUESTION = "What is the capital of France?"
LONGEST_START_S = 600
"""Both workers prove SmolLM2, on however few cores."""
LONGEST_ANSWER_S = 300
NEXT = "shop/products-next"
NEXT_LOAD_S = 12
SERVED = {
    "shop/products-small": ("adapter:FakeAdapter", "{dense: {dims: 16}}", 6),
    "shop/products-large": ("adapter:FakeAdapter", "{dense: {dims: 16}}", 14),
    "shop/rerank": ("scorer:FakeScorer", "{score: {}}", 9),
}
LANGUAGES = ("cs", "da", "de", "el", "en", "es", "fi", "fr", "hu", "it", "nl", "pl", "pt", "ro", "sv", "tr")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers with four models, and a catalog of many more that nobody has asked for."""
    place = tmp_path_factory.mktemp("pictures")
    with contextlib.redirect_stdout(io.StringIO()):
        assert demo_chat.main([str(place / "catalog")]) == 0
    fakes = SERVED | {f"shop/reviews-{code}": SERVED["shop/products-small"] for code in LANGUAGES}
    fakes[NEXT] = SERVED["shop/products-small"]
    for name, (adapter, outputs, batch_ms) in fakes.items():
        text = ENTRY.format(
            name=name,
            weights=ROOT / "tests" / "fakes" / "weights",
            adapter=adapter,
            outputs=outputs,
            batch_ms=batch_ms,
            load_s=NEXT_LOAD_S if name == NEXT else 0,
        )
        (place / "catalog" / f"{name.replace('/', '-')}.yaml").write_text(text)
    settings = {
        "worker.count": 2,
        "server.frontends": 2,
        "limits.load_wait_s": 60,
        "catalog.preload": ",".join([*SERVED, CHAT]),
    }
    with serving(place, (), settings, place / "catalog", ready_s=LONGEST_START_S) as started:
        yield started
    # Not before: the clients of the load run in this process.
    for file in TAKEN:
        in_256_colours(Image.open(file).convert("RGB")).save(file, optimize=True)


@contextlib.contextmanager
def opened_page(chromium: Browser, server: Server, view: str = "") -> Iterator[Page]:
    """The page with its first frame, in a wide window; its console must stay empty.

    On a busy machine frames may stay out. The page then asks over HTTP why, and is told to upgrade, which is no error.
    """
    with chromium.page() as opened:
        opened.look(1440, 900, "light")
        opened.open(f"{server.url}/{view}")
        opened.until("document.getElementById('live-text').textContent === 'live'")
        yield opened
        assert [line for line in opened.console if "426 (Upgrade Required)" not in line] == []


@pytest.fixture
def page(chromium: Browser, server: Server) -> Iterator[Page]:
    with opened_page(chromium, server) as opened:
        yield opened


def look(page: Page, name: str, width: int, height: int, scheme: str = "light") -> None:
    """The page fits a window of this size; a picture with a name is kept if TEST_SCREENSHOTS names a directory.

    A page whose frames stay out on a busy machine is grey until they come again.
    """
    page.look(width, height, scheme)
    page.until("document.getElementById('live-text').textContent === 'live'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    place = os.environ.get("TEST_SCREENSHOTS")
    if place and name:
        TAKEN.append(Path(place) / f"{name}.png")
        page.picture(TAKEN[-1])


def in_256_colours(picture: Image.Image) -> Image.Image:
    """A third of the size: the commonest colours stay as they are, the others become the nearest of a palette."""
    commonest = [colour for _, colour in sorted(picture.getcolors(1 << 24) or [], reverse=True)[:128]]
    covering = (
        picture.quantize(256 - len(commonest), Image.Quantize.MAXCOVERAGE).convert("RGB").getcolors() or []
    )
    palette = np.array([*commonest, *(colour for _, colour in covering)])
    colours, places = np.unique(np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True)
    nearest = np.array([np.abs(palette - colour.astype(int)).sum(axis=1).argmin() for colour in colours])
    small = Image.fromarray(nearest[places].reshape(picture.height, picture.width).astype(np.uint8), "P")
    small.putpalette(palette.astype(np.uint8).tobytes())
    return small


@contextlib.contextmanager
def chatting(server: Server) -> Iterator[None]:
    """A client that asks the chat model again and again; an answer may end with the worker that writes the answer."""
    enough = Event()

    def ask() -> None:
        body = {
            "model": CHAT,
            "messages": [{"role": "user", "content": f"{QUESTION} " * 12}],
            "max_tokens": 24,
        }
        while not enough.wait(0.3):
            assert server.post("/v1/chat/completions", body, timeout_s=LONGEST_ANSWER_S).status in (200, 503)

    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(ask)
        try:
            yield
        finally:
            enough.set()
        client.result()


def described(client: int, turn: int) -> str:
    """A text of a product, of some length."""
    return f"product {client} {turn}:" + " good" * (40 + 97 * (client + 3 * turn) % 400)


@contextlib.contextmanager
def busy(server: Server, page: Page, seconds: int = 5) -> Iterator[None]:
    """Clients of several models, who have asked for so many seconds."""
    with (
        Load(server.port, clients=5, model="shop/products-small", text=described),
        Load(server.port, clients=3, model="shop/products-large:query", text=described),
        chatting(server),
    ):
        page.until(f"past.track('requests').points.filter(point => point[1] > 1).length > {seconds}", 240)
        yield


def test_a_server_that_nobody_has_asked_yet(server: Server, page: Page) -> None:
    page.until("document.getElementById('first-example').textContent.startsWith('curl')")
    page.until("document.getElementById('readiness').textContent === 'Ready'", LONGEST_START_S)
    look(page, "status-idle", 1440, 1480)


def test_a_server_under_load(server: Server, page: Page) -> None:
    with busy(server, page, KEPT_S if os.environ.get("TEST_SCREENSHOTS") else 5):
        server.post("/v1/score/shop/rerank", {"query": {"text": "a"}, "items": [{"text": "one 1"}]})
        for _ in range(3):
            server.post("/v1/encode/shop/products-small", {"items": []})
        server.post("/v1/encode/shop/nothing", {"items": [{"text": "a"}]})
        page.until("document.querySelectorAll('#errors .error').length >= 2")
        page.until("past.track('errors').points.some(([, value]) => value > 0)")
        for name, width, height, scheme in (
            ("status-load", 1440, 2000, "light"),
            ("status-dark", 1440, 2000, "dark"),
            ("status-phone", 390, 2600, "light"),
            ("", 390, 1900, "dark"),
        ):
            look(page, name, width, height, scheme)


def test_one_of_two_workers_is_dead(server: Server, page: Page) -> None:
    pid = server.worker_pid(1)
    assert pid is not None
    seconds = KEPT_S // 2 if os.environ.get("TEST_SCREENSHOTS") else 5
    with busy(server, page, seconds), stopped(server.supervisor_pid()):
        os.kill(pid, signal.SIGKILL)
        page.until(
            "document.getElementById('readiness').textContent.startsWith('Degraded: 1 of 2 workers is down since')"
        )
        assert page.text("#readiness").endswith("(restarting)")
        page.until("document.querySelectorAll('#tile-requests .death').length === 1")
        down_s = 15 if os.environ.get("TEST_SCREENSHOTS") else 0
        page.until(f"past.downs(90).some(([from, to]) => to - from > {down_s})")
        look(page, "status-degraded", 1440, 800)
        look(page, "", 390, 800)
    page.until("document.getElementById('readiness').textContent === 'Ready'", LONGEST_START_S)


def test_a_worker_loads_a_model_that_a_request_asked_for(server: Server, page: Page) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.encode, NEXT, ["one"])
        page.until("/loading products-next [2-9]\\d %/.test(document.getElementById('devices').innerText)")
        page.until("/loading [2-9]\\d %/.test(document.getElementById('models').innerText)")
        look(page, "status-loading", 1440, 1300)
        look(page, "", 390, 1300)
        assert answer.result().status == 200
    page.until("document.getElementById('models').innerText.includes('on 1 of 2')")


def test_a_chat_and_vectors_in_the_browser(server: Server, page: Page) -> None:
    page.evaluate("location.hash = '#try'")
    page.until(
        "!document.getElementById('chat-box').disabled && !document.getElementById('vectors-box').disabled"
    )
    page.evaluate("byId('chat-most').value = 40")
    page.evaluate(f"byId('chat-input').value = '{QUESTION}', byId('chat-form').requestSubmit()")
    page.until("document.querySelector('.assistant .turn-note')?.innerText.includes('first after')", 120)
    page.evaluate("byId('vectors-form').requestSubmit()")
    page.until("document.querySelectorAll('.alike td').length > 9")
    for name, width, height, scheme in (
        ("status-try", 1440, 860, "light"),
        ("", 1440, 860, "dark"),
        ("status-try-phone", 390, 1500, "light"),
    ):
        look(page, name, width, height, scheme)


def test_many_models(server: Server, page: Page) -> None:
    with busy(server, page):
        page.evaluate("document.getElementById('models-more').click()")
        page.evaluate("[...document.querySelectorAll('.fold')].find(b => !b.hidden).click()")
        page.evaluate("document.querySelectorAll('.sorter')[6].click()")
        page.until("document.querySelectorAll('#models tr').length > 12")
        page.evaluate("document.getElementById('models-title').scrollIntoView()")
        look(page, "status-models", 1440, 900)
        look(page, "", 390, 900)


def test_a_run_waits_for_a_decision_and_another_works(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    required_tool("bwrap")
    place = tmp_path_factory.mktemp("runs")
    catalog = place / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", place / "chatml", context=4096))
    settings = {"agent.code_execution": "true", "agent.shell": "true", "server.graceful_timeout_s": 4}
    with (
        serving(place, (MODEL,), settings, catalog=catalog) as server,
        opened_page(chromium, server) as page,
        Run(server, "works", ["python3 simulate.py || sleep 600"], permission="auto"),
        Run(server, "asks", ["curl -O https://example.org/prices.csv\nwc -l prices.csv"]) as asks,
    ):
        asks.asked()
        page.until("document.querySelectorAll('.run').length === 2")
        page.until("/Shell command runs, [1-9]/.test(document.getElementById('runs').innerText)")
        page.evaluate("document.getElementById('runs-title').scrollIntoView()")
        look(page, "status-runs", 1440, 460)
        look(page, "", 390, 900, "dark")
