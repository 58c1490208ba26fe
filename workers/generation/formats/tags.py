"""The parser of answers that mark reasoning and calls by tags: a scan for marks, with as little held back as can be.

1. In visible text the parser looks for the mark that opens reasoning or a call. Text that ends with the beginning of a
   mark waits; all text before passes.
2. A mark of a call opens a `Region`. A call of the region leaves as it is written once it is certain to be one. The
   region's other text waits until the region is over, then becomes calls or text.
3. In reasoning the parser looks for the closing mark alone.
4. Blanks at the begin of an answer and after a call wait for what follows: before a call they are dropped.

The segments depend on the whole text only, not on the pieces in which the text arrives.

A `Wrapper` says how a family of models writes tool calls: what stands around name and arguments, for grammars that
force calls. Arguments are JSON in every wrapper, since a grammar can hold JSON alone to a schema. The parsers of
formats with a notation of their own for arguments take JSON in the same place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ipc.wire.streams import REASONING, TEXT
from workers.generation.formats.bodies import Schemas
from workers.generation.formats.regions import JsonValue, Opened, Region
from workers.generation.request import Segment

_REASONING = ("reasoning_content", "thinking", "reasoning")
_NAME, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '
_BREAKS = re.compile(r"\A\n{1,2}")
_NO_CALLS: Mapping[str, Opened] = {}
_NO_TOKENS: frozenset[str] = frozenset()


class Wrapper(NamedTuple):
    """The texts around calls; marks in them are tokens where the tokenizer has such tokens.

    The calls of an answer are `opened`, calls with `joined` between two of them, and `closed`. A call is `begins`, the
    name, `between`, the arguments, and `ends`. All calls begin with `mark`; an answer is a call from its first
    character where `mark` is empty.
    """

    mark: str
    begins: str
    between: str
    ends: str
    joined: str = ""
    opened: str = ""
    closed: str = ""


HARMONY = Wrapper("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "")
_WRAPPERS = {
    "json": Wrapper("", _NAME, _ARGUMENTS, "}", "\n"),
    "qwen": Wrapper("<tool_call>", f"<tool_call>\n{_NAME}", _ARGUMENTS, "}\n</tool_call>", "\n"),
    "qwen_xml": Wrapper("<tool_call>", "<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", "\n"),
    "llama": Wrapper("", _NAME, _PARAMETERS, "}", "; "),
    "mistral": Wrapper("[TOOL_CALLS]", _NAME, _ARGUMENTS, "}", ", ", "[TOOL_CALLS] [", "]"),
    "deepseek": Wrapper(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "gemma4": Wrapper("<|tool_call>", "<|tool_call>call:", "", "<tool_call|>"),
    "gemma": Wrapper("", _NAME, _PARAMETERS, "}", "\n"),
    "phi4": Wrapper("<|tool_call|>", _NAME, _ARGUMENTS, "}", ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "granite": Wrapper("<|tool_call|>", _NAME, _ARGUMENTS, "}", ", ", "<|tool_call|>[", "]"),
    "python": Wrapper(
        "<function_calls>", _NAME, _ARGUMENTS, "}", ", ", "<function_calls>[", "]</function_calls>"
    ),
    "harmony": HARMONY,
}
_VARIANTS = {
    "mistral": ("[ARGS]", Wrapper("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "")),
    "deepseek": (
        "```json",
        _WRAPPERS["deepseek"]._replace(
            begins="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            between="\n```json\n",
            ends="\n```<｜tool▁call▁end｜>",
            joined="\n",
        ),
    ),
}
"""Other wrappers of a format, each with the text that tells it in a chat template."""


def wrapper_of(name: str, template: str) -> Wrapper | None:
    """The wrapper of a format by name and by the text of the chat template; None where the format has no calls."""
    words, variant = _VARIANTS.get(name, ("", None))
    return variant if variant is not None and words in template else _WRAPPERS.get(name)


def templated_wrapper(template: Any) -> Wrapper | None:
    """The wrapper that a response template describes; None for a template whose calls are no JSON between marks."""
    field = _field(template, "tool_calls")
    tags = _tags(field)
    if tags is None or field.get("content") != "json":
        return None
    if field.get("transform") != {"type": "function", "function": "{content}"}:
        return None
    return Wrapper(tags.opened, f"{tags.opened}\n{_NAME}", _ARGUMENTS, f"}}\n{tags.closed}", "\n")


def templated_tags(template: Any) -> Tags | None:
    """The marks around reasoning that a response template describes."""
    return next((tags for name in _REASONING if (tags := _tags(_field(template, name)))), None)


def _field(template: Any, name: str) -> Mapping[str, Any]:
    fields = template.get("fields") if isinstance(template, Mapping) else None
    field = fields.get(name) if isinstance(fields, Mapping) else None
    return field if isinstance(field, Mapping) else {}


def _tags(field: Mapping[str, Any]) -> Tags | None:
    opened, closed = field.get("open"), field.get("close")
    if not isinstance(opened, str) or not isinstance(closed, str):
        return None
    return Tags(opened, closed) if opened and closed else None


class Tags(NamedTuple):
    """The marks around reasoning."""

    opened: str
    closed: str


class Marks:
    """Finds the first of some marks in a text, and how much of the text cannot belong to one."""

    def __init__(self, marks: list[str]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")
        self._firsts = frozenset(mark[0] for mark in marks)
        self._longest = max(map(len, marks), default=1)

    def find(self, text: str, begin: int = 0) -> re.Match[str] | None:
        """The first mark of the text from a position on."""
        return self._pattern.search(text, begin)

    def are_far(self, text: str) -> bool:
        """Whether no mark begins in a text, by a look that costs less than `find` and is right when true."""
        return self._firsts.isdisjoint(text)

    def settled(self, text: str) -> int:
        """Characters from the start of a text without marks that cannot begin one."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(mark.startswith(text[at:]) for mark in self._marks):
                return at
        return len(text)


