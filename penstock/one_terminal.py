"""`penstock run MODEL [QUESTION]`: download, serve and chat in one terminal.

1. A server that runs already at the address of the flags, and has the model, is asked as `penstock chat` asks.
2. Else the model is downloaded if need be, and `penstock serve MODEL` starts in the background, on a free port of this
   machine. Its log goes into a file of a temporary directory, and the last lines are printed if the server fails.
3. When the conversation ends, the server is stopped.

Exit codes are those of `penstock chat`; 1 also for a model that cannot be had or served.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ipc import extras, settings
from ipc.catalog.entries import Catalog, read_entries
from ipc.errors import ConfigError, PenstockError
from ipc.processes import starting
from ipc.settings import Settings
from penstock import chat, processes, target, terminal

_ASK_S = 5.0
_PAUSE_S = 0.3
_STOP_S = 30.0
_SHOWN_LINES = 15


class NotServed(PenstockError):
    """The server of the model did not start."""


def add_parser(commands: Any) -> None:
    """Add `run` to the commands."""
    parser = commands.add_parser(
        "run", help="download a chat model, serve it, and talk to it, in one terminal"
    )
    parser.add_argument(
        "model", metavar="MODEL", help="id of the catalog or of the hub, directory, GGUF file"
    )
    parser.add_argument("question", nargs="?", default="", help="ask this only (default: a conversation)")
    chat.add_arguments(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the model runs")
    target.add_arguments(parser)
    terminal.with_examples(
        parser,
        ("run Qwen/Qwen3-0.6B", "talks to a model of the hub"),
        ("run ./model.gguf 'What is a penstock?'", "asks a model in a file one question"),
    )


def run(options: argparse.Namespace, config: Settings) -> int:
    """Serve and talk; returns the exit code. Raises `ConfigError` for wrong flags and for a model without text."""
    chat.check(options)
    url, key = target.url_of(options, config), target.key_of(options)
    if _serves(url, key, options.model):
        return chat.talk(options, url, key, options.model, options.question)
    if options.url:
        raise ConfigError(
            f"run: no server at {url} has the model {options.model!r}; leave --url out to start one"
        )
    if not extras.has_worker():
        raise ConfigError(f"run needs {extras.needed('worker')}")
    if code := _fetch(options.model, config):
        return code
    with _serving(options) as (own, model):
        return chat.talk(options, own, key, model, options.question)


def _serves(url: str, key: str, model: str) -> bool:
    """Whether a server answers at `url` that has the model."""
    address = f"{url}/v1/models/{urllib.parse.quote(model)}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=_ASK_S
        ) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _fetch(model: str, config: Settings) -> int:
    """Have the model's files on this machine; 0, or the exit code. Raises `ConfigError` for a model without text."""
    # NOTE: imported here, since machines with frontends only have none of the packages of workers.
    from penstock import downloads
    from penstock.files import directory_of

    catalog = Catalog(read_entries(config.catalog.dirs).entries.values())
    entry = downloads.entry_of(model, catalog, source_alone=True)
    if directory_of(entry) is None:
        if code := downloads.run([model], catalog, None):
            return code
        entry = downloads.entry_of(model, catalog)
    if "chat" not in entry.outputs:
        raise ConfigError(
            f"run: {model} generates no text, it gives {', '.join(entry.outputs)}: use `penstock serve {model}`"
        )
    return 0


@contextlib.contextmanager
def _serving(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(address, model) of a server of the model, which ends with the context. Raises `NotServed`."""
    port = _free_port()
    flags = {"server.bind": f"127.0.0.1:{port}"}
    if options.device:
        flags["worker.device"] = options.device
    config = settings.load(options.config, flags)
    words = [f"--set={name}={value}" for name, value in flags.items()]
    words += [f"--config={options.config}"] if options.config else []
    command = starting.command("penstock", "serve", *words, "--", options.model)
    with tempfile.TemporaryDirectory(prefix="penstock-run-") as place:
        log = Path(place) / "log"
        with log.open("wb") as out:
            # A session of its own: Ctrl-C ends an answer, not the server.
            server = subprocess.Popen(
                command,
                env=starting.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _await(server, url, config, options.model, log)
            yield url, "default"
        finally:
            _stop(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(server: subprocess.Popen[bytes], url: str, config: Settings, model: str, log: Path) -> None:
    """Wait until the model is loaded, and show how far. Raises `NotServed` for a server that ends or cannot load."""
    began, shows = time.monotonic(), sys.stderr.isatty()
    while not _is_ready(url):
        known = [
            status for worker in processes.look(config.paths, 1, 1.0).workers for status in worker.models
        ]
        failed = next((status for status in known if status.state == "failed"), None)
        if failed is not None or server.poll() is not None:
            told = failed.error_message if failed else "\n".join(log.read_text().splitlines()[-_SHOWN_LINES:])
            raise NotServed(f"run: {model} is not served: {told}")
        if shows:
            stage = next((f"{one.state} {one.progress:.0%}" for one in known), "the server starts")
            terminal.redraw(f"{model}: {stage}, {terminal.span(time.monotonic() - began)}")
        time.sleep(_PAUSE_S)
    if shows:
        terminal.redraw("")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=_ASK_S):
            return True
    except (OSError, ValueError):
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server as an operator does, and by force if that takes too long."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
