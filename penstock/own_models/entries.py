"""Catalog entries of models that the catalog lacks, read from the models' own files: for `serve`, and for `models add`.

1. Names of `catalog.models` that the catalog has stay as they are.
2. The entry of any other is read from the model's files and written below the run directory. The directory is named by
   its content, so that another start with other models changes nothing for a server that runs.
3. A program, such as `./model.onnx`, comes into a repository there instead (`penstock.own_models.programs`).
4. Server and workers read this directory after the catalog's own. A directory that brings an entry with an id of the
   catalog, such as a copy of `penstock models pull --to`, is served in place of the catalog's model.

`penstock models add` writes such an entry into a file to be edited. The command overwrites nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec

from ipc import yaml_text
from ipc.catalog import ids
from ipc.catalog.entries import BadFile, Catalog, ModelEntry, Reading
from ipc.catalog.reading import read_entries, read_entry
from ipc.errors import ConfigError
from ipc.processes.paths import asset, prepare_run_dir
from ipc.settings import Settings
from penstock import terminal
from penstock.own_models import places, programs
from penstock.own_models.places import Own


def resolve(config: Settings) -> dict[str, str]:
    """Settings that make the models servable, as `{"section.field": "value"}`; empty where the catalog has all.

    Prints what was chosen for each model. Raises `ConfigError` for a name that means nothing, and for files that do not
    say what the model is.
    """
    chosen = config.catalog
    if not any(chosen.models):
        return {}
    reading = read_entries(chosen.dirs)
    models: list[str] = []
    own: dict[str, Own] = {}
    laid: dict[str, Path] = {}
    for model, names in ids.split_served(chosen.models).items():
        if model in reading.entries or _may_be_torn(reading):
            models += _with_names(model, names)
            continue
        program = programs.program_of(model)
        if program is not None:
            for name in [programs.name_of(model, program, alias) for alias in names or ("",)]:
                if name in laid or name in reading.entries:
                    raise ConfigError(
                        f"{model}: the catalog, or another model, has the id {name!r}; name it: {model}=other-name"
                    )
                laid[name] = program
            continue
        match = _find(model, names, reading)
        name = str(match.entry["id"])
        if name == ids.RESERVED_NAME:
            raise ConfigError(
                f"{model}: {name!r} stands for the model of generated text; name it: {model}=other-name"
            )
        taken = name in reading.entries
        if name in own or (taken and not match.complete):
            raise ConfigError(
                f"{model}: the catalog, or another model, has the id {name!r}; name it: {model}=other-name"
            )
        own[name] = match._replace(entry=match.entry | {"replaces": True}) if taken else match
        models += _with_names(name, [each for each in names if each != name])
    lines = [*(match.lines for match in own.values()), *starmap(programs.line_of, laid.items())]
    if lines:
        print("\n".join(lines), file=sys.stderr)
    flags = _served_programs(config, laid) | ({"catalog.models": ",".join(models)} if own or laid else {})
    if own:
        directory = _write(config, list(own.values()))
        dirs = [*(chosen.dirs or [str(asset("config/models"))]), str(directory)]
        flags["catalog.dirs"] = ",".join(dirs)
    return flags


def _served_programs(config: Settings, laid: Mapping[str, Path]) -> dict[str, str]:
    """Settings that serve programs beside the repositories of the configuration."""
    if not laid:
        return {}
    chosen = config.repository
    flags = {"repository.dirs": ",".join([*chosen.dirs, str(programs.lay_out(config, laid))])}
    if chosen.control == "explicit":
        flags["repository.models"] = ",".join([*chosen.models, *laid])
    return flags


def _may_be_torn(reading: Reading) -> bool:
    """Whether a file of the catalog is so broken that the file may describe any model."""
    return any(bad.entry is None for bad in reading.bad)


def _with_names(model: str, names: Sequence[str]) -> list[str]:
    return [f"{model}={name}" for name in names] or [model]


def _find(model: str, names: Sequence[str], reading: Reading) -> Own:
    """The model that a name means. Raises `ConfigError` that also tells the nearest name of the catalog."""
    try:
        return places.find(model, names[0] if names else "")
    except ConfigError as error:
        near = Catalog(reading.entries.values()).absence(model)
        raise ConfigError(error.message + (f"; {near}" if near else "")) from error


def _write(config: Settings, own: Sequence[Own]) -> Path:
    """The directory that holds the entries of these models."""
    texts = [model.text for model in own]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    try:
        prepare_run_dir(config.paths)
        directory = config.paths.own_models() / digest
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number, text in enumerate(texts):
            (directory / f"{number}.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir {config.paths.root} cannot be written: {error.strerror}") from error
    return directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `models add`."""
    parser.add_argument(
        "model", metavar="MODEL", help="a directory or an id of the hub; PATH=ID names a directory"
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="file or directory of the entry, - to print it (default: the --catalog DIR)",
    )
    parser.add_argument(
        "--field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a field that the files leave open, such as loadtime.pooling=mean; may repeat",
    )
    terminal.with_json(parser)
    terminal.with_examples(
        parser,
        ("models add ./my-model --output my-catalog", "writes my-catalog/my-model.yaml"),
        ("models add org/name=short --output -", "prints the entry of a repository, with a further name"),
        (
            "models add ./bert --output c --field adapter=dense --field loadtime.pooling=cls",
            "states what is open",
        ),
    )


