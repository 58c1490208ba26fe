"""Text of chosen tokens: whole characters, stop strings, reasoning and tool calls, and the end of a choice.

1. `Vocabulary` knows the bytes of every token. Tokenizers over bytes need no more. Text of all others is the difference
   of two decodings (`_Window`).
2. `ChoiceOutput` turns the tokens of one choice into `Emission`s: bytes become characters, text that may begin a stop
   string waits, and the parser of the request tells text, reasoning and calls apart. The emissions depend on the tokens
   alone: they are the same whenever and wherever the tokens are pushed again.
3. Text that waits for long is told by entries without text, so that nobody takes the choice for stuck.
4. Every token has its log probability in an emission, at the latest in FINISHED, if the request asks for these.
5. A choice ends with an end token, a stop string, its last allowed token, or a call that the request does not want
   (`CalledFunctions`). A stop string is looked for in all text, and neither the string nor text behind the string is
   sent. The same holds for an unwanted call.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from ipc.wire.messages import ToolUse
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    FINISHED,
    HELD,
    REASONING,
    Finish,
    TokenLogprob,
)
from workers.generation.formats.table import PlainParser
from workers.generation.formats.tags import Marks
from workers.generation.request import Emission, GenerationRequest, PromptText, Segment

PARTS = frozenset((CALLED, ARGUMENTS, CALL_ENDED, CALL_CUT))
"""Kinds of segments that tell a call."""
HELD_TOKENS = 8
"""After so many tokens without an entry one tells that the choice goes on."""
_SAMPLE = "Ünï 你好 🙂\n\tf(x)  = {0}"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META = "\u2581"
_UNFINISHED = "\ufffd"
_Decoder = codecs.getincrementaldecoder("utf-8")
_JOINT = 8
"""Tokens of a prompt with which the first tokens of a continuation are decoded."""


class Vocabulary:
    """The bytes of all tokens of a tokenizer, which never change once made."""

    def __init__(self, tokenizer: Any, kept: tuple[str, ...] = ()) -> None:
        """`kept` are the marks that a parser reads; special tokens that are part of none have no text."""
        self._tokenizer = tokenizer
        pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        self._bytes, self.is_exact = _bytes_of(tokenizer, pieces, added)
        self._bytes.update({number: token.content.encode() for number, token in added.items()})
        self.marks = frozenset(
            number for number, token in added.items() if any(token.content in mark for mark in kept)
        )
        """Added tokens that are a mark for the parser, or a part of one."""
        self.silent = frozenset(
            number for number, token in added.items() if token.special and number not in self.marks
        )
        """Special tokens without text."""
        self._whole: dict[int, str] = {}
        """Text of the tokens that were seen as whole characters."""

    def raw(self, token: int) -> bytes:
        """The bytes of a token; empty for a number that is no token."""
        return self._bytes.get(token, b"")

    def detokenizer(self, before: Sequence[int] = ()) -> Callable[[int | None], str]:
        """Makes text of the tokens of one choice, given one by one; None asks for what is left.

        `before` are tokens of a text that the choice continues.
        """
        return self._detokenizer(self.silent, before)

    def prompt_text(self, ids: Sequence[int], text: str | None) -> PromptText:
        """The text of a prompt, `text` if it was given as text, and the places of its tokens in this text.

        Tokens that a tokenizer puts around a text have no width there. Ids show their special tokens.
        """
        push = self._detokenizer(frozenset())
        starts, pieces, length = [], [], 0
        for token in ids:
            starts.append(length)
            pieces.append(push(token))
            length += len(pieces[-1])
        shown = ("".join(pieces) + push(None)).replace("\0", _UNFINISHED)
        whole = _decoded(self._tokenizer, ids).replace("\0", _UNFINISHED) if text is None else text
        before = shown.rfind(whole)
        if before < 0:
            # NOTE: the beginning of a prompt that is too long was cut, or the tokenizer has changed the text.
            before = len(shown) - len(whole) if whole.endswith(shown) else 0
        return PromptText(whole, [min(max(0, start - before), len(whole)) for start in starts], self.raw)

    def _detokenizer(self, silent: frozenset[int], before: Sequence[int] = ()) -> Callable[[int | None], str]:
        return self._by_bytes(silent) if self.is_exact else _Window(self._tokenizer, silent, before).push

    def _by_bytes(self, silent: frozenset[int]) -> Callable[[int | None], str]:
        decoder = _Decoder("replace")
        known, whole = self._bytes, self._whole
        begun = False

        def push(token: int | None) -> str:
            nonlocal begun
            if token is None:
                return decoder.decode(b"", True)
            if token in silent:
                return ""
            # PERF: the text of a token that stands between whole characters is decoded once.
            if not begun and token in whole:
                return whole[token]
            text = decoder.decode(known.get(token, b""))
            alone, begun = not begun, bool(decoder.getstate()[0])
            if alone and not begun:
                whole[token] = text
            return text

        return push


class _Window:
    """Text of a tokenizer whose tokens have no bytes of their own, by decoding the last tokens with and without one."""

    def __init__(self, tokenizer: Any, silent: frozenset[int], before: Sequence[int] = ()) -> None:
        self._tokenizer, self._silent = tokenizer, silent
        # NOTE: some decoders drop the space before the first token of a text.
        self._before = list(before)
        self._unsaid: list[int] = []

    def push(self, token: int | None) -> str:
        """More text, once its characters are whole; None asks for what is left."""
        if token is not None:
            if token in self._silent:
                return ""
            self._unsaid.append(token)
        if not self._unsaid:
            return ""
        said = _decoded(self._tokenizer, self._before)
        whole = _decoded(self._tokenizer, self._before + self._unsaid)
        if token is not None and (whole.endswith(_UNFINISHED) or len(whole) <= len(said)):
            return ""
        self._before, self._unsaid = self._unsaid, []
        return whole[len(said) :]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids with their special tokens, as a tokenizer joins them."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


class ChoiceOutput:
    """What one choice of a request has become so far (`workers.generation.scheduler.Output`)."""

    def __init__(
        self, vocabulary: Vocabulary, request: GenerationRequest, choice: int, *, in_pieces: bool = True
    ) -> None:
        """Without `in_pieces` the arguments of a call leave in one piece."""
        self.ended: str | None = None
        self._request, self._choice = request, choice
        self._text = vocabulary.detokenizer(request.prompt[-_JOINT:] if request.call.continues_text else ())
        self._marks, self._silent = vocabulary.marks, vocabulary.silent
        self._parser = request.make_parser() if request.make_parser else PlainParser()
        self._stops = Marks(request.call.ending.stop) if request.call.ending.stop else None
        self._held = ""
        self._has_mark = False
        """Whether a token that is a mark is in the text that was not fed yet."""
        self._stop: str | None = None
        self._unfed = self._tokens = self._reasoning_tokens = self._quiet = 0
        self._logprobs: list[TokenLogprob] = []
        self._calls = CalledFunctions(request.call.tools, in_pieces=in_pieces)

    def push(self, token: int, logprob: TokenLogprob | None) -> list[Emission]:
        """What one more token adds; `ended` says then whether the choice goes on."""
        self._tokens += 1
        is_end = token in self._request.stop_ids
        if logprob is not None:
            is_silent = is_end or token in self._silent
            self._logprobs.append(replace(logprob, is_silent=True) if is_silent else logprob)
        if is_end:
            self.ended = "stop"
            return []
        self._unfed += 1
        self._has_mark |= token in self._marks
        text = self._text(token)
        if self._tokens >= self._request.max_tokens:
            self.ended = "length"
        emissions = self._feed(text) if text else []
        if emissions:
            self._quiet = 0
            return emissions
        self._quiet += 1
        if self._quiet < HELD_TOKENS:
            return emissions
        self._quiet = 0
        return [Emission(self._request.key, self._choice, HELD)]

    def finish(self, reason: str) -> list[Emission]:
        """The end of the choice: what was held back, and FINISHED."""
        emissions = self._feed(self._text(None)) if self._stop is None else []
        if self._stop is None and self._held:
            emissions += self._fed(self._held)
        if not self._calls.is_over:
            emissions += self._told(self._parser.finish(reason == "length" and self._stop is None))
        if self._stop is not None:
            reason = "stop"
        if reason == "stop" and self._calls.count:
            reason = "tool_calls"
        end = Finish(reason, self._stop, self._tokens, self._reasoning_tokens)
        logprobs, self._logprobs = self._logprobs or None, []
        emissions.append(Emission(self._request.key, self._choice, FINISHED, logprobs=logprobs, finish=end))
        return emissions

    def _feed(self, text: str) -> list[Emission]:
        """More text, without what may still begin a stop string."""
        if self._stops is None:
            return self._fed(text)
        text = self._held + text
        stop = self._stops.find(text)
        if stop is not None:
            self.ended, self._stop, self._held = "stop", stop.group(), ""
            return self._fed(text[: stop.start()])
        settled = self._stops.settled(text)
        self._held = text[settled:]
        return self._fed(text[:settled])

    def _fed(self, text: str) -> list[Emission]:
        if not text or self._calls.is_over:
            return []
        tokens, self._unfed = self._unfed, 0
        # NOTE: no request may hold NUL, and clients send answers back.
        has_mark, self._has_mark = self._has_mark, False
        segments = self._parser.feed(text.replace("\0", _UNFINISHED), tokens, has_mark)
        return self._told(segments)

    def _told(self, segments: list[Segment]) -> list[Emission]:
        """Segments up to the first call that the request does not want, which ends the choice."""
        emissions: list[Emission] = []
        for segment in segments:
            if segment.kind not in PARTS:
                emissions.append(self._emission(segment))
                continue
            emissions += map(self._emission, self._calls.take(segment))
            if self._calls.is_over:
                self.ended = "stop"
                break
        return emissions

    def _emission(self, segment: Segment) -> Emission:
        kind, tokens, logprobs = segment.kind, segment.tokens, None
        if self._logprobs:
            logprobs, self._logprobs = self._logprobs, []
        if kind == REASONING:
            self._reasoning_tokens += tokens
        return Emission(self._request.key, self._choice, kind, segment.text, tokens, logprobs, segment.call)


def _bytes_of(tokenizer: Any, pieces: dict[int, str], added: dict[int, Any]) -> tuple[dict[int, bytes], bool]:
    """The bytes of all tokens, and whether joined bytes are the text that the tokenizer decodes."""
    ids = [number for number in tokenizer.encode(_SAMPLE, add_special_tokens=False) if number not in added]
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False).lstrip(" ")
    for bytes_of in (_byte_level, _sentence_piece):
        joined = b"".join(bytes_of(pieces[number]) or b"" for number in ids)
        if joined.decode(errors="replace").lstrip(" ") == decoded:
            return {number: bytes_of(piece) or b"" for number, piece in pieces.items()}, True
    return {number: tokenizer.decode([number]).encode() for number in pieces}, False


def _byte_level(piece: str) -> bytes | None:
    """The bytes of a piece in GPT-2's alphabet of printable characters; None for another piece."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return None


