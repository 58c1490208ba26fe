"""Rendered answers of requests that come again byte for byte, so that not even their bodies need be read.

1. An answer is kept only if all items of its request were in the cache of embeddings. So a text that comes once takes
   no room twice.
2. An answer belongs to one reading of the catalog and one identity of the model. A look-up under others finds nothing.
3. Each request has times of its own, which stand between the two parts of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from frontend.engine.bounded_cache import BoundedCache
from frontend.records.finishing import Recorder
from ipc.catalog.entries import Catalog
from ipc.metrics.registry import Amount

SHARE = 4
"""Part of the bytes for embeddings that whole answers may take."""
LONGEST_BODY = 64 << 10
"""Bodies up to this size are looked up."""


class WholeAnswer(NamedTuple):
    """A body in two parts. `total` writes the total time between the parts; None for a body without times.

    `name` is the model's name in the request, `model` the id of the model that computed, `items` counts the request.
    """

    name: str
    model: str
    items: int
    headers: Sequence[tuple[str, str]]
    before: bytes
    after: bytes = b""
    total: Callable[[float], bytes] | None = None


class _Kept(NamedTuple):
    """An answer, the reading and identity that the answer belongs to, and the counter of its hits."""

    answer: WholeAnswer
    identity: str
    reading: object
    hits: Amount


class WholeAnswers:
    """The whole answers of one frontend."""

    def __init__(
        self, catalog: Catalog, identity: Callable[[str], str], recorder: Recorder, limit_nbytes: int
    ) -> None:
        """Keep answers of `limit_nbytes` together. `identity` gives the identity of a loaded model by name."""
        self._catalog, self._identity, self._recorder = catalog, identity, recorder
        self._kept: BoundedCache[_Kept] = BoundedCache(limit_nbytes)

    def find(self, key: bytes) -> WholeAnswer | None:
        """The answer to the request of that key, whose items are counted as hits."""
        kept = self._kept.get(key)
        if kept is None or kept.reading is not self._catalog.sources:
            return None
        answer = kept.answer
        if kept.identity != self._identity(answer.model):
            return None
        kept.hits.inc(answer.items)
        return answer

    def keep(self, key: bytes, answer: WholeAnswer) -> None:
        """Keep an answer that was made of embeddings of the model that is loaded now."""
        identity = self._identity(answer.model)
        if identity:
            nbytes = len(answer.before) + len(answer.after)
            meter = self._recorder.cache(answer.model)
            self._kept.put(key, _Kept(answer, identity, self._catalog.sources, meter.hits), nbytes, meter)
