"""Catalog files: one YAML file per model, read from one or more directories, and the models that settings name of them.

A file in SIE's own layout (`ipc.catalog.sie_layout`) may lie beside ours. A file with a mistake stands in the reading
with its place, and its model answers with the mistake.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc import yaml_text
from ipc.catalog import ids, sie_layout
from ipc.catalog.entries import (
    ADAPTER_FILE,
    ENCODE_OUTPUTS,
    ID,
    LORA_PART,
    QUANTIZED,
    AdapterSource,
    BadFile,
    Catalog,
    DirectorySource,
    ModelEntry,
    OutputSpec,
    Profile,
    Reading,
    bad_file,
    is_lora_name,
)
from ipc.catalog.option_names import FAMILY_OPTIONS, SHARED_OPTIONS
from ipc.errors import ConfigError
from ipc.processes.paths import asset
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository

ALL = "*"
AUTO = "auto"
MOST_LEVELS = 32
"""Nesting of options in a catalog file."""
ID_LINE = re.compile(rb"^(?:sie_)?id:[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)
_UNLISTED = (
    "; only `penstock serve` finds a model by its path or hub id, `penstock models add` writes its entry"
)


def _check(entry: ModelEntry, own_layout: bool) -> None:
    """Raise `ValueError` that begins with the field, for a value that fits its type and is wrong all the same."""
    for name in ("code", "error"):
        if getattr(entry, name):
            raise ValueError(f"{name}: unknown field")
    for name, profile in entry.profiles.items():
        parent = entry.profiles.get(profile.extends) if profile.extends else None
        if profile.extends and (parent is None or parent.extends or profile.extends == name):
            raise ValueError(f"profiles: profile {name!r} must extend one existing profile that extends none")
        added = {"dense"} if profile.runtime.get("muvera") is not None else set()
        unknown = {*profile.output_types, *profile.similarity} - {*entry.outputs, *added}
        if unknown:
            raise ValueError(f"profiles: profile {name!r} names outputs the model lacks: {sorted(unknown)}")
    for name in entry.loras:
        if not is_lora_name(name):
            raise ValueError(f"loras: {name!r} is no name of one or two parts of {LORA_PART}")
    owners: dict[str, ModelEntry | Profile] = {"": entry}
    owners |= {f"profiles.{name}.": profile for name, profile in entry.profiles.items()}
    for place, owner in owners.items():
        family = owner.adapter or entry.adapter
        if owner.precision in QUANTIZED and family in FAMILY_OPTIONS and family != "causal":
            raise ValueError(
                f"{place}precision: {owner.precision} is for models that generate text (adapter causal); the family "
                f"{family} takes float32, bfloat16 or float16"
            )
        for field in ("runtime", "loadtime"):
            options = getattr(owner, field)
            check_plain(options, f"{place}{field}")
            if set(entry.adapters) <= set(FAMILY_OPTIONS):
                known = (FAMILY_OPTIONS[family] for family in entry.adapters)
                check_names(options, f"{place}{field}", set().union(*known), own_layout)


def check_names(options: Iterable[str], field: str, known: Collection[str], own_layout: bool = True) -> None:
    """Raise `ValueError` for an option that is neither `known` nor shared by all families.

    In SIE's layout options that only SIE's adapters have are passed over, but not nearly the name of one that is known.
    """
    names = {*known, *SHARED_OPTIONS}
    elsewhere = set().union(*FAMILY_OPTIONS.values())
    for name in options:
        if name in names or (name in elsewhere and not own_layout):
            continue
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.6 if own_layout else 0.85)
        if close or own_layout:
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(names))}"
            raise ValueError(f"{field}.{name[:64]}: unknown option; {hint}")


def read_entry(path: Path) -> ModelEntry:
    """One catalog file. Raises `BadFile`, which names the file, the line and the field."""
    data, raw, entry = b"", None, None
    try:
        data = path.read_bytes()
        raw = yaml_text.decode(data)
        own_layout = not (isinstance(raw, dict) and sie_layout.KEY in raw)
        entry = msgspec.convert(raw if own_layout else sie_layout.translate(raw), ModelEntry)
        _check(entry, own_layout)
        loras = {name: _beside(path, source) for name, source in entry.loras.items()}
        entry = msgspec.structs.replace(entry, source=_beside(path, entry.source), loras=loras)
        return _with_code(path, entry)
    except OSError as error:
        text = f"the file cannot be read: {error.strerror}"
    except RecursionError:
        text = "nested too deeply"
    except (ValueError, OverflowError) as error:
        text = " ".join(str(error).split())
    raise bad_file(path, text, entry or _stand_in(data, raw))


def configured_entry(raw: dict[str, Any]) -> ModelEntry:
    """The model of a document in SIE's layout that comes from no file. Raises `ValueError`, which names the field."""
    try:
        entry = msgspec.convert(sie_layout.translate(raw), ModelEntry)
        _check(entry, own_layout=False)
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"{sie_layout.KEY}: values that no model has") from error
    return entry


