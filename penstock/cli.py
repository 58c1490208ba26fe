"""The command `penstock` and its subcommands; `penstock --help` lists them.

Flags become settings, and settings travel to Gunicorn and the workers as environment variables. Exit codes: 0 fine,
2 wrong command line, 3 wrong configuration, 1 anything else. With `serve`, `gateway`, `bridge`, `worker` and `tools`
this process becomes Gunicorn, the bridge, a worker or the tool host, so that signals and systemd see one main process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ipc import brokers, extras, settings
from ipc.errors import ConfigError, PenstockError
from ipc.processes import starting
from ipc.processes.paths import asset
from ipc.version import VERSION
from penstock import completion, keys, target, terminal
from penstock.command_line import COMMANDS, TOOL_FLAGS, parser
from penstock.tuning import command as tuning

EXIT_CONFIG = 3
_DESCRIBING = ("version", "openapi", "completion")
"""Commands that print what the package knows, and read no settings."""


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """Settings named by the command line, as `{"section.field": "value"}`."""
    flags: dict[str, str] = {}
    named = (
        ("workers", "worker.count"),
        ("frontends", "server.frontends"),
        ("models", "catalog.models"),
        ("max_seqs", "generation.max_sequences"),
        ("access_log_format", "log.format"),
    )
    for option, name in named:
        value = getattr(options, option, None)
        if value is not None:
            flags[name] = str(value)
    if named_models := getattr(options, "named", None):
        if "" in named_models:
            raise ConfigError(f"penstock {options.command}: the name of a model is empty")
        flags["catalog.models"] = ",".join([*filter(None, [flags.get("catalog.models")]), *named_models])
    flags |= _serving_flags(options)
    if options.command == "gateway":
        flags["server.engine"] = "cluster"
    flags |= target.stated(options)
    if (bind := target.bind_of(options, flags)) is not None:
        flags.setdefault("server.bind", bind)
    return flags


_SERVING = ("serve", "check", "doctor", "worker")
"""Commands that read models which the catalog lacks."""
_SWITCHES = (
    ("disable_request_id_header", "server.request_id_header", "false"),
    ("disable_metrics", "server.metrics", "false"),
    ("access_log", "log.access", "true"),
    ("disable_access_log", "log.access", "false"),
    ("access_log_health", "log.access_health", "true"),
    ("fetch_file_urls", "fetch.file_urls", "true"),
    ("no_fetch_media", "generation.fetch_media", "false"),
    ("agent", "agent.code_execution", "true"),
    ("agent", "agent.shell", "true"),
    ("agent", "agent.search", "true"),
    ("enable_code_execution", "agent.code_execution", "true"),
    ("enable_shell", "agent.shell", "true"),
    ("enable_search", "agent.search", "true"),
)
"""Flags without a value, their settings, and the values that they set."""


def _serving_flags(options: argparse.Namespace) -> dict[str, str]:
    """Settings of the flags of `serve` that are no value of one setting. Raises `ConfigError`."""
    flags: dict[str, str] = {}
    prefixes = getattr(options, "prefix_cache_n", None)
    if prefixes is not None:
        if not prefixes.isdecimal():
            raise ConfigError(f"--prefix-cache-n {prefixes}: expected a number from 0")
        flags["generation.prefix_cache"] = str(int(prefixes) > 0).lower()
    flags |= {setting: value for flag, setting, value in _SWITCHES if getattr(options, flag, False)}
    return flags | _tool_flags(options)


def _tool_flags(options: argparse.Namespace) -> dict[str, str]:
    """Settings of the flags of tools. Raises `ConfigError` for two work directories, as all tools share one."""
    flags: dict[str, str] = {}
    for flag, (setting, _, _) in TOOL_FLAGS.items():
        value = getattr(options, flag.strip("-").replace("-", "_"), None)
        if value is None:
            continue
        if flag == "--sb-max-memory-mb":
            value = f"{value}MiB"
        if flags.setdefault(setting, value) != value:
            raise ConfigError(f"{flag} {value}: Python and shell share one work directory, {flags[setting]}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser().print_help()
        return 0
    options = parser().parse_args(words)
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed the pipe.
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"penstock: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    return code


def _drop_output() -> None:
    """Discard what standard output does not take: the interpreter flushes at its end and would fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    try:
        if options.command in _DESCRIBING:
            return _describe(options)
        if options.command == "keys" and options.action == "new":
            return keys.new(options)
        flags = flags_of(options)
        config = settings.load(getattr(options, "config", None), flags)
        if options.command in _SERVING and any(config.catalog.models):
            # Imported here: only models that the catalog lacks need to be read.
            from penstock.own_models import entries

            flags |= entries.resolve(config)
            config = settings.load(getattr(options, "config", None), flags)
        if options.command in COMMANDS:
            return COMMANDS[options.command](options, config)
        if options.command == "serve":
            return serve(options, flags, config)
        if options.command == "gateway":
            return _become(options, flags, "frontend.arbiter.program", "-c", str(asset("gunicorn.conf.py")))
        if options.command == "bridge":
            return bridge(options, flags, config)
        if options.command == "worker":
            return work(options, flags)
        if options.command == "tools":
            return _become(options, flags, "workers.tools")
        if options.command == "doctor":
            return _doctor(config, as_json=options.json)
        if options.command == "tune":
            return tuning.run(options, config, flags)
        return _check(config, as_json=options.json)
    except ConfigError as error:
        if options.command == "check" and options.json:
            print(terminal.as_json({"valid": False, "models": [], "mistakes": [error.message]}))
        else:
            print(f"penstock: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1


# NOTE: the next three import modules that need all of the frontend. Other commands do not wait for these modules.


def _describe(options: argparse.Namespace) -> int:
    """Run one of `_DESCRIBING`; returns the exit code."""
    if options.command == "completion":
        return completion.run(options, parser())
    if options.command == "version":
        print(terminal.as_json({"version": VERSION}) if options.json else VERSION)
        return 0
    from frontend.protocols import registry

    print(registry.protocols().schema().decode())
    return 0


def _check(config: settings.Settings, *, as_json: bool) -> int:
    from penstock import configuration

    return configuration.run(config, as_json=as_json)


def _doctor(config: settings.Settings, *, as_json: bool) -> int:
    from penstock import doctor

    return doctor.run(config, as_json=as_json)


def serve(options: argparse.Namespace, flags: dict[str, str], config: settings.Settings) -> int:
    """Become the server. Raises `ConfigError` for a catalog that cannot be served, or without what workers need."""
    # Imported here: the module needs all of the frontend, a worker does not.
    from penstock import configuration

    configuration.read(config)
    if os.environ.get("PENSTOCK_SUPERVISE", "1") != "0":
        _require_workers()
        if options.named or options.models:
            configuration.refuse_unreachable(config)
    return _become(options, flags, "frontend.arbiter.program", "-c", str(asset("gunicorn.conf.py")))


def bridge(options: argparse.Namespace, flags: dict[str, str], config: settings.Settings) -> int:
    """Become the bridge of this host. Raises `ConfigError` without brokers, or without their client."""
    brokers.check(config)
    if not config.cluster.on:
        raise ConfigError("cluster.urls: expected the brokers that this host is to work for")
    brokers.require_client("penstock bridge")
    return _become(options, flags, "frontend.bridge")


def work(options: argparse.Namespace, flags: dict[str, str]) -> int:
    """Become the worker of a slot. Raises `ConfigError` for a slot that is none."""
    if options.slot < 0:
        raise ConfigError(f"worker: --slot {options.slot}: expected a number from 0")
    _require_workers()
    return _become(options, flags, "workers", "--slot", str(options.slot))


def _require_workers() -> None:
    if not extras.has_worker():
        raise ConfigError(f"workers need {extras.needed('worker')}")


def _become(options: argparse.Namespace, flags: dict[str, str], module: str, *arguments: str) -> int:
    """Replace this process by one of our modules, with the same settings."""
    environment = starting.environment() | settings.to_environ(flags)
    if options.config:
        environment["PENSTOCK_CONFIG"] = options.config
    os.execve(sys.executable, starting.command(module, *arguments), environment)
