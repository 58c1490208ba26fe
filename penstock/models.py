"""`penstock models list | show | pull | add | verify` and `penstock verify`: the catalog on the command line.

These commands see all models of the catalog directories, served or not. `penstock list`, as ollama's, leaves out models
whose files are not on this machine, and has those of the hub cache that no catalog names. Where a flag names a server,
`list` shows what that server has. `show` reads the catalog of the server that runs at the address, if one does; where
`--url` names a server of another machine, or one whose processes this user does not see, as in a container, `show` asks
over HTTP. Exit codes: 0 fine, 1 for a model or file that cannot be had, 2 and 3 as for the other commands.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ipc import extras
from ipc.catalog.entries import ENCODE_OUTPUTS, Catalog
from ipc.catalog.reading import read_entries
from ipc.errors import ConfigError, PenstockError
from ipc.settings import Settings
from penstock import files, target, terminal
from penstock.own_models import entries
from penstock.verification import command as verification

OUTPUTS = (*ENCODE_OUTPUTS, "score", "json", "chat")
AddFlags = Callable[[argparse.ArgumentParser], None]


def add_parsers(commands: Any, add_flags: AddFlags, add_looking: AddFlags) -> None:
    """Add `models ...`, and its most used actions as commands of their own.

    `add_flags` adds what all commands understand, `add_looking` what commands do that also look at a running server.
    """
    models = commands.add_parser("models", help="list, show, pull or verify models of the catalog")
    terminal.with_examples(
        models,
        ("models list", "all models of the catalog"),
        ("models add ./my-model", "writes the entry of a model of one's own"),
    )
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, about, add_arguments in (
        ("list", "all models of the catalog in a table", _add_list),
        ("show", "everything that the catalog says of one model, or a server of a loaded program", _add_show),
        ("pull", "download models from the hub, of the catalog or by their ids", _add_pull),
        ("verify", "compare a model's results with a reference library", _add_verify),
    ):
        meaning = f"the same as `models {name}`" if name != "list" else "the models that are on this machine"
        alone = commands.add_parser(name, help=meaning)
        alone.set_defaults(action=name, here=True)
        for parser in (actions.add_parser(name, help=about), alone):
            add_arguments(parser)
            (add_looking if name == "show" else add_flags)(parser)
            if name == "list":
                target.add_url(parser)
            if name in ("list", "show"):
                target.add_key(parser)
                parser.set_defaults(asks=True)
    adding = actions.add_parser("add", help="write the catalog entry of a model, to be edited")
    entries.add_arguments(adding)
    add_flags(adding)


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="*",
        help="only models whose id, family, outputs or description has each",
    )
    parser.add_argument("--family", help="only this family, for example dense")
    parser.add_argument("--output", choices=OUTPUTS, help="only models that give this output")
    terminal.with_json(parser)
    terminal.with_examples(
        parser,
        ("models list", "all models of the catalog"),
        ("models list rerank multilingual", "models whose words have both"),
        ("models list --output sparse --json", "models that give sparse vectors, for a script"),
    )


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=target.text)
    terminal.with_json(parser)
    terminal.with_examples(parser, ("models show BAAI/bge-m3", "everything that the catalog says of a model"))


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="+", type=target.text)
    parser.add_argument(
        "--to", metavar="DIR", help="copy each model to DIR/MODEL, to be served without a network"
    )
    terminal.with_json(parser)
    terminal.with_examples(
        parser,
        ("models pull BAAI/bge-m3", "fetches a model into the hub cache"),
        ("models pull org/name --to /srv/copies", "copies a model for a machine without a network"),
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    verification.add_arguments(parser)
    terminal.with_examples(parser, ("verify BAAI/bge-m3", "compares with the model's reference library"))


def run(options: argparse.Namespace, config: Settings) -> int:
    """Run one of the actions; returns the exit code."""
    action: str = options.action
    try:
        return _run(action, options, config)
    except ConfigError:
        raise
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
    except ImportError as error:
        print(f"penstock: {action} needs {extras.needed('worker')}: {error}", file=sys.stderr)
    return 1


def _run(action: str, options: argparse.Namespace, config: Settings) -> int:
    # NOTE: imported here, since machines with frontends only have none of the packages of workers.
    from penstock import downloads, processes, status

    reading = read_entries(config.catalog.dirs)
    for file in reading.bad:
        print(f"penstock: {file.message}", file=sys.stderr)
    catalog = Catalog(reading.entries.values())
    if action in ("pull", "verify") and not extras.has_worker():
        raise ConfigError(f"{action} needs {extras.needed('worker')}")
    if action == "list" and target.names_server(options):
        return _list_served(options, config)
    if action == "list":
        return files.print_list(config, options)
    if action == "show" and not options.catalog:
        dirs = processes.catalog_dirs(config.paths)
        if options.url and (not dirs or target.is_elsewhere(options.url)):
            key = target.key_of(options)
            return print_one(target.url_of(options, config), key, options.model, as_json=options.json)
        catalog = _served_catalog(dirs, options.model) or catalog
    if action == "show" and options.model not in catalog:
        versions = processes.programs(config.paths, config.worker_count, options.model, status.WAIT_S)
        if versions:
            return files.print_programs(versions, as_json=options.json)
    if action == "show":
        entry = downloads.entry_of(options.model, catalog)
        loaded = processes.loaded(config.paths, config.worker_count, entry.id, status.WAIT_S)
        return files.print_one(entry, loaded, as_json=options.json)
    if action == "pull":
        return downloads.run(options.model, catalog, options.to, as_json=options.json)
    if action == "add":
        return entries.write_entry(options, config, catalog)
    return verification.run(downloads.entry_of(options.model, catalog), config, as_json=options.json)


def _list_served(options: argparse.Namespace, config: Settings) -> int:
    """Print what the server of the flags has. Raises `ConfigError` for a flag that only the catalog can follow."""
    if options.family:
        raise ConfigError(
            "list: a server does not tell families; leave out --family, or the flags of the server"
        )
    return print_list(
        target.url_of(options, config),
        target.key_of(options),
        options.text,
        options.output,
        as_json=options.json,
        may_say="; is a server running there? Without its flags the models of this machine are listed",
    )


def _served_catalog(dirs: Sequence[str], model: str) -> Catalog | None:
    """The catalog of a server's directories, where that catalog has the model."""
    catalog = Catalog(read_entries(dirs).entries.values()) if dirs else None
    return catalog if catalog is not None and model in catalog else None


