"""`penstock models list | show`: the catalog as a table, one model as YAML, and where the files of a model are.

A model's files lie in the hub cache, in a directory of the operator, or in an installed package. `penstock list` shows
the models whose files are there, and those of the hub cache that the catalog does not name.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc import extras
from ipc.catalog import ids
from ipc.catalog.entries import QUANTIZED, AdapterSource, DirectorySource, HubSource, ModelEntry
from ipc.catalog.reading import read_entries
from ipc.machine import count_gpus
from ipc.settings import Settings
from ipc.wire.messages import ModelStatus
from penstock import terminal
from penstock.families import FAMILIES, Family
from penstock.own_models import gguf
from workers.loading import source
from workers.loading.gguf_file import choices

_PARAMETERS = re.compile(r"([\d.]+) ([MB]) parameters")
_SCALES = {"M": 1e6, "B": 1e9}
_SHORTEST, _OUTPUTS_CUT = 16, 14
"""Characters of names and of lists of outputs that a narrow terminal keeps."""


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


_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_HEAD = ("MODEL", "OUTPUTS", "DIMS", "LENGTH", "SERVED", "DISK", "AS", "MEMORY")


def summary(entry: ModelEntry, config: Settings) -> dict[str, Any]:
    """One model as a row of the list; sizes in bytes, None where nothing is known."""
    directory = directory_of(entry)
    return {
        "id": entry.id,
        "family": entry.adapter,
        "inputs": list(entry.inputs),
        "outputs": list(entry.outputs),
        "dims": {name: output.dims for name, output in entry.outputs.items() if output.dims},
        "max_sequence_length": entry.max_sequence_length,
        "profiles": [name for name in entry.profiles if name != "default"],
        "served": _is_served(entry, config),
        "on_disk": directory is not None,
        "disk_bytes": None if directory is None else nbytes(directory),
        "precision": precision_in(entry, config) if entry.adapter else "",
        "memory_bytes": weights_nbytes(entry, config),
    }


def precision_in(entry: ModelEntry, config: Settings) -> str:
    """What the weights of a model become by its entry, the settings and the device."""
    precision = entry.precision or config.worker.precision
    if precision in QUANTIZED and entry.adapter != "causal":
        precision = "auto"
    if precision != "auto":
        return precision
    on_gpu = config.worker.device == "cuda" or (config.worker.device == "auto" and count_gpus() > 0)
    return "bfloat16" if on_gpu else "float32"


def weights_nbytes(entry: ModelEntry, config: Settings) -> int | None:
    """Memory of the weights, from the number of parameters in the description; None where the text has none.

    Weights have four bytes on CPU and two on a GPU, unless the entry or the settings choose the precision. Quantised
    weights are counted as if all were; embeddings and norms have more.
    """
    match = _PARAMETERS.search(entry.description)
    if match is None:
        return None
    precision = precision_in(entry, config)
    each = {"float32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.625}.get(precision, 2.0)
    return int(float(match[1]) * _SCALES[match[2]] * each)


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
        summary(entry, config)
        for entry in sorted(entries.values(), key=lambda entry: (entry.adapter, entry.id.lower()))
        if options.family in (None, entry.adapter)
        if options.output is None or options.output in entry.outputs
        if _matches(entry, options.text)
    ]
    if getattr(options, "here", False):
        if options.family is None and options.output is None:
            further = _further(entries.values())
            rows += [summary(entry, config) for entry in further if _matches(entry, options.text)]
        rows = [row for row in rows if row["on_disk"]]
        count = f"{len(rows)} models are" if len(rows) != 1 else "1 model is"
        print(
            f"penstock: {count} on this machine; `penstock models list` shows the {len(entries)} of the catalog",
            file=sys.stderr,
        )
    if options.json:
        print(terminal.as_json(rows))
    else:
        print("\n".join(fitted([_HEAD, *map(_cells, rows)])))
    return 0


def _further(entries: Iterable[ModelEntry]) -> list[ModelEntry]:
    """Entries for the repositories of the hub cache that hold weights and are the source of none of `entries`.

    Such a model was pulled or served by its id; nothing but its place is known here.
    """
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ImportError:
        return []
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    sources = [entry.source for entry in entries if isinstance(entry.source, HubSource)]
    known = {name for where in sources for name in (where.repo, where.tokenizer_repo)}
    rows = []
    for one in sorted(repositories, key=lambda one: one.repo_id.lower()):
        if one.repo_type == "model" and one.repo_id not in known:
            paths = {
                file.file_path.relative_to(each.snapshot_path).as_posix()
                for each in one.revisions
                for file in each.files
            }
            rows += _cached(one.repo_id, paths)
    return rows


def _cached(repository: str, paths: Collection[str]) -> list[ModelEntry]:
    """Entries for the models of a repository of which files are in the hub cache."""
    ggufs = choices(list(paths))
    named = [(f"{repository}:{gguf.tag_of(path)}", HubSource(repository, gguf=path)) for path in ggufs]
    if any(path.endswith(source.WEIGHTS) for path in paths):
        named.append((repository, HubSource(repository)))
    return [ModelEntry(name, where, adapter="", inputs=(), outputs={}, served=False) for name, where in named]


def _matches(entry: ModelEntry, words: Sequence[str]) -> bool:
    """Whether the id, a further name, the family, an output or the description has each of the words."""
    text = " ".join((entry.id, *entry.served_names, entry.adapter, *entry.outputs, entry.description)).lower()
    return all(word.lower() in text for word in words)


def fitted(rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of the table; on a terminal long names and lists of outputs lose their middle, so that a line fits."""
    lines, width = terminal.table(rows), shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, lines)) <= width:
        return lines
    cut = [(row[0], _shortened(row[1], _OUTPUTS_CUT), *row[2:]) for row in rows]
    room = width - max(map(len, terminal.table(cut))) + max(len(row[0]) for row in cut)
    return terminal.table([(_shortened(row[0], max(room, _SHORTEST)), *row[1:]) for row in cut])


