"""POST /tokenize and /detokenize: a text to its tokens, and token ids to their text."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from frontend.protocols.foreign.tokens import (
    TokensPlan,
    TokensResource,
    check_ids_together,
    check_texts_together,
)
from frontend.protocols.vllm.schemas import PromptRequest, TokenIdsRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire import tokens
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import GenerateCall, InputItem


class PromptResource(TokensResource[PromptRequest]):
    """The tokens of one text, or of a conversation in the template of its model."""

    operation = "tokenize"
    body = PromptRequest
    names = FieldNames("prompt", "prompt")

    def reading(self, request: PromptRequest) -> Sequence[str]:
        """Conversations are read by models that answer them."""
        return super().reading(request) if request.messages is None else ("chat",)

    def examine(self, request: PromptRequest) -> None:
        """A text within its limit, or a conversation."""
        limits = self.services.settings.limits
        check_texts_together([request.text], "prompt", limits)
        request.conversation(limits)

    def check(self, request: PromptRequest, entry: ModelEntry) -> list[InputItem]:
        """The text. Raises `InvalidInput` for a conversation with a model that answers none."""
        if request.messages is not None and "chat" not in entry.outputs:
            raise InvalidInput(
                f"messages: model '{entry.id}' answers no conversations, send a text as prompt"
            )
        return [InputItem(request.text)]

    def prompt(self, request: PromptRequest) -> GenerateCall | None:
        """The conversation."""
        return request.conversation(self.services.settings.limits)

    def special(self, request: PromptRequest) -> bool:
        """Special tokens are added unless the request says otherwise."""
        return request.add_special_tokens is not False

    def write(self, request: PromptRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """Count, length of the model, ids, and strings where they were asked for."""
        read = tokens.unpack(results[0])
        strings = read.strings if request.return_token_strs else None
        body = {
            "count": len(read.ids),
            "max_model_len": plan.longest,
            "tokens": read.ids,
            "token_strs": strings,
        }
        return [orjson.dumps(body)]


class TokenIdsResource(TokensResource[TokenIdsRequest]):
    """The text of token ids, special tokens included."""

    operation = "detokenize"
    body = TokenIdsRequest
    names = FieldNames("tokens", "tokens")

    def examine(self, request: TokenIdsRequest) -> None:
        """Token ids within their limit."""
        if not request.tokens:
            raise InvalidInput("tokens: may not be empty")
        check_ids_together([request.tokens], "tokens", self.services.settings.limits)

    def check(self, request: TokenIdsRequest, entry: ModelEntry) -> list[InputItem]:
        """The ids."""
        return [InputItem(None, request.tokens)]

    def special(self, request: TokenIdsRequest) -> bool:
        """vLLM shows special tokens."""
        return True

    def write(self, request: TokenIdsRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """The text."""
        return [orjson.dumps({"prompt": results[0].decode()})]
