"""Request bodies of vLLM's pooling routes. Absent and null fields have their defaults, unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.protocols.foreign.options import activation, function
from frontend.protocols.sie.inputs import Inputs, TokenId
from frontend.protocols.sie.schemas import Key, Keys
from ipc.errors import InvalidInput

ModelName = Annotated[
    str | None, Meta(description="Name of the model; without a name the only model that can answer.")
]
Cut = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(
        description="Cut texts at so many tokens, with -1 at the length of the model; else refuse long texts."
    ),
]
Texts = Annotated[str | list[str], Meta(description="A text, or several texts.")]
OnOff = Annotated[bool | None, Meta(description="False gives the bare logits.")]


class Naming(msgspec.Struct, kw_only=True):
    """What all requests say."""

    model: ModelName = None

    def keys(self) -> Keys:
        """Names of the fields, as `Body.keys`."""
        return tuple(map(Key, self.__struct_fields__)), ()


class Cutting(Naming, kw_only=True):
    """What requests say about inputs that are too long."""

    truncate_prompt_tokens: Cut = None

    @property
    def cut(self) -> dict[str, Any]:
        """The options of a call that it stands for."""
        most = self.truncate_prompt_tokens
        if most is None:
            return {"overflow_policy": "error"}
        return {"overflow_policy": "truncate_text", "max_tokens": None if most == -1 else most}


class PoolingRequest(Cutting, kw_only=True):
    """Body of POST /pooling."""

    input: Annotated[
        Inputs,
        Meta(description="A text, several texts, the token ids of one text, or those of several texts."),
    ]
    task: Annotated[
        Literal["embed", "token_embed"] | None,
        Meta(description="One vector for each input, or one for each token; by default what the model has."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="Numbers, or base64 of little-endian float32.")
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
        return {**self.cut, **activation(False in (self.activation, self.use_activation))}


class PairScoreRequest(Scoring, kw_only=True):
    """Body of POST /score and /v1/score."""

    text_1: Annotated[Texts, Meta(description="What the other texts are scored against.")]
    text_2: Texts

    @property
    def query(self) -> str:
        """The one first text. Raises `InvalidInput` for several."""
        if isinstance(self.text_1, str):
            return self.text_1
        if len(self.text_1) != 1:
            raise InvalidInput(
                f"text_1: {len(self.text_1)} texts, a request here scores one text against those of text_2"
            )
        return self.text_1[0]

    @property
    def texts(self) -> list[str]:
        """The other texts."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


class DocumentsRequest(Scoring, kw_only=True):
    """Body of POST /rerank."""

    query: Annotated[str, Meta(description="What the documents should answer.")]
    documents: Annotated[list[str], Meta(description="The texts to order.")]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Only the best so many; 0 for all.")
    ] = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return self.documents

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

    input: Texts
    activation: OnOff = None
    use_activation: OnOff = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def options(self) -> dict[str, Any]:
        """What becomes of long texts, and logits where they are wanted."""
        return {**self.cut, **function(False in (self.activation, self.use_activation))}


class PromptRequest(Naming, kw_only=True):
    """Body of POST /tokenize."""

    prompt: Annotated[str | None, Meta(description="The text.")] = None
    messages: Annotated[Any, Meta(description="Refused: only texts are tokenized.")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Add the special tokens of the model; the default.")
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="Give the tokens as strings too.")] = None

    @property
    def text(self) -> str:
        """The text. Raises `InvalidInput` for a conversation."""
        if self.messages is not None:
            raise InvalidInput("messages: conversations are not tokenized here, send their text as prompt")
        if self.prompt is None:
            raise InvalidInput("prompt: missing")
        return self.prompt


class TokenIdsRequest(Naming, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(description="The token ids of a text.")]
