"""`penstock completion SHELL`: a script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from penstock import terminal

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Any) -> None:
    """Add `completion` to the commands."""
    parser = commands.add_parser("completion", help="print a script that completes commands in a shell")
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
    terminal.with_examples(
        parser,
        ("completion bash > ~/.local/share/bash-completion/completions/penstock", "for bash"),
        ("completion zsh > ~/.zfunc/_penstock", "for zsh, with ~/.zfunc in fpath"),
        ("completion fish > ~/.config/fish/completions/penstock.fish", "for fish"),
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script of `parser`."""
    # Imported here: only this command needs the library.
    import shtab

    print(shtab.complete(parser, shell=options.shell))
    return 0
