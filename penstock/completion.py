"""`penstock completion SHELL`: a script that completes commands, flags, files and names of models in a shell."""

from __future__ import annotations

import argparse
import re
from typing import Any

from penstock import terminal

SHELLS = ("bash", "zsh", "fish")
_NAMES = "penstock completion names 2>/dev/null"
_MODELS = {
    "bash": "_penstock_models",
    "zsh": "_penstock_models",
    "fish": f"({_NAMES}; __fish_complete_directories)",
}
_PREAMBLE = {
    "bash": f'_penstock_models() {{ compgen -W "$({_NAMES})" -- "$1"; }}',
    "zsh": f"""_penstock_models() {{
  local -a names
  names=(${{(f)"$({_NAMES})"}})
  compadd -a names || _files -/
}}""",
    "fish": "",
}
_MODEL_FIELDS = ("model", "models", "named")


def add_parser(commands: Any) -> None:
    """Add `completion` to the commands."""
    parser = commands.add_parser("completion", help="print a script that completes commands in a shell")
    parser.add_argument(
        "shell", choices=(*SHELLS, "names"), help="bash, zsh or fish; names prints the names of models"
    )
    terminal.with_examples(
        parser,
        ("completion bash > ~/.local/share/bash-completion/completions/penstock", "for bash"),
        ("completion zsh > ~/.zfunc/_penstock", "for zsh, with ~/.zfunc in fpath"),
        ("completion fish > ~/.config/fish/completions/penstock.fish", "for fish"),
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script of `parser`, or the names of models."""
    if options.shell == "names":
        from penstock import names

        return names.main()
    # Imported here: only this command needs the library.
    import shtab

    _mark(parser)
    script = shtab.complete(parser, shell=options.shell, preamble=_PREAMBLE[options.shell])
    # NOTE: shtab 1.13 writes `(*)` for a position that repeats. zsh reads an exclusion, and completes one word.
    print(re.sub(r'"\(\*\)::?', '"*:', script) if options.shell == "zsh" else script)
    return 0


def _mark(parser: argparse.ArgumentParser) -> None:
    """Say what completes the values of flags and positions: names of models, files, directories."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _mark(child)
        elif action.dest in _MODEL_FIELDS:
            action.complete = _MODELS  # type: ignore[attr-defined]
        elif action.metavar in ("FILE", "IN.jsonl", "OUT"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
