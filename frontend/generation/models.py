"""Which models generate text, and which of them a request means.

1. A model generates text if its catalog entry has the output `chat`.
2. A request without a model, or for `default`, means `generation.default_model`, or the only such model.
3. An unknown name is answered with the names that exist.
"""

from __future__ import annotations

from frontend.generation.errors import InvalidField
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.errors import ModelNotFound
from ipc.settings import Settings

OUTPUT = "chat"
DEFAULT = "default"
STATUSES = {"loaded": "loaded", "loading": "reloading"}
"""Statuses of the contract for states of a model; all other states are `unloaded`."""
_SHOWN = 20


def status_of(state: str) -> str:
    """The status of the contract for a state of a model."""
    return STATUSES.get(state, "unloaded")


def generators(catalog: Catalog) -> list[str]:
    """Names of the models that generate text, without variants of profiles."""
    return [name for name, entry in catalog.items() if OUTPUT in entry.outputs and ":" not in name]


def default_model(catalog: Catalog, settings: Settings) -> str:
    """The name that `default` stands for; empty if several models could be meant, or none."""
    if settings.generation.default_model:
        return settings.generation.default_model
    known = generators(catalog)
    return known[0] if len(known) == 1 else ""


def find_generator(name: str | None, catalog: Catalog, settings: Settings) -> ModelEntry:
    """Catalog entry of the model of a request.

    Raises `ModelNotFound` with the names that exist, and `InvalidField` for a model that generates no text.
    """
    if name is None or name in ("", DEFAULT):
        name = default_model(catalog, settings)
        if not name:
            all_names = generators(catalog)
            why = f"several could be meant; {_listing(all_names)}" if all_names else "none is served"
            raise ModelNotFound(f"model: no default model of generated text: {why}")
    try:
        entry = catalog.find(name)
    except ModelNotFound:
        why, known = catalog.absence(name), _listing(generators(catalog))
        text = f"model {name[:200]!a} does not exist{'; ' + why if why else ''}; {known}, or 'default'"
        raise ModelNotFound(text) from None
    if OUTPUT not in entry.outputs:
        raise InvalidField("model", f"'{entry.id}' generates no text; {_listing(generators(catalog))}")
    return entry


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"models of generated text: {', '.join(names[:_SHOWN]) or 'none'}{more}"
