"""Names under which a model is served besides its id, such as the fixed name that a client sends.

1. An entry states them in `served_name`. `catalog.models` adds more, each as `ID=NAME`.
2. A name leads to one model only. A name that another served model has is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ipc.errors import ConfigError

PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
RESERVED = "default"
"""What requests of generated text call the model that the settings name."""


def split(models: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Ids of `catalog.models` with the names that stand behind them. Raises `ConfigError` for a name of wrong form."""
    found: dict[str, tuple[str, ...]] = {}
    for each in models:
        model, equals, name = each.partition("=")
        if equals and not re.fullmatch(PATTERN, name):
            raise ConfigError(
                f"catalog.models: {name[:200]!a} is no name for a model: letters, digits, '.', '_', '-' and '/', "
                "at most 200, the first a letter or digit"
            )
        found[model] = (*found.get(model, ()), *([name] if equals else []))
    return found


def shadowing(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Mistakes in the names of models, by id. `names` has the further names of all served models, by id."""
    shorts: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = {}
    for model, own in names.items():
        shorts.setdefault(model.rpartition("/")[2], []).append(model)
        for name in dict.fromkeys(own):
            owners.setdefault(name, []).append(model)
    found: dict[str, str] = {}
    for name, models in owners.items():
        for model in models:
            rivals = [*names.keys() & {name}, *shorts.get(name, ()), *models]
            rival = next((each for each in rivals if each != model), None)
            if name == RESERVED:
                found[model] = f"{name!r} stands for the model of generated text that the settings name"
            elif rival is not None:
                found[model] = f"{name!r} is a name of the model {rival!r}"
    return found
