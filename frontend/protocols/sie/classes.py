"""Classes of whole texts for the forms of other APIs: one call of a classifier, the scores of all of its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.options import resolve
from frontend.protocols.sie.options import FUNCTION
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire import extraction
from ipc.wire.extraction import Classification
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import ExtractCall, InputItem, ModelStatus

FAMILY = "text_classification"


@dataclass(frozen=True, slots=True)
class ClassesPlan:
    """What to run and on which entry; `labels` are those of the model, in the order of its outputs."""

    model: str
    call: ExtractCall
    labels: list[str]


def plan_classes(
    services: Services,
    entry: ModelEntry,
    status: ModelStatus,
    inputs: list[InputItem],
    options: Mapping[str, Any],
    names: FieldNames,
) -> ClassesPlan:
    """A call for all classes. Raises `InvalidInput` for a model that is no classifier of whole texts."""
    if FUNCTION not in status.uses:
        raise InvalidInput(f"model: '{entry.id}' is no classifier of whole texts with labels of its own")
    catalog, limits = services.catalog, services.settings.limits
    found = resolve(entry, dict(options), None, catalog, len(inputs), limits, names)
    call = ExtractCall(inputs, [], None, found.instruction, found.options, found.overflow, found.lora, names)
    return ClassesPlan(found.entry.id, call, status.labels)


def classes_of(reply: Answer) -> list[list[Classification]]:
    """The classes of each item, the likeliest first. The lease ends."""
    with reply:
        data, found, at = reply.tensors()["extraction"].data, [], 0
        for size in reply.rows("extraction"):
            found.append(extraction.unpack(data[at : at + size]).classifications)
            at += size
    return found
