"""The catalog as the command line checks it: also that workers know every model's adapter."""

from __future__ import annotations

from ipc.catalog import Catalog, load_catalog
from ipc.errors import ConfigError
from ipc.settings import Settings
from workers.adapters import registry


def read(config: Settings) -> Catalog:
    """The catalog that `config` names. Raises `ConfigError`.

    An adapter that is a dotted path is not imported, since that may take the model libraries.
    """
    found = load_catalog(config.catalog.dirs, config.catalog.models)
    for name, entry in found.items():
        try:
            registry.check(entry.adapter)
        except registry.UnknownAdapterError as error:
            raise ConfigError(f"model {name!r}: {error}") from error
    return found