def _shortened(name: str, most: int) -> str:
    end = (most - 3) // 2
    return name if len(name) <= most else f"{name[: most - 3 - end]}...{name[-end:]}"


def _is_served(entry: ModelEntry, config: Settings) -> bool:
    if config.catalog.serve_all:
        return True
    named = ids.split_served(config.catalog.models)
    return entry.id in named if named else entry.served


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["id"],
        "+".join(row["outputs"]).replace("multivector", "multi") or "-",
        str(next(iter(row["dims"].values()), "-")),
        str(row["max_sequence_length"] or "-"),
        "yes" if row["served"] else "no",
        decimal_size(row["disk_bytes"]),
        short_precision(row["precision"]),
        decimal_size(row["memory_bytes"]),
    )


def short_precision(precision: str | None) -> str:
    """A precision as tables show it, such as `bf16`; `-` for none."""
    return _SHORT.get(precision or "", precision) or "-"


def decimal_size(nbytes: int | None) -> str:
    """`2.3 GB`, as makers of cards and the hub count; `-` for an unknown size."""
    return "-" if nbytes is None else f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def print_one(entry: ModelEntry, loaded: ModelStatus | None, *, as_json: bool) -> int:
    """Print everything about one model; `loaded` is what a running server says of the model."""
    described = description(entry)
    if loaded is not None:
        names: tuple[str, ...] = ("device", "max_sequence_length", "limited_by", "max_sequences", "tools")
        names += ("precision", "weight_bytes", "cache_bytes", "cache_tokens")
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
    try:
        directory = located(entry, ignore_progress, cached_only=True)
    except (source.SourceError, source.DownloadFailed, ImportError) as error:
        fetched = f"fetch it with `penstock models pull {entry.id}`"
        fields["on_disk"] = f"no; {fetched if isinstance(entry.source, HubSource) else error}"
    else:
        fields["on_disk"] = f"{nbytes(directory) / 1e6:.0f} MB in {directory}"
    return fields


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not empty, at every depth."""
    deep = {name: _filled(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: value for name, value in deep.items() if value not in (None, "", {}, [], ())}