def write_entry(options: argparse.Namespace, config: Settings, catalog: Catalog) -> int:
    """`models add`: write the entry. Returns 0. Raises `ConfigError` for what cannot be read, told or written."""
    name, _, alias = options.model.partition("=")
    if name in catalog:
        raise ConfigError(
            f"{name}: the catalog has this model; `penstock models show {name}` prints the entry"
        )
    own = places.find(name, alias, _stated(options.field))
    if alias and own.entry["id"] != alias:
        own.entry["served_name"] = alias
    if options.output == "-":
        print(terminal.as_json(_fields(own, None)) if options.json else own.text.rstrip("\n"))
        return 0
    print(own.lines, file=sys.stderr)
    path = _place_of(options.output, config, str(own.entry["id"]))
    _write_file(path, own.text)
    if options.json:
        print(terminal.as_json(_fields(own, path)))
        return 0
    print(f"wrote {path}; serve it: penstock serve --catalog {path.parent} --models {own.entry['id']}")
    return 0


def _fields(own: Own, path: Path | None) -> dict[str, Any]:
    """What was written, and from where each choice was read."""
    read = [choice._asdict() for choice in own.told]
    return {
        "id": own.entry["id"],
        "file": None if path is None else str(path),
        "entry": own.entry,
        "read": read,
    }


def _stated(pairs: Sequence[str]) -> dict[str, Any]:
    """`a.b=value` as nested fields; values are YAML. Raises `ConfigError`."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *above, last = name.split(".")
        if not equals or not all([*above, last]):
            raise ConfigError(f"--field {pair}: expected NAME=VALUE")
        place = fields
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--field {pair}: {part} has a value already")
        try:
            place[last] = yaml_text.decode(text.encode())
        except ValueError as error:
            raise ConfigError(f"--field {pair}: {error}") from error
    try:
        msgspec.convert({"id": "model", "source": {"kind": "directory", "path": "."}, **fields}, ModelEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--field: {error}") from error
    return fields


def _place_of(output: str | None, config: Settings, model: str) -> Path:
    """The file to write. Raises `ConfigError` where nothing names a directory."""
    if output is not None and output.endswith((".yaml", ".yml")):
        return Path(output)
    directory = output or next(iter(config.catalog.dirs), None)
    if directory is None:
        raise ConfigError("name a directory for the entry: --output DIR, or --catalog DIR (catalog.dirs)")
    return Path(directory) / f"{model.replace('/', '--')}.yaml"


def _write_file(path: Path, text: str) -> None:
    """Put a catalog file in its place in one step, if the catalog can read the file. Raises `ConfigError`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        read_entry(draft)
        os.link(draft, path)
    except BadFile as error:
        raise ConfigError(f"the entry would be refused: {error.text}") from error
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already: remove the file, or name another place with --output"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
