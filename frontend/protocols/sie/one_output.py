"""Calls for one output of encode, as the forms of other APIs ask for them: all inputs alike, options by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.engine.options import resolve
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What to run and on which entry."""

    model: str
    call: EncodeCall


def plan_output(
    services: Services,
    entry: ModelEntry,
    output: str,
    inputs: list[InputItem],
    options: Mapping[str, Any],
    names: FieldNames,
    is_query: bool | None = None,
    instruction: str | None = None,
) -> OutputPlan:
    """A call for `output` with the options of the model's profile below `options`; `is_query` None: as these say."""
    limits, catalog = services.settings.limits, services.catalog
    found = resolve(entry, dict(options), instruction, catalog, len(inputs), limits, names)
    call = EncodeCall(
        inputs,
        [output],
        found.instruction,
        bool(found.options.get("is_query")) if is_query is None else is_query,
        found.options,
        found.overflow,
        found.lora,
        names,
    )
    return OutputPlan(found.entry.id, call)
