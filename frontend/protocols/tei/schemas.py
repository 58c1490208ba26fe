"""Request bodies of TEI. Absent and null fields have their defaults, unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.protocols.sie.inputs import Inputs, TokenId
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


class EmbedAllRequest(Truncating, kw_only=True):
    """Body of POST /embed_all and /embed_sparse."""

    inputs: TextsOrIds
    prompt_name: PromptName = None


class Sentences(msgspec.Struct):
    """Texts to compare."""

    source_sentence: Annotated[str, Meta(description="The text that all others are compared with.")]
    sentences: Annotated[list[str], Meta(description="The other texts.")]


class SimilarityParameters(Truncating, kw_only=True):
    """How texts are made vectors."""

    prompt_name: PromptName = None


class SimilarityRequest(msgspec.Struct):
    """Body of POST /similarity."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None

    @property
    def chosen(self) -> SimilarityParameters:
        """The parameters, or their defaults."""
        return self.parameters or SimilarityParameters()

    def keys(self) -> Keys:
        """Names of the fields, as `Body.keys`."""
        return tuple(map(Key, (*self.__struct_fields__, *Sentences.__struct_fields__, "prompt_name"))), ()


class PredictRequest(Truncating, kw_only=True):
    """Body of POST /predict."""

    inputs: Annotated[
        str | list[str | list[str]],
        Meta(description="A text, an array with one text, or an array of such arrays for a batch."),
    ]
    raw_scores: RawScores = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize."""

    inputs: Annotated[str | list[str], Meta(description="A text, or several texts.")]
    add_special_tokens: Annotated[
        bool | None, Meta(description="Add the special tokens of the model; the default.")
    ] = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs

    def keys(self) -> Keys:
        """Names of the fields, as `Body.keys`."""
        return tuple(map(Key, self.__struct_fields__)), ()


class DecodeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /decode."""

    ids: Annotated[
        list[TokenId | list[TokenId]], Meta(description="The token ids of a text, or of several texts.")
    ]
    skip_special_tokens: Annotated[
        bool | None, Meta(description="Leave special tokens out of the texts; the default.")
    ] = None

    @property
    def lists(self) -> list[list[int]]:
        """A list of ids for each text. Raises `InvalidInput` for a mix of ids and lists."""
        if all(isinstance(entry, list) for entry in self.ids):
            return self.ids  # type: ignore[return-value]
        if any(isinstance(entry, list) for entry in self.ids):
            raise InvalidInput("ids: expected one kind of entry (int, or array of int), got a mix")
        return [self.ids]  # type: ignore[list-item]

    def keys(self) -> Keys:
        """Names of the fields, as `Body.keys`."""
        return tuple(map(Key, self.__struct_fields__)), ()


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
