"""The table of formats: the marks of each family of models, and how a model's own is told.

`detect` looks at facts of the tokenizer and of its chat template, never at names of models: a response template of
transformers, else the marks that the template writes. The options `tool_format` and `reasoning` of a catalog entry
choose instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ipc.wire.messages import ToolUse
from ipc.wire.streams import TEXT
from workers.generation.formats import harmony
from workers.generation.formats.bodies import (
    Reader,
    Schemas,
    read_fenced,
    read_gemma,
    read_json,
    read_named,
    read_python,
    read_xml,
    read_xml_function,
    whole_python,
    whole_xml,
)
from workers.generation.formats.regions import Delimited, JsonValue, Opened
from workers.generation.formats.tags import (
    Layout,
    TagParser,
    Tags,
    Wrapper,
    templated_tags,
    templated_wrapper,
    wrapper_of,
)
from workers.generation.formats.templated import TemplatedParser
from workers.generation.formats.written import ITEM, Head, in_xml, named, whole_only
from workers.generation.request import OutputParser, Segment

THINK = Tags("<think>", "</think>")
REASONING = {
    "think": THINK,
    "bracket": Tags("[THINK]", "[/THINK]"),
    "thought": Tags("<|channel>thought", "<channel|>"),
}
"""Marks around reasoning by the value of the option `reasoning`; `none` is no marks."""
_NAMED = r"[\w.:-]+(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?"


def _between(
    closed: str,
    read: Reader = read_json,
    begins: Sequence[str] = ("{", "["),
    json: str = "",
    whole: Callable[[str], str] = str,
    heads: Sequence[Head] = (ITEM,),
) -> Opened:
    return partial(Delimited, closed=(closed,), read=read, begins=begins, json=json, whole=whole, heads=heads)


def _xml_heads(before: str) -> tuple[Head, Head]:
    return in_xml(before), named(before, r"\s*\{")


_MISTRAL = named(
    r"\s*(?P<name>[\w.:-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?", r"(?:(?<=\])|\s*\{|\[CALL_ID\])"
)
_DEEPSEEK = (
    named(r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>[\w.:-]+)\s*(?:```(?:json)?\s*)?", r"(?:(?<=[\n`])|\{)"),
    named(r"\s*(?!function\s*<｜tool▁sep｜>\s*\w)(?P<name>[\w.:-]+)\s*<｜tool▁sep｜>", ""),
)
_GEMMA = named(r"\s*call:(?P<name>[\w.:-]+)", r"\s*\{")
_PYTHON = whole_only(r"[\s,\[]*(?:print\()?(?P<name>[\w.]+)\(")


class Format(NamedTuple):
    """How one model writes its answers.

    name        value of the option `tool_format`
    layout      marks of a tag parser; None for Harmony and for response templates
    marks       all marks, which must stay visible in the text that a parser gets
    wrapper     how a grammar writes calls; None for formats whose calls no grammar can force
    template    the response template of the tokenizer, for the format `template`
    tokens      marks that the tokenizer has as tokens, or whose beginning is one
    """

    name: str
    layout: Layout | None
    marks: tuple[str, ...]
    wrapper: Wrapper | None = None
    template: Any = None
    tokens: frozenset[str] = frozenset()

    def parser(
        self,
        prompt: str,
        tools: ToolUse | None,
        splits: bool = True,
        said: str | None = None,
        *,
        held: bool = False,
    ) -> OutputParser:
        """A parser for one choice that answers `prompt` (text), whose end `said` is the begin of the answer, if any.

        Without `splits` all text is visible. With the choice `none`, and without tools, calls are visible text.
        `held`: a grammar holds the answer, which is visible text whatever its letters are.
        """
        if not splits:
            return PlainParser()
        calls = tools is not None and bool(tools.functions)
        schemas = schemas_of(tools) if calls else {}
        if self.template is not None and not held:
            functions = tools.functions if tools is not None and calls else []
            return TemplatedParser(self.template, prompt, functions, schemas, calls=calls)
        if self.name == "harmony":
            return harmony.HarmonyParser(schemas, calls=calls, continues=said is not None, held=held)
        reasons, layout = self.reasons(prompt, said), self._tagged(calls)
        if held and reasons is False:
            layout = layout._replace(reasoning=None)
        tokens = self.tokens if held else None
        return TagParser(
            layout, schemas, calls=calls, reasons=bool(reasons), continues=bool(said), tokens=tokens
        )

    def _tagged(self, calls: bool) -> Layout:
        """The layout of a tag parser; for a response template, of the answers that a grammar holds."""
        if self.layout is not None:
            return self.layout
        wrapper = self.wrapper if calls else None
        marks = {wrapper.mark: _between(wrapper.ends.removeprefix("}\n"))} if wrapper else {}
        return Layout(marks, reasoning=self.reasoning)

    @property
    def reasoning(self) -> Tags | None:
        """The marks around reasoning; None where there are none, and for Harmony."""
        return self.layout.reasoning if self.layout else templated_tags(self.template)

    @property
    def openings(self) -> tuple[str, ...]:
        """The marks that open calls."""
        if self.layout is not None:
            return tuple(self.layout.calls)
        if self.template is None:
            return harmony.OPENINGS
        return (self.wrapper.mark,) if self.wrapper else ()

    @property
    def is_bare(self) -> bool:
        """Whether an answer may begin with a call in JSON, without a mark."""
        return self.layout is not None and self.layout.bare

    def reasons(self, prompt: str, said: str | None = None) -> bool | None:
        """Whether the prompt ends within reasoning; None if the answer may begin with reasoning of its own.

        What was `said` of an answer already is no reasoning, unless reasoning stands open there.
        """
        if self.name == "harmony":
            return None if said is None else False
        if self.reasoning is not None and said:
            return said.rfind(self.reasoning.opened) > said.rfind(self.reasoning.closed)
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.closed):
            return False
        return True if prompt.rstrip().endswith(self.reasoning.opened) else None


class PlainParser:
    """An `OutputParser` for which all text is visible."""

    def feed(self, text: str, tokens: int, has_mark: bool = False) -> list[Segment]:
        """The text as it is."""
        return [Segment(TEXT, text, tokens=tokens)] if text else []

    def finish(self, cut: bool) -> list[Segment]:
        """Nothing was held back."""
        return []


def schemas_of(tools: ToolUse | None) -> Schemas:
    """Schemas of arguments by name of the function."""
    functions = [tool.get("function", tool) for tool in tools.functions] if tools else []
    return {function["name"]: function.get("parameters") or {} for function in functions}


_LAYOUTS: dict[str, Layout] = {
    "none": Layout({}),
    "json": Layout({}, bare=True),
    "qwen": Layout({"<tool_call>": _between("</tool_call>")}, bare=True),
    "qwen_xml": Layout(
        {
            "<tool_call>": _between(
                "</tool_call>",
                read_xml,
                ("<function=",),
                r"\s*<function=[^>\n]+>\s*(?=\{)",
                whole_xml,
                _xml_heads(r"\s*<function=(?P<name>[^<>\n]{1,512})>"),
            ),
            "<function=": _between(
                "</function>",
                read_xml_function,
                (),
                r"[^>\n]+>\s*(?=\{)",
                whole_xml,
                _xml_heads(r"(?P<name>[^<>\n]{1,512})>"),
            ),
        },
        dropped=("</tool_call>",),
    ),
    "llama": Layout({"<|python_tag|>": JsonValue}, bare=True),
    "mistral": Layout(
        {"[TOOL_CALLS]": partial(JsonValue, read=read_named, header=_NAMED, heads=(ITEM, _MISTRAL))},
        bare=True,
    ),
    "deepseek": Layout(
        {
            "<｜tool▁call▁begin｜>": _between(
                "<｜tool▁call▁end｜>",
                read_fenced,
                (),
                r"[^{]*<｜tool▁sep｜>[^{]*(?=\{)",
                heads=_DEEPSEEK,
            )
        },
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        bare=True,
    ),
    "gemma4": Layout(
        {
            "<|tool_call>": _between(
                "<tool_call|>", read_gemma, ("call:",), r"\s*call:[^{]*(?=\{\s*\")", heads=(_GEMMA,)
            )
        }
    ),
    "gemma": Layout(
        {"```tool_code": _between("```", read_python, (), "(?!)", whole_python, (_PYTHON,))}, bare=True
    ),
    "phi4": Layout({"<|tool_call|>": _between("<|/tool_call|>")}, bare=True),
    "granite": Layout({"<|tool_call|>": JsonValue, "<tool_call>": JsonValue}, bare=True),
    "python": Layout(
        {
            "<function_calls>": _between(
                "</function_calls>", read_python, (), r"\s*(?=\[?\{)", whole_python, (ITEM, _PYTHON)
            )
        }
    ),
}
"""Layouts by name of the format, without reasoning."""
PLAIN = "qwen"
"""The format of calls that models are told to write whose templates do not know tools."""
NAMES = (*_LAYOUTS, "harmony", "template")
"""Values of the option `tool_format`."""
_TOLD_BY = (
    ("<|tool_call>", "gemma4"),
    ("<function=", "qwen_xml"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "qwen"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
    ("<function_calls>", "python"),
    ("<start_of_turn>", "gemma"),
)
"""What a chat template writes, and the format that the mark tells, in this order."""


def detect(
    tokenizer: Any, template: str, tool_format: str = "", reasoning: str = "", *, knows_tools: bool = True
) -> Format:
    """The format of a model by its tokenizer and the text of its chat templates; options choose instead of facts.

    A model whose template does not know tools is told to write calls as in the format `PLAIN`.
    Raises ValueError for an option that is no name of a format.
    """
    name = tool_format or _detected(tokenizer, template)
    if name not in NAMES:
        raise ValueError(f"tool_format {name!r} is none of {', '.join(NAMES)}")
    if name == "template":
        own = getattr(tokenizer, "response_template", None)
        if own is None:
            raise ValueError("tool_format 'template' needs a tokenizer with a response template")
        form = Format(name, None, tuple(_special(tokenizer)), templated_wrapper(own), own)
        marks = (*form.marks, *form.openings, *(form.reasoning or ()))
        return _with_tokens(form._replace(marks=marks), tokenizer)
    wrapper = wrapper_of(name, template)
    if name == "harmony":
        return _with_tokens(Format(name, None, harmony.MARKS, wrapper), tokenizer)
    # PERF: a tokenizer makes the map of its vocabulary anew for each call.
    known: Mapping[str, int] = tokenizer.get_vocab()
    layout = _LAYOUTS[name]._replace(reasoning=_reasoning(known, template, reasoning))
    if not knows_tools and not tool_format:
        layout = layout._replace(calls={**layout.calls, **_LAYOUTS[PLAIN].calls}, bare=True)
        wrapper = wrapper_of(PLAIN, template)
    marks = (*layout.calls, *layout.dropped, *(layout.reasoning or ()), *_closing(known))
    return _with_tokens(Format(name, layout, marks, wrapper), tokenizer)


def _with_tokens(form: Format, tokenizer: Any) -> Format:
    tags = form.reasoning
    known = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    marks = (*form.openings, *(tags or ()), *(form.layout.dropped if form.layout else ()))
    return form._replace(tokens=frozenset(mark for mark in marks if mark.startswith(known)))


def _detected(tokenizer: Any, template: str) -> str:
    if getattr(tokenizer, "response_template", None) is not None:
        return "template"
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    return next((name for mark, name in _TOLD_BY if mark in template), "json")


def _reasoning(known: Collection[str], template: str, chosen: str) -> Tags | None:
    """The marks of reasoning: those of the option, else those of which the template writes one."""
    if chosen and chosen != "none":
        if chosen not in REASONING:
            raise ValueError(f"reasoning {chosen!r} is none of {', '.join((*REASONING, 'none'))}")
        return REASONING[chosen]
    if chosen:
        return None
    for tags in REASONING.values():
        if tags.closed in template or (tags.opened in known and tags.closed in known):
            return tags
    return None


def _special(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def _closing(known: Collection[str]) -> list[str]:
    """Special tokens inside of calls: closing marks, separators, quotes."""
    inner = (
        "</tool_call>",
        "<tool_call|>",
        "<|/tool_call|>",
        "[ARGS]",
        "[CALL_ID]",
        '<|"|>',
        "</function_calls>",
    )
    deepseek = ("<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
    return [mark for mark in (*inner, *deepseek) if mark in known]
