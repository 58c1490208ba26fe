"""The command `penstock` and its subcommands; `penstock --help` lists them.

Flags become settings, and settings travel to Gunicorn and the workers as environment variables. Exit codes: 0 fine,
2 wrong command line, 3 wrong configuration, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ipc import settings
from ipc.errors import ConfigError
from ipc.version import VERSION
from penstock import clients, completion, keys, models, running, status, sweeping
from penstock.tuning import command as tuning

EXIT_CONFIG = 3


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="settings file (default: $PENSTOCK_CONFIG)")
    parser.add_argument(
        "--catalog", metavar="DIR", action="append", default=[], help="directory of model files; may repeat"
    )
    parser.add_argument("--models", metavar="ID,ID", help="serve only these models: ids of the catalog")
    parser.add_argument("--bind", metavar="HOST:PORT", help="address to listen on (default 127.0.0.1:8080)")
    parser.add_argument(
        "--workers", metavar="N", help="GPU processes (default: one per GPU, on CPU one for four cores)"
    )
    parser.add_argument(
        "--frontends", metavar="N", help="HTTP processes (default: one per two cores, at most 4)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="where models run; cuda never falls back to the CPU"
    )
    parser.add_argument(
        "--set", metavar="SECTION.FIELD=VALUE", action="append", default=[], help="any setting; may repeat"
    )


def _named(parser: argparse.ArgumentParser) -> None:
    """Models by position, of commands that read a model which the catalog lacks from the model's files."""
    parser.add_argument(
        "named",
        metavar="MODEL",
        nargs="*",
        help="serve only these models: ids of the catalog or of the hub, directories; ID=NAME adds a name",
    )


