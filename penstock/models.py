"""`penstock models list | show | pull | add | verify` and `penstock verify`: the catalog on the command line.

These commands see all models of the catalog directories, served or not. Exit codes: 0 fine, 1 for a model or file that
cannot be had, 2 and 3 as for the other commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from ipc import extras
from ipc.catalog.entries import ENCODE_OUTPUTS, Catalog, read_entries
from ipc.errors import ConfigError, PenstockError
from ipc.settings import Settings
from penstock import terminal
from penstock.own_models import entry_file
from penstock.verification import command as verification

OUTPUTS = (*ENCODE_OUTPUTS, "score", "json", "chat")
AddFlags = Callable[[argparse.ArgumentParser], None]


def add_parsers(commands: Any, add_flags: AddFlags) -> None:
    """Add `models ...` and `verify` to the commands; `add_flags` adds what all commands understand."""
    models = commands.add_parser("models", help="list, show, pull or verify models of the catalog")
    terminal.with_examples(
        models,
        ("models list", "all models of the catalog"),
        ("models add ./my-model", "writes the entry of a model of one's own"),
    )
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all models of the catalog in a table")
    listing.add_argument("--family", help="only this family, for example dense")
    listing.add_argument("--output", choices=OUTPUTS, help="only models that give this output")
    terminal.with_json(listing)
    showing = actions.add_parser(
        "show", help="everything that the catalog says of one model, or a server of a loaded program"
    )
    showing.add_argument("model", metavar="MODEL")
    terminal.with_json(showing)
    terminal.with_examples(
        listing,
        ("models list", "all models of the catalog"),
        ("models list --output sparse --json", "models that give sparse vectors, for a script"),
    )
    terminal.with_examples(
        showing, ("models show BAAI/bge-m3", "everything that the catalog says of a model")
    )
    pull = actions.add_parser("pull", help="download models from the hub, of the catalog or by their ids")
    pull.add_argument("model", metavar="MODEL", nargs="+")
    pull.add_argument(
        "--to", metavar="DIR", help="copy each model to DIR/MODEL, to be served without a network"
    )
    terminal.with_json(pull)
    terminal.with_examples(
        pull,
        ("models pull BAAI/bge-m3", "fetches a model into the hub cache"),
        ("models pull org/name --to /srv/copies", "copies a model for a machine without a network"),
    )
    entry_file.add_arguments(
        actions.add_parser("add", help="write the catalog entry of a model, to be edited")
    )
    verify = actions.add_parser("verify", help="compare a model's results with a reference library")
    alone = commands.add_parser("verify", help="the same as `models verify`")
    for parser in (verify, alone):
        verification.add_arguments(parser)
        terminal.with_examples(parser, ("verify BAAI/bge-m3", "compares with the model's reference library"))
    for parser in (listing, showing, pull, actions.choices["add"], verify, alone):
        add_flags(parser)


def run(options: argparse.Namespace, config: Settings) -> int:
    """Run one of the actions; returns the exit code."""
    action = getattr(options, "action", "verify")
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
    from penstock import downloads, files, processes, status

    reading = read_entries(config.catalog.dirs)
    for file in reading.bad:
        print(f"penstock: {file.message}", file=sys.stderr)
    catalog = Catalog(reading.entries.values())
    if action in ("pull", "verify") and not extras.has_worker():
        raise ConfigError(f"{action} needs {extras.needed('worker')}")
    if action == "list":
        return files.print_list(config, options)
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
        return entry_file.run(options, config, catalog)
    return verification.run(downloads.entry_of(options.model, catalog), config, as_json=options.json)
