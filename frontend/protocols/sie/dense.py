"""Vectors for the forms of other APIs: what a request asks of a model, and the call.

1. `check_wishes` refuses wishes that no model could fulfil, or that exclude each other.
2. `plan_vectors` refuses what the loaded model does not offer, and makes the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from frontend.engine.options import check_options
from frontend.protocols.sie.convert import check_dimensions, check_used
from frontend.protocols.sie.one_output import OutputPlan, plan_output
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus

QUERIES = ("query", "search_query")
"""Values of `input_type` for the query side of a model; all others are documents."""


class Wishes(NamedTuple):
    """What a request asks of a model beside its inputs; None: as the model has it.

    `is_query` chooses the side. `prompt_name` is the name of a stored prompt, or chooses the side too.
    `max_tokens` cuts each text, by `overflow_policy`.
    """

    is_query: bool | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    overflow_policy: str | None = None
    max_tokens: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The wishes that travel as options of the call."""
        return {
            "overflow_policy": self.overflow_policy,
            "prompt_name": self.prompt_name,
            "max_tokens": self.max_tokens,
        }


def check_wishes(wishes: Wishes, names: FieldNames) -> None:
    """Raise `InvalidInput` for an unknown overflow policy, and for two ways to choose a prompt."""
    check_options(wishes.options, names)
    if wishes.prompt_name is None:
        return
    if wishes.instruction is not None:
        raise InvalidInput("prompt_name: cannot be given with instruction")
    if wishes.is_query is not None:
        raise InvalidInput("prompt_name: cannot be given with input_type")


def plan_vectors(
    services: Services,
    entry: ModelEntry,
    status: ModelStatus,
    inputs: list[InputItem],
    wishes: Wishes,
    names: FieldNames,
    output: str = "dense",
) -> OutputPlan:
    """A call for vectors with the options of the model's profile; `status` is that of the loaded model."""
    if output not in entry.outputs:
        raise InvalidInput(f"model: '{entry.id}' has no {output} output")
    check_used(wishes.options, entry, status)
    side = wishes.is_query
    return plan_output(
        services, entry, output, inputs, wishes.options, names, side, instruction=wishes.instruction
    )


def check_width(given: int | None, entry: ModelEntry, status: ModelStatus, where: str) -> None:
    """Raise `InvalidInput` for a width that vectors of the loaded model cannot have."""
    check_dimensions(given, entry, status.dims.get("dense", 0), where)
