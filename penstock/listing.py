"""`penstock models list` and `show`: the catalog as a table, one model as YAML, either as JSON."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any

import msgspec

from ipc import extras
from ipc.catalog.entries import HubSource, ModelEntry, read_entries
from ipc.settings import Settings
from penstock.families import FAMILIES, Family
from penstock.files import directory_of, nbytes

_HEAD = ("MODEL", "FAMILY", "INPUTS", "OUTPUTS", "DIMS", "LENGTH", "SERVED", "ON DISK")


def summary(entry: ModelEntry, served: bool) -> dict[str, Any]:
    """One model as a row of the list."""
    return {
        "id": entry.id,
        "family": entry.adapter,
        "inputs": list(entry.inputs),
        "outputs": list(entry.outputs),
        "dims": {name: output.dims for name, output in entry.outputs.items() if output.dims},
        "max_sequence_length": entry.max_sequence_length,
        "profiles": [name for name in entry.profiles if name != "default"],
        "served": served,
        "on_disk": directory_of(entry) is not None,
    }


def print_list(config: Settings, options: argparse.Namespace) -> int:
    """Print the models that `options` choose; 1 when there is no such family."""
    entries = read_entries(config.catalog.dirs).entries
    families = sorted({entry.adapter for entry in entries.values()})
    if options.family and options.family not in families:
        close = difflib.get_close_matches(options.family, families, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"families are {', '.join(families)}"
        print(f"penstock: no model of the family {options.family!r}; {hint}", file=sys.stderr)
        return 1
    rows = [
        summary(entry, _is_served(entry, config))
        for entry in sorted(entries.values(), key=lambda entry: (entry.adapter, entry.id.lower()))
        if options.family in (None, entry.adapter)
        if options.output is None or options.output in entry.outputs
    ]
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        _print_table([_HEAD, *map(_cells, rows)])
    return 0


def _is_served(entry: ModelEntry, config: Settings) -> bool:
    if config.catalog.serve_all:
        return True
    return entry.id in config.catalog.models if config.catalog.models else entry.served


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["id"],
        row["family"],
        ",".join(row["inputs"]),
        ",".join(row["outputs"]),
        ",".join(map(str, row["dims"].values())) or "-",
        str(row["max_sequence_length"] or "-"),
        "yes" if row["served"] else "no",
        "yes" if row["on_disk"] else "no",
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_one(entry: ModelEntry, *, as_json: bool) -> int:
    """Print everything about one model."""
    described = description(entry)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(described)).decode())
    else:
        print(msgspec.yaml.encode(described).decode(), end="")
    return 0


def description(entry: ModelEntry) -> dict[str, Any]:
    """All fields of an entry that say something, what its family needs, and where its files are."""
    fields: dict[str, Any] = {"id": entry.id, **_said(msgspec.to_builtins(entry))}
    fields["outputs"] = {name: _said(msgspec.to_builtins(spec)) for name, spec in entry.outputs.items()}
    family = FAMILIES.get(entry.adapter, Family(title=entry.adapter, about="")).extra
    if family:
        fields["needs"] = extras.needed(family)
    directory = directory_of(entry)
    if directory is None:
        where = f"no; fetch it with `penstock models pull {entry.id}`"
        fields["on_disk"] = where if isinstance(entry.source, HubSource) else "no"
    else:
        fields["on_disk"] = f"{nbytes(directory) / 1e6:.0f} MB in {directory}"
    return fields


def _said(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that say something, at every depth."""
    deep = {name: _said(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: value for name, value in deep.items() if value not in (None, "", {}, [], ())}
