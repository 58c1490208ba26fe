"""The contract of vLLM's pooling routes: bodies of requests and bodies of answers.

Absent and null fields have their defaults, unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.generation.conversation import (
    BeginsAnswer,
    ChatMessage,
    ContinuesMessage,
    choice_of,
    end_variables,
    functions_of,
    messages_of,
    tool_use,
)
from frontend.generation.fields import template_variables
from frontend.generation.pictures import refuse_pictures
from frontend.protocols.foreign.scoring import activation_option, function_option
from frontend.protocols.sie.inputs import Inputs, TokenId
from frontend.protocols.sie.plans import check_used
from frontend.protocols.sie.schemas import FlatBody
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall, ModelStatus

ModelName = Annotated[
    str | None, Meta(description="Name of the model; without a name the only model that can answer.")
]
Cut = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(
        description="Cut texts at so many tokens, with -1 at the length of the model; else refuse long texts."
    ),
]
TextsOrIds = Annotated[
    Inputs, Meta(description="A text, several texts, the token ids of one text, or those of several texts.")
]
Texts = Annotated[str | list[str], Meta(description="A text, or several texts.")]
OnOff = Annotated[bool | None, Meta(description="False gives the bare logits.")]


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The fields of a score request that may hold first and second texts."""


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Naming(FlatBody, kw_only=True):
    """What all requests say."""

    model: ModelName = None


class Cutting(Naming, kw_only=True):
    """What requests say about inputs that are too long."""

    truncate_prompt_tokens: Cut = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, Meta(description="The side that is cut, by default the right one.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Must be true, the default: models read their special tokens.")
    ] = None
    padding: Annotated[
        Literal["do_not_pad"] | None, Meta(description="Texts are not padded to the model's length.")
    ] = None

    def __post_init__(self) -> None:
        if self.add_special_tokens is False:
            raise ValueError("add_special_tokens: false is not offered, leave the field out")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: 0 leaves nothing of a text; send -1, or 1 and more")

    def check_cut(self, entry: ModelEntry, status: ModelStatus) -> None:
        """Raise `InvalidInput` for a number of tokens where the loaded model cannot cut at one."""
        most = None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        check_used({"truncate_prompt_tokens": most}, entry, status)

    @property
    def cut(self) -> dict[str, Any]:
        """The options of a call that the fields stand for."""
        most = self.truncate_prompt_tokens
        if most is None:
            return {"overflow_policy": "error"}
        policy = "truncate_left" if self.truncation_side == "left" else "truncate_text"
        return {"overflow_policy": policy, "max_tokens": None if most == -1 else most}


class PoolingRequest(Cutting, kw_only=True):
    """Body of POST /pooling."""

    input: TextsOrIds
    task: Annotated[
        Literal["embed", "token_embed"] | None,
        Meta(description="One vector for each input, or one for each token; by default what the model has."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="Numbers, or base64 of little-endian float32.")
    ] = None
    embed_dtype: Annotated[Literal["float32"] | None, Meta(description="Numbers in base64.")] = None
    endianness: Annotated[
        Literal["native", "little"] | None, Meta(description="Order of bytes in base64.")
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="Only the first so many values of the vector of each input.")
    ] = None


class Scoring(Cutting, kw_only=True):
    """What requests say about scores of pairs."""

    activation: OnOff = None
    use_activation: OnOff = None

    @property
    def options(self) -> dict[str, Any]:
        """What becomes of long texts, and logits where they are wanted."""
        return {**self.cut, **activation_option(False in (self.activation, self.use_activation))}


