"""Chat templates: messages, tools and variables of a request become the token ids of a prompt.

1. `ChatTemplate` takes the templates of a tokenizer (`default`, `tool_use`) or the text of another one, and compiles
   each in the sandbox of `workers.generation.sandbox`.
2. The form that each template reads, texts or lists of parts, is found out (`workers.generation.template_forms`).
3. `prompt` marks control tokens that stand as text in strings of the request, and renders.
4. The rendered text is split at the marks. Marked control tokens are tokenized as the plain text that they are, all
   else as transformers' `apply_chat_template` does. Without marks the ids are the same as those of transformers.

With the variable `continue_final_message` the prompt ends within the last message, which an answer continues
(`workers.generation.template_forms`).

A mark is a pair of noncharacters around a control token. A single mark stands where a string of the request ends with
the beginning of a control token, so that two strings that the template joins make no control token either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jinja2

from ipc.errors import InputTooLong, InvalidInput
from workers.generation import template_forms, tool_texts
from workers.generation.formats.tags import Wrapper
from workers.generation.sandbox import MAX_CHARACTERS, Sandbox, TemplateOverrun
from workers.generation.template_forms import TemplateForms
from workers.generation.tool_texts import Shown

MAX_INPUT = MAX_CHARACTERS // 16
"""Characters of all strings of a request together."""
MAX_DEPTH = 64
"""Nesting of the parts of a request."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""The marks around a control token that stands as text."""
_ESCAPED = {r"\ufdd0": BEGIN, r"\ufdd1": END}
_MARK = re.compile("[\ufdd0\ufdd1]")
_WANTS_NINE = re.compile(r"\bid\s*\|\s*length\s*!=\s*9\b")
"""A template that refuses ids of calls without nine characters, which is what Mistral's models write."""
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*>|<.*[|｜]>|\[/?[A-Z_]{3,}\]|</?(tool_call|tool_response|think)>")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MOST_TEXT = 400


_ERRORS = (jinja2.TemplateError, TemplateOverrun, ValueError, ArithmeticError, LookupError, TypeError)
"""What a template may end with."""
_USED = ("default", "tool_use")
"""Names of the templates that conversations use, where there are several."""
_TOLD_CHARS = 65536
"""Each frontend keeps the template of every loaded model."""


class Prompt(NamedTuple):
    """A rendered prompt: its token ids and its text, and the begin of the answer if that stands in the prompt."""

    ids: list[int]
    text: str
    said: str | None = None


