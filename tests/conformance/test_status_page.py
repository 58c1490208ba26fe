"""The page at `/`: what it answers to whom, and in a real browser that its numbers move and nothing of it breaks.

With TEST_SCREENSHOTS naming a directory, pictures of the page under load are put there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.access import api_keys
from tests.harness.browser import Browser, Page
from tests.harness.load import Load
from tests.harness.server import Server, make_server, serving

MODEL, SCORES = "fake/echo", "fake/score"
LOOKS = [
    (name, width, height, scheme)
    for name, width, height in (("wide", 1440, 1200), ("narrow", 390, 1700))
    for scheme in ("light", "dark")
]
EVIL = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends and one worker; the browser's stream may reach either."""
    models = (MODEL, SCORES)
    with serving(tmp_path_factory.mktemp("page"), models, {"server.frontends": 2}) as started:
        yield started


@pytest.mark.parametrize("accept", ["", "*/*", "application/json", "text/plain"])
def test_who_does_not_ask_for_html_gets_ok(server: Server, accept: str) -> None:
    answer = server.request("GET", "/", headers={"Accept": accept} if accept else {})
    assert (answer.status, answer.body) == (200, b"OK")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["vary"] == "Accept"


def test_a_browser_gets_one_page_that_may_load_and_run_nothing_else(server: Server) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    answer = server.request("GET", "/", headers=browser)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    page = answer.body.decode()
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page
    assert "innerHTML" not in page
    again = server.request("GET", "/", headers={**browser, "If-None-Match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert server.request("HEAD", "/", headers=browser).body == b""


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A tab of a browser that has written nothing to its console at the end."""
    with chromium.page() as opened:
        yield opened
        assert opened.console == []


def open_live(page: Page, server: Server, view: str = "") -> None:
    """Open the page and wait for its first frame."""
    page.open(f"{server.url}/{view}")
    page.until("document.getElementById('live-text').textContent === 'live'")


def keep_picture(page: Page, name: str) -> None:
    """Keep a picture of the window where TEST_SCREENSHOTS says, if it does."""
    folder = os.environ.get("TEST_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.picture(Path(folder) / f"{name}.png")


def test_the_numbers_move_under_load_and_every_look_fits_its_window(server: Server, page: Page) -> None:
    page.look(1440, 1200, "light")
    open_live(page, server)
    with Load(server.port, clients=3):
        page.until("parseFloat(document.querySelector('#tile-requests .value').innerText) > 1")
        page.until("parseFloat(document.querySelector('#tile-tokens .value').innerText) > 1")
        page.until("document.querySelectorAll('#requests .request:not([hidden])').length > 5")
        first = page.text("#requests .when")
        page.until(f"document.querySelector('#requests .when').innerText !== {json.dumps(first)}")
        assert page.text("#models td.model-name") == MODEL
        page.until("parseFloat(document.querySelector('[data-label=\"p50\"]').innerText) > 0")
        page.until("document.querySelector('.device .line').hasAttribute('d')")
        answer = server.post(f"/v1/encode/{MODEL}", {"items": []}, X_Request_ID="page-error-1")
        assert answer.status == 400
        page.until("document.getElementById('errors').innerText.includes('page-error-1')")
        assert "items: may not be empty" in page.text("#errors")
        for name, width, height, scheme in LOOKS:
            page.look(width, height, scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            keep_picture(page, f"status-{name}-{scheme}")
    page.until("document.querySelector('#readiness').innerText === 'Ready'")
    assert set(page.requests) == {f"{server.url}/"}, "the page asked for something else"


CHANGED = """(change => {
    const frame = structuredClone(panels.find(panel => panel instanceof Models).last);
    change(frame);
    for (const panel of panels) panel.draw(frame);
})"""
"""Draws the last frame with a change. The next frame of the server undoes the change, so look at once."""


def test_the_headline_says_what_is_down_since_when(server: Server, page: Page) -> None:
    open_live(page, server)
    problems = [
        {"kind": "down", "text": "1 of 2 workers is down", "since": 1000.0, "note": "restarting"},
        {"kind": "model", "text": "Model a could not be loaded", "since": 0, "note": "CONFIG_ERROR"},
    ]
    health = json.dumps({"state": "degraded", "why": "", "problems": problems})
    said, others, title = page.evaluate(
        f"{CHANGED}(frame => {{ frame.health = {health}; }}),"
        " [...['readiness', 'problems'].map(id => byId(id).innerText), document.title]"
    )
    clock = page.evaluate("asClock(1000)")
    assert said == f"Degraded: 1 of 2 workers is down since {clock} (restarting)"
    assert others == "Model a could not be loaded (CONFIG_ERROR)"
    assert title == "Degraded · Penstock"
    page.until("document.getElementById('readiness').innerText === 'Ready'")


def test_a_page_that_stood_still_takes_waiting_frames_before_it_calls_the_server_silent(
    server: Server, page: Page
) -> None:
    open_live(page, server)
    assert page.evaluate(
        "(stream => { const long = performance.now() - 9000, told = [];"
        " Object.assign(stream, {socket: {close() {}}, heardAt: long, checkedAt: long, again: why => told.push(why)});"
        " stream.check(); told.push('in time'); stream.heardAt = long; stream.check(); return told;"
        " })(Object.create(Stream.prototype))"
    ) == ["in time", "The server is silent."]


def test_a_loading_worker_and_a_model_on_some_workers_say_so(server: Server, page: Page) -> None:
    open_live(page, server)
    change = """frame => {
        const [device] = frame.devices;
        const loading = [{model: 'org/large', progress: 0.434}];
        frame.devices = [{...device, loading}, {...device, worker: 1, loading: []}];
        frame.models[0].devices = ['cpu'];
    }"""
    loading, other, state = page.evaluate(
        f"{CHANGED}({change}), [...document.querySelectorAll('.device')].map(card => card.innerText)"
        ".concat(document.querySelector('#models td.state').innerText)"
    )
    assert "loading large 43 %" in loading and "loading" not in other
    assert state == "on 1 of 2"


RUNS = """frame => {
    const run = {request_id: 'req_first', model: 'org/writer', owner: 'k1', began: frame.timestamp - 90,
        round: 1, files: 2, doing: 'tool', arguments: 'print(1)', arguments_chars: 8, approval_id: '',
        since: frame.timestamp - 12, tool: 'Python code'};
    const waits = {...run, request_id: 'req_second', doing: 'approval', tool: 'Shell command', approval_id: 'appr/1',
        arguments: %s, arguments_chars: 5000};
    frame.runs = [run, waits].slice(%d);
    const host = {alive: true, since: 0, sandboxes: 3, layers: {namespaces: 'active', cgroup: 'not delegated'},
        mcp: {connected: 2, tools: 1}};
    const state = {files: 7, bytes: 5e6, max_bytes: 8e9, full: %s};
    frame.agent = {in_flight: {model: 0, tool: 1, approval: 4}, host, state};
}"""
"""Two runs, of which the second waits for a decision. To be filled in: arguments, runs left out, a full directory."""
HELD = "Stream.prototype.take = function () { this.heardAt = performance.now(); }"
"""The page takes no further frame."""
WAITING = "[...document.querySelectorAll('.run')].at(-1)"


def test_a_page_of_a_server_without_tools_shows_no_runs(server: Server, page: Page) -> None:
    open_live(page, server)
    assert page.evaluate("byId('runs-section').hidden")


def test_runs_are_shown_with_what_they_do_and_the_state_of_tools(server: Server, page: Page) -> None:
    open_live(page, server)
    shown = f"{HELD}; {CHANGED}({RUNS % (json.dumps(EVIL), 0, 'true')}), "
    first, waits, note, facts = page.evaluate(
        f"{shown}[...document.querySelectorAll('.run'), byId('runs-note'), byId('tool-host')].map(one => one.innerText)"
    )
    assert "Python code runs, 12 s" in first and "round 2, 2 files, 1 min 30 s in all" in first
    assert "writer, key k1" in first and "print(1)" in first and "Approve" not in first
    assert "Shell command waits for a decision, 12 s" in waits and EVIL in waits
    assert f"Only the first {len(EVIL)} of 5000 characters are shown." in waits
    assert note == "5 under way · 4 wait for a decision · 2 shown"
    assert "alive since" in facts and "Missing layers\ncgroup: not delegated" in facts
    assert "Sandbox layers\nnamespaces\n" in facts
    assert "2 connected, 1 tool" in facts and "full: uploads are refused" in facts
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    for name, width, height, scheme in LOOKS:
        page.look(width, height, scheme)
        fits = f"{shown}document.documentElement.scrollWidth <= innerWidth"
        assert page.evaluate(fits), name
        page.evaluate("byId('runs-title').scrollIntoView()")
        keep_picture(page, f"runs-{name}-{scheme}")


def test_arguments_are_shown_in_their_order_and_a_cut_is_told(server: Server, page: Page) -> None:
    open_live(page, server)
    arguments = "\U0001f40e" * 3000 + "\u202eab"
    waits = page.evaluate(
        f"{HELD}; {CHANGED}({RUNS % (json.dumps(arguments), 0, 'false')}), {WAITING}.innerText"
    )
    assert "Only the first 3003 of 5000 characters are shown." in waits
    assert "\\u202eab" in waits and "\u202e" not in waits


def test_two_runs_of_one_id_are_both_shown(server: Server, page: Page) -> None:
    open_live(page, server)
    change = f"""frame => {{
        ({RUNS % ("null", 0, "false")})(frame);
        Object.assign(frame.runs[1], {{request_id: 'req_first', began: frame.timestamp - 80}});
    }}"""
    count = page.evaluate(f"{HELD}; {CHANGED}({change}), document.querySelectorAll('.run').length")
    assert count == 2


def test_a_viewer_without_the_scope_admin_sees_neither_arguments_nor_buttons(
    server: Server, page: Page
) -> None:
    open_live(page, server)
    change = f"""frame => {{
        ({RUNS % ("null", 0, "false")})(frame);
        for (const run of frame.runs) Object.assign(run, {{arguments: null, arguments_chars: null, approval_id: ''}});
    }}"""
    waits = page.evaluate(f"{CHANGED}({change}), {WAITING}.innerText")
    assert "A key with the scope admin sees the call and may decide here." in waits and "Approve" not in waits


def test_a_wait_is_decided_by_keyboard_and_keeps_the_place_while_frames_come(
    server: Server, page: Page
) -> None:
    open_live(page, server)
    page.command("Emulation.setFocusEmulationEnabled", enabled=True)
    page.evaluate(
        "window.asked = []; window.answer = new Response('{}', {status: 404});"
        "window.fetch = (path, asking) => { asked.push([path, asking]); return Promise.resolve(answer); };"
        f"{HELD}; access.key = 'pk_admin';"
        f"{CHANGED}({RUNS % ('`rm -r a`', 0, 'false')});"
    )
    reason = f"{WAITING}.querySelector('input')"
    page.evaluate(f"{reason}.focus(), {reason}.value = ' not this one '")
    page.evaluate(f"{CHANGED}({RUNS % ('`rm -r a`', 1, 'false')})")
    assert page.evaluate(f"document.activeElement === {reason} && {reason}.value") == " not this one "
    buttons = f"[...{WAITING}.querySelectorAll('button')]"
    assert page.evaluate(f"{buttons}.map(one => one.ariaLabel)") == [
        f"{label}: Shell command of req_second" for label in ("Approve", "Approve for the session", "Deny")
    ]
    said = f"{WAITING}.querySelector('.outcome').innerText"
    page.evaluate(f"{buttons}[2].focus(), {buttons}[2].click()")
    page.until(f"{said} === 'nobody waits for this decision any more'")
    [[path, asking]] = page.evaluate("asked")
    assert path == "/v1/agent/approvals/appr%2F1"
    assert json.loads(asking["body"]) == {"decision": "deny", "message": "not this one"}
    assert asking["headers"]["Authorization"] == "Bearer pk_admin"
    other = RUNS.replace("appr/1", "appr/2") % ("`ls`", 1, "false")
    page.evaluate(f"window.answer = new Response('{{}}'), {CHANGED}({other}), {buttons}[1].click()")
    page.until(f"{said} === 'decided' && {buttons}[0].disabled")
    assert json.loads(page.evaluate("asked[1][1].body")) == {
        "decision": "approve",
        "remember_for_session": True,
    }


def test_equal_errors_are_one_row_with_a_count(server: Server, page: Page) -> None:
    open_live(page, server)
    for _ in range(3):
        assert server.post(f"/v1/encode/{MODEL}", {"items": "none"}).status == 400
    shown = "[...document.querySelectorAll('.error .count')].filter(count => count.offsetWidth)"
    counts = f"{shown}.map(count => count.innerText.slice(1))"
    page.until(f"{counts}.includes('3')")
    assert page.evaluate(counts).count("3") == 1


def test_the_death_of_a_worker_is_a_mark_in_the_charts(server: Server, page: Page) -> None:
    open_live(page, server)
    page.until("past.tracks.get('requests') !== undefined")
    page.evaluate("past.look({worker: 3, state: 'leaving', since: past.now - 7})")
    page.evaluate("past.look({worker: 3, state: 'absent', since: past.now - 7})")
    assert page.evaluate("past.deaths(90)") == [], "a worker that was asked to end did not die"
    page.evaluate("past.look({worker: 2, state: 'absent', since: past.now - 45})")
    page.until("document.querySelectorAll('#tile-requests .death').length === 1")
    plot = "document.querySelector('#tile-requests .plot')"
    told = page.evaluate(
        f"(box => {plot}.dispatchEvent(new PointerEvent('pointermove', {{clientY: box.top + 9, clientX: "
        f"document.querySelector('.death').getBoundingClientRect().left}})))({plot}.getBoundingClientRect()), "
        "byId('tip').innerText"
    )
    assert "worker 2 died" in told
    assert "a worker died" in page.text("#traffic-note")
    earlier = "[past.now - 60, 0, 0, 0, null, null, 0, 0, 0, 0, 2], [past.now - 44, 0, 0, 0, null, null, 0, 0, 0, 0, 1]"
    words = f"past.history = [{earlier}], past.deaths(90).map(([, words]) => words)"
    assert page.evaluate(words) == ["2 workers died", "worker 2 died"], "this page saw the second itself"


def test_the_time_without_a_worker_is_red_from_its_death_to_its_return(server: Server, page: Page) -> None:
    open_live(page, server)
    page.until("past.tracks.get('requests') !== undefined")
    told = page.evaluate(
        "(now => { past.watched = now - 60; past.outages = []; past.history = [70, 55, 30].map(ago => "
        "[now - ago, 0, 0, 0, null, null, 0, 0, 0, 1, 0]); "
        "past.watch([{state: 'ready'}, {state: 'absent', since: 0}], now - 45); "
        "past.watch([{state: 'ready'}, {state: 'absent', since: now - 41}], now - 40); "
        "past.watch([{state: 'ready'}, {state: 'connecting', since: now - 41}], now - 20); "
        "past.watch([{state: 'ready'}, {state: 'ready', since: 0}], now - 19); "
        "past.watch([{state: 'ready'}, {state: 'unresponsive', since: 0}], now - 9); "
        "past.watch([{state: 'ready'}, {state: 'leaving', since: 0}], now - 3); "
        "return past.downs(90).map(times => times.map(time => Math.round(now - time))); })(past.now)"
    )
    assert told == [[80, 70], [65, 60], [41, 20], [9, 3]], (
        "before the page watched, in the server's ten seconds"
    )
    page.until("document.querySelector('#tile-requests .down-time').getAttribute('d').split('M').length >= 5")
    assert "red: a worker was down" in page.text("#traffic-note")


def test_each_model_and_operation_has_its_times_and_charts(server: Server, page: Page) -> None:
    open_live(page, server)
    assert server.encode(MODEL, ["one"]).status == 200
    assert (
        server.post(f"/v1/score/{SCORES}", {"query": {"text": "a"}, "items": [{"text": "1"}]}).status == 200
    )
    row = "[...document.querySelectorAll('#operations tr')].find(row => row.innerText.includes('score'))"
    page.until(f"parseFloat({row}?.querySelector('[data-label=\"p99\"]').innerText) > 0")
    assert page.evaluate(f"{row}.querySelector('.bar').ariaLabel").startswith("tokenize ")
    page.until(f"{row}.querySelector('[data-label^=\"Latency\"] .line').getAttribute('d') !== ''")


WRITER = """frame => {
    const model = {...frame.models[0], name: 'org/writer', %s};
    model.config = {...model.config, outputs: ['chat']};
    frame.models = [...frame.models.filter(one => one.name !== model.name), model];
}"""
"""A model that writes text beside the others, in the state that is filled in."""


def test_a_box_without_a_model_is_closed_and_says_why(server: Server, page: Page) -> None:
    open_live(page, server, "#try")
    page.until("document.getElementById('vectors-box').disabled === false")
    assert page.evaluate("document.getElementById('view-live').hidden")

    def told(state: str) -> list[Any]:
        change = f"{CHANGED}({WRITER % state})" if state else "null"
        return list(page.evaluate(f"{change}, [byId('chat-box').disabled, byId('chat-why').innerText]"))

    closed, why = told("")
    assert closed and "no model that writes text" in why and "penstock serve" in why
    loading = "org/writer is loading: 43 %. The box opens when the model is loaded."
    assert told("state: 'loading', progress: 0.43") == [True, loading]
    failure = "last_error: {code: 'OOM', message: 'too large'}"
    assert told(f"state: 'failed', {failure}") == [True, "org/writer could not be loaded. OOM: too large"]
    assert told("state: 'available'")[0] is False
    assert told("state: 'loaded'") == [False, ""]


def test_what_a_model_writes_is_shown_as_it_comes_and_as_text(server: Server, page: Page) -> None:
    open_live(page, server, "#try")
    loaded = WRITER % "state: 'loaded'"
    page.evaluate(
        "window.asked = [];"
        "window.fetch = (path, asking) => { asked.push([path, asking]); return Promise.resolve(new Response("
        "new ReadableStream({ start(control) { window.control = control; } }))); };"
        "window.write = text => control.enqueue(new TextEncoder().encode(text));"
        "window.tell = event => write(`data: ${JSON.stringify(event)}\\n\\n`);"
        "window.say = (content, more) => tell({choices: [{delta: {content}}], ...more});"
        "Stream.prototype.take = function () { this.heardAt = performance.now(); };"
        f"{CHANGED}({loaded}); access.key = 'pk_held_in_memory';"
        "byId('chat-input').value = 'hello'; byId('chat-form').requestSubmit();"
    )
    answer = "document.querySelector('.turn.assistant > .words')"
    page.until("window.control !== undefined")
    page.evaluate(f"say({json.dumps(EVIL[:9])})")
    page.until(f"{answer}.textContent === {json.dumps(EVIL[:9])}")
    assert page.evaluate("document.querySelector('.turn.assistant').ariaBusy") == "true"
    loading = WRITER % "state: 'loading', progress: 0.4"
    closed = page.evaluate(f"{CHANGED}({loading}), byId('chat-box').disabled")
    assert closed is False, "an answer under way can be stopped"
    page.evaluate(f"{CHANGED}({loaded})")
    page.evaluate(
        f"say({json.dumps(EVIL[9:])}, {{usage: {{completion_tokens: 9}}}}), write('data: [DONE]\\n\\n')"
    )
    page.until("document.getElementById('chat-send').textContent === 'Send'")
    assert page.evaluate(f"{answer}.textContent") == EVIL
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.text(".turn.assistant .turn-note").startswith("9 tokens")
    [[path, asking]] = page.evaluate("asked")
    body = json.loads(asking["body"])
    assert (path, body["stream"], body["messages"]) == (
        "/v1/chat/completions", True, [{"role": "user", "content": "hello"}],
    )  # fmt: skip
    assert asking["headers"]["Authorization"] == "Bearer pk_held_in_memory"
    assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    page.evaluate(
        "byId('chat-input').value = 'more', window.control = undefined, byId('chat-form').requestSubmit()"
    )
    page.until("window.control !== undefined")
    page.evaluate('write(\'data: {"message": "the worker died", "error": {}}\\n\\n\')')
    page.until("document.querySelector('.turn-note.bad')?.innerText === 'the worker died'")
    assert [one["content"] for one in json.loads(page.evaluate("asked[1][1].body"))["messages"]] == [
        "hello", EVIL, "more",
    ]  # fmt: skip


def test_vectors_and_scores_are_those_of_the_routes(server: Server, page: Page) -> None:
    open_live(page, server, "#try")
    page.until("document.getElementById('vectors-box').disabled === false")
    choose = "byId('vectors-model').value = {}, byId('vectors-model').dispatchEvent(new Event('change')), "
    send = "byId('vectors-texts').value = 'one 1\\ntwo 2', byId('vectors-form').requestSubmit()"
    page.evaluate(choose.format(json.dumps(f"encode {MODEL}")) + send)
    page.until("document.querySelectorAll('.alike td').length > 4")
    vectors = [item["dense"]["values"] for item in server.encode(MODEL, ["one 1", "two 2"]).json()["items"]]
    expected = sum(left * right for left, right in zip(*vectors, strict=True))
    shown = page.evaluate("document.querySelectorAll('.alike td')[2].innerText")
    assert float(shown) == pytest.approx(expected, abs=0.006)
    page.evaluate(choose.format(json.dumps(f"score {SCORES}")) + send)
    page.until("document.querySelectorAll('.ranked li').length === 2")
    assert page.evaluate(
        "[...document.querySelectorAll('.ranked li')].map(row => row.innerText.split('\\n'))"
    ) == [
        ["two 2", "2.0000"],
        ["one 1", "1.0000"],
    ]
    assert all(address.startswith(server.url) for address in page.requests)
    page.evaluate("byId('vectors-texts').value = '', byId('vectors-form').requestSubmit()")
    assert "Write a text" in page.text("#vectors-out")


def test_many_models_are_folded_searched_and_sorted(server: Server, page: Page) -> None:
    open_live(page, server)
    names = ["org/b", "org/b:query", "org/b:archive", *(f"org/a{number}" for number in range(6))]
    frame = f"""frame => {{
        const [model] = frame.models;
        frame.models = {json.dumps(names)}.map((name, at) => ({{...model, name, p50_ms: at}}));
    }}"""
    rows = "[...document.querySelectorAll('#models .name')].map(name => name.innerText)"

    def shown(action: str = "null") -> list[str]:
        return list(page.evaluate(f"{CHANGED}({frame}), {action}, {rows}"))

    search = "document.getElementById('models-search')"
    assert shown() == ["org/b", *names[3:]]
    assert shown("document.querySelector('#models .fold').click()")[:3] == ["org/b", ":query", ":archive"]
    typed = f"{search}.value = '{{}}', {search}.dispatchEvent(new Event('input'))"
    assert shown(typed.format("QUERY")) == ["org/b:query"]
    assert shown(typed.format(""))[0] == "org/b"
    by_p50 = "[...document.querySelectorAll('.sorter')].find(head => head.innerText === 'p50').click()"
    assert shown(by_p50)[0] == "org/a5"
    assert page.evaluate("document.querySelector('th[aria-sort]').ariaSort") == "descending"


def test_charts_tell_their_values_to_pointer_and_keys_and_words_explain_themselves(
    server: Server, page: Page
) -> None:
    page.look(1440, 1200, "light")
    page.command("Emulation.setFocusEmulationEnabled", enabled=True)
    open_live(page, server)
    assert server.encode(MODEL, ["one"]).status == 200
    page.until("Math.max(...past.points('requests', 90).map(point => point[1])) > 0")
    plot = "document.querySelector('#tile-requests .plot')"
    page.evaluate(
        f"(box => {plot}.dispatchEvent(new PointerEvent('pointermove', "
        f"{{clientX: box.right - 8, clientY: box.top + 9}})))({plot}.getBoundingClientRect())"
    )
    assert "requests/s" in page.text("#tip")
    assert page.evaluate("document.querySelectorAll('.hair:not([hidden])').length") == 6
    page.evaluate(f"{plot}.focus(), {plot}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'End'}}))")
    assert "requests/s" in page.evaluate(f"{plot}.ariaValueText")
    page.evaluate("document.querySelector('#tile-latency .term').focus()")
    assert "half of the answers were faster" in page.text("#tip")


def test_a_touch_tells_the_values_and_what_has_just_come_is_shown(server: Server, page: Page) -> None:
    page.look(390, 844, "light")
    page.command("Emulation.setTouchEmulationEnabled", enabled=True)
    open_live(page, server)
    assert server.encode(MODEL, ["one"]).status == 200
    page.until("Math.max(...past.points('requests', 90).map(point => point[1])) > 0")
    plot = "document.querySelector('#tile-requests .plot')"
    x, y = page.evaluate(
        f"({plot}.scrollIntoView({{block: 'center'}}), "
        f"(box => [box.right - 8, box.top + 9])({plot}.getBoundingClientRect()))"
    )
    page.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.until("document.getElementById('tip').innerText.includes('requests/s')")
    page.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert page.evaluate("(track => (track.note(10.2, 3), track.all))(new Track())") == [[10.2, 3]]


def test_the_colours_follow_the_system(server: Server, page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.look(1440, 900, "light")
    open_live(page, server)
    light = page.evaluate(background)
    page.look(1440, 900, "dark")
    assert page.evaluate(background) != light


def test_names_that_clients_send_are_shown_as_text(server: Server, page: Page) -> None:
    page.look(1440, 900, "dark")
    open_live(page, server)
    server.post(
        "/v1/encode/" + EVIL.replace(" ", "%20").replace("<", "%3C").replace(">", "%3E"), {"items": []}
    )
    page.until("document.getElementById('errors').innerText.includes('onerror')")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    page.until("document.title === 'Ready · Penstock'")


def test_the_example_works_as_it_is_shown(server: Server, page: Page) -> None:
    open_live(page, server)
    shown = "document.getElementById('example').textContent"
    page.until(f"{shown}.startsWith('curl')")
    command = page.evaluate(shown)
    address, body = command.split("'")[1], command.split("-d ")[1].strip("'")
    assert address.startswith(server.url)
    assert server.post(address.removeprefix(server.url), json.loads(body)).status == 200


def test_a_lost_connection_is_told_though_the_server_answers_nothing(server: Server, page: Page) -> None:
    """The page asks over HTTP why the connection was lost; neither that nor an earlier loss may hold the page up."""
    open_live(page, server)
    page.evaluate(
        "window.fetch = (_, { signal } = {}) => new Promise((_, no) => signal?.addEventListener('abort', no));"
        "AbortSignal.timeout = () => (window.limit = new AbortController()).signal;"
        "window.told = []; window.lost = new Stream();"
        "lost.again = (why) => told.push(why); lost.say = (tone, text) => told.push(text);"
    )
    page.evaluate("lost.lost(false); window.limit?.abort()")
    page.until("told.join() === 'disconnected,The server does not answer.'")
    page.evaluate(
        "told.length = 0; lost.lost(false); lost.drop(); window.limit.abort(); setTimeout(() => told.push('end'))"
    )
    page.until("told.join() === 'disconnected,end'")


@pytest.mark.long
def test_the_page_comes_back_by_itself_after_the_server_was_away(tmp_path: Path, chromium: Browser) -> None:
    server = make_server(tmp_path)
    server.start()
    try:
        server.wait_ready()
        with chromium.page() as page:
            open_live(page, server)
            server.stop()
            page.until("!document.getElementById('notice').hidden")
            assert "Next try in" in page.text("#notice-text")
            page.until("document.getElementById('readiness').innerText === 'Disconnected'")
            server.start()
            server.wait_ready()
            page.until("document.getElementById('live-text').textContent === 'live'", 40)
            assert page.evaluate("document.getElementById('notice').hidden")
        server.stop()
        server.assert_nothing_left()
    finally:
        server.kill_everything()


@pytest.mark.long
def test_with_keys_the_page_asks_for_one_and_sends_it_to_its_server_only(
    tmp_path: Path, chromium: Browser
) -> None:
    key = api_keys.fresh()
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "viewer", "hash": api_keys.hashed(key), "scopes": ["infer"]}]))
    file.chmod(0o600)
    enter = "document.getElementById('key').value = {}, document.getElementById('key-form').requestSubmit()"
    with (
        serving(tmp_path, settings={"server.keys_file": file}) as server,
        chromium.page() as page,
    ):
        page.open(f"{server.url}/")
        page.until("!document.getElementById('key-form').hidden")
        assert page.evaluate("document.getElementById('main').hidden")
        page.evaluate(enter.format(json.dumps(api_keys.fresh())))
        page.until("document.getElementById('key-note').innerText.includes('not valid')")
        page.evaluate(enter.format(json.dumps(key)))
        page.until("document.getElementById('live-text').textContent === 'live'")
        assert page.evaluate("document.getElementById('key-form').hidden")
        page.until("document.getElementById('example').textContent.includes('$PENSTOCK_KEY')")
        assert key not in server.log
        assert key not in page.evaluate("document.documentElement.outerHTML + byId('key').value")
        assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
