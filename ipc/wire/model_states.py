"""States of models as people are told: a profile is mentioned where its state differs from that of its model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from ipc.catalog.ids import profiled
from ipc.wire.messages import ModelStatus


def models_ready(statuses: Iterable[ModelStatus]) -> str:
    """`1/2 models ready`. A model is ready when the model or one of its profiles is loaded."""
    states = {status.name: status.state for status in statuses}
    models = {profiled(name, states) for name in states}
    ready = {profiled(name, states) for name, state in states.items() if state == "loaded"}
    return f"{len(ready)}/{len(models)} models ready"


class Folded(msgspec.Struct, frozen=True):
    """A status, and the names of the model and of all profiles for which the status stands."""

    status: ModelStatus
    names: list[str]


def folded(statuses: Collection[ModelStatus]) -> list[Folded]:
    """The statuses of one worker or server; a profile that says the same as its model is folded under the model."""
    by_name = {status.name: status for status in statuses}
    found: dict[str, Folded] = {}
    for status in statuses:
        model = profiled(status.name, by_name)
        shown = model if _told(by_name[model]) == _told(status) else status.name
        found.setdefault(shown, Folded(by_name[shown], [])).names.append(status.name)
    return list(found.values())


def _told(status: ModelStatus) -> tuple[object, ...]:
    """What people are told of a model besides the name."""
    error = (status.error_class, status.error_message)
    return (status.state, status.device, status.progress, status.memory_bytes, *error)
