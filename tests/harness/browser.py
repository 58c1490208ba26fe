"""A headless Chromium, spoken to over the DevTools protocol: open a page, look at it, take its picture.

`opened(url, tmp_path)` gives a `Page`; everything that the page writes to its console, and every request that it makes,
is kept for the test.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import subprocess
import time
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


class Page:
    """One tab. `console` holds errors and warnings, `requests` the addresses that were asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; returns its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(30))
            if message.get("id") != number:
                self._note(message)
                continue
            assert "error" not in message, f"{method}: {message.get('error')}"
            return dict(message["result"])

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


@contextlib.contextmanager
def browser_page(tmp_path: Path) -> Iterator[Page]:
    """A new tab of a browser of its own; skips the test where there is no Chromium."""
    program = required_tool("chromium")
    profile = tmp_path / "chromium"
    with (tmp_path / "chromium.log").open("ab") as log:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
    try:
        port = int(wait_until(lambda: _debug_port(profile, process), what="the browser's port"))
        with connect(
            _tab(port), max_size=64 << 20, max_queue=None, ping_interval=None, compression=None, proxy=None
        ) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(60)


def _debug_port(profile: Path, process: subprocess.Popen[bytes]) -> str:
    assert process.poll() is None, "the browser has ended"
    try:
        lines = (profile / "DevToolsActivePort").read_text().splitlines()
    except FileNotFoundError:
        return ""
    return lines[0] if lines else ""


def _tab(port: int) -> str:
    limit = time.monotonic() + 20
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("PUT", "/json/new?about:blank")
            return str(json.loads(connection.getresponse().read())["webSocketDebuggerUrl"])
        except (OSError, ValueError):
            assert time.monotonic() < limit, "the browser gives no tab"
            time.sleep(0.05)
        finally:
            connection.close()