class Layout(NamedTuple):
    """What a tag parser looks for.

    calls       regions by the mark that opens them
    reasoning   marks around reasoning, if the format has any
    dropped     marks without meaning to a reader, such as those around a list of calls
    bare        whether an answer may begin with a call in JSON, without a mark
    """

    calls: Mapping[str, Opened]
    reasoning: Tags | None = None
    dropped: tuple[str, ...] = ()
    bare: bool = False


class Sought(NamedTuple):
    """Marks that a tag parser looks for.

    outside   in visible text
    written   those of `outside` that count where other tokens than marks write them
    behind    those of `written` that count behind reasoning
    inside    in reasoning
    """

    outside: Marks
    written: Marks
    behind: Marks
    inside: Marks


@lru_cache(maxsize=256)
def _sought(
    calls: tuple[str, ...], reasoning: Tags | None, dropped: tuple[str, ...], tokens: frozenset[str]
) -> Sought:
    """The marks of a layout. `tokens` are marks that mean nothing when other tokens write their letters."""
    # PERF: each choice has a parser, and all parsers of a model look for the same marks.
    opening = [reasoning.opened] if reasoning else []
    marks = [*calls, *opening, *dropped]
    written = [mark for mark in marks if mark not in tokens]
    behind = [mark for mark in written if mark not in opening]
    inside = [reasoning.closed] if reasoning else []
    return Sought(Marks(marks), Marks(written), Marks(behind), Marks(inside))


class SegmentParser:
    """What the parsers share: segments, each of which stands for the tokens fed since the segment before."""

    def __init__(self) -> None:
        self._tokens = 0
        self._segments: list[Segment] = []

    def _tell(self, parts: list[Segment]) -> None:
        for segment in parts:
            self._segments.append(Segment(segment.kind, segment.text, segment.call, self._tokens))
            self._tokens = 0

    def _emit(self, kind: int, text: str) -> None:
        if text:
            self._segments.append(Segment(kind, text, None, self._tokens))
            self._tokens = 0

    def _taken(self) -> list[Segment]:
        segments, self._segments = self._segments, []
        return segments


