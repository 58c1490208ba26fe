"""The server that a command asks over HTTP: the flags of its address and of the API key, and its refusals.

The key comes from the environment variable PENSTOCK_KEY or from a file, and never from the command line, which other
users of the machine can read.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from frontend.access.api_keys import read_private_file
from ipc import addresses, settings
from ipc.errors import ConfigError
from ipc.settings import Server, Settings
from penstock import terminal

KEY_VARIABLE = "PENSTOCK_KEY"
_USER = re.compile(r"^([^/?#]*//)[^/?#]*@")
"""The beginning of an address with a user: what stands before the `@` of the host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the server and the key, of a command that asks a server over HTTP."""
    add_address(parser)
    add_url(parser)
    parser.add_argument("--config", metavar="FILE", help="settings file (default: $PENSTOCK_CONFIG)")
    add_key(parser)


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add `--key-file`, of a command that asks a server which may have keys."""
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help=f"file with the API key (default: the environment's {KEY_VARIABLE})",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set `server.bind`."""
    parser.add_argument(
        "-p", "--port", metavar="PORT", help="port of the server (default: of server.bind, 8080)"
    )
    parser.add_argument(
        "--host", metavar="HOST", help="host of the server's address (default: of server.bind, 127.0.0.1)"
    )
    parser.add_argument("--bind", metavar="HOST:PORT", help="both in one (default: server.bind)")


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, of a command that asks or looks at a running server."""
    parser.add_argument("--url", help="address of the server, http://HOST:PORT, in place of the three")


def stated(options: argparse.Namespace) -> dict[str, str]:
    """Settings of `--device`, `--catalog` and `--set`, as `{"section.field": "value"}`. Raises `ConfigError`."""
    flags = {"worker.device": options.device} if getattr(options, "device", None) else {}
    if getattr(options, "catalog", None):
        flags["catalog.dirs"] = ",".join(options.catalog)
    for pair in getattr(options, "set", ()):
        name, sign, value = pair.partition("=")
        if not sign or "." not in name:
            raise ConfigError(f"--set {pair}: expected SECTION.FIELD=VALUE")
        flags[name] = value
    return flags


def bind_of(options: argparse.Namespace, flags: Mapping[str, str]) -> str | None:
    """`server.bind` as the flags have it, None without such a flag. Raises `ConfigError` for two that contradict.

    `--host` or `--port` alone leave the other half to the `server.bind` of file, environment and the other `flags`. A
    `--url` counts only for commands that look at processes (`options.looks`): it must name this machine, unless the
    command asks other machines over HTTP (`options.asks`).
    """
    url, bind, host, port = (getattr(options, name, None) for name in ("url", "bind", "host", "port"))
    if url and (bind or host or port):
        raise ConfigError("--url cannot stand beside --bind, --host and --port")
    if (
        url
        and getattr(options, "looks", False)
        and not (getattr(options, "asks", False) and is_elsewhere(url))
    ):
        return _bind_of_url(url)
    if not (host or port):
        return str(bind) if bind is not None else None
    if bind:
        raise ConfigError("--bind HOST:PORT cannot stand beside --host and --port")
    if not (host and port):
        configured = settings.load(getattr(options, "config", None), flags).server.bind
        # A Unix socket and an inherited one have neither host nor port.
        default = configured if addresses.port_of(configured, "server.bind") else Server().bind
        default_host, _, default_port = default.rpartition(":")
        host, port = host or default_host, port or default_port
    name = f"[{host}]" if ":" in host.strip("[]") and not host.startswith("[") else host
    return f"{name}:{port}"


def _bind_of_url(url: str) -> str:
    """Host and port of the address of a server of this machine. Raises `ConfigError`."""
    parts = urlsplit(_checked(url))
    host = parts.hostname or ""
    if not _is_here(host):
        raise ConfigError(
            f"--url {url}: the command looks at processes of this machine; ask {url}/readyz and {url}/v1/models "
            "about another one"
        )
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_elsewhere(url: str) -> bool:
    """Whether the address of a server names another machine. Raises `ConfigError` for a text that is no address."""
    return not _is_here(urlsplit(_checked(url)).hostname or "")


