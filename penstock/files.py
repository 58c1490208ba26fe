"""`penstock models list | show`: the catalog as a table, one model as YAML, and where the files of a model are.

A model's files lie in the hub cache, in a directory of the operator, or in an installed package.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc import extras
from ipc.catalog import ids
from ipc.catalog.entries import AdapterSource, DirectorySource, HubSource, ModelEntry, read_entries
from ipc.settings import Settings
from ipc.wire.messages import ModelStatus
from penstock import terminal
from penstock.families import FAMILIES, Family
from workers.loading import source


def located(
    entry: ModelEntry,
    progress: source.Progress,
    *,
    cached_only: bool = False,
    on_bytes: source.OnBytes | None = None,
    to: Path | None = None,
) -> Path:
    """The directory that holds the whole model, downloaded first if need be and not `cached_only`.

    A download goes to the directory `to` in place of the hub cache, and tells `on_bytes` of its bytes.
    Raises `SourceError` for a model that is absent, damaged, or wrong in its catalog file, and `DownloadFailed`.
    """
    where = entry.source
    if entry.error:
        raise source.SourceError(entry.error, "UNKNOWN")
    if isinstance(where, AdapterSource):
        return Path(where.path)
    if isinstance(where, DirectorySource):
        return source.from_directory(where.path, where.gguf)
    if not isinstance(where, HubSource):
        return source.from_package(where.package, where.path, where.gguf)
    return source.from_hub(
        where.repo,
        where.revision,
        progress,
        extra_files=where.files,
        tokenizer_repo=where.tokenizer_repo,
        cached_only=cached_only,
        on_bytes=on_bytes,
        to=to,
        gguf=where.gguf,
    )


def directory_of(entry: ModelEntry) -> Path | None:
    """The directory that holds the whole model, or None; leaves the network alone.

    Without the hub's library, which comes with the extra `worker`, the hub cache is not looked at.
    """
    try:
        return located(entry, ignore_progress, cached_only=True)
    except (source.SourceError, source.DownloadFailed, ImportError):
        return None


def ignore_progress(phase: str, fraction: float) -> None:
    """Show nothing."""


def nbytes(directory: Path) -> int:
    """Size of all files below `directory`."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


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
        print(terminal.as_json(rows))
    else:
        print("\n".join(terminal.table([_HEAD, *map(_cells, rows)])))
    return 0


def _is_served(entry: ModelEntry, config: Settings) -> bool:
    if config.catalog.serve_all:
        return True
    named = ids.split_served(config.catalog.models)
    return entry.id in named if named else entry.served


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


def print_one(entry: ModelEntry, loaded: ModelStatus | None, *, as_json: bool) -> int:
    """Print everything about one model; `loaded` is what a running server says of the model."""
    described = description(entry)
    if loaded is not None:
        names = ("device", "max_sequence_length", "limited_by", "max_sequences", "tools")
        described["loaded"] = _filled({name: getattr(loaded, name) or None for name in names})
    if as_json:
        print(terminal.as_json(described))
    else:
        print(msgspec.yaml.encode(described).decode(), end="")
    return 0


def print_programs(loaded: Sequence[ModelStatus], *, as_json: bool) -> int:
    """Print what a running server says of the loaded versions of a program."""
    described = [
        {
            "id": status.name,
            "state": status.state,
            "configuration": _filled(msgspec.to_builtins(status.config)),
        }
        for status in loaded
    ]
    print(terminal.as_json(described) if as_json else msgspec.yaml.encode(described).decode().rstrip())
    return 0


def description(entry: ModelEntry) -> dict[str, Any]:
    """The fields of an entry that are not empty, the extra that its family needs, and the place of its files."""
    fields: dict[str, Any] = {"id": entry.id, **_filled(msgspec.to_builtins(entry))}
    fields["outputs"] = {name: _filled(msgspec.to_builtins(spec)) for name, spec in entry.outputs.items()}
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


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not empty, at every depth."""
    deep = {name: _filled(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: value for name, value in deep.items() if value not in (None, "", {}, [], ())}
