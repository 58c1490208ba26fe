"""`penstock run MODEL [QUESTION]`: download, serve and chat in one terminal.

1. A server that runs already at the address of the flags, and has the model, is asked as `penstock chat` asks.
2. Else the model is downloaded if need be, and `penstock serve MODEL` starts in the background (`own_server`), with the
   settings in use but addresses and directories of its own. The last lines of the log are printed if the server fails.
3. When the conversation ends, the server is stopped.

Exit codes are those of `penstock chat`; 1 also for a model that cannot be had or served.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ipc import extras, settings
from ipc.catalog.entries import Catalog
from ipc.catalog.reading import read_entries
from ipc.errors import ConfigError, PenstockError
from ipc.processes import starting
from ipc.settings import Settings
from penstock import chat, own_server, processes, target, terminal
from penstock.own_server import NotStarted, Server

_ASK_S = 5.0
_LOAD_S = 3600.0
"""Longest start of a server, whose model may be large and lie on a slow disk."""
_SHOWN_LINES = 15


class NotServed(PenstockError):
    """The server of the model did not start."""


def add_parser(commands: Any) -> None:
    """Add `run` to the commands."""
    parser = commands.add_parser(
        "run", help="download a chat model, serve it, and talk to it, in one terminal"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=target.text,
        help="id of the catalog or of the hub, directory, GGUF file",
    )
    parser.add_argument("question", nargs="?", default="", help="ask this only (default: a conversation)")
    chat.add_arguments(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the model runs")
    parser.add_argument(
        "--set", metavar="SECTION.FIELD=VALUE", action="append", default=[], help="any setting; may repeat"
    )
    parser.add_argument(
        "--catalog", metavar="DIR", action="append", default=[], help="directory of model files; may repeat"
    )
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
    missing = _why_not_served(url, key, options.model)
    if not missing:
        return chat.talk(options, url, key, options.model, options.question)
    if options.url:
        raise ConfigError(
            f"run: no server at {url} has the model {options.model!r} ({missing}); leave --url out to start one"
        )
    if not extras.has_worker():
        raise ConfigError(f"run needs {extras.needed('worker')}")
    code, name = _fetch(options.model, config)
    if code:
        return code
    with _serving(options, target.stated(options)) as own:
        return chat.talk(options, own, key, name, options.question)


class _Model(msgspec.Struct):
    """What a server tells of a model; servers of SIE name it in `name`, those of OpenAI's API in `id`."""

    name: str = ""
    id: str = ""


def _why_not_served(url: str, key: str, model: str) -> str:
    """Why no server at `url` has the model; "" if one has."""
    address = f"{url}/v1/models/{urllib.parse.quote(model)}"
    try:
        known = msgspec.json.decode(target.fetched(address, key, _ASK_S), type=_Model)
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        return target.failure(error)
    return "" if known.name or known.id else "the answer names no model"


def _fetch(model: str, config: Settings) -> tuple[int, str]:
    """Have the model's files on this machine; the exit code and the id that the model is served as.

    Raises `ConfigError` for a model without text.
    """
    # NOTE: imported here, since machines with frontends only have none of the packages of workers.
    from penstock import downloads
    from penstock.files import directory_of

    catalog = Catalog(read_entries(config.catalog.dirs).entries.values())
    entry = downloads.entry_of(model, catalog, source_alone=True)
    if directory_of(entry) is None:
        if code := downloads.run([model], catalog, None):
            return code, ""
        entry = downloads.entry_of(model, catalog)
    if "chat" not in entry.outputs:
        raise ConfigError(
            f"run: {model} generates no text, it gives {', '.join(entry.outputs)}: use `penstock serve {model}`"
        )
    return 0, entry.id


@contextlib.contextmanager
def _serving(options: argparse.Namespace, flags: Mapping[str, str]) -> Iterator[str]:
    """The address of a server of the model with these settings, which ends with the context. Raises `NotServed`."""
    environment = {**os.environ, **settings.to_environ(flags)}
    if options.config:
        environment["PENSTOCK_CONFIG"] = options.config
    command = starting.command("penstock", "serve", "--", options.model)
    with own_server.started("penstock-run-", command, environment) as server:
        _await(server, options.model)
        yield f"http://127.0.0.1:{server.port}"


def _await(server: Server, model: str) -> None:
    """Wait until the model is loaded, and show how far. Raises `NotServed`."""
    began, shows = time.monotonic(), sys.stderr.isatty()
    failure, stage = "", "the server starts"

    def ready() -> bool:
        nonlocal failure, stage
        if server.get("/readyz"):
            return True
        # NOTE: a worker that is busy may not answer in time, and then the last stage stays.
        for worker in processes.look(server.paths, 1, 1.0).workers:
            for status in reversed(worker.models):
                left = f", about {terminal.span(status.left_s)} left" if status.left_s else ""
                stage = f"{status.stage or status.state} {status.progress:.0%}{left}"
                if status.state == "failed":
                    failure = status.error_message
                    raise NotStarted("the model did not load")
        if shows:
            terminal.redraw(f"{model}: {stage}, {terminal.span(time.monotonic() - began)}")
        return False

    try:
        own_server.wait(server, ready, _LOAD_S)
    except NotStarted as error:
        lines = [error.message, *server.last_lines(_SHOWN_LINES)]
        raise NotServed(f"run: {model} is not served: " + (failure or "\n".join(lines))) from None
    if shows:
        terminal.redraw("")
