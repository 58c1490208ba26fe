"""docs/settings.md: every setting with default, allowed values, and its comment in config/server.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import wrap

import msgspec
from msgspec import inspect

from ipc import setting_sources, settings
from tools.source_tree import ROOT

SOURCE = ROOT / "config" / "server.yaml"
_HEAD = """# Settings

Made by `make docs` from `ipc/settings.py` and `config/server.yaml`.

Precedence: default, then the file (`--config` or `PENSTOCK_CONFIG`), then the environment, then flags. `server.bind` is
`PENSTOCK_SERVER__BIND` in the environment and `--set server.bind=...` on the command line, and so for every other.
Several values of one setting, directories too, are separated by commas, and spaces beside a comma do not count; in
the file they are lists, whose texts may hold commas.
Sizes are bytes, or have a unit: B, KiB, MiB, GiB, TiB, and kB, MB, GB, TB by thousands.
What is more than a row holds stands below the table.
"""
CELL_WORDS = 25
"""Words of a cell; the sentences and clauses behind them go below the table."""


def render() -> str:
    """The whole page."""
    told = dict(_comments())
    parts = [_HEAD]
    for section in msgspec.structs.fields(settings.Settings):
        assert told[section.name], f"{SOURCE.name}: the section {section.name} has no comment"
        parts.append(f"## {section.name}\n\n{told[section.name]}\n")
        parts.append("| setting | default | takes | meaning |\n|---|---|---|---|")
        more = []
        for field in inspect.type_info(section.type).fields:  # type: ignore[attr-defined]
            name = f"{section.name}.{field.name}"
            default = f"`{setting_sources.shown(field.name, field.default)}`"
            takes = setting_sources.taken(field.name, field.type)
            cell, rest = _split(told[name])
            parts.append(f"| `{name}` | {default} | {takes} | {_cell(cell)} |")
            more += wrap(f"- `{name}`: {_cell(rest)}", 120, subsequent_indent="  ") if rest else []
        parts += ["", *more, ""] if more else [""]
    return "\n".join(parts)


def _comments() -> Iterator[tuple[str, str]]:
    """(section or section.field, the comment lines right above it)."""
    above: list[str] = []
    section = ""
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        if text:
            name = text.partition(":")[0]
            section = section if line.startswith(" ") else name
            yield (f"{section}.{name}" if line.startswith(" ") else name), " ".join(above)
        above = []


def _split(text: str) -> tuple[str, str]:
    """The first sentences or clauses of a comment, and what no cell has room for."""
    for ends in (r"(?<=[.;]) ", r"(?<=[.;:,]) "):
        cell, *rest = re.split(ends, text)
        while rest and len(f"{cell} {rest[0]}".split()) <= CELL_WORDS:
            cell = f"{cell} {rest.pop(0)}"
        if len(cell.split()) <= CELL_WORDS:
            break
    return cell.rstrip(";,:"), " ".join(rest)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
