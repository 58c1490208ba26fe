"""The model of a request that names no model. Requests of TEI and its like name none: such a server has one model.

1. The first of `server.default_models` that gives what the request asks for.
2. Else the only served model that gives the output.
3. Else the request is refused with the names of the models that give the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipc.catalog.entries import Catalog
from ipc.errors import ConfigError, ModelNotFound
from ipc.settings import Settings

_SHOWN = 10
UNNAMED = ("default/not-specified",)
"""Names that clients send where they name no model."""


def default_model(catalog: Catalog, settings: Settings, outputs: Sequence[str], family: str = "") -> str:
    """Name of the model that is meant by a request for one of `outputs`. Raises `ModelNotFound`.

    Where several families have the output, only models of `family` can answer.
    """
    known = [name for name in catalog if ":" not in name and _gives(catalog, name, outputs, family)]
    named = [name for name in settings.server.default_models if _gives(catalog, name, outputs, family)]
    if named or len(known) == 1:
        return (named or known)[0]
    wanted = f"{' or '.join(outputs)}{f' of {family}' if family else ''}"
    if not known:
        raise ModelNotFound(f"the request names no model, and no served model gives {wanted}")
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    raise ModelNotFound(
        f"the request names no model, and several give {wanted}: {', '.join(known[:_SHOWN])}{more}; "
        "server.default_models chooses one"
    )


def is_served(catalog: Catalog, outputs: Sequence[str], family: str = "") -> bool:
    """Whether a served model takes text, gives one of `outputs`, and is of `family` if that is said."""
    return any(_gives(catalog, name, outputs, family) for name in catalog)


def check(catalog: Catalog, names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name in `server.default_models` that no served model has."""
    unknown = next((name for name in names if name not in catalog), None)
    if unknown is not None:
        raise ConfigError(f"server.default_models: no model {unknown[:200]!r} is served")


def model_named(
    request: object, catalog: Catalog, settings: Settings, outputs: Sequence[str], family: str = ""
) -> str:
    """The field `model` of a request, else `default_model`."""
    named: str = getattr(request, "model", None) or ""
    return named if named not in ("", *UNNAMED) else default_model(catalog, settings, outputs, family)


def _gives(catalog: Catalog, name: str, outputs: Sequence[str], family: str) -> bool:
    """`is_served` of the model of that name."""
    entry = catalog.get(name)
    if entry is None or "text" not in entry.inputs or (family and entry.adapter != family):
        return False
    return not entry.outputs.keys().isdisjoint(outputs)
