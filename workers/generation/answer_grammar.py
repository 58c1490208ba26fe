"""Grammars of whole answers in Lark: reasoning, free text, tool calls in the wrapper of the model, a given grammar.

1. An answer may begin with reasoning, if the model reasons, or ends reasoning that the prompt has begun.
2. Forced calls: the model may say something, up to a number of tokens, then calls functions and ends.
3. Guided calls: free text and calls in any order. What the parser would take for a call cannot be written otherwise.
4. With a grammar for the answer, calls stand in place of the answer.

A mark that is one token of the tokenizer ends the text before it. Any other mark ends a lazy lexeme. Where the text
is bounded, its characters exclude the first one of such a mark, as a bounded lexeme may end anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workers.generation.formats.table import Format
from workers.generation.formats.tags import Tags, Wrapper

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of arguments that may be any object."""
MOST_CALLS = 32
"""Most calls in a row."""
ANSWER = "penstock-answer"
"""Name of the grammar of an answer among several."""
_ANALYSIS = Tags("<|channel|>analysis<|message|>", "<|end|>")
_PREAMBLE = Tags("<|channel|>commentary<|message|>", "<|end|>")
_NEXT, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_ANY = "/(?s:.*)/"
_BARE = r'/[\s;,]*(\[\s*)?\{\s*"(arguments|function|id|name|parameters|type)"(?s:.*)/'
# NOTE: tool calls of chat templates have blanks behind commas and colons, and models write what they have read.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Function(NamedTuple):
    """A function that may be called, and the schema of its arguments."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    def loose(self) -> Function:
        """The same function with any object as arguments."""
        return self._replace(schema=ANY_OBJECT)

    def rule(self) -> str:
        """The rule of arguments.

        Schemas of functions without `strict` may have keywords that no grammar can hold to; those are left out.
        """
        lenient = {} if self.strict else {"lenient": True, "coerce_one_of": True}
        return f"%json {json.dumps({**self.schema, 'type': 'object', 'x-guidance': _GUIDANCE | lenient})}"


class Calls(NamedTuple):
    """The calls that an answer may have, in the wrapper of the model; without `parallel` one at most."""

    wrapper: Wrapper
    functions: Sequence[Function]
    parallel: bool


class Budget(NamedTuple):
    """Most tokens of reasoning and of other text before a forced call."""

    reasoning: int
    talk: int


class AnswerGrammar:
    """Writes the grammar of one answer.

    `special` are the ids of tokens that no text of the answer contains. `reasons`: the prompt has begun reasoning, or
    the model may begin with reasoning (None), or not (false). In Harmony false says that the prompt ends within a
    visible message.
    """

    def __init__(self, form: Format, special: Mapping[str, int], reasons: bool | None) -> None:
        self._form, self._special, self._reasons = form, special, reasons
        longest_first = sorted(special, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._rules: list[str] = []

    def forced(self, calls: Calls, budget: Budget) -> str:
        """The grammar of an answer that calls a function at its end.

        A model without reasoning calls at once: such models are often small, and talk as long as the grammar lets them.
        """
        reasoning = self._reasoning(budget.reasoning)
        if self._form.name == "harmony":
            return self._whole(f"{reasoning} {self._preamble(budget.talk)} {self._calls(calls)}")
        if not calls.wrapper.mark or self._form.reasoning is None:
            return self._whole(f"{reasoning} {self._calls(calls)}")
        return self._whole(f"{reasoning} {self._calls(calls, self._until(calls.wrapper.mark, budget.talk))}")

    def guided(self, calls: Calls) -> str:
        """The grammar of an answer in which calls may stand, all as they must be."""
        reasoning = self._reasoning(None)
        if self._form.name == "harmony":
            talk, called = self._preamble(None), self._calls(calls)
            final = f"{self._final()} {self._terminal(_ANY + self._excluded())}"
            return self._whole(f"{reasoning} ({talk} {called} | {final})")
        text = self._terminal(_ANY + self._excluded())
        if not calls.wrapper.mark:
            return self._whole(f"{reasoning} ({self._calls(calls)} | {text})")
        called = self._calls(calls, self._until(calls.wrapper.mark, None))
        often = "*" if calls.parallel else "?"
        return self._whole(f"{reasoning} ({called}){often} {text}")

    def answered(self, name: str, calls: Calls | None, budget: int) -> str:
        """The grammar of an answer by the grammar of this name, or of calls instead, after some reasoning."""
        reasoning = self._reasoning(budget)
        answer = f"@{name}"
        if self._form.name == "harmony":
            answer = f"{self._final()} {answer}"
        if calls is not None:
            ends = self._sequence(_PREAMBLE.closed + _NEXT) if self._is_in_message else ""
            answer = f"({answer} | {ends} {self._calls(calls)})"
        return self._whole(f"{reasoning} {answer}")

    def _whole(self, start: str) -> str:
        return "\n".join([f"start: {' '.join(start.split())}", *self._rules, ""])

    def _calls(self, calls: Calls, before: str = "") -> str:
        """One call or several; `before` is the text up to and with the mark of the first."""
        wrapper = calls.wrapper
        first = self._sequence((wrapper.opened + wrapper.begins).removeprefix(wrapper.mark if before else ""))
        body = f"{self._functions(wrapper, calls.functions)} {self._sequence(wrapper.ends)}"
        several = ""
        if calls.parallel and self._form.name != "harmony":
            again = self._sequence(wrapper.joined + wrapper.begins)
            several = f"({again} {body}){{0,{MOST_CALLS - 1}}}"
        return f"{before} {first} {body} {several} {self._sequence(wrapper.closed)}"

    def _functions(self, wrapper: Wrapper, functions: Sequence[Function]) -> str:
        """The rule of a name, what follows the name, and arguments by the schema of the function."""
        between = self._sequence(wrapper.between)
        by_schema: dict[str, list[str]] = {}
        for function in functions:
            by_schema.setdefault(function.rule(), []).append(_string(function.name))
        return self._rule(
            " | ".join(
                f"{self._terminal(' | '.join(names))} {between} {arguments}"
                for arguments, names in by_schema.items()
            )
        )

    def _reasoning(self, budget: int | None) -> str:
        """Reasoning at the begin of an answer."""
        if self._reasons is False:
            return ""
        if self._form.name == "harmony":
            return self._message(_ANALYSIS, budget)
        tags = self._form.reasoning
        if tags is None:
            return ""
        blank = self._terminal(r"/\n{1,2}/")
        thought = f"{self._until(tags.closed, budget, within=True)} {blank}?"
        return thought if self._reasons else f"({self._sequence(tags.opened)} {thought})?"

    @property
    def _is_in_message(self) -> bool:
        """Whether the prompt ends within a visible message of Harmony."""
        return self._form.name == "harmony" and self._reasons is False

    def _preamble(self, budget: int | None) -> str:
        """What may stand before a call in Harmony: a message, or the end of the one that the prompt has begun."""
        if self._is_in_message:
            return f"{self._until(_PREAMBLE.closed, budget)} {self._sequence(_NEXT)}"
        return self._message(_PREAMBLE, budget)

    def _final(self) -> str:
        """The header of the answer in Harmony, unless the prompt has the header."""
        return "" if self._is_in_message else self._sequence(_FINAL)

    def _message(self, tags: Tags, budget: int | None) -> str:
        """A message of Harmony that may stand before the others."""
        until = self._until(tags.closed, budget, within=True)
        return f"({self._sequence(tags.opened)} {until} {self._sequence(_NEXT)})?"

    def _until(self, mark: str, budget: int | None, *, within: bool = False) -> str:
        """Free text up to and with a mark. `within` reasoning no other mark has a meaning."""
        excluded = "" if within else self._excluded(but=mark)
        most = "" if budget is None else f"max_tokens={budget}"
        if self._is_token(mark):
            spelled = f" & ~/(?s:.*){_quoted(mark)}(?s:.*)/"
            return f"{self._rule(self._terminal(_ANY + excluded + spelled), most)} {self._sequence(mark)}"
        if budget is None:
            return self._rule(self._terminal(f"/(?s:.*){_quoted(mark)}/{excluded}"), "lazy")
        text = self._terminal(f"/[^{_quoted(mark[0])}]*/{excluded}")
        return f"{self._rule(text, most)} {self._sequence(mark)}"

    def _excluded(self, but: str = "") -> str:
        """What free text cannot contain, since a parser would read a call or reasoning there."""
        tags = self._form.reasoning
        marks = [*self._form.openings, *([tags.opened] if tags else [])]
        patterns = [f"/(?s:.*){_quoted(mark)}(?s:.*)/" for mark in marks if mark != but]
        if self._form.is_bare:
            patterns.append(_BARE)
        return "".join(f" & ~{pattern}" for pattern in patterns)

    def _is_token(self, mark: str) -> bool:
        """Whether a mark begins with a token that no text contains."""
        return self._marks.match(mark) is not None

    def _sequence(self, text: str) -> str:
        """The text as tokens and strings."""
        parts = [
            f"<[{self._special[part]}]>" if part in self._special else _string(part)
            for part in self._marks.split(text)
            if part
        ]
        return " ".join(parts)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{f'[{attributes}]' if attributes else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A regular expression for a text, fit to stand between slashes."""
    return re.escape(text).replace("/", r"\/")