class TagParser(SegmentParser):
    """An `OutputParser` for a layout. `schemas` are those of the request's functions; without calls, none is parsed.

    `reasons`: the prompt has opened reasoning already. `continues`: the answer has begun in the prompt. `tokens` are
    there where a grammar holds the answer: marks that are tokens, whose letters mean nothing when other tokens write
    them. Then reasoning and calls stand in front, and all text is visible from the first that is neither.
    """

    def __init__(
        self,
        layout: Layout,
        schemas: Schemas,
        *,
        calls: bool,
        reasons: bool,
        continues: bool = False,
        tokens: frozenset[str] | None = None,
    ) -> None:
        super().__init__()
        self._layout, self._schemas = layout, schemas
        self._is_held, self._is_plain, self._has_mark = tokens is not None, False, False
        self._opened = layout.calls if calls else _NO_CALLS
        self._bare = layout.bare and calls
        dropped = layout.dropped if calls else ()
        sought = _sought(tuple(self._opened), layout.reasoning, dropped, tokens or _NO_TOKENS)
        self._outside, self._written, self._behind, self._inside = sought
        self._rest = self._blanks = ""
        self._reasons = reasons and layout.reasoning is not None
        self._begins, self._skips = True, self._reasons and not continues
        self._after_call = False
        self._region: Region | None = None
        self._closing: Sequence[str] = ()
        """Marks of which one may follow a call that has broken off."""

    def feed(self, text: str, tokens: int, has_mark: bool = False) -> list[Segment]:
        """More text of the answer."""
        is_scanned = self._rest or self._begins or self._reasons or self._region is not None or self._closing
        if text and not is_scanned and self._outside.are_far(text):
            # PERF: most text of most answers is visible and far from any mark. The scan below would tell the same.
            self._has_mark, self._after_call = has_mark, False
            segment, self._tokens = Segment(TEXT, text, None, self._tokens + tokens), 0
            return [segment]
        self._has_mark = has_mark or (self._has_mark and bool(self._rest.strip()))
        self._rest += text
        self._tokens += tokens
        while self._advance():
            pass
        return self._taken()

    def finish(self, cut: bool) -> list[Segment]:
        """The answer has ended."""
        if self._region is not None:
            self._close(len(self._rest), cut)
        while self._rest and self._advance():
            pass
        rest = self._rest.rstrip() if self._reasons else self._rest
        if self._reasons or not self._after_call or rest.strip(self._separators()):
            self._emit(REASONING if self._reasons else TEXT, rest)
        self._rest = ""
        return self._taken()

    def _advance(self) -> bool:
        """One step of the scan; false when more text is needed."""
        if self._region is not None:
            end = self._region.end(self._rest)
            self._tell(self._region.told(self._rest))
            if self._region.broken_at is not None:
                self._break(self._region.broken_at)
                return bool(self._rest)
            if end is not None:
                self._close(end, cut=False)
            return end is not None
        if self._closing and self._rest and not self._pass_closing():
            return False
        if not self._rest:
            return False
        if self._is_plain:
            self._emit(TEXT, self._rest)
            self._rest = ""
            return False
        return self._reason() if self._reasons else self._show()

    def _reason(self) -> bool:
        """Pass reasoning on; its blanks at both ends are dropped."""
        if self._skips:
            self._rest = self._rest.lstrip()
            self._skips = not self._rest
        mark = self._inside.find(self._rest)
        settled = mark.start() if mark else self._inside.settled(self._rest)
        said = self._rest[:settled].rstrip()
        self._emit(REASONING, said)
        if mark is None:
            self._rest = self._rest[len(said) :]
            return False
        self._rest = self._rest[mark.end() :]
        self._reasons, self._skips, self._begins = False, True, True
        self._written = self._behind
        return True

    def _show(self) -> bool:
        """Pass visible text on up to the next mark."""
        if self._begins and not self._begin():
            return False
        if self._region is not None or self._is_plain:
            return True
        mark = self._outside.find(self._rest)
        settled = mark.start() if mark else self._outside.settled(self._rest)
        if settled:
            self._emit(TEXT, self._rest[:settled])
            self._rest = self._rest[settled:]
            self._after_call = False
            return bool(mark)
        if mark is None:
            return False
        self._open(mark[0])
        return True

    def _begin(self) -> bool:
        """Blanks at the begin of visible text wait for what follows; true once something has followed."""
        if self._skips and not self._is_held:
            self._rest = self._rest.lstrip()
        follows = self._rest.lstrip(self._separators())
        if not follows:
            return False
        marks = self._outside if self._has_mark or not self._is_held else self._written
        mark = marks.find(follows)
        begun = mark.start() == 0 if mark else marks.settled(follows) == 0
        if begun and mark is None:
            return False
        is_bare = not begun and self._bare and follows[0] in "{["
        if begun or is_bare:
            self._blanks, self._rest = self._rest[: len(self._rest) - len(follows)], follows
        elif self._is_held:
            # NOTE: the grammar has up to two line breaks between reasoning and answer.
            self._rest = _BREAKS.sub("", self._rest) if self._skips else self._rest
            self._is_plain = True
        if is_bare:
            self._region = JsonValue("", self._schemas, is_bare=True)
        self._begins = self._skips = False
        return True

    def _separators(self) -> str:
        """Blanks, and after a call without a mark what stands between two of those."""
        return " \t\r\n;," if self._after_call and self._bare else " \t\r\n"

    def _open(self, mark: str) -> None:
        """A mark at the begin of the rest: of reasoning, of a call, or one that is dropped."""
        opened = self._opened.get(mark)
        if opened is not None:
            self._region = opened(mark, self._schemas)
            return
        self._rest = self._rest[len(mark) :]
        self._blanks = ""
        if self._layout.reasoning and mark == self._layout.reasoning.opened:
            self._reasons = self._skips = True
        else:
            self._begins = True

    def _close(self, end: int, cut: bool) -> None:
        """The region is over: its calls, or its text."""
        raw, self._rest = self._rest[:end], self._rest[end:]
        region, self._region = self._region, None
        assert region is not None
        parts, left = region.read(raw, cut)
        blanks, self._blanks = self._blanks, ""
        self._tell(parts)
        self._begins = self._after_call = not left
        if left:
            self._is_plain = self._is_held
            self._emit(TEXT, blanks + left if left == raw else left)

    def _break(self, at: int) -> None:
        """A call has broken off: the text from there on is visible, but for a closing mark that stands there."""
        assert self._region is not None
        self._closing, self._region = self._region.closed, None
        self._rest, self._blanks = self._rest[at:], ""
        self._begins, self._is_plain = False, self._is_held

    def _pass_closing(self) -> bool:
        """Drop the closing mark of a call that has broken off; false while the text may become the mark."""
        rest = self._rest
        mark = next((mark for mark in self._closing if rest.startswith(mark)), None)
        if mark is None and any(mark.startswith(rest) for mark in self._closing):
            return False
        self._closing = ()
        if mark is not None:
            self._rest = rest[len(mark) :]
            self._begins = self._after_call = True
        return True