def _sentence_piece(piece: str) -> bytes:
    """The bytes of a piece of SentencePiece, in which a single byte may stand as `<0x0A>`."""
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_META, " ").encode()


def _alphabet() -> dict[str, int]:
    """Bytes by the characters that stand for them: printable Latin-1 is itself, all others follow from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _alphabet()


class CalledFunctions:
    """Which calls of one choice leave, and when: the parts of calls between parser and `Emission`s.

    1. Where an answer may have one call, a second one ends the choice as soon as it begins.
    2. Where the model must call, a call that repeats an earlier one ends the choice. The parts of a call wait while
       the call may still become such a repetition. A model that must call cannot stop between two calls unless the
       model has learned to: without this rule such a model makes the same call again and again.
    3. Where arguments leave in one piece, the parts of a call wait for the end of the call.

    `is_over`: a call has come that the request does not want. `count` is the number of calls that have left, or are
    about to.
    """

    def __init__(self, tools: ToolUse | None, *, in_pieces: bool) -> None:
        self.is_over = False
        self.count = 0
        self._is_single = tools is not None and tools.is_single
        self._must_differ = tools is not None and tools.choice == "required" and not tools.is_single
        self._in_pieces = in_pieces
        self._earlier: list[tuple[str, str]] = []
        self._name = ""
        self._texts: list[str] = []
        self._length = 0
        self._rivals: list[str] = []
        """Arguments of earlier calls of the same function that begin with those of the present call."""
        self._held: list[Segment] = []

    def take(self, segment: Segment) -> list[Segment]:
        """The parts that leave, once a further part of a call is known."""
        if segment.call is not None:
            if self._is_single and self.count:
                self.is_over = True
                return []
            self._begin(segment.call.name)
        elif segment.kind == ARGUMENTS:
            self._grow(segment.text)
        has_ended = segment.kind in (CALL_ENDED, CALL_CUT)
        if segment.kind == CALL_ENDED and self._repeats():
            self.is_over = True
            self.count -= 1
            return []
        self._held.append(segment)
        if not has_ended and (self._rivals or not self._in_pieces):
            return []
        parts, self._held = self._held, []
        return parts if self._in_pieces else _joined(parts)

    def _begin(self, name: str) -> None:
        self.count += 1
        self._name, self._texts, self._length = name, [], 0
        self._rivals = [arguments for earlier, arguments in self._earlier if earlier == name]

    def _grow(self, text: str) -> None:
        if self._must_differ:
            self._rivals = [rival for rival in self._rivals if rival.startswith(text, self._length)]
            self._texts.append(text)
            self._length += len(text)

    def _repeats(self) -> bool:
        """Whether the call that ends is an earlier one again; else the call is an earlier one from now on."""
        if not self._must_differ:
            return False
        if any(len(rival) == self._length for rival in self._rivals):
            return True
        self._earlier.append((self._name, "".join(self._texts)))
        return False


def _joined(parts: Iterable[Segment]) -> list[Segment]:
    """The parts of one call with all arguments in one piece."""
    begun, *pieces, end = parts
    if not pieces:
        return [begun, end]
    text, tokens = "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces)
    return [begun, Segment(ARGUMENTS, text, tokens=tokens), end]
