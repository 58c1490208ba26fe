"""What is wrong with settings and catalog, before a server starts: for `penstock check` and `penstock serve`.

1. `run` is `penstock check`: settings, keys, addresses, and the catalog, with mistakes that else only a load finds.
2. `penstock serve NAME` refuses to start where no named model can be had (`refuse_unreachable`). A model of the catalog
   comes from the hub with its first load. Where the hub cannot be reached, or refuses the model, a server without any
   other model would run on and answer nothing.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frontend import tracing
from frontend.access import api_keys
from frontend.arbiter import hooks
from frontend.arbiter.configuration import check_tools, restrictions_of
from frontend.http import listeners
from ipc import extras
from ipc.catalog.entries import AdapterSource, Catalog, DirectorySource, HubSource, ModelEntry, PackageSource
from ipc.catalog.ids import profiled, split_served
from ipc.catalog.reading import check_lists, check_lora_dirs, read_entries
from ipc.catalog.repository import check_models
from ipc.errors import PenstockError
from ipc.settings import Settings
from penstock import terminal
from workers.adapters import registry
from workers.repository.catalog_files import open_catalog

EXIT_CONFIG = 3
MOST_NAMES = 8
"""Names in a summary; `penstock models list` has all of them."""
_WIDTHS = {
    ("dense", "dense"): ("hidden_size", "d_model", "n_embd", "dim"),
    ("clip", "dense"): ("projection_dim",),
    ("splade", "sparse"): ("vocab_size",),
}
"""Where config.json has the width of an output, by family and output."""

_WITHOUT = "docs/hub.md#without-a-network says how models come to a machine without the hub"


class NothingToServe(PenstockError):
    """None of the named models can be had; the message says why."""


def run(config: Settings, *, as_json: bool = False) -> int:
    """Print the mistakes, or the served models. Returns the exit code. Raises `ConfigError`."""
    models = read(config)
    if config.server.keys_file:
        api_keys.read(Path(config.server.keys_file))
    tracing.check(config.tracing)
    listeners.check_addresses(config)
    restrictions_of(config)
    check_tools(config)
    wrong = mistakes(models)
    if as_json:
        print(terminal.as_json({"valid": not wrong, "models": list(models), "mistakes": wrong}))
    elif wrong:
        print("\n".join(f"penstock: {each}" for each in wrong), file=sys.stderr)
    if wrong:
        return EXIT_CONFIG
    hooks.require_free_addresses(config)
    if not as_json:
        print(f"settings are valid; {summary(models)}")
    return 0


def read(config: Settings) -> Catalog:
    """The catalog of `config`. Raises `ConfigError`, but not for mistakes in single model files (`mistakes`)."""
    catalog = open_catalog(config.catalog, config.repository)
    check_lists(catalog, config.catalog.preload, config.catalog.pinned)
    check_models(config.repository.models, catalog.versions)
    check_lora_dirs(config.catalog.lora_dirs)
    return catalog


def mistakes(catalog: Catalog) -> list[str]:
    """Mistakes in the catalog's files, and in served entries that a load would refuse, with file and line.

    The module of an adapter that is a dotted path is not imported, as the import may need the model libraries.
    """
    messages = [file.message for file in catalog.reading.bad]
    for entry in catalog.sources:
        if not entry.error and "@" not in entry.id:
            messages += [catalog.reading.mistake(entry.id, text).message for text in _of_entry(entry)]
    return messages


def _of_entry(entry: ModelEntry) -> Iterator[str]:
    for name in entry.adapters:
        try:
            registry.refuse_unknown(name)
        except registry.UnknownAdapterError as error:
            yield f"adapter: {error}"
    for field, source in (("source", entry.source), *((f"loras.{n}", s) for n, s in entry.loras.items())):
        if isinstance(source, DirectorySource | AdapterSource):
            yield from _absent(f"{field}.path", Path(source.path))
    if isinstance(entry.source, PackageSource) and not _package(entry.source):
        name = entry.source.package
        yield f"source.package: {name!r} is not installed{extras.bringing(name)}"
    directory = _directory(entry)
    if directory is not None:
        yield from _widths(entry, directory)


def _absent(field: str, directory: Path) -> Iterator[str]:
    if directory.is_dir():
        return
    try:
        beside = [path.name for path in directory.parent.iterdir() if path.is_dir()]
    except OSError:
        beside = []
    close = difflib.get_close_matches(directory.name, beside, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    yield f"{field}: the directory {directory} does not exist{hint}"


def _widths(entry: ModelEntry, directory: Path) -> Iterator[str]:
    """Widths that differ from those in the model's config.json, where config.json has them."""
    config, modules = _json(directory / "config.json"), _json(directory / "modules.json")
    if not isinstance(config, dict) or "Dense" in json.dumps(modules):
        return
    for name, spec in entry.outputs.items():
        keys = _WIDTHS.get((entry.adapter, name), ())
        width = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        if width is not None and spec.dims not in (None, width):
            yield f"outputs.{name}.dims: {spec.dims} is stated, the model gives {width}"


def _directory(entry: ModelEntry) -> Path | None:
    """The directory of a model's config.json on this machine; None where the file is missing or not looked for."""
    source = entry.source
    if isinstance(source, DirectorySource):
        return Path(source.path)
    if isinstance(source, HubSource):
        try:
            from huggingface_hub import try_to_load_from_cache
        except ImportError:
            return None
        path = try_to_load_from_cache(source.repo, "config.json", revision=source.revision)
        return Path(path).parent if isinstance(path, str) else None
    if isinstance(source, PackageSource) and (root := _package(source)) is not None:
        return root / source.path
    return None


def _package(source: PackageSource) -> Path | None:
    """The directory of an installed package. The package is not imported."""
    try:
        spec = importlib.util.find_spec(source.package)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def summary(models: Catalog) -> str:
    """The number of served models and the first names. Profiles do not count."""
    names = [name for name in models if profiled(name, models) == name]
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    return f"{len(names)} model{'' if len(names) == 1 else 's'}: {shown}"


def refuse_unreachable(config: Settings) -> None:
    """Raise `NothingToServe` if no named model is on this machine or to be had; print those that are not."""
    catalog = Catalog(read_entries(config.catalog.dirs).entries.values())
    named = [catalog[name] for name in split_served(config.catalog.models) if name in catalog]
    reasons = {entry.id: reason for entry in named if (reason := _why_absent(entry))}
    if not reasons:
        return
    absent = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if len(reasons) == len(named):
        raise NothingToServe(f"serve: there is nothing to serve: {absent}; {_WITHOUT}")
    print(f"penstock: the server starts without {absent}", file=sys.stderr)


def _why_absent(entry: ModelEntry) -> str:
    """Why a model of the hub can neither be read nor fetched; "" for one that can, and for models of other sources."""
    where = entry.source
    if entry.error or not isinstance(where, HubSource):
        return ""
    # NOTE: imported here, since only models of the hub need what the extra `worker` brings.
    from penstock.files import directory_of
    from workers.loading import failure, source

    if directory_of(entry) is not None:
        return ""
    try:
        source.size_in_hub(where.repo, where.revision, where.gguf)
    except Exception as error:
        return f"not on this machine, and not to be had from the hub: {failure.classify(error).message}"
    return ""
