"""Models of named tensors in repositories, as far as both sides know them; workers alone read the files.

1. A version of a model is a catalog entry (`VersionEntry`). Workers make the entries and tell frontends of them.
2. The start of a server and workers list the names of models in the repositories (`model_directories`), and refuse
   names that clash.
3. A version that the policy no longer chooses, or whose directory is gone, is served while none of the chosen versions
   of its model is loaded (`with_retained`). So a new version is loaded beside the old one, and a version that cannot be
   loaded replaces nothing. Each process decides by the loads that the process knows.

A changed version is not the business of `with_retained`: it has the id of the old one, and workers alone decide which
of the two serves (`workers.lifecycle.model_states`).
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.ids import NO_VERSION, id_of
from ipc.catalog.model_config import ModelConfig
from ipc.errors import ConfigError

log = logging.getLogger(__name__)

CONFIGS = ("config.pbtxt", "config.yaml")
MOST_CONFIG_NBYTES = 1 << 20
MOST_LEVELS = 4
"""Directories below a repository in which changes are noticed: model, version, and two more."""
EVERY_WORKER = 1024
"""`replicas` of a model: as many workers as there are."""
_NAME = re.compile(r"(?!\.)[^\x00-\x1f\x7f/:@\\?#%]{1,200}")


class Wish(msgspec.Struct, frozen=True):
    """What the last load or unload by name wishes of a model: to be `loaded` or not, and how it is configured.

    `config` is JSON text that takes the place of the configuration on disk; None: the load brought nothing. `files` is
    the name of the directory with files that the load brought ("": the files are those of the repository). `again`
    tells that a load which brought nothing has come since.
    """

    loaded: bool
    config: str | None = None
    files: str = ""
    again: bool = False

    @property
    def digest(self) -> str:
        """Stands for `config` and `files`."""
        return hashlib.blake2b(f"{self.files}\0{self.config}".encode(), digest_size=16).hexdigest()


class VersionEntry(ModelEntry, frozen=True, kw_only=True):
    """One version of a repository model, with the id that `ipc.catalog.ids.id_of` makes.

    `config` is what the configuration file or a load says: a program's signature adds what is missing when the program
    is loaded. With the version `NO_VERSION` the entry tells why the model has no version, and nothing else.
    """

    id: str
    model: str
    version: int
    config: ModelConfig

    @property
    def is_version(self) -> bool:
        """Whether there is such a version."""
        return self.version != NO_VERSION


def is_model_name(name: str) -> bool:
    """Whether this can be the name of a model and its directory, which fits into a request's path and a metric's label.

    Names that begin with a dot lead elsewhere (`..`) or are hidden.
    """
    return _NAME.fullmatch(name) is not None and name.strip() == name and name.isprintable()


def model_directories(dirs: Iterable[str]) -> dict[str, Path]:
    """The directory of each model in these repositories, by name.

    Raises `ConfigError` for a repository that cannot be read, and for a model that is in two of them.
    """
    found: dict[str, Path] = {}
    for root in map(Path, dirs):
        try:
            with os.scandir(root) as listed:
                directories = sorted(
                    Path(each.path) for each in listed if each.name[0] != "." and each.is_dir()
                )
        except OSError as error:
            raise ConfigError(
                f"repository.dirs: directory {root} cannot be read: {error.strerror}"
            ) from error
        for directory in directories:
            if not is_model_name(directory.name):
                log.warning("%s is passed over: %a is no name for a model", directory, directory.name)
            elif directory.name in found:
                raise ConfigError(f"repository.dirs: model {directory.name!r} is in two of the directories")
            else:
                found[directory.name] = directory
    return found


def names_of(served: Iterable[ModelEntry]) -> dict[str, str]:
    """Ids of catalog models by every name that these take: the id, its last part, and `served_name`."""
    return {
        name: entry.id
        for entry in served
        for name in (entry.id.rpartition("/")[2], *entry.served_names, entry.id)
    }


def refuse_clash(models: Iterable[str], taken: dict[str, str]) -> None:
    """Raise `ConfigError` for a model of a repository whose name a catalog model has (`names_of`)."""
    clash = next((model for model in models if model in taken), None)
    if clash is not None:
        raise ConfigError(
            f"repository.dirs: model {clash!r} has a name of the catalog model {taken[clash]!r}"
        )


def check_models(named: Iterable[str], models: Collection[str]) -> None:
    """Raise `ConfigError` for a name in `repository.models` that no model has."""
    unknown = next((name for name in named if name not in models), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, models, n=1)
        raise ConfigError(
            f"repository.models: unknown model {unknown!r}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )


def with_retained(
    new: Catalog, served: Iterable[ModelEntry], is_loaded: Callable[[str, str], bool]
) -> Catalog:
    """`new`, and the versions of `served` that stay for now; `new` itself when none stays.

    `is_loaded` tells whether an entry is loaded, by id and `code`; an empty code stands for any.
    """

    def is_there(name: str) -> bool:
        return is_loaded(name, new[name].code)

    retained = [
        entry
        for entry in served
        if isinstance(entry, VersionEntry)
        and entry.id not in new
        and is_loaded(entry.id, "")
        and entry.model in new.versions
        and not any(is_there(id_of(entry.model, version)) for version in new.versions[entry.model])
    ]
    if not retained:
        return new
    return Catalog([*new.sources, *retained], new.files, new.reading, new.read_ns, new.names)
