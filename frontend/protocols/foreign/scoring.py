"""What the routes of other servers share: classes of whole texts, scores of texts, tokens of texts.

1. `ClassifyResource` makes one call of a classifier, which gives the scores of all of its labels.
2. `TextScoringResource` checks a query and texts, and makes the call of any model that scores.
3. `TextRankingResource` answers with the texts best first; a route says how an entry and the body look.
4. `TokensResource` makes tokens of texts, or texts of tokens: the call, its limits, and its results.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.planning import check_options, model_named
from frontend.http.fields import check_count, check_shared, check_texts
from frontend.http.threads import off_loop_if
from frontend.protocols.sie.flow import Form, InferenceResource, Plan
from frontend.protocols.sie.schemas import Body
from frontend.protocols.sie.score import Pairs, ScoringResource, ranking
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ENCODE_OUTPUTS, ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire import extraction
from ipc.wire.extraction import Classification
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import ExtractCall, GenerateCall, InputItem, ModelStatus, ScoreCall, TokenizeCall

FUNCTION = "function_to_apply"
"""The option by which classifiers of whole texts are known: no other family reads the option."""


def activation_option(raw: bool) -> dict[str, Any]:
    """The option for scores of pairs: bare logits if `raw`, else 0 to 1. Models without the option score as they do."""
    return {"activation": "identity" if raw else "sigmoid"}


def function_option(raw: bool) -> dict[str, Any]:
    """The option for scores of classes: bare logits if `raw`, else the function of the model's configuration."""
    return {FUNCTION: "none"} if raw else {}


FAMILY = "text_classification"
ENTRY_NBYTES = 64
"""About how long an entry of `labelled` is in JSON."""
INLINE_NBYTES = 64 << 10
"""Classes up to this size are read on the event loop, more in a thread."""


class ClassifyBody(Body, Protocol):
    """A request for classes."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""


class ClassifyTextsBody(ClassifyBody, Protocol):
    """A request with texts to classify."""

    @property
    def items(self) -> Sequence[InputItem]:
        """Texts and pairs of texts. Raises `InvalidInput` for what no classifier takes."""


@dataclass(frozen=True, slots=True)
class ClassesPlan(Plan[ExtractCall | ScoreCall]):
    """The call; `labels` are those of the model, in the order of its outputs."""

    labels: list[str]


R = TypeVar("R", bound=ClassifyBody)
T = TypeVar("T", bound=ClassifyTextsBody)
C = TypeVar("C")


class ClassifyResource(InferenceResource[R, ClassesPlan], Generic[R]):
    """The call; `field` is the name of the inputs. Always JSON."""

    always_json = True
    field = "input"

    def model_of(self, request: R) -> str:
        """The model that the request names, or the classifier."""
        return model_named(request, self.services.directory, self.services.settings, ("json",), FAMILY)

    def plan(
        self, request: R, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes. Raises `InvalidInput` for a model that is no classifier of whole texts."""
        if FUNCTION not in status.uses:
            raise InvalidInput(f"model: '{entry.id}' is no classifier of whole texts with labels of its own")
        resolved = self.resolve(entry, request.options, None, len(inputs), self.names)
        # The answer has all classes, whatever the entry's own threshold is.
        options = {**resolved.options, "threshold": 0.0, "top_k": max(1, len(status.labels))}
        call = ExtractCall(
            inputs, [], None, resolved.instruction, options, resolved.overflow, resolved.lora, self.names
        )
        return ClassesPlan(resolved.entry.id, call, status.labels)

    @property
    def names(self) -> FieldNames:
        """How messages name texts, and the first texts of pairs."""
        place = f"{self.field}[{{}}]"
        return FieldNames(place, place, query=place, options="")


class TextClassesResource(ClassifyResource[T], Generic[T]):
    """Checks of texts and pairs of texts."""

    def examine(self, request: T) -> None:
        """Texts that some model could take."""
        limits, items = self.services.settings.limits, request.items
        check_count(len(items), self.field, limits)
        for texts in ([item.text or "" for item in items], [item.first or "" for item in items]):
            check_texts(texts, f"{self.field}[{{}}]", limits)

    def check(self, request: T, entry: ModelEntry) -> list[InputItem]:
        """The texts as workers take them."""
        return list(request.items)


async def classes_of(reply: Answer) -> list[list[Classification]]:
    """The classes of each item, the likeliest first. The lease ends. Raises `LeaseRevoked`."""
    return await _read(reply, _classes)


async def labelled(reply: Answer, kind: Callable[[float, str], C]) -> list[list[C]]:
    """`kind(score, label)` of each class, for each item. The lease ends. Raises `LeaseRevoked`."""
    return await _read(reply, lambda found: [kind(one.score, one.label) for one in _classes(found)])


