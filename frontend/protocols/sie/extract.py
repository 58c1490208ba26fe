"""POST /v1/extract/{model}: entities, relations, classes and objects found in items, in JSON or msgpack.

A worker writes what it found in each item as one msgpack map, which goes into a msgpack answer as it is. All six keys
are always there; an item that failed alone has them empty beside its `error`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import msgspec
import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.planning import check_options
from frontend.http.fields import check_labels, check_schema, distinct
from frontend.http.rendering import off_loop_if
from frontend.protocols.sie.flow import Form, InferenceResource, Plan
from frontend.protocols.sie.items import check_items, images_in, inputs_of
from frontend.protocols.sie.schemas import ExtractParams, ExtractRequest
from frontend.resources.sending import Buffer
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.wire import extraction
from ipc.wire.extraction import Extraction
from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import ExtractCall, InputItem, ModelStatus

INLINE_NBYTES = 256 << 10
"""Findings up to this size are written on the event loop, larger ones in a thread."""
_EMPTY = extraction.pack(Extraction())


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
        found = self.resolve(entry, params.options, params.instruction, len(inputs.items))
        call = found.extract(inputs.items, inputs.labels, inputs.output_schema, IN_PARAMS)
        return Plan(found.entry.id, call)

    async def render(
        self, reply: Answer, plan: Plan[ExtractCall], request: ExtractRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body in one piece. It holds no view on the result, so the lease ends here."""
        write = _json if form.json else _msgpack
        with reply:
            findings = reply.tensors()["extraction"]
            large = findings.nbytes > INLINE_NBYTES
            return [await off_loop_if(large, write, scope.model, request, reply, findings, form.beside)]


def _found(
    request: ExtractRequest, reply: Answer, findings: np.ndarray
) -> Iterator[tuple[str, memoryview, dict[str, str] | None]]:
    """(id, msgpack of what was found, error) of each item."""
    errors = {error.index: {"code": error.code, "message": error.message} for error in reply.errors}
    packed = findings.data
    for index, (item, span) in enumerate(zip(request.items, reply.spans("extraction"), strict=True)):
        name = f"item-{index}" if item.id is None else item.id
        error = errors.get(index)
        yield name, packed[span] if error is None else memoryview(_EMPTY), error


def _msgpack(
    model: str, request: ExtractRequest, reply: Answer, findings: np.ndarray, beside: dict[str, Any]
) -> bytes:
    """The whole body; a finding is a map of five, to which `id` and maybe `error` are added in front."""
    pack = msgpack.Packer().pack
    fields = _EMPTY[0] & 0x0F
    parts: list[bytes | memoryview] = [
        bytes([0x82 + len(beside)]) + pack("model") + pack(model) + pack("items"),
        msgpack.Packer().pack_array_header(len(request.items)),
    ]
    for name, found, error in _found(request, reply, findings):
        failed = b"" if error is None else pack("error") + pack(error)
        parts.append(bytes([0x80 | fields + 1 + (error is not None)]) + pack("id") + pack(name) + failed)
        parts.append(found[1:])
    parts += [pack(part) for pair in beside.items() for part in pair]
    return b"".join(parts)


def _json(
    model: str, request: ExtractRequest, reply: Answer, findings: np.ndarray, beside: dict[str, Any]
) -> bytes:
    """The whole body, keys in the order of the contract."""
    items: list[bytes] = []
    for name, found, error in _found(request, reply, findings):
        rest = msgspec.json.encode(extraction.unpack(found))[1:-1]
        failed = b"" if error is None else b',"error":' + orjson.dumps(error)
        items.append(b'{"id":' + orjson.dumps(name) + b"," + rest + failed + b"}")
    head = b'{"model":' + orjson.dumps(model) + b',"items":['
    return head + b",".join(items) + b"]," + orjson.dumps(beside)[1:]