def _serving(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve` alone, under the names that mistral.rs gives them."""
    parser.add_argument("--host", metavar="HOST", help="host of the address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "-p", "--port", metavar="PORT", help="port of the address to listen on (default 8080)"
    )
    parser.add_argument("--max-seqs", metavar="N", help="texts that a model generates at once (default 32)")
    parser.add_argument(
        "--prefix-cache-n", metavar="N", help="0: never reuse what is known of a prompt's beginning"
    )
    parser.add_argument(
        "--disable-request-id-header", action="store_true", help="answers without X-Request-ID"
    )
    parser.add_argument("--disable-metrics", action="store_true", help="no /metrics, nothing counted for it")
    parser.add_argument("--access-log", action="store_true", help="two lines for each HTTP request")
    parser.add_argument("--access-log-health", action="store_true", help="... also for probes")
    parser.add_argument("--access-log-format", choices=("text", "json"), help="form of all lines of the log")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="penstock", description="Inference server for chat, embeddings and more."
    )
    root.add_argument("--version", action="version", version=VERSION)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="start the server: gunicorn -c gunicorn.conf.py with these settings"
    )
    _serving(serve)
    check = commands.add_parser("check", help="validate settings and catalog; exit 3 when wrong")
    look = commands.add_parser("doctor", help="look at devices, limits, shared memory, ports, versions")
    for examined in (check, look):
        examined.add_argument("--json", action="store_true", help="print JSON")
    worker = commands.add_parser(
        "worker", help="start one worker by hand, for frontends without a supervisor"
    )
    for each in (serve, check, look, worker):
        _common(each)
        _named(each)
    worker.add_argument("--slot", type=int, required=True, help="number of the worker, from 0")
    sweeping.add_parser(commands, _common)
    status.add_parser(commands, _common)
    clients.add_parsers(commands)
    models.add_parsers(commands, _common)
    tuning.add_parser(commands, _common)
    keys.add_parser(commands, _common)
    completion.add_parser(commands)
    commands.add_parser("openapi", help="print the OpenAPI document of the HTTP surface")
    commands.add_parser("version", help="print the version")
    return root


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """Settings named by the command line, as `{"section.field": "value"}`."""
    flags: dict[str, str] = {}
    named = (
        ("bind", "server.bind"),
        ("workers", "worker.count"),
        ("frontends", "server.frontends"),
        ("device", "worker.device"),
        ("models", "catalog.models"),
        ("max_seqs", "generation.max_sequences"),
        ("access_log_format", "log.format"),
    )
    for option, name in named:
        value = getattr(options, option, None)
        if value is not None:
            flags[name] = str(value)
    if named_models := getattr(options, "named", None):
        flags["catalog.models"] = ",".join([*filter(None, [flags.get("catalog.models")]), *named_models])
    if getattr(options, "catalog", None):
        flags["catalog.dirs"] = ",".join(options.catalog)
    flags |= _serving_flags(options)
    for pair in getattr(options, "set", ()):
        name, found, value = pair.partition("=")
        if not found or "." not in name:
            raise ConfigError(f"--set {pair}: expected SECTION.FIELD=VALUE")
        flags[name] = value
    return flags


_SERVING = ("serve", "check", "doctor", "worker")
"""Commands that read models which the catalog lacks."""
_SWITCHES = (
    ("disable_request_id_header", "server.request_id_header", "false"),
    ("disable_metrics", "server.metrics", "false"),
    ("access_log", "log.access", "true"),
    ("access_log_health", "log.access_health", "true"),
)
"""Flags without a value, their settings, and the values that they set."""


def _serving_flags(options: argparse.Namespace) -> dict[str, str]:
    """Settings of the flags of `serve` that are no value of one setting. Raises `ConfigError`."""
    flags: dict[str, str] = {}
    host, port = getattr(options, "host", None), getattr(options, "port", None)
    if host or port:
        if options.bind:
            raise ConfigError("--bind HOST:PORT cannot stand beside --host and --port")
        default_host, _, default_port = settings.Server().bind.rpartition(":")
        name = f"[{host}]" if host and ":" in host.strip("[]") and not host.startswith("[") else host
        flags["server.bind"] = f"{name or default_host}:{port or default_port}"
    prefixes = getattr(options, "prefix_cache_n", None)
    if prefixes is not None:
        if not prefixes.isdecimal():
            raise ConfigError(f"--prefix-cache-n {prefixes}: expected a number from 0")
        flags["generation.prefix_cache"] = str(int(prefixes) > 0).lower()
    flags |= {setting: value for flag, setting, value in _SWITCHES if getattr(options, flag, False)}
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed the pipe. The interpreter flushes at its end and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(options: argparse.Namespace) -> int:
    try:
        if options.command == "version":
            print(VERSION)
            return 0
        if options.command == "openapi":
            # Imported here: the document needs all of the frontend, other commands do not.
            from frontend.openapi import document

            print(document.schema().decode())
            return 0
        if options.command == "keys" and options.action == "new":
            return keys.new(options)
        if options.command == "completion":
            return completion.run(options, parser())
        flags = flags_of(options)
        config = settings.load(getattr(options, "config", None), flags)
        if options.command in _SERVING and any(config.catalog.models):
            # Imported here: only models that the catalog lacks need to be read.
            from penstock.own_models import serving

            flags |= serving.resolve(config)
            config = settings.load(getattr(options, "config", None), flags)
        if options.command in clients.NAMES:
            return clients.run(options, config)
        if options.command == "serve":
            return running.serve(options, flags, config)
        if options.command == "worker":
            return running.work(options, flags)
        if options.command == "sweep":
            return sweeping.run(options, config)
        if options.command == "status":
            return status.run(options, config)
        if options.command == "keys":
            return keys.run(options, config)
        if options.command == "doctor":
            return _doctor(config, as_json=options.json)
        if options.command == "tune":
            return tuning.run(options, config, flags)
        if options.command in ("models", "verify"):
            return models.run(options, config)
        return _check(config, as_json=options.json)
    except ConfigError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


# NOTE: the modules of the next two are imported there: they need all of the frontend, other commands do not.


def _check(config: settings.Settings, *, as_json: bool) -> int:
    from penstock import checking

    return checking.run(config, as_json=as_json)


def _doctor(config: settings.Settings, *, as_json: bool) -> int:
    from penstock import doctor

    return doctor.run(config, as_json=as_json)
