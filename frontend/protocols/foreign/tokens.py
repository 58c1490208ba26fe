"""Tokens of texts, and texts of tokens, for the forms of other APIs: the call, its limits, and its results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from frontend.engine.answer import Answer
from frontend.engine.planning import model_named
from frontend.http.fields import check_count
from frontend.http.rendering import off_loop_if
from frontend.protocols.sie.flow import Form, InferenceResource, Plan
from frontend.protocols.sie.schemas import Body
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ENCODE_OUTPUTS, ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import GenerateCall, InputItem, ModelStatus, TokenizeCall

READING = ("chat", *ENCODE_OUTPUTS, "score", "json")
"""Outputs of models that read texts."""
_INLINE_NBYTES = 32 << 10
"""Results above this size are written in a thread."""


def check_texts_together(texts: Sequence[str], where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for no texts, too many, and texts that are together longer than one text may be."""
    check_count(len(texts), where, limits)
    _check_sum(
        sum(len(text.encode()) for text in texts), f"{where}: {{}} bytes in all", limits.max_text_bytes
    )


def check_ids_together(lists: Sequence[Sequence[int]], where: str, limits: Limits) -> None:
    """`check_texts_together` for lists of token ids: each id counts as four bytes."""
    check_count(len(lists), where, limits)
    _check_sum(sum(map(len, lists)), f"{where}: {{}} token ids in all", limits.max_text_bytes // 4)


def _check_sum(found: int, text: str, limit: int) -> None:
    if found > limit:
        raise InvalidInput(f"{text.format(found)}, the limit is {limit} (limits.max_text_bytes)")


@dataclass(frozen=True, slots=True)
class TokensPlan(Plan[TokenizeCall]):
    """The call; `longest` is the length of the model in tokens."""

    longest: int


R = TypeVar("R", bound=Body)


class TokensResource(InferenceResource[R, TokensPlan], Generic[R]):
    """Base of the routes that tokenize or decode; always JSON."""

    always_json = True
    names: ClassVar[FieldNames]

    def model_of(self, request: R) -> str:
        """The model that the request names, or one that reads texts."""
        return model_named(request, self.services.catalog, self.services.settings, self.reading(request))

    def reading(self, request: R) -> Sequence[str]:
        """Outputs of the models that can answer."""
        return READING

    def prompt(self, request: R) -> GenerateCall | None:
        """A conversation, where the request has one in place of texts."""
        return None

    @abstractmethod
    def special(self, request: R) -> bool:
        """Whether special tokens are part of the tokens, or of the decoded texts."""

    def plan(self, request: R, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus) -> TokensPlan:
        """The call."""
        call = TokenizeCall(inputs, self.special(request), self.names, self.prompt(request))
        return TokensPlan(entry.id, call, status.max_sequence_length)

    async def render(
        self, reply: Answer, plan: TokensPlan, request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, from a copy of each item's result."""
        with reply:
            packed = reply.tensors()["tokens"].data
            results = [bytes(packed[span]) for span in reply.spans("tokens")]
        large = sum(map(len, results)) > _INLINE_NBYTES
        return await off_loop_if(large, self.write, request, plan, results)

    @abstractmethod
    def write(self, request: R, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """The body in pieces, from the result of each item: msgpack of tokens, or a text in UTF-8."""