class PairScoreRequest(Scoring, kw_only=True):
    """Body of POST /score and /v1/score."""

    text_1: Annotated[
        Texts | None, Meta(description="A text for all of `text_2`, or as many texts: one for each.")
    ] = None
    text_2: Annotated[Texts | None, Meta(description="The texts that are scored.")] = None
    queries: Annotated[Texts | None, Meta(description="The same as `text_1`.")] = None
    documents: Annotated[Texts | None, Meta(description="The same as `text_2`.")] = None
    items: Annotated[Texts | None, Meta(description="The same as `text_2`.")] = None
    data_1: Annotated[Texts | None, Meta(description="The same as `text_1`.")] = None
    data_2: Annotated[Texts | None, Meta(description="The same as `text_2`.")] = None

    @property
    def fields(self) -> tuple[str, str]:
        """The two fields that have the texts. Raises `InvalidInput` where no such two are given, or more."""
        given = [one for one in SIDES if all(getattr(self, name) is not None for name in one)]
        if len(given) != 1:
            raise InvalidInput(f"{' and '.join(SIDES[0])}: expected one pair of fields, got {len(given)}")
        return given[0]

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The first texts, one or as many as second texts, and the second texts. Raises `InvalidInput`."""
        one, other = self.fields
        first, second = (_listed(getattr(self, name)) for name in (one, other))
        if len(first) not in (1, len(second)):
            raise InvalidInput(f"{one}: {len(first)} texts, expected 1, or {len(second)} as in {other}")
        return first, second

    @property
    def query(self) -> str:
        """The first text, where there is one for all; else empty."""
        first, _ = self.sides
        return first[0] if len(first) == 1 else ""

    @property
    def texts(self) -> list[str]:
        """The second texts."""
        return self.sides[1]

    @property
    def firsts(self) -> list[str]:
        """A first text for each second text; empty where there is one for all."""
        first, _ = self.sides
        return first if len(first) > 1 else []


class DocumentsRequest(Scoring, kw_only=True):
    """Body of POST /rerank."""

    query: Annotated[str, Meta(description="What the documents should answer.")]
    documents: Annotated[Texts, Meta(description="The text or texts to order.")]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Only the best so many; 0 for all.")
    ] = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return _listed(self.documents)

    @property
    def most(self) -> int | None:
        """So many of the best, None for all."""
        return self.top_n or None

    @property
    def repeats(self) -> bool:
        """The answer always has the documents."""
        return True


class ClassifyRequest(Cutting, kw_only=True):
    """Body of POST /classify."""

    input: TextsOrIds
    activation: OnOff = None
    use_activation: OnOff = None

    @property
    def options(self) -> dict[str, Any]:
        """What becomes of long texts, and logits where they are wanted."""
        return {**self.cut, **function_option(False in (self.activation, self.use_activation))}


class PromptRequest(Naming, kw_only=True):
    """Body of POST /tokenize."""

    prompt: Annotated[str | None, Meta(description="The text.")] = None
    messages: Annotated[
        list[ChatMessage] | None,
        Meta(description="A conversation for the chat template, in place of a text."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Add the special tokens of the model; the default of a text, refused for a conversation."
        ),
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="Give the tokens as strings too.")] = None
    add_generation_prompt: BeginsAnswer = None
    continue_final_message: ContinuesMessage = None
    tools: Annotated[list[Any] | None, Meta(description="Functions for the chat template, at most 128.")] = (
        None
    )
    chat_template: Annotated[
        str | None, Meta(description="Refused: conversations have the template of the model.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="`enable_thinking` and `reasoning_effort` for the template.")
    ] = None

    @property
    def text(self) -> str:
        """The text, where there is no conversation. Raises `InvalidInput` for neither, and for both."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidInput(
                f"prompt and messages: send {'one of them' if self.prompt is None else 'only one'}"
            )
        return self.prompt or ""

    def conversation(self, limits: Limits) -> GenerateCall | None:
        """The conversation as a call for its answer. Raises `InvalidInput` for what no template could take."""
        if self.messages is None:
            return None
        refused = {
            "add_special_tokens": self.add_special_tokens,
            "chat_template": self.chat_template is not None,
        }
        for name, given in refused.items():
            if given:
                raise InvalidInput(f"{name}: not offered with messages, leave the field out")
        messages = messages_of(self.messages, limits)
        refuse_pictures(messages, "POST /v1/messages/count_tokens counts the tokens of images")
        functions = functions_of(self.tools, {})
        variables = template_variables(None, None, self.chat_template_kwargs)
        return GenerateCall(
            messages=messages,
            tools=tool_use(functions, choice_of(None, [one.name for one in functions]), None),
            variables=variables | end_variables(self.add_generation_prompt, self.continue_final_message),
        )


