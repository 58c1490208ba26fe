"""POST /v1/extract/{model}: entities, relations, classes and objects found in items, in JSON or msgpack.

A worker writes what it found in each item as one msgpack map, which goes into a msgpack answer as it is. All six keys
are always there; an item that failed alone has them empty beside its `error`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from frontend.engine.answer import Answer
from frontend.engine.planning import check_options
from frontend.http.fields import check_labels, check_schema, distinct
from frontend.http.threads import off_loop_if
from frontend.protocols.sie.flow import EncodeUsage, Form, InferenceResource, ItemFault, Plan, faults_of
from frontend.protocols.sie.items import check_items, images_in, inputs_of
from frontend.protocols.sie.outputs import array_header, map_header, packed
from frontend.protocols.sie.render import listed_parts
from frontend.protocols.sie.schemas import ExtractParams, ExtractRequest
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.wire import extraction
from ipc.wire.extraction import Classification, DetectedObject, Entity, Extraction, Relation
from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import ExtractCall, InputItem, ModelStatus

INLINE_NBYTES = 256 << 10
"""Findings up to this size are written on the event loop, larger ones in a thread."""
_EMPTY = extraction.pack(Extraction())


class ExtractResult(msgspec.Struct):
    """The findings in an item; kinds that a model does not give are empty."""

    id: Annotated[
        str, Meta(description="Id that the request gave the item, else `item-` and the place of the item.")
    ]
    entities: Annotated[list[Entity], Meta(description="Places in the text that have a label.")]
    relations: Annotated[list[Relation], Meta(description="Relations between entities.")]
    classifications: Annotated[list[Classification], Meta(description="Classes of the whole item.")]
    objects: Annotated[list[DetectedObject], Meta(description="Objects in the picture.")]
    data: Annotated[dict[str, Any], Meta(description="The answer of models that fill in a form.")]
    error: Annotated[ItemFault | UnsetType, Meta(description="What went wrong.")] = UNSET


class ExtractResponse(msgspec.Struct):
    """Answer of extract; `warnings` as for encode."""

    model: Annotated[str, Meta(description="Name of the model.")]
    items: Annotated[list[ExtractResult], Meta(description="The items, in order.")]
    usage: Annotated[EncodeUsage | UnsetType, Meta(description="Counts of tokens.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Tell options that are not used.")] = UNSET


@dataclass(frozen=True, slots=True)
class Asked:
    """The call of a request, and the entry to run on."""

    items: list[InputItem]
    labels: list[str]
    output_schema: dict[str, Any] | None


class ExtractResource(InferenceResource[ExtractRequest, Plan[ExtractCall]]):
    """Findings of any family that gives them."""

    operation: ClassVar[str] = "extract"
    capability: ClassVar[str] = "json"
    body = ExtractRequest
    itemized = True

    def examine(self, request: ExtractRequest) -> None:
        """Items, options, labels and a schema that some model could take."""
        limits, params = self.services.settings.limits, request.params or ExtractParams()
        check_items(request.items, limits)
        check_options(params.options)
        check_labels(params.labels, limits)
        check_schema(params.output_schema)

    def params_of(self, request: ExtractRequest) -> ExtractParams | None:
        """The parameters of the request."""
        return request.params

    def check(self, request: ExtractRequest, entry: ModelEntry) -> Asked:
        """Items, labels and schema as workers take them."""
        limits, params = self.services.settings.limits, request.params or ExtractParams()
        return Asked(
            inputs_of(request.items, entry, limits), distinct(params.labels or []), params.output_schema
        )

    def images(self, request: ExtractRequest, inputs: list[InputItem]) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image of the items."""
        return images_in(request.items)

    def plan(
        self, request: ExtractRequest, entry: ModelEntry, inputs: Asked, status: ModelStatus
    ) -> Plan[ExtractCall]:
        """The call with the options of the request."""
        params = request.params or ExtractParams()
        resolved = self.resolve(entry, params.options, params.instruction, len(inputs.items))
        call = resolved.extract(inputs.items, inputs.labels, inputs.output_schema, IN_PARAMS)
        return Plan(resolved.entry.id, call)

    async def render(
        self, reply: Answer, plan: Plan[ExtractCall], request: ExtractRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result, so the lease ends here."""
        write = _json if form.json else _msgpack
        with reply:
            findings = reply.tensors()["extraction"]
            large = findings.nbytes > INLINE_NBYTES
            return await off_loop_if(large, write, scope.model, request, reply, findings, form.beside)


def _findings(
    request: ExtractRequest, reply: Answer, findings: np.ndarray
) -> Iterator[tuple[str, memoryview, ItemFault | None]]:
    """(id, msgpack of the findings, error) of each item."""
    errors, written = faults_of(reply), findings.data
    for index, (item, span) in enumerate(zip(request.items, reply.spans("extraction"), strict=True)):
        name = f"item-{index}" if item.id is None else item.id
        error = errors.get(index)
        yield name, written[span] if error is None else memoryview(_EMPTY), error


def _msgpack(
    model: str, request: ExtractRequest, reply: Answer, findings: np.ndarray, beside: dict[str, Any]
) -> list[bytes]:
    """The whole body; a finding is a map of five, to which `id` and maybe `error` are added in front."""
    fields = _EMPTY[0] & 0x0F
    head = (map_header(2 + len(beside)), packed("model"), packed(model), packed("items"))
    parts: list[bytes | memoryview] = [*head, array_header(len(request.items))]
    for name, written, error in _findings(request, reply, findings):
        failed = b"" if error is None else packed("error") + packed(error)
        parts.append(map_header(fields + 1 + (error is not None)) + packed("id") + packed(name) + failed)
        parts.append(written[1:])
    parts += [packed(part) for pair in beside.items() for part in pair]
    return [b"".join(parts)]


def _json(
    model: str, request: ExtractRequest, reply: Answer, findings: np.ndarray, beside: dict[str, Any]
) -> list[bytes]:
    """The whole body, written item by item."""
    items = []
    for name, written, error in _findings(request, reply, findings):
        finding = extraction.unpack(written)
        kinds = (finding.entities, finding.relations, finding.classifications, finding.objects)
        items.append(ExtractResult(name, *kinds, finding.data, error or UNSET))
    return listed_parts(ExtractResponse(model, items, **beside))
