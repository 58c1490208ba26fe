"""The commands that ask a running server over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from ipc.settings import Settings
from penstock import chat, layout
from penstock.benching import command as benching
from penstock.embedding import command as embedding

_COMMANDS = {"bench": benching.run, "chat": chat.run, "embed": embedding.run, "layout": layout.run}
NAMES = tuple(_COMMANDS)


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    for module in (benching, chat, embedding, layout):
        module.add_parser(commands)


def run(options: argparse.Namespace, config: Settings) -> int:
    """Run one of `NAMES`; returns the exit code."""
    return _COMMANDS[options.command](options, config)
