"""`penstock bench [MODEL]`: throughput and latency of a running server under a load.

Exit codes: 0 some request succeeded, 1 none did or the server refused the first, 3 wrong flags.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from typing import Any

from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import target, terminal
from penstock.bench import figures
from penstock.bench.figures import Sample

PROTOCOLS = ("encode", "score", "embeddings", "rerank", "kserve", "chat")
MAX_REQUESTS = 1_000_000
"""Bounds the memory of the samples."""
_DEFAULT_DURATION_S = 10.0
_BOUNDS = {
    "connections": 1024,
    "rate": 100_000,
    "duration": 86_400,
    "requests": MAX_REQUESTS,
    "items": 4096,
    "tokens": 100_000,
    "max_tokens": 100_000,
    "timeout": 3600,
}


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands."""
    parser = commands.add_parser("bench", help="measure throughput and latency of a running server")
    parser.add_argument(
        "model", type=target.text, metavar="MODEL", nargs="?", help="name of the model; chat has a default"
    )
    parser.add_argument(
        "--protocol", choices=PROTOCOLS, help="default: what the model gives; chat without a model"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--connections",
        type=int,
        default=8,
        metavar="N",
        help="closed loop: requests at a time (default %(default)s)",
    )
    load.add_argument(
        "--rate", type=float, metavar="R", help="open loop: requests a second, however slow the answers are"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--duration", type=float, metavar="SECONDS", help="send so long (default 10)")
    end.add_argument("--requests", type=int, metavar="N", help="send so many requests")
    parser.add_argument("--items", type=int, default=1, metavar="N", help="texts a request (default 1)")
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--tokens", type=int, default=32, metavar="N", help="words a text, none sent twice (default 32)"
    )
    text.add_argument("--text", type=target.text, help="send this text only")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="chat: longest answer (default 64)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for one request (default 60)"
    )
    terminal.with_json(parser)
    parser.add_argument("--plot", action="store_true", help="print a histogram of the latencies")
    target.add_arguments(parser)
    terminal.with_examples(
        parser,
        ("bench BAAI/bge-m3 --connections 16 --items 8", "sixteen requests at a time, for ten seconds"),
        ("bench BAAI/bge-m3 --rate 50 --duration 30 --plot", "fifty requests a second"),
        ("bench --protocol chat --requests 20", "streams: time to the first token, and between tokens"),
    )


def run(options: argparse.Namespace, config: Settings) -> int:
    """Send the load and print the figures; returns the exit code. Raises `ConfigError` for wrong flags."""
    _check(options)
    url, key = target.url_of(options, config), target.key_of(options)
    # Imported here: only this command needs the HTTP client.
    from penstock.bench.load import Clock, Load, Refused, Requests, protocol_of
    from penstock.http_client import Asker, Unreachable

    load, samples = (
        Load(options.rate, options.connections, options.requests, options.duration),
        list[Sample](),
    )
    clock = Clock()

    async def measured() -> float:
        async with Asker(url, key, load.connections, options.timeout) as asker:
            if options.protocol is None:
                options.protocol = await protocol_of(asker, options.model)
            if options.protocol == "chat" and options.items != 1:
                raise ConfigError(f"bench: --items {options.items}: a request of chat has one text")
            requests = Requests(asker, options, clock.now, samples)
            await requests.warm()
            began = clock.now()
            await load.run(requests.send, clock)
            return clock.now() - began

    try:
        elapsed_s = asyncio.run(measured())
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return 1
    except (Refused, Unreachable) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    results = figures.figures(samples, elapsed_s, options.items)
    if options.json:
        print(terminal.as_json({"url": url, **_conditions(options), **results}))
    else:
        print("\n".join(figures.lines(results)))
    if options.plot and results["succeeded"]:
        plot = figures.histogram([sample.latency_s for sample in samples if not sample.error])
        # NOTE: with --json the output is one object, so the picture goes beside it.
        print("\n".join(["", *plot]), file=sys.stderr if options.json else sys.stdout)
    return 0 if results["succeeded"] else 1


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader of the figures needs to run the same load again."""
    is_chat, own_text = options.protocol == "chat", options.text is not None
    load = {
        "connections": None if options.rate else options.connections,
        "rate": options.rate,
        "duration_s": options.duration,
        "requests": options.requests,
        "items": options.items,
        "words": None if own_text else options.tokens,
        "text": options.text,
        "max_tokens": options.max_tokens if is_chat else None,
    }
    return {"model": options.model, "protocol": options.protocol, "load": load}


def _check(options: argparse.Namespace) -> None:
    """Raises `ConfigError`; sets the defaults that depend on other flags."""
    for name, limit in _BOUNDS.items():
        value = getattr(options, name)
        least = 1 if isinstance(value, int) else 0.001
        if value is not None and not (math.isfinite(value) and least <= value <= limit):
            flag = name.replace("_", "-")
            raise ConfigError(f"bench: --{flag} {value:g}: expected a number from {least:g} to {limit}")
    if options.protocol in (None, "chat") and not options.model:
        options.protocol, options.model = "chat", "default"
    if not options.model:
        raise ConfigError(
            f"bench: --protocol {options.protocol} needs the name of a model: penstock bench MODEL"
        )
    if options.requests is None and options.duration is None:
        options.duration = _DEFAULT_DURATION_S
    if options.rate and options.duration and options.rate * options.duration > MAX_REQUESTS:
        raise ConfigError(f"bench: --rate times --duration is above {MAX_REQUESTS} requests")
