"""The catalog as the command line checks it: also that workers know every model's adapter."""

from __future__ import annotations

from ipc.catalog import Catalog, check_lists, check_lora_dirs
from ipc.errors import ConfigError
from ipc.repository.opening import check_models, open_catalog
from ipc.settings import Settings
from workers.adapters import registry

MOST_NAMES = 8
"""Names in a summary; `penstock models list` has all of them."""


def read(config: Settings) -> Catalog:
    """The catalog that `config` names. Raises `ConfigError`.

    An adapter that is a dotted path is not imported, since that may take the model libraries.
    """
    found = open_catalog(config.catalog, config.repository)
    check_lists(found, config.catalog.preload, config.catalog.pinned)
    check_models(found, config.repository)
    check_lora_dirs(config.catalog.lora_dirs)
    for name, entry in found.items():
        try:
            registry.check(entry.adapter)
        except registry.UnknownAdapterError as error:
            raise ConfigError(f"model {name!r}: {error}") from error
    return found


def summary(models: Catalog) -> str:
    """How many models are served, and the names of the first ones; profiles go with their model."""
    names = [name for name in models if name.rpartition(":")[0] not in models]
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    return f"{len(names)} model{'' if len(names) == 1 else 's'}: {shown}"