def _stand_in(data: bytes, raw: Any) -> ModelEntry | None:
    """An entry with the name that a bad file gives, for requests of every kind; None where the file gives none."""
    stated = raw if isinstance(raw, dict) else {}
    line = ID_LINE.search(data)
    name = (
        stated.get("id") or stated.get(sie_layout.KEY) or (line[1].decode("ascii", "replace") if line else "")
    )
    if not (isinstance(name, str) and re.fullmatch(ID, name)):
        return None
    served, outputs = stated.get("served") is not False, dict.fromkeys((*ENCODE_OUTPUTS, "score", "json"))
    return ModelEntry(
        name,
        AdapterSource(),
        inputs=("text", "image"),
        outputs={output: OutputSpec() for output in outputs},
        served=served,
        preload=sie_layout.KEY not in stated,
    )


def _with_code(path: Path, entry: ModelEntry) -> ModelEntry:
    """The entry with the files of its adapters found beside `path`, and a digest of their content."""
    places = {name: _adapter_beside(path, name) for name in entry.adapters}
    files = sorted({place.rpartition(":")[0] for place in places.values() if ADAPTER_FILE in place})
    content = hashlib.sha256()
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"adapter: the file {Path(file).name} does not exist")
        try:
            content.update(Path(file).read_bytes())
        except OSError as error:
            raise ValueError(
                f"adapter: the file {Path(file).name} cannot be read: {error.strerror}"
            ) from error
    profiles = {
        name: msgspec.structs.replace(profile, adapter=places[profile.adapter] if profile.adapter else None)
        for name, profile in entry.profiles.items()
    }
    code = content.hexdigest() if files else ""
    return msgspec.structs.replace(entry, adapter=places[entry.adapter], profiles=profiles, code=code)


def _adapter_beside(path: Path, name: str) -> str:
    file, _, class_name = name.rpartition(":")
    return f"{(path.parent / file).resolve()}:{class_name}" if ADAPTER_FILE in name else name


def check_plain(options: Any, field: str, levels: int = MOST_LEVELS) -> None:
    """Raise `ValueError` for options that are no JSON: other types, names that are no strings, or too many levels."""
    if levels < 0:
        raise ValueError(f"{field}: nested deeper than {MOST_LEVELS} levels, or within itself")
    if isinstance(options, dict):
        strange = next((name for name in options if not isinstance(name, str)), None)
        if strange is not None:
            raise ValueError(f"{field}: the name {str(strange)[:64]!a} is no string")
    elif not isinstance(options, list):
        if not isinstance(options, str | int | float | None) or not -(2**63) <= _whole(options) < 2**64:
            raise ValueError(
                f"{field}: {str(options)[:64]!a} is no text, number of 64 bits, truth value or null"
            )
        return
    for value in options.values() if isinstance(options, dict) else options:
        check_plain(value, field, levels - 1)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _beside(path: Path, source: Any) -> Any:
    """A source whose relative directory is taken from the catalog file `path`."""
    if isinstance(source, DirectorySource | AdapterSource) and not Path(source.path).is_absolute():
        return msgspec.structs.replace(source, path=str((path.parent / source.path).resolve()))
    return source


def files_below(root: Path, endings: tuple[str, ...] = (".yaml",)) -> list[Path]:
    """Files below a directory with one of these endings, sorted; directories that vanish are passed over."""
    paths: list[Path] = []
    # NOTE: Path.rglob raises when a directory vanishes between being listed and being opened.
    for directory, _, names in os.walk(root):
        paths += [Path(directory, name) for name in names if name.endswith(endings)]
    return sorted(paths)


def read_entries(dirs: Iterable[str], added: Iterable[str] = ()) -> Reading:
    """Every `*.yaml` below `dirs` (empty: the shipped catalog) and below `added`.

    The model of a bad file is there with its error, and so is one that two files define, unless the file of a later
    directory `replaces` the other, as all files below `added` do. Raises `ConfigError` for a missing directory of
    `dirs`.
    """
    roots = [Path(d) for d in dirs] or [asset("config/models")]
    later = [Path(d) for d in added if Path(d).is_dir()]
    reading = Reading({}, {}, [])
    entries, places, bad = reading
    for root in (*roots, *later):
        if not root.is_dir():
            raise ConfigError(f"catalog directory {root} does not exist")
        for path in files_below(root):
            try:
                entry = read_entry(path)
            except BadFile as error:
                bad.append(error)
                if error.entry is None:
                    continue
                entry = error.entry
            replacing = (entry.replaces or root in later) and not places.get(entry.id, root).is_relative_to(
                root
            )
            if entry.id in entries and not replacing:
                for place in (places[entry.id], path):
                    bad.append(bad_file(place, f"id: {entry.id!r} is defined in two files", entry))
                entry = bad[-1].entry or entry
            places[entry.id] = path if replacing else places.get(entry.id, path)
            entries[entry.id] = entry
    return reading


def _check_known(names: Iterable[str], known: Collection[str], setting: str, otherwise: str = "") -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else otherwise
            raise ConfigError(f"{setting}: unknown model {name!r}{hint}")


