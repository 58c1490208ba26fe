"""What all commands print alike: tables, colour on a terminal, JSON, sizes and times for people, examples of a help.

Colour needs a terminal, and neither `NO_COLOR` nor `TERM=dumb` (https://no-color.org).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import msgspec

_STYLES = {"good": "\x1b[32m", "bad": "\x1b[31m", "warn": "\x1b[33m", "strong": "\x1b[1m", "dim": "\x1b[2m"}
_PLAIN = "\x1b[0m"
CLEAR = "\x1b[H\x1b[2J\x1b[3J"
"""Clears a terminal."""
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters; marks that turn the order of text; halves of surrogate pairs, which no stream takes."""
_WIDTH = 80
"""Columns of a terminal that does not tell its width."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def coloured(stream: TextIO) -> bool:
    """Whether text on `stream` may have colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` as good, bad, warn, strong or dim; plain where `stream` (standard output) shows no colour."""
    return f"{_STYLES[style]}{text}{_PLAIN}" if coloured(stream or sys.stdout) else text


def harmless(text: str) -> str:
    """Text of others without the characters that a terminal obeys; line breaks and tabs stay."""
    return _OBEYED.sub("", text)


def one_line(text: str) -> str:
    """Text of others on one line, without the characters that a terminal obeys."""
    return harmless(" ".join(text.split()))


def redraw(text: str, end: str = "") -> None:
    """Put `text` in the place of the moving line on standard error, cut to the width of the terminal."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = 0
    sys.stderr.write(f"\r\x1b[K{text[: (width or _WIDTH) - 1]}{end}")
    sys.stderr.flush()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with columns of equal width; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def as_json(value: Any, *, one_line: bool = False) -> str:
    """`value`, of structs, dictionaries and lists, as JSON."""
    encoded = msgspec.json.encode(_plain(value))
    return (encoded if one_line else msgspec.json.format(encoded)).decode()


def _plain(value: Any) -> Any:
    """`value` with structs as dictionaries, also structs that are arrays between our processes."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def with_json(parser: argparse._ActionsContainer, help: str = "print JSON") -> None:
    """Add `--json`: the result is one JSON document on standard output; messages stay on standard error."""
    parser.add_argument("--json", action="store_true", help=help)


def size(nbytes: float) -> str:
    """`1.4 GiB`."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit in _UNITS[:2] else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def span(seconds: float) -> str:
    """`14 s`, `3 min 2 s`, `5 h 10 min`, `2 d 4 h`."""
    total = int(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if total >= large:
            rest = total % large // small
            return f"{total // large} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{total} s"


def with_examples(parser: argparse.ArgumentParser, *examples: tuple[str, str]) -> None:
    """Let the help of `parser` end with `examples`, pairs of a command line and what the line does."""
    lines = [f"  penstock {command}\n      {what}" for command, what in examples]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "examples:\n" + "\n".join(lines)
