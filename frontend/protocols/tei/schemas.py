"""Request bodies of TEI. Absent and null fields have their defaults, unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.protocols.sie.inputs import Inputs
from frontend.protocols.sie.schemas import Key, Keys
from ipc.errors import InvalidInput

Truncate = Annotated[bool | None, Meta(description="Cut what is too long; else a long input is refused.")]
Direction = Annotated[
    Literal["left", "right", "Left", "Right"] | None, Meta(description="The side that `truncate` cuts.")
]
PromptName = Annotated[
    str | None, Meta(description="Prompt of the model before each text: `query`, `document` or `passage`.")
]
RawScores = Annotated[bool | None, Meta(description="Scores as the model computes them, without a function.")]
TextsOrIds = Annotated[
    Inputs, Meta(description="A text, several texts, the token ids of one text, or those of several texts.")
]


class Truncating(msgspec.Struct, kw_only=True):
    """What all requests say about inputs that are too long."""

    truncate: Truncate = None
    truncation_direction: Direction = None

    def keys(self) -> Keys:
        """Names of the fields, as `Body.keys`."""
        return tuple(map(Key, self.__struct_fields__)), ()

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call that they stand for."""
        if not self.truncate:
            return {"overflow_policy": "error"}
        left = (self.truncation_direction or "").lower() == "left"
        return {"overflow_policy": "truncate_left" if left else "truncate_text"}


class EmbedRequest(Truncating, kw_only=True):
    """Body of POST /embed."""

    inputs: TextsOrIds
    normalize: Annotated[bool | None, Meta(description="Give each vector the length 1; the default.")] = None
    prompt_name: PromptName = None
    dimensions: Annotated[int | None, Meta(description="Only the first so many values of each vector.")] = (
        None
    )


class TextsRequest(Truncating, kw_only=True):
    """Body of POST /rerank."""

    query: Annotated[str, Meta(description="What the texts should answer.")]
    texts: Annotated[list[str], Meta(description="The texts to order.")]
    raw_scores: RawScores = None
    return_text: Annotated[bool | None, Meta(description="Repeat each text beside its score.")] = None


_QUERY = {"query": True, "document": False, "passage": False}
"""Whether texts under a prompt of that name are queries."""


def is_query(prompt_name: str | None) -> bool | None:
    """Whether a prompt is that of queries; None without a prompt. Raises `InvalidInput` for another name."""
    if prompt_name is None:
        return None
    if prompt_name not in _QUERY:
        raise InvalidInput(f"prompt_name: {prompt_name[:64]!r} is not one of {', '.join(_QUERY)}")
    return _QUERY[prompt_name]
