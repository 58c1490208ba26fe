"""A row of the table of operations, from which the document is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

JSON = "application/json"
MSGPACK = "application/msgpack"
TEXT = "text/plain"
HTML = "text/html"
EVENTS = "text/event-stream"


Faults = Mapping[int, type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None]
"""Statuses, and the bodies that answers with a status may have; None for no described body."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or a header of a request; `schema` is JSON Schema."""

    name: str
    place: Literal["query", "header"]
    text: str
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path.

    `{model}` in a path is a model's name and may hold slashes; other names in braces are parameters of one word. `body`
    is the struct of requests, `answer` the type of answers (None: text), in each media type of `media`; a tuple means
    any of its types. `errors` are further statuses. `timed` answers carry the timing headers.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    tag: str
    body: Any = None
    body_required: bool = True
    answer: Any = None
    answer_text: str = "Success."
    many: bool = False
    """Whether the answer is a list of `answer`."""
    media: tuple[str, ...] = (JSON,)
    request_media: tuple[str, ...] = ()
    errors: Faults = field(default_factory=dict)
    also: dict[int, str] = field(default_factory=dict)
    """Further statuses that are no errors and have the body of `answer`, or none."""
    parameters: tuple[Parameter, ...] = ()
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of a parameter of the path, by its name, where the values are fixed."""
    timed: bool = False
    streams: bool = False
    """Whether the answer may also be a stream of events."""
    example: dict[str, Any] | None = None
    error_media: tuple[str, ...] = (TEXT,)
    """Media types of errors without a struct; none: their body is empty and has no type."""
    retry_header: bool = True
    """Whether errors that pass with time carry Retry-After."""
    error_code_header: bool = True
    """Whether errors carry X-SIE-Error-Code."""
    closed: bool = True
    """Whether a key is needed when the server has keys."""

    @property
    def name(self) -> str:
        """Stable id: `post_v1_encode_model`."""
        words = [word.strip("{}") for word in self.path.split("/") if word]
        return "_".join([self.method, *(word.replace(".", "_") for word in words or ["root"])])

    @property
    def accepts(self) -> tuple[str, ...]:
        """Media types of requests."""
        return self.request_media or self.media


def asking(
    path: str, summary: str, body: Any, answer: Any, example: dict[str, Any], *, tag: str, **more: Any
) -> Operation:
    """The row of a route that is asked with a JSON body and an example; `more` are other fields of `Operation`."""
    return Operation(
        "post",
        path,
        summary,
        tag,
        body=body,
        answer=answer,
        example=example,
        request_media=(JSON,),
        **more,
    )
