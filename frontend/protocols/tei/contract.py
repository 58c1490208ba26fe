"""The contract of TEI: bodies of requests and bodies of answers.

Absent and null fields have their defaults, unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.protocols.foreign.scoring import activation_option, function_option
from frontend.protocols.sie.encode import Wishes
from frontend.protocols.sie.inputs import Inputs, TokenId
from frontend.protocols.sie.schemas import FlatBody, Key, Keys
from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem

Truncate = Annotated[
    bool | None, Meta(description="Cut what is too long, the default; with false a long input is refused.")
]
Direction = Annotated[
    Literal["left", "right", "Left", "Right"] | None, Meta(description="The side that `truncate` cuts.")
]
PromptName = Annotated[
    str | None, Meta(description="Name of a prompt of the model, which stands before each text.")
]
RawScores = Annotated[bool | None, Meta(description="Scores as the model computes them, without a function.")]
TextsOrIds = Annotated[
    Inputs, Meta(description="A text, several texts, the token ids of one text, or those of several texts.")
]
TeiKind = Literal["Backend", "Overloaded", "Unhealthy", "Validation"]


class Truncating(FlatBody, kw_only=True):
    """What all requests say about inputs that are too long: TEI cuts them since its version 1.9."""

    truncate: Truncate = None
    truncation_direction: Direction = None

    @property
    def overflow(self) -> dict[str, Any]:
        """The option of a call that they stand for."""
        if self.truncate is False:
            return {"overflow_policy": "error"}
        left = (self.truncation_direction or "").lower() == "left"
        return {"overflow_policy": "truncate_left" if left else "truncate_text"}


class Prompting(Truncating, kw_only=True):
    """What requests for vectors say beside."""

    prompt_name: PromptName = None

    @property
    def wishes(self) -> Wishes:
        """What the request asks of a model beside its inputs."""
        return Wishes(prompt_name=self.prompt_name, overflow_policy=self.overflow["overflow_policy"])


class EmbedRequest(Prompting, kw_only=True):
    """Body of POST /embed."""

    inputs: TextsOrIds
    normalize: Annotated[bool | None, Meta(description="Give each vector the length 1; the default.")] = None
    dimensions: Annotated[int | None, Meta(description="Only the first so many values of each vector.")] = (
        None
    )


class EmbedAllRequest(Prompting, kw_only=True):
    """Body of POST /embed_all and /embed_sparse."""

    inputs: TextsOrIds


class Sentences(msgspec.Struct):
    """Texts to compare."""

    source_sentence: Annotated[str, Meta(description="The text that all others are compared with.")]
    sentences: Annotated[list[str], Meta(description="The other texts.")]


class SimilarityParameters(Prompting, kw_only=True):
    """How texts are made vectors."""


class SimilarityRequest(msgspec.Struct):
    """Body of POST /similarity."""

    inputs: Annotated[Sentences, Meta(description="A text, and the texts that the first is compared with.")]
    parameters: Annotated[SimilarityParameters | None, Meta(description="Options, by name.")] = None

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
        Meta(
            description="A text, an array with a text or a pair of texts, or an array of such arrays for a batch."
        ),
    ]
    raw_scores: RawScores = None

    @property
    def is_batch(self) -> bool:
        """Whether the answer is an array of arrays."""
        return isinstance(self.inputs, list) and bool(self.inputs) and isinstance(self.inputs[0], list)

    @property
    def items(self) -> list[InputItem]:
        """The texts and pairs. Raises `InvalidInput` for inputs of several kinds, and for more than two texts."""
        given = self.inputs
        if isinstance(given, str):
            return [InputItem(given)]
        if not given:
            raise InvalidInput("inputs: may not be empty")
        if not self.is_batch:
            return [_text_or_pair(given, "inputs")]
        return [_text_or_pair(entry, f"inputs[{index}]") for index, entry in enumerate(given)]

    @property
    def options(self) -> dict[str, Any]:
        """What becomes of long texts, and logits where they are wanted."""
        return {**self.overflow, **function_option(bool(self.raw_scores))}


class TokenizeRequest(FlatBody, kw_only=True):
    """Body of POST /tokenize."""

    inputs: Annotated[str | list[str], Meta(description="A text, or several texts.")]
    add_special_tokens: Annotated[
        bool | None, Meta(description="Add the special tokens of the model; the default.")
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="Refused: the tokens are those of the texts without a prompt.")
    ] = None

    def __post_init__(self) -> None:
        if self.prompt_name is not None:
            raise ValueError("prompt_name: not offered here, put the prompt before each text")

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


class DecodeRequest(FlatBody, kw_only=True):
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


class TextsRequest(Truncating, kw_only=True):
    """Body of POST /rerank."""

    query: Annotated[str, Meta(description="What the texts should answer.")]
    texts: Annotated[list[str], Meta(description="The texts to order.")]
    raw_scores: RawScores = None
    return_text: Annotated[bool | None, Meta(description="Repeat each text beside its score.")] = None

    @property
    def most(self) -> None:
        """All texts."""

    @property
    def repeats(self) -> bool:
        """Whether the answer has the texts."""
        return bool(self.return_text)

    @property
    def options(self) -> dict[str, Any]:
        """What becomes of long texts, and logits where they are wanted."""
        return {**self.overflow, **activation_option(bool(self.raw_scores))}


def _text_or_pair(entry: str | Sequence[str | list[str]], where: str) -> InputItem:
    if isinstance(entry, str) or not all(isinstance(text, str) for text in entry):
        raise InvalidInput(f"{where}: expected an array with one str, or with two")
    if len(entry) not in (1, 2):
        raise InvalidInput(f"{where}: {len(entry)} texts, expected one text or a pair")
    *first, text = map(str, entry)
    return InputItem(text, first=first[0] if first else None)


class Info(msgspec.Struct):
    """A model and the limits of its server."""

    model_id: Annotated[str, Meta(description="Name of the model.")]
    model_sha: Annotated[str | None, Meta(description="Revision on the hub, where the catalog names one.")]
    model_dtype: Annotated[str, Meta(description="Precision of the weights, `auto` if the device decides.")]
    served_model_name: Annotated[str, Meta(description="A further name of the model, or its name.")]
    model_type: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="`embedding`, `classifier` or `reranker`, with its facts."),
    ]
    max_concurrent_requests: Annotated[int, Meta(description="Open connections of one frontend.")]
    max_input_length: Annotated[
        int | None, Meta(description="Tokens of an input, once the model was loaded.")
    ]
    max_batch_tokens: Annotated[int, Meta(description="Tokens of a batch; 0: the device decides.")]
    max_batch_requests: Annotated[int | None, Meta(description="Items of a batch.")]
    max_client_batch_size: Annotated[int, Meta(description="Inputs of a request.")]
    auto_truncate: Annotated[
        bool, Meta(description="Always true: long inputs are cut unless a request says no.")
    ]
    tokenization_workers: Annotated[int, Meta(description="Threads of a worker that tokenize.")]
    version: Annotated[str, Meta(description="Version of Penstock.")]
    sha: Annotated[str | None, Meta(description="Always null.")] = None
    docker_label: Annotated[str | None, Meta(description="Always null.")] = None


class TeiError(msgspec.Struct):
    """An error in the form of TEI."""

    error: Annotated[str, Meta(description="What went wrong.")]
    error_type: Annotated[TeiKind, Meta(description="Kind of the error.")]


class TeiRank(msgspec.Struct):
    """A text at its rank."""

    index: Annotated[int, Meta(description="Place of the text in the request.")]
    score: Annotated[float, Meta(description="How well the text answers the query.")]
    text: Annotated[str | UnsetType, Meta(description="The text, with `return_text`.")] = UNSET


class TeiTerm(msgspec.Struct):
    """A term of the vocabulary."""

    index: Annotated[int, Meta(description="Number of the term.")]
    value: Annotated[float, Meta(description="Weight of the term.")]


class TeiClass(msgspec.Struct):
    """A class of a text."""

    score: Annotated[float, Meta(description="How likely the class is; with `raw_scores` the logit.")]
    label: Annotated[str, Meta(description="Name of the class.")]


class TeiToken(msgspec.Struct):
    """A token of a text."""

    id: Annotated[int, Meta(description="Number of the token.")]
    text: Annotated[str, Meta(description="Its piece of the text; of a special token the token itself.")]
    special: Annotated[bool, Meta(description="Whether the token was added around the text.")]
    start: Annotated[int | None, Meta(description="First character of the piece.")]
    stop: Annotated[int | None, Meta(description="End of the piece, exclusive.")]
