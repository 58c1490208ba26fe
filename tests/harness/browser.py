"""A headless Chromium, spoken to over the DevTools protocol: open a page, look at it, take its picture.

`browser(directory)` starts the program and `Browser.page()` opens a tab that shares nothing with other tabs. Everything
that a page writes to its console, and every request that it makes, is kept for the test.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.conformance.required_tool import required_tool
from tests.harness.server import PATIENCE_S, wait_until

FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-sandbox",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--mute-audio",
)


class Peer:
    """One end of the DevTools protocol: the browser, or a tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; returns its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(90))
            if message.get("id") != number:
                self._note(message)
                continue
            assert "error" not in message, f"{method}: {message.get('error')}"
            return dict(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        """Take an event in."""


class Page(Peer):
    """One tab. `console` holds errors and warnings, `requests` the addresses that were asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        super().__init__(socket)
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console.append(str([part.get("value") for part in params["args"]]))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.console.append(str(details.get("exception", details).get("description", details)))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Load `url`."""
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        found = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Visible text of the first element that fits."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """The first true value of a JavaScript expression."""
        return wait_until(lambda: self.evaluate(expression), timeout_s, expression)

    def look(self, width: int, height: int, scheme: str) -> None:
        """Show the page at this size of the window (CSS pixels) in the colour scheme `light` or `dark`."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.command(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        )

    def picture(self, path: Path) -> bytes:
        """A PNG of the window, written to `path`."""
        data = base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data


class Browser:
    """A running Chromium."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        """A new tab with storage and cache of its own; closed at the end."""
        with self._connected(self._path) as socket:
            browser = Peer(socket)
            context = browser.command("Target.createBrowserContext")["browserContextId"]
            try:
                tab = browser.command("Target.createTarget", url="about:blank", browserContextId=context)
                with self._connected(f"/devtools/page/{tab['targetId']}") as page:
                    yield Page(page)
            finally:
                browser.command("Target.disposeBrowserContext", browserContextId=context)

    def _connected(self, path: str) -> ClientConnection:
        return connect(
            f"ws://127.0.0.1:{self._port}{path}",
            open_timeout=PATIENCE_S, max_size=64 << 20, max_queue=None, ping_interval=None, compression=None,
            proxy=None,
        )  # fmt: skip


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser whose profile is in `directory`; skips the test where there is no Chromium."""
    program = required_tool("chromium")
    profile = directory / "chromium"
    with (directory / "chromium.log").open("ab") as log:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
    try:
        port, path = wait_until(lambda: _address(profile, process), what="the browser's port")
        yield Browser(int(port), path)
    finally:
        process.terminate()
        process.wait(60)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """Port and path of the browser's socket; nothing as long as there is none."""
    assert process.poll() is None, "the browser has ended"
    try:
        lines = (profile / "DevToolsActivePort").read_text().splitlines()
    except FileNotFoundError:
        return []
    return lines if len(lines) == 2 else []