class TokenIdsRequest(Naming, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(description="The token ids of a text.")]


Place = Annotated[int, Meta(description="Place in the request.")]
Identity = Annotated[str, Meta(description="A new id of the answer.")]
Created = Annotated[int, Meta(description="When the answer was made, in seconds since 1970.")]
Name = Annotated[str, Meta(description="Name of the model that answered.")]


class PoolingUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all inputs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]
    completion_tokens: Annotated[int, Meta(description="Always 0.")]
    prompt_tokens_details: Annotated[None, Meta(description="Always null.")]


class PooledInput(msgspec.Struct):
    """The vectors of one input."""

    index: Place
    object: Annotated[Literal["pooling"], Meta(description="Names the form of this object.")]
    data: Annotated[
        list[float] | str, Meta(description="A vector, or base64; for `token_embed` an array of vectors.")
    ]


class ScoredText(msgspec.Struct):
    """The score of one text."""

    index: Place
    object: Annotated[Literal["score"], Meta(description="Names the form of this object.")]
    score: Annotated[float, Meta(description="How well the text fits the first text.")]


class ClassifiedText(msgspec.Struct):
    """The classes of one text."""

    index: Place
    label: Annotated[str, Meta(description="The likeliest class.")]
    probs: Annotated[list[float], Meta(description="A number for each class, in the order of the model.")]
    num_classes: Annotated[int, Meta(description="How many classes the model has.")]


class _Listed(msgspec.Struct):
    id: Identity
    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    created: Created
    model: Name


class PoolingAnswer(_Listed):
    """Answer of /pooling."""

    data: Annotated[list[PooledInput], Meta(description="The list.")]
    usage: Annotated[PoolingUsage, Meta(description="Counts of tokens.")]


class PairScoreAnswer(_Listed):
    """Answer of /score and /v1/score."""

    data: Annotated[list[ScoredText], Meta(description="The list.")]
    usage: Annotated[PoolingUsage, Meta(description="Counts of tokens.")]


class ClassifyAnswer(_Listed):
    """Answer of /classify."""

    data: Annotated[list[ClassifiedText], Meta(description="The list.")]
    usage: Annotated[PoolingUsage, Meta(description="Counts of tokens.")]


class RankedText(msgspec.Struct):
    """The text of a document."""

    text: Annotated[str, Meta(description="The text.")]


class RankedDocument(msgspec.Struct):
    """A document at its rank."""

    index: Place
    document: Annotated[RankedText, Meta(description="The document.")]
    relevance_score: Annotated[float, Meta(description="How well the document answers the query.")]


class RankUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all pairs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]


class DocumentsAnswer(msgspec.Struct):
    """Answer of /rerank."""

    id: Identity
    model: Name
    usage: Annotated[RankUsage, Meta(description="Counts of tokens.")]
    results: Annotated[list[RankedDocument], Meta(description="The documents, the best first.")]


class PromptTokens(msgspec.Struct):
    """Answer of /tokenize."""

    count: Annotated[int, Meta(description="How many tokens the text has.")]
    max_model_len: Annotated[int, Meta(description="The longest sequence of the model.")]
    tokens: Annotated[list[int], Meta(description="Numbers of the tokens.")]
    token_strs: Annotated[list[str] | None, Meta(description="The tokens, with `return_token_strs`.")]


class PromptText(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: Annotated[str, Meta(description="The text, with special tokens.")]
