"""The file that names MCP servers: `agent.mcp_config`, JSON in the form of mistral.rs.

`read` is called at the start of a server, so that a mistake is told there, and by the tool host, which connects. The
file may hold tokens and passwords, so no message of this module tells a value of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import msgspec
from msgspec import Meta

from ipc.errors import ConfigError

REVISIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Revisions of MCP that this server speaks, as a client and as a server, the newest first."""
MAX_NBYTES = 1 << 20
MAX_SERVERS = 32
_VALUE = re.compile(r", got `.*?`|Invalid value .*?(?= - at|$)")
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Url = Annotated[str, Meta(max_length=2048)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts: unknown fields are refused."""


class Process(_Part, frozen=True, tag_field="type", tag="Process"):
    """A program in a sandbox, which speaks over its standard input and output, with `env` as its own variables."""

    command: Annotated[str, Meta(min_length=1)]
    args: list[str] = []
    env: dict[str, str] = {}
    work_dir: str | None = None


class Http(_Part, frozen=True, tag_field="type", tag="Http"):
    """A server over streamable HTTP."""

    url: Annotated[Url, Meta(pattern=r"^https?://[^\s/]\S*\Z")]
    headers: dict[str, str] | None = None
    timeout_secs: Seconds | None = None


class WebSocket(_Part, frozen=True, tag_field="type", tag="WebSocket"):
    """A server over a WebSocket."""

    url: Annotated[Url, Meta(pattern=r"^wss?://[^\s/]\S*\Z")]
    headers: dict[str, str] | None = None
    timeout_secs: Seconds | None = None


class McpServer(_Part, frozen=True):
    """One server. `tool_prefix` begins the names of its tools; `resources` is accepted and not used."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    source: Process | Http | WebSocket
    enabled: bool = True
    tool_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,48}\Z")] | None = None
    bearer_token: str | None = None
    id: str | None = None
    resources: list[str] | None = None


class McpConfig(_Part, frozen=True):
    """All servers. Without `auto_register_tools` no tool is offered. At most `max_concurrent_calls` run at once."""

    servers: Annotated[list[McpServer], Meta(max_length=MAX_SERVERS)]
    auto_register_tools: bool
    tool_timeout_secs: Seconds = 30.0
    max_concurrent_calls: Annotated[int, Meta(ge=1, le=10000)] = 10


def read(path: str) -> McpConfig | None:
    """The servers that a file names; None for the empty path. Raises `ConfigError` with the field of a mistake."""
    if not path:
        return None
    what = f"agent.mcp_config = {path}"
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    if len(text) > MAX_NBYTES:
        raise ConfigError(f"{what}: the file has over {MAX_NBYTES} bytes")
    try:
        config = msgspec.json.decode(text, type=McpConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {_VALUE.sub('', str(error)).replace('`', '')}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise ConfigError(f"{what}: the file is no JSON") from None
    _check(config, what)
    return config


def _check(config: McpConfig, what: str) -> None:
    """Raise `ConfigError` for what the types of the fields do not say."""
    seen: set[str] = set()
    for index, server in enumerate(config.servers):
        where = f"{what}: $.servers[{index}]"
        prefix = server.tool_prefix
        if prefix is not None and (prefix in seen or f"{prefix}_".startswith("mistralrs_")):
            raise ConfigError(
                f"{where}.tool_prefix: another server or the tools of this server have the prefix"
            )
        seen |= {prefix} if prefix is not None else set()
        source = server.source
        texts = {"bearer_token": server.bearer_token or ""}
        if isinstance(source, Process):
            texts |= {"source.command": source.command, "source.work_dir": source.work_dir or ""}
            texts |= {f"source.args[{at}]": text for at, text in enumerate(source.args)}
            texts |= {f"source.env.{name}": f"{name}{text}" for name, text in source.env.items()}
            if any(not name or "=" in name for name in source.env):
                raise ConfigError(f"{where}.source.env: names must not be empty or have an equals sign")
            if source.work_dir and not Path(source.work_dir).is_absolute():
                raise ConfigError(f"{where}.source.work_dir: expected an absolute path")
            forbidden = "\0"
        else:
            texts |= {
                f"source.headers.{name}": f"{name}{text}" for name, text in (source.headers or {}).items()
            }
            forbidden = "\0\r\n"
        for name, text in texts.items():
            if any(each in text for each in forbidden):
                raise ConfigError(f"{where}.{name}: control characters are not allowed")


def prefix_of(server: McpServer) -> str:
    """What the names of the tools of a server begin with, up to their underscore; new for each call without one set."""
    return server.tool_prefix or f"mcp_{uuid4()}"