def read_catalog(
    dirs: Collection[str],
    models: Sequence[str] = (),
    serve_all: bool = False,
    vanished_ok: bool = False,
    added: Collection[str] = (),
) -> Catalog:
    """The models to serve: the models in `models`, else all without `served: false`. `serve_all` takes all models.

    The models of the directories `added` are served in any case.

    A name in `models` may bring a further name of the model, `ID=NAME`. Raises `ConfigError` as `read_entries` does,
    for an id that no model has (unless `vanished_ok`: a file may be taken away while the server runs; or a bad file may
    be that of the model), for a further name that another model has, and when nothing is left to serve.
    """
    began_ns, reading = time.monotonic_ns(), read_entries(dirs, added)
    entries, bad, named = reading.entries, reading.bad, ids.split_served(models)
    if not vanished_ok and all(file.entry is not None for file in bad):
        _check_known(named, entries, "catalog.models", _UNLISTED)
    served = [entry for entry in entries.values() if entry.served or serve_all]
    chosen = [entries[name] for name in named if name in entries] if any(models) and not serve_all else served
    chosen += [entry for entry in _below(reading, added) if entry not in chosen]
    if not (chosen or bad):
        raise ConfigError("the catalog serves no model")
    return Catalog(_with_names(chosen, named, reading), reading=reading, read_ns=began_ns)


def _below(reading: Reading, dirs: Collection[str]) -> list[ModelEntry]:
    """The entries of files below some directories."""
    places = reading.places.items()
    return [reading.entries[name] for name, at in places if any(at.is_relative_to(root) for root in dirs)]


def _with_names(
    chosen: Iterable[ModelEntry], named: Mapping[str, tuple[str, ...]], reading: Reading
) -> list[ModelEntry]:
    """The entries with the names that `catalog.models` adds.

    An entry whose file states a name of another model is a mistake of `reading`. Raises `ConfigError` for such a name
    in `catalog.models`.
    """
    renamed = [
        msgspec.structs.replace(entry, served_name=(*entry.served_names, *more))
        if (more := named.get(entry.id))
        else entry
        for entry in chosen
    ]
    wrong = ids.shadowing({entry.id: entry.served_names for entry in renamed})
    for model, text in wrong.items():
        if named.get(model):
            raise ConfigError(f"catalog.models: {text}")
        reading.bad.append(reading.mistake(model, f"served_name: {text}"))
    refused = {file.entry.id: file.entry for file in reading.bad if file.entry is not None}
    return [refused[entry.id] if entry.id in wrong else entry for entry in renamed]


def read_served(
    chosen: CatalogSettings, repository: Repository, vanished_ok: bool = False, added: Collection[str] = ()
) -> Catalog:
    """The models of the catalog's files that the settings name, and of `added`. Raises as `read_catalog` does.

    With a repository the shipped catalog is left out unless the section `catalog` asks for it.
    """
    if repository.dirs and not (chosen.dirs or any(chosen.models) or chosen.serve_all):
        there = [root for root in added if Path(root).is_dir()]
        began_ns, reading = time.monotonic_ns(), read_entries(there) if there else Reading({}, {}, [])
        return Catalog(_below(reading, there), reading=reading, read_ns=began_ns)
    return read_catalog(chosen.dirs, chosen.models, chosen.serve_all, vanished_ok, added)


def check_lora_dirs(dirs: Iterable[str]) -> None:
    """Raise `ConfigError` for a directory of `catalog.lora_dirs` that does not exist."""
    for root in dirs:
        if not Path(root).is_dir():
            raise ConfigError(f"catalog.lora_dirs: directory {root} does not exist")


def check_lists(catalog: Catalog, preload: Iterable[str], pinned: Iterable[str]) -> None:
    """Raise `ConfigError` for a name in `catalog.preload` or `catalog.pinned` that no served model has."""
    ids = list(catalog)
    _check_known((name for name in preload if name not in (ALL, AUTO)), ids, "catalog.preload")
    _check_known((name for name in pinned if name != ALL), ids, "catalog.pinned")


def preloaded_names(
    catalog: Catalog, preload: Iterable[str], models: Sequence[str], serve_all: bool
) -> list[str]:
    """Ids of the models that are loaded at the start, in the catalog's order; variants of profiles go with their model.

    `auto` means all of `catalog.models`, or every served model without such a list, but none with `catalog.serve_all`
    and none whose entry says `preload: false`. Of repository models their own section of the settings decides.
    """
    chosen = set(preload)
    if AUTO in chosen:
        chosen |= ids.split_served(models).keys()
    if ALL in chosen:
        chosen |= set(catalog)
    if AUTO in chosen and not any(models) and not serve_all:
        chosen |= {name for name, entry in catalog.items() if entry.preload}
    own = {name for name, entry in catalog.items() if entry.preload}
    return [n for n in catalog if (n in own if "@" in n else n in chosen or n.partition(":")[0] in chosen)]
