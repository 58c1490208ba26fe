"""POST /tokenize and /decode: texts to tokens with their places, and token ids to texts."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from frontend.protocols.foreign.tokens import (
    TokensPlan,
    TokensResource,
    check_ids_together,
    check_texts_together,
)
from frontend.protocols.sie.render import joined
from frontend.protocols.tei.schemas import DecodeRequest, TokenizeRequest
from ipc.catalog.entries import ModelEntry
from ipc.wire import tokens
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem
from ipc.wire.tokens import TextTokens


class TokenizeResource(TokensResource[TokenizeRequest]):
    """The tokens of each text."""

    operation = "tokenize"
    body = TokenizeRequest
    names = FieldNames("inputs[{}]", "inputs[{}]")

    def examine(self, request: TokenizeRequest) -> None:
        """Texts within their limit."""
        check_texts_together(request.texts, "inputs", self.services.settings.limits)

    def check(self, request: TokenizeRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts."""
        return [InputItem(text) for text in request.texts]

    def special(self, request: TokenizeRequest) -> bool:
        """Special tokens are added unless the request says otherwise."""
        return request.add_special_tokens is not False

    def write(self, request: TokenizeRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """For each text an array of tokens."""
        return joined(_arrays(request.texts, results))


def _arrays(texts: list[str], results: list[bytes]) -> Iterator[bytes]:
    for index, (text, data) in enumerate(zip(texts, results, strict=True)):
        yield b",[" if index else b"[["
        yield from _entries(text, tokens.unpack(data))
        yield b"]"
    yield b"]"


def _entries(text: str, found: TextTokens) -> Iterator[bytes]:
    columns = zip(found.ids, found.strings, found.starts, found.ends, found.special, strict=True)
    for place, (number, string, start, stop, special) in enumerate(columns):
        entry = {
            "id": number,
            "text": string if special else text[start:stop],
            "special": special,
            "start": None if special else start,
            "stop": None if special else stop,
        }
        yield (b"," if place else b"") + orjson.dumps(entry)


class DecodeResource(TokensResource[DecodeRequest]):
    """The text of each list of token ids."""

    operation = "decode"
    body = DecodeRequest
    names = FieldNames("ids[{}]", "ids[{}]")

    def examine(self, request: DecodeRequest) -> None:
        """Token ids within their limit."""
        check_ids_together(request.lists, "ids", self.services.settings.limits)

    def check(self, request: DecodeRequest, entry: ModelEntry) -> list[InputItem]:
        """The lists of ids."""
        return [InputItem(None, ids) for ids in request.lists]

    def special(self, request: DecodeRequest) -> bool:
        """Special tokens are left out unless the request says otherwise."""
        return request.skip_special_tokens is False

    def write(self, request: DecodeRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """An array of texts."""
        return [orjson.dumps([text.decode() for text in results])]