class ChatTemplate:
    """The chat templates of one model. Methods may be called from several threads.

    `source` replaces the tokenizer's own: the text of a template, or the name of one of several. `reserved` are more
    control tokens, of whatever kind the tokenizer has them.
    Raises ValueError for a template that is too large or has wrong syntax.
    """

    def __init__(self, tokenizer: Any, source: str = "", reserved: Iterable[str] = ()) -> None:
        self._sandbox = Sandbox()
        self._sources = _sources(tokenizer, source)
        self._templates = {name: self._compiled(name, text) for name, text in self._sources.items()}
        self._special = dict(tokenizer.special_tokens_map)
        self._pieces = PieceTokenizer(tokenizer)
        tokens = _control_tokens(tokenizer, "\0".join(self._sources.values()))
        self._control = Marking(tokens.union(reserved))
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special_only = Marking(special.union(reserved))
        self._wants_nine = _WANTS_NINE.search(self.text) is not None
        self._forms = {
            name: TemplateForms(partial(self._probed, name, template), _ERRORS)
            for name, template in self._templates.items()
            if name in _USED or len(self._templates) == 1
        }

    def check(self) -> None:
        """Raise ValueError if a template shows no message of a user, whichever form the message has."""
        for forms in self._forms.values():
            forms.check()

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template at all."""
        return bool(self._templates)

    @property
    def shows(self) -> Shown:
        """What the template for requests with tools shows of them; nothing without a template."""
        forms = [self._forms[name] for name in ("tool_use", *self._forms) if name in self._forms]
        return forms[0].shows if forms else Shown(False, False, False)

    @property
    def text(self) -> str:
        """The texts of all templates, from which the format of the model's answers is told."""
        return "\n".join(self._sources.values())

    @property
    def told(self) -> str:
        """The template of requests without tools; empty where there is none, or one above `_TOLD_CHARS`."""
        name = "default" if "default" in self._sources else next(iter(self._sources), "")
        text = self._sources.get(name, "").encode("utf-8", "replace").decode()
        return text if len(text) <= _TOLD_CHARS else ""

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wrapper: Wrapper | None = None,
        place: Callable[[str], str] | None = None,
    ) -> Prompt:
        """The prompt of a conversation, ready for the model's answer, unless `variables` say otherwise.

        What the template does not show of tools becomes text by `wrapper`, if that is there. `place` changes the
        rendered text with its marks, before the text is tokenized.
        Raises `InvalidInput` with the words of a template that refuses the messages, and `InputTooLong`.
        """
        _check_size([messages, tools, dict(variables or {})])
        if self._wants_nine:
            messages = [_with_short_ids(message) for message in messages]
        marked = [self._marked_message(message) for message in messages]
        others = self._control.mark(dict(variables or {}))
        said = None
        if others.pop("continue_final_message", False) and messages:
            said, marked[-1] = messages[-1].get("content"), template_forms.marked(marked[-1])
        name = self._chosen(bool(tools))
        forms, functions = self._forms[name], self._control.mark(tools)
        if wrapper is not None:
            marked, functions = tool_texts.told(marked, functions, forms.shows, forms.has_system, wrapper)
        text = _unescaped(self._rendered(name, marked, functions, others))
        if said is not None:
            text = self._unfinished(text, name)
        if place is not None:
            text = place(text)
        shown = _MARK.sub("", text) if BEGIN in text or END in text else text
        return Prompt(self._pieces.encode(text, self._control), shown, said)

    def plain(self, text: str) -> list[int]:
        """Token ids of a prompt without a template, with the tokens that the tokenizer puts around each text."""
        return self._pieces.encode_whole(text)

    def _unfinished(self, text: str, name: str) -> str:
        """The prompt up to the end of the last message. Raises `InvalidInput` where no answer can continue there."""
        cut = template_forms.cut(text)
        why = template_forms.LEAVES_OUT if cut is None else self._forms[name].obstacle
        if cut is None or why:
            raise template_forms.refusal(f"the chat template {name!r} of the model {why}")
        return cut

    def _marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without its empty fields, its strings marked.

        NOTE: answers of the model keep tags that are ordinary tokens, such as those of reasoning, as the model wrote
        them as tokens; a marked tag would tokenize the history anew and lose its prefix in the cache.
        """
        stated = {name: value for name, value in message.items() if value is not None}
        reasoning = next((stated[name] for name in _REASONING if name in stated), None)
        if reasoning is not None:
            stated = {"thinking": reasoning, **stated, "reasoning_content": reasoning}
        marking = self._special_only if stated.get("role") == "assistant" else self._control
        if stated.get("tool_calls"):
            stated = {**stated, "tool_calls": [_with_object(call) for call in stated["tool_calls"]]}
        marked: dict[str, Any] = marking.mark(stated)
        return marked

    def _rendered(self, name: str, messages: list[dict[str, Any]], tools: Any, variables: Any) -> str:
        """The text; templates that join arguments of calls as texts get them as texts."""
        try:
            return self._render(name, messages, tools, variables)
        except (TypeError, jinja2.UndefinedError) as error:
            if not any(message.get("tool_calls") for message in messages):
                raise self._refusal(name, error, messages) from None
        except _ERRORS as error:
            raise self._refusal(name, error, messages) from None
        try:
            with_texts = [_with_text_arguments(message) for message in messages]
            return self._render(name, with_texts, tools, variables)
        except _ERRORS as error:
            raise self._refusal(name, error, messages) from None

    def _refusal(self, name: str, error: Exception, messages: Sequence[Mapping[str, Any]]) -> InvalidInput:
        """What a client is told of a template that refuses its messages: the role, if the role is refused always."""
        role = self._forms[name].refused_role(messages)
        return _refusal(error, "these messages" if role is None else f"messages of the role {role!a}")

    def _probed(
        self,
        name: str,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a conversation as the load asks for it."""
        tools = [tool_texts.PROBE] if name == "tool_use" else None
        names = {"messages": messages, "tools": tools, "documents": None}
        defaults = {"add_generation_prompt": True, **self._special}
        return _unescaped(self._sandbox.rendered(template, {**defaults, **names, **variables}))

    def _render(self, name: str, messages: list[dict[str, Any]], tools: Any, variables: Any) -> str:
        names = {"messages": self._forms[name].shaped(messages), "tools": tools, "documents": None}
        variables = {"add_generation_prompt": True, **self._special, **variables, **names}
        return self._sandbox.rendered(self._templates[name], variables)

    def _chosen(self, with_tools: bool) -> str:
        """The name of the template for a request with or without tools."""
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates and len(self._templates) == 1:
            [name] = self._templates
        if name not in self._templates:
            raise InvalidInput("the model has no chat template: send a prompt to /v1/completions instead")
        return name

    def _compiled(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._sandbox.compiled(source)
        except TemplateOverrun as error:
            raise ValueError(f"the chat template {name!r} is refused: {error}") from None
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template {name!r} is wrong in line {error.lineno}: {error}") from None


class Marking:
    """Puts marks around control tokens that stand as text in the values of a request."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        beginnings = {token[:length] for token in longest_first for length in range(1, len(token))}
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._begun = re.compile(
            f"({'|'.join(map(re.escape, sorted(beginnings, key=len, reverse=True))) or '(?!)'})(?=\\s*$)"
        )
        self.marked = re.compile(f"{BEGIN}({self._whole.pattern}){END}|[{BEGIN}{END}]")
        self._firsts = frozenset(token[0] for token in longest_first)
        self._tails = frozenset(beginning[-1] for beginning in beginnings)

    def mark(self, value: Any) -> Any:
        """The value, a string or lists and dicts of strings, with all its control tokens marked."""
        # PERF: values come from a message, so a mapping is a dict; a look at the abstract type costs a microsecond.
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(part) for part in value]
        return value

    def _mark_text(self, text: str) -> str:
        # PERF: most texts have neither marks nor control tokens, and a substitution costs more than a search.
        if BEGIN in text or END in text:
            text = _MARK.sub("", text)
        if self._whole.search(text):
            text = self._whole.sub(f"{BEGIN}\\g<0>{END}", text)
        # PERF: the search for a beginning looks at the end of a text, and only where a beginning can stand and end so.
        if text.rstrip()[-1:] in self._tails and not self._firsts.isdisjoint(tail := text[-256:]):
            text = text[: len(text) - len(tail)] + self._begun.sub(f"\\g<0>{END}", tail, count=1)
        return text


def pieces_between(word: str, text: str) -> list[str]:
    """The pieces of a rendered text with marks between the places where the template itself has written `word`."""
    return re.split(f"(?<!{BEGIN}){re.escape(word)}", text)


def switch_off_limits(tokenizer: Any) -> None:
    """Let a tokenizer neither cut nor pad, as files of models that were trained further often say for training.

    NOTE: at the load only. A tokenizer that works for another thread cannot be changed.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.no_truncation()


class PieceTokenizer:
    """Tokenizes text of which some pieces must not become control tokens.

    PERF: a batch of texts, unlike a single one, is tokenized without the lock of the interpreter. A megabyte takes
    seconds, in which the worker must send the tokens of others.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        switch_off_limits(tokenizer)
        [self._newline] = self._ordinary(["\n"])
        self._texts: dict[str, list[int]] = {}
        """Token ids of control tokens that stand as text."""

    def encode(self, text: str, marking: Marking) -> list[int]:
        """Token ids of a rendered text with marks."""
        if BEGIN not in text and END not in text:
            return self._ordinary([text])[0]
        first, *others = marking.marked.split(text)
        ids, *inner = self._ordinary([first, *("\n" + piece for piece in others[1::2] if piece)])
        ordinary = iter(inner)
        for at, piece in enumerate(others):
            if piece:
                ids += self._within(piece, next(ordinary)) if at % 2 else self._as_text(piece)
        return ids

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a text by itself, with the tokens that the tokenizer puts around each text."""
        if self._backend is None:
            return list(self._tokenizer.encode(text))
        return list(self._backend.encode_batch_fast([text])[0].ids)

    def _ordinary(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if self._backend is None:
            return [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _within(self, piece: str, behind_newline: list[int]) -> list[int]:
        """Token ids of an ordinary piece that does not begin a text.

        NOTE: encoded after a newline, which is taken away again, since some tokenizers put a space before each text.
        """
        bare = self._without_newline(behind_newline)
        return self._ordinary([piece])[0] if bare is None else bare

    def _as_text(self, token: str) -> list[int]:
        """Token ids of a control token as the text that the token is."""
        ids = self._texts.get(token)
        if ids is None:
            bare = self._without_newline(self._plain("\n" + token))
            ids = self._texts[token] = self._plain(token) if bare is None else bare
        return ids

    def _without_newline(self, ids: list[int]) -> list[int] | None:
        count = len(self._newline)
        return ids[count:] if ids[:count] == self._newline else None

    def _plain(self, text: str) -> list[int]:
        """Token ids without any added token, special or not."""
        backend = self._backend
        if backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in backend.model.tokenize(split)]


def _sources(tokenizer: Any, source: str) -> dict[str, str]:
    """Templates by name."""
    own = tokenizer.chat_template
    named = dict(own) if isinstance(own, dict) else {"default": own} if own else {}
    if not source:
        return named
    return {"default": named.get(source, source)}


def _control_tokens(tokenizer: Any, templates: str) -> frozenset[str]:
    """Added tokens that control the model: special ones, those in a template, those in the usual brackets."""
    return frozenset(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
        or (token.content in templates and not token.content.isspace())
        or _LOOKS_LIKE_CONTROL.fullmatch(token.content)
    )


def _unescaped(text: str) -> str:
    """The text with the marks that a template has written as JSON escapes."""
    for escaped, mark in _ESCAPED.items():
        text = text.replace(escaped, mark)
    return text


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose ids of calls have nine letters and digits: the last ones of each id."""
    short = dict(message)
    if isinstance(short.get("tool_call_id"), str):
        short["tool_call_id"] = _short_id(short["tool_call_id"])
    if short.get("tool_calls"):
        short["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in short["tool_calls"]
        ]
    return short


def _short_id(given: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", given)[-9:].rjust(9, "0")


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object; they came as JSON text if a number of theirs needs over 64 bits."""
    function = call.get("function") or {}
    if not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON text, and a content in any case."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {"content": "", **message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _check_size(value: Any) -> None:
    """Raises `InputTooLong` for a request with more characters than a prompt can have, or nested too deeply."""
    total, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, str):
                total += len(part)
            elif isinstance(part, dict):
                inner += part
                inner += part.values()
            elif isinstance(part, list | tuple):
                inner += part
        if total > MAX_INPUT:
            raise InputTooLong(f"messages, tools and variables have over {MAX_INPUT} characters")
        if not inner:
            return
        level = inner
    raise InvalidInput(f"messages, tools and variables: nested over {MAX_DEPTH} levels")


def _refusal(error: Exception, what: str) -> InvalidInput:
    words = _MARK.sub("", str(error))[:_MOST_TEXT]
    if isinstance(error, TemplateOverrun):
        return InvalidInput(f"the chat template of the model takes too long for {what}: {words}")
    return InvalidInput(f"the chat template of the model refuses {what}: {words}")
