"""Puts texts of the web in the order in which they answer a query, by an embedding model of this server.

1. BM25 scores the texts by the words of the query. The best `MOST_ENCODED` go on to the model, the others are left out.
2. The model encodes query and texts, and the cosine decides the order.
3. A model that cannot answer costs the ranking only: the texts stay in their order, and the log says why.

A page is ranked by its `passages`.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
import numpy as np

from frontend.engine.planning import cost_of, plan, resolve
from frontend.http.threads import off_loop_if
from frontend.scope import RequestScope
from frontend.services import Services
from ipc import deadline
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput, PenstockError
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus

log = logging.getLogger(__name__)
Rank = Callable[[str, Sequence[str]], Awaitable[list[int]]]
"""Places of the texts that answer a query best, the best first; a text may be left out."""
MOST_ENCODED = 48
"""Texts that the model reads for one query."""
PASSAGE_CHARS = 1000
_K1, _B = 1.2, 0.75
_INLINE_CHARS = 32 << 10
_WORD = re.compile(r"\w+")


class Ranking:
    """Ranks by the model `model`, within `timeout_s` for one query."""

    def __init__(self, services: Services, model: str, timeout_s: float) -> None:
        self._services, self._model, self._timeout_s = services, model, timeout_s

    async def best(self, scope: RequestScope, query: str, texts: Sequence[str]) -> list[int]:
        """See `Rank`; for the run of `scope`. All places in their order where the model cannot answer."""
        if len(texts) < 2:
            return [*range(len(texts))]
        scores = await off_loop_if(sum(map(len, texts)) > _INLINE_CHARS, bm25, query, texts)
        likeliest = sorted(range(len(texts)), key=lambda at: -scores[at])[:MOST_ENCODED]
        try:
            closeness = await self._closeness(scope, query, [texts[at] for at in likeliest])
        except PenstockError as error:
            log.warning("%s: texts of the web stay in their order: %s", self._model, error)
            return [*range(len(texts))]
        return [likeliest[at] for at in np.argsort(-closeness, kind="stable")]

    async def _closeness(self, scope: RequestScope, query: str, texts: Sequence[str]) -> np.ndarray:
        """The cosine [text] of each text and the query, float32."""
        entry = self._services.directory.find(self._model)
        until_ns = deadline.after(self._timeout_s)
        status = await self._services.directory.ensure_loaded(entry.id, until_ns)
        # NOTE: the record of the request is that of its text.
        scope = msgspec.structs.replace(
            scope,
            started=time.perf_counter(),
            deadline_ns=until_ns,
            start_by_ns=0,
            model=entry.id,
            span=None,
            cache_hits=None,
            phases={},
            http=None,
        )
        [asked] = await self._units(scope, entry, status, [query], is_query=True)
        closeness: np.ndarray = await self._units(scope, entry, status, texts, is_query=False) @ asked
        return closeness

    async def _units(
        self,
        scope: RequestScope,
        entry: ModelEntry,
        status: ModelStatus,
        texts: Sequence[str],
        *,
        is_query: bool,
    ) -> np.ndarray:
        """Vectors [text, width] of length 1, float32. Raises a `PenstockError` if one text has none."""
        services, settings = self._services, self._services.settings
        items = [InputItem(text=text) for text in texts]
        resolved = resolve(entry, None, None, services.catalog, len(items), settings.limits)
        call = resolved.encode(items, ["dense"], is_query, FieldNames())
        work = plan(scope, settings, resolved.entry.id, call, cost_of(call, status, settings.limits))
        with await services.engine.run(scope, work) as answer:
            if answer.errors:
                raise InvalidInput(f"a text has no vector: {answer.errors[0].message}")
            rows = np.array(answer.tensors()["dense"], np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        units: np.ndarray = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
        return units


def bm25(query: str, texts: Sequence[str]) -> list[float]:
    """The score of each text by the words of the query.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), with k1 = 1.2,
    b = 0.75, and an inverse document frequency that is never negative.
    """
    terms = set(_words(query))
    counts = [Counter(_words(text)) for text in texts]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / len(lengths) or 1.0
    scores = [0.0] * len(texts)
    for word in terms:
        having = sum(word in count for count in counts)
        weight = math.log1p((len(texts) - having + 0.5) / (having + 0.5))
        for at, count in enumerate(counts):
            often = count[word]
            scores[at] += weight * often * (_K1 + 1) / (often + _K1 * (1 - _B + _B * lengths[at] / mean))
    return scores


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def passages(text: str) -> list[str]:
    """The lines of a text, joined to passages of at most `PASSAGE_CHARS` characters; a longer line is cut."""
    parts, joined = list[str](), ""
    for line in _lines(text):
        if joined and len(joined) + 1 + len(line) > PASSAGE_CHARS:
            parts.append(joined)
            joined = ""
        joined = f"{joined}\n{line}" if joined else line
    return [*parts, joined] if joined else parts


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for start in range(0, len(line), PASSAGE_CHARS):
            yield line[start : start + PASSAGE_CHARS]
