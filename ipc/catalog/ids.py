"""Ids in the catalog: `<model>@<version>` for a version of a repository model, the name for any other model.

A repository model without a version has one entry with the id `<model>@`, which tells why.

`<model>:<profile>` is a profile of a model.
"""

from __future__ import annotations

from collections.abc import Container

_MAX_DIGITS = 18
"""Digits of the largest version that protocols read."""
VERSION_ALONE = 1
"""Version of a catalog model that has no others."""
NO_VERSION = -1
"""Stands for the version of a repository model that has none."""


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
