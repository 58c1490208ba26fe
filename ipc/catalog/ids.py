"""Ids in the catalog: `<model>@<version>` for a version of a repository model, the name for any other model.

A repository model without a version has one entry with the id `<model>@`, which tells why.

`<model>:<profile>` is a profile of a model.

A model may have names besides its id, such as the fixed name that a client sends. An entry states them in
`served_name`, and `catalog.models` adds more, each as `ID=NAME`. A name leads to one model only: a name that another
served model has is refused.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from ipc.errors import ConfigError

_MAX_DIGITS = 18
"""Digits of the largest version that protocols read."""
VERSION_ALONE = 1
"""Version of a catalog model that has no others."""
NO_VERSION = -1
"""Stands for the version of a repository model that has none."""
SERVED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}\Z"
RESERVED_NAME = "default"
"""What requests of generated text call the model that the settings name."""


def id_of(model: str, version: int) -> str:
    """The catalog id of one version of a repository model, or (`NO_VERSION`) of a model without one."""
    return f"{model}@" if version == NO_VERSION else f"{model}@{version}"


def split_id(entry: str) -> tuple[str, int]:
    """(name, version) of a catalog id; a model of the catalog has the version `VERSION_ALONE`."""
    name, at, version = entry.rpartition("@")
    if at and not version:
        return name, NO_VERSION
    # NOTE: clients name models too, and `isdigit` alone takes a superscript.
    is_number = version.isascii() and version.isdigit() and len(version) <= _MAX_DIGITS
    return (name, int(version)) if at and is_number else (entry, VERSION_ALONE)


def is_repository(entry: str) -> bool:
    """Whether a catalog id names a version of a repository model."""
    return "@" in entry


def model_of(entry: str) -> str:
    """Full name of the model that a catalog id belongs to."""
    return entry.partition("@")[0]


def profiled(entry: str, known: Container[str]) -> str:
    """The id of the model whose profile `entry` is, if the model is among `known`; else `entry`."""
    model = entry.rpartition(":")[0]
    return model if model in known else entry


def split_served(models: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Ids of `catalog.models` with the names that stand behind them. Raises `ConfigError` for a name of wrong form."""
    names: dict[str, tuple[str, ...]] = {}
    for each in models:
        model, equals, name = each.partition("=")
        if equals and not re.fullmatch(SERVED_NAME, name):
            raise ConfigError(
                f"catalog.models: {name[:200]!a} is no name for a model: letters, digits, '.', '_', '-' and '/', "
                "at most 200, the first a letter or digit"
            )
        names[model] = (*names.get(model, ()), *([name] if equals else []))
    return names


def shadowing(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Mistakes in the names of models, by id. `names` has the further names of all served models, by id."""
    shorts: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = {}
    for model, own in names.items():
        shorts.setdefault(model.rpartition("/")[2], []).append(model)
        for name in dict.fromkeys(own):
            owners.setdefault(name, []).append(model)
    mistakes: dict[str, str] = {}
    for name, models in owners.items():
        for model in models:
            rivals = [*names.keys() & {name}, *shorts.get(name, ()), *models]
            rival = next((each for each in rivals if each != model), None)
            if name == RESERVED_NAME:
                mistakes[model] = f"{name!r} stands for the model of generated text that the settings name"
            elif rival is not None:
                mistakes[model] = f"{name!r} is a name of the model {rival!r}"
    return mistakes
