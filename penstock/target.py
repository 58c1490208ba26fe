"""The server that a command asks over HTTP: the flags of its address and of the API key, and its refusals.

The key comes from the environment variable PENSTOCK_KEY or from a file, and never from the command line, which other
users of the machine can read.
"""

from __future__ import annotations

import argparse
import http.client
import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from frontend.access.api_keys import read_private_file
from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import terminal

KEY_VARIABLE = "PENSTOCK_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the server and the key."""
    parser.add_argument("--url", help="address of the server (default: http:// and server.bind)")
    parser.add_argument("--config", metavar="FILE", help="settings file (default: $PENSTOCK_CONFIG)")
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help=f"file with the API key (default: the environment's {KEY_VARIABLE})",
    )


def text(value: str) -> str:
    """The type of a flag whose text is sent to the server. Raises `argparse.ArgumentTypeError` for other bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{value[:200]!a} is no text in UTF-8") from None
    return value


def url_of(options: argparse.Namespace, config: Settings) -> str:
    """The address of the server, without a slash at the end. Raises `ConfigError` for a text that is no address."""
    url: str = options.url or f"http://{config.server.bind}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # NOTE: a host that no resolver takes raises UnicodeError, which is a ValueError.
        (parts.hostname or "").encode("idna")
        rest = parts.path + parts.query
        valid = valid and url.isprintable() and rest.isascii() and " " not in rest
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{url!r} is no address of a server; name it with --url http://HOST:PORT")
    return url.rstrip("/")


def key_of(options: argparse.Namespace) -> str:
    """The API key, or "".

    Raises `ConfigError` for a file that is missing, or that other users may read, and for a key no header can hold.
    """
    found, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if options.key_file:
        where = "--key-file"
        found = read_private_file(Path(options.key_file), where).decode(errors="replace")
    key = found.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: this is no API key, it holds characters that no header can have")
    if options.key_file and not key:
        raise ConfigError(f"--key-file {options.key_file}: the file holds no key")
    return key


def message_of(body: bytes) -> str:
    """The message of an error in one line, in the forms of SIE, OpenAI and KServe; "" for a body of another form."""
    try:
        told = msgspec.json.decode(body)
        told = told.get("detail") or told.get("error") or told
        text = told["message"] if isinstance(told, dict) else told
    except (msgspec.DecodeError, ValueError, AttributeError, KeyError, RecursionError):
        return ""
    return terminal.one_line(text) if isinstance(text, str) else ""


def refusal(status: int, body: bytes) -> str:
    """An answer that is no success in one line: status and message, else the beginning of the body, else a phrase."""
    text = message_of(body) or terminal.one_line(body[:300].decode(errors="replace"))
    return f"{status}: {text or http.client.responses.get(status, 'an empty answer')}"
