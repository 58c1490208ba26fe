"""Makes what the command line names servable: entries of models that the catalog lacks, in a directory of their own.

1. Names of `catalog.models` that the catalog has stay as they are.
2. The entry of any other is read from the model's files and written below the run directory. The directory is named by
   its content, so that another start with other models changes nothing for a server that runs.
3. A program, such as `./model.onnx`, comes into a repository there instead (`penstock.own_models.programs`).
4. Server and workers read this directory after the catalog's own. A directory that brings an entry with an id of the
   catalog, such as a copy of `penstock models pull --to`, is served in place of the catalog's model.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path

from ipc.catalog import ids
from ipc.catalog.entries import Catalog, Reading, read_entries
from ipc.errors import ConfigError
from ipc.processes.paths import asset, prepare_run_dir
from ipc.settings import Settings
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
        found = _find(model, names, reading)
        name = str(found.entry["id"])
        if name == ids.RESERVED_NAME:
            raise ConfigError(
                f"{model}: {name!r} stands for the model of generated text; name it: {model}=other-name"
            )
        taken = name in reading.entries
        if name in own or (taken and not found.complete):
            raise ConfigError(
                f"{model}: the catalog, or another model, has the id {name!r}; name it: {model}=other-name"
            )
        own[name] = found._replace(entry=found.entry | {"replaces": True}) if taken else found
        models += _with_names(name, [each for each in names if each != name])
    lines = [*(found.lines for found in own.values()), *starmap(programs.line_of, laid.items())]
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
    texts = [found.text for found in own]
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