async def _read(reply: Answer, read: Callable[[memoryview], C]) -> list[C]:
    """What `read` makes of the findings of each item, in a thread where they are many."""
    with reply:
        packed, spans = reply.tensors()["extraction"].data, reply.spans("extraction")
        large = packed.nbytes > INLINE_NBYTES
        return await off_loop_if(large, lambda: [read(packed[span]) for span in spans])


def _classes(found: memoryview) -> list[Classification]:
    return extraction.unpack(found).classifications


class ScoreBody(Body, Protocol):
    """A request with a query and texts."""

    @property
    def query(self) -> str:
        """What the texts should answer; empty where each has a text of its own."""

    @property
    def texts(self) -> Sequence[str]:
        """The texts to score."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""


class RankBody(ScoreBody, Protocol):
    """A request for the order of texts."""

    @property
    def most(self) -> int | None:
        """How many of the best texts the answer has; None: all."""

    @property
    def repeats(self) -> bool:
        """Whether the answer has the texts."""


S = TypeVar("S", bound=ScoreBody)
K = TypeVar("K", bound=RankBody)


class TextScoringResource(ScoringResource[S], Generic[S]):
    """Checks and calls; `names` says what query and texts are called. Always JSON."""

    always_json = True

    def model_of(self, request: S) -> str:
        """The model that the request names, else the model that scores."""
        return model_named(request, self.services.directory, self.services.settings, ("score",))

    def firsts_of(self, request: S) -> Sequence[str]:
        """What each text should answer; empty where the query is for all."""
        return ()

    def examine(self, request: S) -> None:
        """A query and texts that some model could take."""
        limits, texts, names = self.services.settings.limits, request.texts, self.names_of(request)
        check_count(len(texts), names.text.removesuffix("[{}]"), limits)
        check_texts(texts, names.text, limits)
        check_texts(self.firsts_of(request), names.query, limits)
        check_shared(request.query, names.query, len(texts), limits)
        check_options(request.options, names)

    def check(self, request: S, entry: ModelEntry) -> Pairs:
        """Query and texts as workers take them."""
        pairs = zip_longest(request.texts, self.firsts_of(request))
        return Pairs(InputItem(request.query), [InputItem(text, first=first) for text, first in pairs])

    def options_of(self, request: S) -> tuple[dict[str, Any], None]:
        """The options of the request; none of these servers has instructions."""
        return request.options, None

    def echoed_nbytes(self, request: S) -> int:
        """Nothing, unless a route repeats texts."""
        return 0


class TextRankingResource(TextScoringResource[K], Generic[K]):
    """Texts in the order in which they answer the query."""

    operation = "rerank"

    def __init_subclass__(cls, field: str = "documents", **more: Any) -> None:
        """`field` is the name of the texts."""
        super().__init_subclass__(**more)
        cls.names = FieldNames(item=f"{field}[{{}}]", text=f"{field}[{{}}]", query="query", options="")

    def echoed_nbytes(self, request: K) -> int:
        """Texts that are returned."""
        return sum(map(len, request.texts)) if request.repeats else 0

    def answer(
        self, request: K, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The best texts."""
        best = [
            self.entry(index, score, request.texts[index] if request.repeats else None)
            for index, score in ranking(scores)[: request.most]
        ]
        return self.around(best, scope, reply)

    @abstractmethod
    def entry(self, index: int, score: float, text: str | None) -> msgspec.Struct:
        """One text; `text` is None where the request does not ask for texts."""

    @abstractmethod
    def around(
        self, best: list[Any], scope: RequestScope, reply: Answer
    ) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The body with these entries."""


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


B = TypeVar("B", bound=Body)


class TokensResource(InferenceResource[B, TokensPlan], Generic[B]):
    """Base of the routes that tokenize or decode; always JSON."""

    always_json = True
    names: ClassVar[FieldNames]

    def model_of(self, request: B) -> str:
        """The model that the request names, or one that reads texts."""
        return model_named(request, self.services.directory, self.services.settings, self.reading(request))

    def reading(self, request: B) -> Sequence[str]:
        """Outputs of the models that can answer."""
        return READING

    def prompt(self, request: B) -> GenerateCall | None:
        """A conversation, where the request has one in place of texts."""
        return None

    @abstractmethod
    def special(self, request: B) -> bool:
        """Whether special tokens are part of the tokens, or of the decoded texts."""

    def plan(self, request: B, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus) -> TokensPlan:
        """The call."""
        call = TokenizeCall(inputs, self.special(request), self.names, self.prompt(request))
        return TokensPlan(entry.id, call, status.max_sequence_length)

    async def render(
        self, reply: Answer, plan: TokensPlan, request: B, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, from a copy of each item's result."""
        with reply:
            packed = reply.tensors()["tokens"].data
            results = [bytes(packed[span]) for span in reply.spans("tokens")]
        large = sum(map(len, results)) > _INLINE_NBYTES
        return await off_loop_if(large, self.write, request, plan, results)

    @abstractmethod
    def write(self, request: B, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """The body in pieces, from the result of each item: msgpack of tokens, or a text in UTF-8."""
