"""Late chunking as requests ask for it: the option `late_chunking`, its rules, and the inputs with their spans.

    true                                              one chunk for each sentence
    {"by": "sentences", "size": 3, "overlap": 1}      so many sentences a chunk, some of them in the next chunk too
    {"by": "tokens", "size": 128, "overlap": 16}      the same in tokens of the model
    {"spans": [[[0, 40], [40, 95]], ...]}             for each item the characters of each chunk, from and up to

No character lies in more than two chunks, so all chunks together have at most twice the tokens of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from frontend.http.fields import mismatch_of
from ipc.decoding import learnt
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import MAX_CHUNKS, Chunking, EncodeCall, InputItem

OPTION = "late_chunking"
FEWEST_TOKENS = 16
"""Smallest chunk in tokens. A document of the longest models has a few thousand chunks then."""
_MOST = 1 << 20

Span = tuple[int, int]


class LateChunking(msgspec.Struct, forbid_unknown_fields=True):
    """The option in its long form: either `by` or `spans`."""

    by: Literal["tokens", "sentences"] | None = None
    size: int | None = None
    overlap: int = 0
    spans: list[list[Span]] | None = None

    @property
    def rule(self) -> Chunking:
        """The rule for workers, which get the spans with the items."""
        if self.spans is not None or self.by is None:
            return Chunking("spans")
        return Chunking(self.by, self.size or 1, self.overlap)


def read(value: Any, where: str) -> LateChunking | None:
    """The option, None without late chunking. Raises `InvalidInput` that names field, value and limit."""
    if value is None or value is False:
        return None
    if value is True:
        return LateChunking("sentences", 1)
    try:
        chunking = msgspec.convert(value, learnt(LateChunking))
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {mismatch_of(error, LateChunking)}") from None
    if (chunking.by is None) == (chunking.spans is None):
        raise InvalidInput(f"{where}: expected either 'by' or 'spans'")
    if chunking.spans is not None:
        if chunking.size is not None or chunking.overlap:
            raise InvalidInput(f"{where}: 'size' and 'overlap' do not go with 'spans'")
        return chunking
    fewest = FEWEST_TOKENS if chunking.by == "tokens" else 1
    if chunking.by == "tokens" and chunking.size is None:
        raise InvalidInput(f"{where}.size: missing")
    size = 1 if chunking.size is None else chunking.size
    if not fewest <= size <= _MOST:
        raise InvalidInput(f"{where}.size: {size} is outside {fewest}..{_MOST}")
    if not 0 <= chunking.overlap <= size // 2:
        raise InvalidInput(f"{where}.overlap: {chunking.overlap} is outside 0..{size // 2}, half of the size")
    return chunking


def check(value: Any, texts: Sequence[str], where: str) -> None:
    """Raise `InvalidInput` for an option that these texts cannot have."""
    chunking = read(value, where)
    if chunking is None or chunking.spans is None:
        return
    if len(chunking.spans) != len(texts):
        raise InvalidInput(f"{where}.spans: {len(chunking.spans)} lists for {len(texts)} items")
    for index, (spans, text) in enumerate(zip(chunking.spans, texts, strict=True)):
        _check_spans(spans, len(text), f"{where}.spans[{index}]")


def _check_spans(spans: Sequence[Span], length: int, where: str) -> None:
    if not spans:
        raise InvalidInput(f"{where}: empty, expected at least one chunk")
    if len(spans) > MAX_CHUNKS:
        raise InvalidInput(f"{where}: {len(spans)} chunks, the limit is {MAX_CHUNKS}")
    before, last = (0, 0), (0, 0)
    for index, (start, stop) in enumerate(spans):
        if not 0 <= start < stop <= length:
            raise InvalidInput(
                f"{where}[{index}]: characters {start} to {stop} are not a part of a text of {length}"
            )
        if start < last[0] or stop < last[1]:
            raise InvalidInput(f"{where}[{index}]: begins or ends before the chunk in front of it")
        if start < before[1]:
            raise InvalidInput(f"{where}[{index}]: its first character lies in two other chunks already")
        before, last = last, (start, stop)


def check_policy(policy: Any, where: str) -> None:
    """Raise `InvalidInput` for an overflow policy that cuts or divides a document."""
    if policy not in (None, "default", "error"):
        raise InvalidInput(f"{where}: {policy!r} does not go with {OPTION}, which takes whole documents only")


def divided(call: EncodeCall, rule: Chunking, names: FieldNames | None = None) -> EncodeCall:
    """The same call for the chunks of its items; a document that is too long is an error."""
    return msgspec.structs.replace(
        call, outputs=["chunks"], overflow="error", chunking=rule, names=names or call.names
    )


def with_spans(items: Sequence[InputItem], chunking: LateChunking) -> list[InputItem]:
    """The inputs with their spans, where the request gives spans."""
    if chunking.spans is None:
        return list(items)
    return [
        msgspec.structs.replace(item, spans=spans) for item, spans in zip(items, chunking.spans, strict=True)
    ]


IN_EMBEDDINGS = FieldNames(item="input", text="input", options="")
"""Names of fields where the inputs of a request are the chunks of one document."""


def check_inputs(given: Any, limits: Limits) -> None:
    """Raise `InvalidInput` for inputs of /v1/embeddings that cannot be the chunks of one document."""
    texts = [given] if isinstance(given, str) else given
    if len(texts) > MAX_CHUNKS:
        raise InvalidInput(f"input: {len(texts)} chunks, the limit of {OPTION} is {MAX_CHUNKS}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            kind = "of token ids" if isinstance(text, list | int) else "no text"
            raise InvalidInput(f"{OPTION}: takes texts, input[{index}] is {kind}")
        if not text.strip():
            raise InvalidInput(f"input[{index}]: a chunk may not be blank")
    nbytes = sum(len(text.encode()) + 1 for text in texts) - 1
    if nbytes > limits.max_text_bytes:
        raise InvalidInput(
            f"input: {nbytes} bytes together, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
        )


def document_of(given: str | Sequence[str]) -> InputItem:
    """The document whose chunks are these inputs, with a blank between two of them."""
    texts = [given] if isinstance(given, str) else given
    stops = accumulate(len(text) + 1 for text in texts)
    spans = [(stop - 1 - len(text), stop - 1) for text, stop in zip(texts, stops, strict=True)]
    return InputItem(" ".join(texts), spans=spans)
