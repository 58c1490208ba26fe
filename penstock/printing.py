"""The commands that print what the package knows: version, OpenAPI document, completions of a shell."""

from __future__ import annotations

import argparse
from typing import Any

from ipc.version import VERSION
from penstock import completion, terminal

NAMES = ("version", "openapi", "completion")


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    completion.add_parser(commands)
    document = commands.add_parser("openapi", help="print the OpenAPI document of the HTTP surface")
    terminal.with_examples(document, ("openapi > openapi.json", "for a generator of clients"))
    terminal.with_json(document, "the document is JSON always")
    version = commands.add_parser("version", help="print the version")
    terminal.with_json(version)
    terminal.with_examples(version, ("version", "the same as `penstock --version`"))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run one of `NAMES`; returns the exit code."""
    if options.command == "completion":
        return completion.run(options, parser)
    if options.command == "version":
        print(terminal.as_json({"version": VERSION}) if options.json else VERSION)
        return 0
    # Imported here: the document needs all of the frontend, other commands do not.
    from frontend.protocols import registry

    print(registry.schema().decode())
    return 0