def names_server(options: argparse.Namespace) -> bool:
    """Whether a flag of the command line names a server."""
    return any(getattr(options, name, None) for name in ("url", "bind", "host", "port"))


def _is_here(host: str) -> bool:
    """Whether a host, in small letters, is this machine: its name, a loopback address, or the wildcard address."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    return wildcard or addresses.is_loopback(host) or host in ("localhost", socket.gethostname().lower())


def text(value: str) -> str:
    """The type of a flag whose text is sent to a server or written as JSON.

    Raises `argparse.ArgumentTypeError` for bytes that are no UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{value[:200]!a} is no text in UTF-8") from None
    return value


def url_of(options: argparse.Namespace, config: Settings) -> str:
    """The address of the server, without a slash at the end. Raises `ConfigError` for a text that is no address."""
    return _checked(options.url or f"http://{config.server.bind}")


def _checked(url: str) -> str:
    """The address. No message shows an address that may hold a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # NOTE: a host that no resolver takes raises UnicodeError, which is a ValueError.
        (parts.hostname or "").encode("idna")
        valid = valid and url.isprintable() and parts.path.isascii() and " " not in parts.path
        valid = valid and "@" not in parts.netloc
    except ValueError:
        valid = False
    if not valid and "@" in url:
        raise ConfigError(
            "--url: no user, no password and no @ before the path may stand in the address: name the server with "
            f"--url http://HOST:PORT, and give the API key in {KEY_VARIABLE} or with --key-file"
        )
    if "?" in url or "#" in url:
        raise ConfigError(
            "--url: no ? and no # may stand in the address; name it with --url http://HOST:PORT"
        )
    if not valid:
        raise ConfigError(f"{url!r} is no address of a server; name it with --url http://HOST:PORT")
    return url.rstrip("/")


def key_of(options: argparse.Namespace) -> str:
    """The API key, or "".

    Raises `ConfigError` for a file that is missing, or that other users may read, and for a key no header can hold.
    """
    key_text, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if options.key_file:
        where = "--key-file"
        key_text = read_private_file(Path(options.key_file), where).decode(errors="replace")
    key = key_text.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{where}: this is no API key, it holds characters that no header can have")
    if options.key_file and not key:
        raise ConfigError(f"--key-file {options.key_file}: the file holds no key")
    return key


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Makes an error of an answer that names another address, which must not get the key."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection)
"""Asks the server itself, whatever proxies the environment names, as `penstock chat` does."""


def fetched(address: str, key: str, timeout_s: float) -> bytes:
    """The body of the answer to a GET. Raises `OSError`, `http.client.HTTPException` and `ValueError`."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    with _DIRECT.open(request, timeout=timeout_s) as answer:
        return bytes(answer.read())


def failure(error: Exception) -> str:
    """Why `fetched` gave nothing readable, in one line: the server's own sentence where the server sent one."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            body = error.read(100_000)
        except (OSError, http.client.HTTPException):
            body = b""
        return redirection(error.code, error.headers.get("Location")) or refusal(error.code, body)
    reason = getattr(error, "reason", error)
    return terminal.one_line(getattr(reason, "strerror", None) or str(reason)) or type(error).__name__


def message_of(body: bytes) -> str:
    """The message of an error in one line, in the forms of SIE, OpenAI and KServe; "" for a body of another form."""
    try:
        answer = msgspec.json.decode(body)
        answer = answer.get("detail") or answer.get("error") or answer
        text = answer["message"] if isinstance(answer, dict) else answer
    except (msgspec.DecodeError, ValueError, AttributeError, KeyError, RecursionError):
        return ""
    return terminal.one_line(text) if isinstance(text, str) else ""


def redirection(status: int, location: str | None) -> str:
    """An answer that names another address, in one line; "" for any other answer. A password there is not shown."""
    if status // 100 != 3 or not location:
        return ""
    where = terminal.one_line(_USER.sub(r"\1", location))
    return f"{status}: the server sends requests on to {where}; name that address with --url"


def refusal(status: int, body: bytes) -> str:
    """An answer that is no success in one line: status and message, else the beginning of the body, else a phrase."""
    text = message_of(body) or terminal.one_line(body[:300].decode(errors="replace"))
    return f"{status}: {text or http.client.responses.get(status, 'an empty answer')}"