_ASK_S = 10.0
_HEAD = ("MODEL", "OUTPUTS", "DIMS", "LENGTH", "STATE", "AS", "WEIGHTS", "CACHE")
_MEMORY = ("precision", "weight_bytes", "cache_bytes", "cache_tokens")
_CHAT = "chat"


class NotTold(PenstockError):
    """The server gave no answer, or one that is no list of models."""


class Listed(msgspec.Struct):
    """A model in the form of OpenAI. Only models that generate text say how they are shown `tools`, once loaded.

    Models that generate text also say in which `precision` their weights are, the bytes of weights and of the cache of
    keys and values, and how many tokens fit this cache.
    """

    id: str
    tools: str | None = None
    precision: str | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    cache_tokens: int | None = None


class Served(msgspec.Struct):
    """A model in the form of SIE; `outputs` leaves out the text of models that chat."""

    name: str
    state: str
    outputs: list[str] = []
    dims: dict[str, int] = {}
    max_sequence_length: int | None = None


class Answer(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[Listed]
    models: list[Served]


def print_list(
    url: str, key: str, words: Sequence[str], output: str | None, *, as_json: bool, may_say: str
) -> int:
    """Print the models of a server whose id and outputs have all `words`. Raises `NotTold`.

    `may_say` ends the message where no server answers.
    """
    try:
        answer = msgspec.json.decode(_asked(f"{url}/v1/models", key, may_say), type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotTold(
            f"{url} answers /v1/models with no list of models: is it a server of Penstock?"
        ) from None
    listed = {each.id: each for each in answer.data}
    rows = []
    for model in answer.models:
        one = listed.get(model.name) or Listed(model.name)
        outputs = [*model.outputs, *([_CHAT] if one.tools is not None else ())]
        text = " ".join((model.name, *outputs)).lower()
        if output in (None, *outputs) and all(word.lower() in text for word in words):
            memory = {name: getattr(one, name) for name in _MEMORY}
            rows.append({**msgspec.structs.asdict(model), "outputs": outputs, **memory})
    count = f"{len(rows)} models" if len(rows) != 1 else "1 model"
    print(f"penstock: {count} of the server at {url}", file=sys.stderr)
    print(terminal.as_json(rows) if as_json else "\n".join(files.fitted([_HEAD, *map(_cells, rows)])))
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        terminal.harmless(row["name"]),
        "+".join(row["outputs"]) or "-",
        str(next(iter(row["dims"].values()), "-")),
        str(row["max_sequence_length"] or "-"),
        row["state"],
        files.short_precision(row["precision"]),
        files.decimal_size(row["weight_bytes"]),
        files.decimal_size(row["cache_bytes"]),
    )


def print_one(url: str, key: str, model: str, *, as_json: bool) -> int:
    """Print what a server says of one model. Raises `NotTold`."""
    body = _asked(f"{url}/v1/models/{urllib.parse.quote(model)}", key, "")
    try:
        described = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotTold(f"{url} answers with no model: is it a server of Penstock?") from None
    print(terminal.as_json(described) if as_json else msgspec.yaml.encode(described).decode().rstrip())
    return 0


def _asked(address: str, key: str, may_say: str) -> bytes:
    """The body of an answer. Raises `NotTold`."""
    try:
        return target.fetched(address, key, _ASK_S)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = target.failure(error)
        if reason.startswith("401"):
            reason += f" (the key stands in {target.KEY_VARIABLE} or in --key-file)"
        raise NotTold(f"no answer from {address}: {reason}{may_say}") from None
