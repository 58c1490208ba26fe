"""Tokenize texts from several threads at once.

A transformers tokenizer sets truncation on its Rust object in every call, which two threads must not do at the same
time. So the Rust object is configured once, at load, and called directly. Encoding releases the interpreter lock.
Tokenizers without a Rust object are called under a lock.

Token ids that callers send in place of a text.

The model reads the ids as they are. The tokens of a prompt go between the special tokens with which the ids begin, and
the other ids. Ids over the model's length are cut as texts are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer, normalizers

from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem
from workers.adapters.base import ItemRefused
from workers.adapters.shared.checkpoint import read_tokenizer, stored_limit
from workers.adapters.shared.known_ids import KnownIds
from workers.adapters.shared.long_texts import (
    CHARACTERS_PER_TOKEN,
    LONG,
    FittedText,
    Frame,
    Tokens,
    encode_beginning,
    fit,
    goes_word_by_word,
)

T = TypeVar("T")

_NO_LIMIT = 10**9
"""Limit of a tokenizer that is not limited yet."""


class ApartIds(TypedDict):
    """Ids of a tokenizer that a model may treat apart, and whether the tokenizer makes segment ids."""

    special_ids: frozenset[int]
    pad_id: int
    types: bool


def apart_ids(tokenizer: Any) -> ApartIds:
    """Special and added ids of a transformers tokenizer, as arguments of a `TextEncoder`."""
    added = tokenizer.get_added_vocab().values()
    return ApartIds(
        special_ids=frozenset([*tokenizer.all_special_ids, *added]),
        pad_id=int(tokenizer.pad_token_id or 0),
        types="token_type_ids" in tokenizer.model_input_names,
    )


def stand_in(tokenizer: Any) -> int:
    """The id that stands for a text without any token."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    numbers = (getattr(tokenizer, name, None) for name in names)
    return int(next((number for number in numbers if number is not None), 0))


class TextTokenizer:
    """The tokenizer of one model, cut to one length, without padding.  Thread-safe after construction."""

    def __init__(self, tokenizer: Any, *, lower_case: bool = False, no_token: int | None = None) -> None:
        """Wrap a transformers tokenizer; `lower_case` adds lower-casing where the tokenizer has none.

        A text without any token becomes the id `no_token`, by default one of the tokenizer's special tokens.
        """
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        self._lower_case = lower_case and self._backend is None
        self._lock = threading.Lock()
        self.uses_types = "token_type_ids" in tokenizer.model_input_names
        self._stand_in = stand_in(tokenizer) if no_token is None else no_token
        self.known: KnownIds | None = None
        self._max_length = self.stored_max_length or _NO_LIMIT
        self._only_beginnings = False
        if self._backend is not None:
            self._backend.no_padding()
            if lower_case:
                add_lower_casing(tokenizer)

    @classmethod
    def read(
        cls,
        directory: Path,
        *,
        lower_case: bool = False,
        trust_remote_code: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> TextTokenizer:
        """Read from a local directory; `arguments` go to transformers' AutoTokenizer."""
        tokenizer = read_tokenizer(directory, trust_remote_code=trust_remote_code, arguments=arguments)
        return cls(tokenizer, lower_case=lower_case)

    @property
    def stored_max_length(self) -> int | None:
        """The limit stored with the tokenizer, in tokens, or None."""
        return stored_limit(self._tokenizer)

    @property
    def wrapped(self) -> Any:
        """The transformers tokenizer."""
        return self._tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(self._tokenizer.all_special_ids)

    @property
    def apart(self) -> ApartIds:
        """What a model may treat apart."""
        return apart_ids(self._tokenizer)

    def marker_ids(self, *roles: str) -> frozenset[int]:
        """Ids of the special tokens in these roles ("cls", "mask", ...), as far as the tokenizer has them."""
        markers = (getattr(self._tokenizer, f"{role}_token_id", None) for role in roles)
        return frozenset(int(marker) for marker in markers if marker is not None)

    def id_of(self, token: str) -> int | None:
        """The id of exactly this token, or None where the vocabulary lacks it."""
        number = self._tokenizer.get_vocab().get(token)
        return None if number is None else int(number)

    @property
    def pad_id(self) -> int:
        """The id for padding; 0 for a tokenizer without one, as padding is masked."""
        pad = self._tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    @property
    def cuts_left(self) -> bool:
        """Whether texts that are too long lose their beginning where a request says nothing (`truncation_side`)."""
        return bool(self._tokenizer.truncation_side == "left")

    def limit(self, max_length: int) -> None:
        """Cut texts to `max_length` tokens from now on, special tokens included.  Not for concurrent use."""
        self._max_length = max_length
        if self._backend is not None:
            direction = self._tokenizer.truncation_side
            self._backend.enable_truncation(max_length, direction=direction)
            self._only_beginnings = direction == "right" and goes_word_by_word(self._backend)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize `texts` with special tokens; every result has at least one token."""
        if self._backend is None:
            return [self._encode_slowly(text) for text in texts]
        sequences = []
        for encoding in self._encodings(texts):
            types = encoding.type_ids if self.uses_types else None
            type_ids = types if types and any(types) else None
            ids = encoding.ids or [self._stand_in]
            sequences.append(Tokens(ids, type_ids, bool(encoding.overflowing)))
        return sequences

    @property
    def tells_places(self) -> bool:
        """Whether `placed` can tell where tokens lie in their text."""
        return self._backend is not None

    def placed(self, text: str) -> tuple[Tokens, np.ndarray[Any, np.dtype[np.int64]], int]:
        """The tokens of a text, int64 [n, 2] characters of each of them, and how many tokens the whole text has.

        A special token around the text has the characters (0, 0).
        """
        assert self._backend is not None
        [encoding] = self._backend.encode_batch([text])
        types = encoding.type_ids if self.uses_types and any(encoding.type_ids) else None
        rest = sum(len(one.ids) - self.frame.before - self.frame.after for one in encoding.overflowing)
        own = 1 - np.array(encoding.special_tokens_mask, np.int64)[:, None]
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2) * own
        tokens = Tokens(encoding.ids or [self._stand_in], types, bool(encoding.overflowing))
        return tokens, places, len(encoding.ids) + rest

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """The encodings of `texts`, cut to the limit. Of a long text only the beginning is read if that is enough."""
        assert self._backend is not None
        most = LONG * CHARACTERS_PER_TOKEN * self._max_length
        if not self._only_beginnings or max(map(len, texts), default=0) < most:
            return list(self._backend.encode_batch_fast(list(texts)))
        return [encode_beginning(self._backend, text, self._max_length) for text in texts]

    def windows(
        self, texts: Sequence[str], overflow: str = "truncate", max_length: int | None = None
    ) -> list[FittedText]:
        """Tokenize `texts` and fit each into `max_length` tokens, by default the limit; see `long_texts.fit`.

        The policies that cut cut at the side that is stored with the tokenizer.
        """
        if max_length is None:
            max_length = self._max_length
            if overflow == "truncate":
                return [FittedText([tokens], tokens.truncated) for tokens in self.encode(texts)]
        if overflow == "truncate" and self._only_beginnings and max_length < self._max_length:
            heads = self.encode(texts)
            return [fit([head], overflow, max_length, self.frame)._replace(tokens=0) for head in heads]
        if self.cuts_left and overflow in ("truncate", "error"):
            overflow = "truncate_left"
        return [fit(whole, overflow, max_length, self.frame) for whole in self._stretches(texts)]

    @functools.cached_property
    def frame(self) -> Frame:
        """Special tokens before and after a text."""
        bare, framed = self._bare("a"), self._framed("a")
        before = next(at for at in range(len(framed) + 1) if framed[at : at + len(bare)] == bare)
        return Frame(before, len(framed) - before - len(bare))

    def _stretches(self, texts: Sequence[str]) -> Iterator[list[Tokens]]:
        """The tokens of each whole text, as consecutive stretches."""
        if self._backend is None:
            for text in texts:
                with self._lock:
                    whole = self._tokenizer(text.lower() if self._lower_case else text)
                yield [Tokens(list(whole["input_ids"]) or [self._stand_in], self._kept_types(whole))]
            return
        backwards = (self._backend.truncation or {}).get("direction") == "left"
        for encoding in self._backend.encode_batch_fast(list(texts)):
            stretches = [
                Tokens(
                    one.ids or [self._stand_in],
                    one.type_ids if self.uses_types and any(one.type_ids) else None,
                )
                for one in (encoding, *encoding.overflowing)
            ]
            yield stretches[::-1] if backwards else stretches

    def knows(self, rows: int) -> None:
        """Tell for how many ids the model has embeddings.  Not for concurrent use."""
        self.known = KnownIds(rows, self._tokenizer)

    def fitted(
        self,
        items: Sequence[InputItem],
        around: tuple[str, str],
        overflow: str = "truncate",
        max_length: int | None = None,
    ) -> Iterator[tuple[FittedText, Frame]]:
        """Each item with the texts of a prompt `around` it, fitted as by `windows`, and the special tokens around it.

        Token ids of a caller stay as they are; see `GivenIds`. Raises ValueError for an item without text and ids.
        """
        before, after = around
        if any(item.text is None and item.ids is None for item in items):
            raise ValueError("an item needs text or token ids")
        texts = [f"{before}{item.text}{after}" for item in items if item.text is not None]
        windows = iter(self.windows(texts, overflow, max_length) if texts else ())
        if self.cuts_left and overflow in ("truncate", "error"):
            overflow = "truncate_left"
        for item in items:
            if item.text is not None:
                yield next(windows), self.frame
            else:
                bare = (self._bare(before), self._bare(after))
                yield self._given.fitted(item, bare, overflow, max_length or self._max_length)

    @functools.cached_property
    def _given(self) -> GivenIds:
        assert self.known is not None
        framed, frame = self._framed("a"), self.frame
        return GivenIds(self.known, (framed[: frame.before], framed[len(framed) - frame.after :]))

    def _bare(self, text: str) -> list[int]:
        """The tokens of a text without special tokens."""
        if not text:
            return []
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _framed(self, text: str) -> list[int]:
        """The tokens of a text with special tokens."""
        if self._backend is not None:
            return list(self._backend.encode(text).ids)
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def prefix_length(self, prefix: str) -> int:
        """Tokens that `prefix` takes at the head of a text, a leading special token included."""
        ids = self.encode([prefix])[0].ids
        return len(ids) - (ids[-1] in self.special_ids)

    def _encode_slowly(self, text: str) -> Tokens:
        """One text through a tokenizer written in Python."""
        text = text.lower() if self._lower_case else text
        with self._lock:
            whole = self._tokenizer(text)
            truncated = len(whole["input_ids"]) > self._max_length
            if truncated:
                whole = self._tokenizer(text, truncation=True, max_length=self._max_length)
        return Tokens(list(whole["input_ids"]) or [self._stand_in], self._kept_types(whole), truncated)

    def _kept_types(self, encoding: Mapping[str, Any]) -> list[int] | None:
        """Segment ids; None for a model without, and where all are 0."""
        types = encoding.get("token_type_ids") if self.uses_types else None
        return types if types and any(types) else None


def add_lower_casing(tokenizer: Any) -> None:
    """Lower-case before all other normalisation, unless the fast tokenizer of transformers lower-cases already."""
    backend = tokenizer.backend_tokenizer
    present = backend.normalizer
    steps: list[Any] = [present] if present is not None else []
    if isinstance(present, normalizers.Sequence):
        steps = [present[index] for index in range(len(present))]
    if any(isinstance(step, normalizers.Lowercase) for step in steps):
        return
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def cut_to_fit(
    text: str, starts: Sequence[int], limit: int, process: Callable[[str], T], count: Callable[[T], int]
) -> tuple[T, int, int]:
    """`process` of a text whose end is cut until the result has at most `limit` tokens, or no text is left.

    `starts` are where the tokens of the text begin, in characters. Returns the result, the tokens of the whole text,
    and how many tokens of the text were kept. Beside other text, a text may have a token or two more or less than
    alone, so the text is cut again until the result fits.
    """
    result, room = process(text), len(starts)
    whole = count(result)
    while (excess := count(result) - limit) > 0 and room:
        room = max(0, room - excess)
        result = process(text[: starts[room]])
    return result, whole, room


def rust_copy(tokenizer: Any, purpose: str = "") -> Tokenizer:
    """A copy of a transformers tokenizer's Rust object that neither pads nor cuts.

    Raises ValueError, whose message ends in `purpose`, for a tokenizer without a Rust object.
    """
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer of this model is not a fast one" + (purpose and f"; {purpose}"))
    backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def without_token(labels: Sequence[str], index: int) -> InvalidInput:
    """The refusal of a label of which the tokenizer makes nothing."""
    return InvalidInput(f"params.labels[{index}]: {labels[index][:64]!r} has no token in this model")


def as_ids(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids as an int64 array."""
    return np.fromiter(values, dtype=np.int64, count=len(values))


class GivenIds:
    """Token ids of callers for one model.  Thread-safe after construction."""

    def __init__(self, known: KnownIds, frame: tuple[list[int], list[int]]) -> None:
        """`frame` are the special tokens that the tokenizer puts before and after a text."""
        self._known, self._frame = known, frame

    def fitted(
        self,
        item: InputItem,
        around: tuple[Sequence[int], Sequence[int]],
        overflow: str,
        limit: int,
    ) -> tuple[FittedText, Frame]:
        """The ids of an item with the tokens of a prompt `around` them, fitted into `limit` tokens as `long_texts.fit`.

        Beside them how many special tokens the caller has put before and after the text. Raises `ItemRefused` without
        ids, and for an id that the model cannot read.
        """
        ids = item.ids
        if not ids:
            raise ItemRefused(item, "needs at least one token id")
        unknown = next((number for number in ids if not 0 <= number < self._known.rows), None)
        if unknown is not None:
            raise ItemRefused(
                item, f"token id {unknown} is outside this model's vocabulary of {self._known.rows}"
            )
        before, after = self._frame
        head = len(before) if ids[: len(before)] == before else 0
        tail = len(after) if after and ids[head:][-len(after) :] == after else 0
        end = len(ids) - tail
        whole = [*ids[:head], *around[0], *ids[head:end], *around[1], *ids[end:]]
        frame = Frame(head, tail)
        return fit([Tokens(whole, None)], overflow, limit, frame), frame
