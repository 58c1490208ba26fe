"""Grammars of requests: from what a request asks for to the state of a grammar in each choice.

1. `Grammars.factory` writes the grammar of an answer (`workers.generation.answer_grammar`): the given one, calls of
   functions, or both. Preparing threads call `factory`.
2. A grammar that was not compiled before is tried in another process, then compiled here, and kept for a while. A
   grammar that was refused is remembered as well. Only calls of one `space` find what was kept, since the time of a
   request tells whether its grammar was known.
3. Each choice gets a copy of the compiled grammar (`Guide`).
4. A mistake in a grammar is `InvalidInput` with the words of llguidance, or plainer ones (`grammar_formats.plain`).

NOTE: `Grammars` makes the tokenizer of llguidance when the model is loaded. A vocabulary of 250,000 tokens takes over
two seconds, in which no other thread of the worker runs: llguidance keeps the lock of the interpreter.

llguidance reads the tokenizer of a model so that no text becomes a control token:

1. llguidance tokenizes the text that a grammar forces. The model's own tokenizer would make a control token of letters
   such as `<think>`, which a grammar of text does not take.
2. `without_marks` gives control tokens other names, which no text has. All ids stay what they are.
3. Grammars in Lark may name control tokens. `with_ids` writes ids in place of these names.

`MaskFiller` fills masks in a thread, while the model runs. The rows of all masks lie in one buffer. One call of
llguidance fills the rows of a step without the interpreter's lock, so that the thread of the model never waits for this
one.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from ipc.errors import InvalidInput
from ipc.wire.messages import GenerateCall, Grammar, ToolUse
from workers.generation import grammar_formats
from workers.generation.answer_grammar import ANSWER, ANY_OBJECT, AnswerGrammar, Budget, Calls, Function
from workers.generation.formats.table import Format
from workers.generation.grammar_trial import LIMITS, Trial, error_of
from workers.generation.request import Matcher
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Unfit
from workers.generation.templates import switch_off_limits

MOST_TALK = 512
"""Most tokens of text before a forced call."""
MOST_REASONING = 4096
"""Most tokens of reasoning before a forced call."""
MOST_SCHEMAS = 128
"""Most functions whose arguments are held to their schemas without `strict`."""
_KEPT, _KEPT_NBYTES = 64, 4 << 20
_COMPACT: Any = {"whitespace_flexible": False}
_HIDDEN = "\U0010ffff"
"""A character that no text has."""
_LARK_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|(?P<token><[^<>\s\[\]]+>)'
)


class Guide:
    """The state of a grammar in one choice (`workers.generation.request.Matcher`).

    `is_stopped` holds after a failure too: then `error` says why, and nothing but an end token is allowed.
    """

    __slots__ = ("_end", "matcher")

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self.matcher, self._end = matcher, end

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self.matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing may follow but an end token."""
        return self.matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, such as a limit; empty while all is well."""
        return error_of(self.matcher) if self.matcher.is_error() else ""

    def fill_mask(self, bits: Any) -> None:
        """Write the mask of allowed next tokens into a numpy array of int32."""
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def consume(self, token: int) -> bool:
        """Take a chosen token; false if the grammar forbids the token."""
        return self.matcher.consume_token(token)

    def forced(self) -> list[int]:
        """The tokens that must come next; an end token after the last text, and none after a failure."""
        if self.matcher.is_stopped():
            return [] if self.matcher.is_error() else [self._end]
        return self.matcher.compute_ff_tokens()


class Grammars:
    """The grammars of one model. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Sequence[int], form: Format) -> None:
        """`vocabulary` is the number of logits of the model, `end_ids` are its end tokens."""
        self._tokenizer, self._end_ids, self._form = tokenizer, list(end_ids), form
        switch_off_limits(tokenizer)
        self._vocabulary = max(vocabulary, len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        self._lock = threading.Lock()
        self._guided: LLTokenizer | None = None
        self._trial: Trial | None = None
        self._special: dict[str, int] = {}
        self._lack = self._prepare()
        self._kept: OrderedDict[tuple[str, str], LLMatcher | str] = OrderedDict()

    @property
    def words(self) -> int:
        """Words of 32 bits in a mask."""
        return -(-self._vocabulary // 32)

    def factory(
        self, call: GenerateCall, prompt: str, max_tokens: int, said: str | None = None
    ) -> Callable[[], Matcher] | None:
        """Makes the matchers of a request's choices; None for a request without a grammar.

        `prompt` is the text of the prompt, whose end `said` is the begin of the answer, if any; `max_tokens` the most
        tokens of a choice. Raises `InvalidInput`.
        """
        tools = _tools_of(call)
        if call.grammar is None and (tools is None or not tools.restricts):
            return None
        if self._lack:
            raise InvalidInput(f"grammars: not offered for this model{self._lack}", param=_field_of(call))
        reasons = self._form.reasons(prompt, said) if call.splits else False
        compiled = self._whole(call, tools, max_tokens, reasons)
        end = self._end_ids[0]
        return lambda: Guide(compiled.deep_copy(), end)

    def close(self) -> None:
        """End the process that tries grammars."""
        if self._trial is not None:
            self._trial.close()

    def _prepare(self) -> str:
        """Make the tokenizer of llguidance; returns why there is none, or an empty text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._end_ids:
            return f", which has no {'end token' if backend else 'fast tokenizer'}"
        marks = self._form.marks
        added = self._tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if is_control(token, marks)}
        text = without_marks(backend.to_str(), self._special)
        try:
            guided = LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._end_ids)
        except ValueError as error:
            return f": {str(error)[:200]}"
        self._trial = Trial(text, self._vocabulary, self._end_ids)
        self._guided = guided
        return ""

    def _whole(
        self, call: GenerateCall, tools: ToolUse | None, max_tokens: int, reasons: bool | None
    ) -> LLMatcher:
        """The grammar of a whole answer."""

        def answer() -> AnswerGrammar:
            return AnswerGrammar(self._form, self._special, reasons)

        if tools is not None and tools.is_forced:
            budget = Budget(_part(max_tokens // 4, MOST_REASONING), _part(max_tokens // 8, MOST_TALK))
            return self._with_calls(tools, lambda calls: answer().forced(calls, budget), call.space)
        if call.grammar is None:
            return self._with_calls(tools, lambda calls: answer().guided(calls), call.space)
        given = _given(call.grammar, self._special)
        field = call.grammar.field
        compiled = self._compiled(given, field, call.space)
        if tools is None and reasons is False:
            return compiled
        grammars = json.loads(given) if given.startswith("{") else {"grammars": [{"lark_grammar": given}]}
        name = grammars["grammars"][0]["name"] = grammars["grammars"][0].get("name") or ANSWER

        def write(calls: Calls | None) -> str:
            text = answer().answered(name, calls, _part(max_tokens // 2, max_tokens))
            start = {"name": "penstock-start", "lark_grammar": text}
            return json.dumps({**grammars, "grammars": [start, *grammars["grammars"]]})

        if tools is None or self._form.wrapper is None:
            return self._compiled(write(None), field, call.space)
        return self._with_calls(tools, write, call.space)

    def _with_calls(self, tools: ToolUse | None, write: Callable[[Calls], str], space: str) -> LLMatcher:
        """A grammar with calls. A schema that no grammar can hold to is left out, unless its function is strict."""
        wrapper = self._form.wrapper
        if tools is None or wrapper is None:
            lack = "this model has no format of tool calls that a grammar can hold to"
            raise InvalidInput(f"tools: {lack}", param="tools")
        functions = _functions(tools)
        if len(functions) > MOST_SCHEMAS:
            functions = [function if function.strict else function.loose() for function in functions]
        try:
            return self._compiled(write(Calls(wrapper, functions, not tools.is_single)), "tools", space)
        except InvalidInput:
            sound = [self._sound(function, space) for function in functions]
            if sound == functions:
                raise
            return self._compiled(write(Calls(wrapper, sound, not tools.is_single)), "tools", space)

    def _sound(self, function: Function, space: str) -> Function:
        """The function, with a schema that can be compiled.

        Raises `InvalidInput` for one that is strict, and for a number that a grammar would change.
        """
        field = f"tools: parameters of function {function.name!a}"
        try:
            self._compiled(f"start: {function.rule()}", field, space)
        except InvalidInput:
            lost = grammar_formats.lost(function.schema)
            if function.strict or (lost is not None and not lost.is_type_bound):
                raise
            return function.loose()
        return function

    def _compiled(self, text: str, field: str, space: str) -> LLMatcher:
        """A grammar of llguidance, compiled. Raises `InvalidInput`, whose message begins with the field."""
        key = space, text
        with self._lock:
            compiled = self._kept.get(key)
        if compiled is None:
            compiled = self._tried(text)
        with self._lock:
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT or self._kept_nbytes() > max(_KEPT_NBYTES, len(text)):
                self._kept.popitem(last=False)
        if isinstance(compiled, str):
            # NOTE: llguidance shows the line with the mistake, which for functions nobody but us has written.
            of_function = field.startswith("tools")
            words, param = (
                (grammar_formats.of_function(compiled), "tools") if of_function else (compiled, field)
            )
            raise InvalidInput(f"{field}: {words}", param=param)
        return compiled

    def _kept_nbytes(self) -> int:
        return sum(len(text) for _, text in self._kept)

    def _tried(self, text: str) -> LLMatcher | str:
        """A grammar, or what is wrong with the grammar."""
        assert self._guided is not None and self._trial is not None
        lost = grammar_formats.lost_numbers(text)
        text = grammar_formats.of_grammar(text)
        error = str(lost) if lost else self._trial.error(text)
        return error or LLMatcher(self._guided, text, log_level=0, limits=LIMITS)


def _tools_of(call: GenerateCall) -> ToolUse | None:
    """The functions that an answer may call; None without any."""
    tools = call.tools if call.splits else None
    return tools if tools is not None and tools.functions else None


def _field_of(call: GenerateCall) -> str:
    """The field of a request that asks for its grammar."""
    return "tools" if call.grammar is None else call.grammar.field


def _given(grammar: Grammar, special: Mapping[str, int]) -> str:
    """The grammar of a request in a form of llguidance, JSON compact; `special` are ids of control tokens.

    Raises `InvalidInput`.
    """
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.value)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(with_ids(grammar.value, special))
    try:
        if grammar.kind == "llguidance":
            return _compact(grammar.value, special)
        schema = json.dumps(ANY_OBJECT) if grammar.kind == "json_object" else grammar.value
        schema = {"true": "{}", "false": '{"not":{}}'}.get(schema, schema)
        return LLMatcher.grammar_from_json_schema(schema, defaults=_COMPACT)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{grammar.field}: {error}", param=grammar.field) from None


def _compact(text: str, special: Mapping[str, int]) -> str:
    """Grammars in llguidance's own form, with schemas that allow no blanks unless they say so. Raises `ValueError`."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("expected an object with grammars")
    grammars = value.get("grammars")
    for item in grammars if isinstance(grammars, list) else ():
        if isinstance(item, dict) and isinstance(item.get("lark_grammar"), str):
            item["lark_grammar"] = with_ids(item["lark_grammar"], special)
        schema = item.get("json_schema") if isinstance(item, dict) else None
        if isinstance(schema, dict):
            given = schema.get("x-guidance", {})
            if not isinstance(given, dict):
                raise ValueError("x-guidance: expected an object")
            schema["x-guidance"] = {**_COMPACT, **given}
    return json.dumps(value)


def _functions(tools: ToolUse) -> list[Function]:
    """The functions that may be called. Raises `InvalidInput` for a strict one whose arguments are no object."""
    functions = []
    for definition in tools.functions:
        inner = definition.get("function", definition)
        name, strict = inner["name"], inner["name"] in tools.strict
        if name != tools.name if tools.choice == "named" else tools.allowed and name not in tools.allowed:
            continue
        schema = inner.get("parameters") or ANY_OBJECT
        declared = schema.get("type", "object")
        if "object" not in (declared if isinstance(declared, list) else [declared]):
            if strict:
                text = f"tools: parameters of function {name!a}: expected the schema of an object"
                raise InvalidInput(text, param="tools")
            schema = ANY_OBJECT
        functions.append(Function(name, schema, strict))
    return functions


def _part(tokens: int, most: int) -> int:
    """Tokens at most, as a power of two, so that a grammar with the number is found again."""
    return 1 << max(1, min(tokens, most)).bit_length() - 1


def is_control(token: Any, marks: Collection[str]) -> bool:
    """Whether an added token controls the model, as llguidance sees it, or is part of one of the `marks`."""
    text: str = token.content
    return bool(token.special) or (text[:1] + text[-1:]) == "<>" or any(text in mark for mark in marks)


def without_marks(text: str, control: Collection[str]) -> str:
    """JSON text of a tokenizer in which the `control` tokens are special and have names that no text has."""
    tokenizer = msgspec.json.decode(text)
    names = {name: f"{name[:-1]}{_HIDDEN}{name[-1:]}" for name in control}
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": True}
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        _rename_pieces(model, names)
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    return msgspec.json.encode(tokenizer).decode()


def with_ids(lark: str, special: Mapping[str, int]) -> str:
    """A grammar in Lark with `<[id]>` in place of the names of control tokens."""

    def written(part: re.Match[str]) -> str:
        token = special.get(part["token"] or "")
        return part[0] if token is None else f"<[{token}]>"

    return _LARK_PART.sub(written, lark)


def _rename_pieces(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename pieces of a vocabulary, and leave out merges that would make one of them."""
    known = names.keys() & model["vocab"].keys()
    if not known:
        return
    model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    unknown = model.get("unk_token") or ""
    if unknown in names:
        model["unk_token"] = names[unknown]
    model["merges"] = [
        merge
        for merge in model.get("merges", ())
        if ("".join(merge) if isinstance(merge, list) else merge.replace(" ", "")) not in known
    ]


class GrammarFailed(Unfit, InvalidInput):
    """The grammars of some `sequences` cannot go on; the message has the words of llguidance on the first."""

    def __init__(self, sequences: Sequence[Choice], reason: str) -> None:
        super().__init__(f"grammar: {reason}")
        self.sequences = sequences


class MaskFiller:
    """The masks of one engine (`workers.generation.engine.Masks`)."""

    def __init__(self, words: int, vocabulary: int, threads: int = 1) -> None:
        """`words` as of `Grammars`, `vocabulary` is the number of logits of the model."""
        self._words, self._width = words, -(-vocabulary // 32)
        self._executor = LLExecutor(threads)
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._rows = torch.empty(0, words, dtype=torch.int32)
        self._filling: Future[None] | None = None
        self._choices: list[Choice] = []

    def begin(self, sequences: Sequence[Choice]) -> None:
        """Begin to fill `mask` of sequences, whose matchers are `Guide`s."""
        if len(sequences) > len(self._rows):
            self._rows = torch.empty(2 * len(sequences), self._words, dtype=torch.int32)
        self._choices = list(sequences)
        rows: list[tuple[LLMatcher, int]] = []
        for row, sequence in enumerate(sequences):
            assert isinstance(sequence.matcher, Guide)
            sequence.mask = self._rows[row, : self._width]
            rows.append((sequence.matcher.matcher, row))
        self._filling = self._thread.submit(
            self._executor.unsafe_compute_mask_ptr,
            rows,
            self._rows.data_ptr(),
            self._words * 4,
            len(self._rows),
        )

    def wait(self) -> None:
        """Return when all masks are filled. Raises `GrammarFailed` for sequences that neither ended nor rest."""
        if self._filling is None:
            return
        filling, self._filling = self._filling, None
        choices, self._choices = self._choices, []
        filling.result()
        unfinished = [one for one in choices if not (one.done or one.paused)]
        failed = {one: one.matcher.error for one in unfinished if isinstance(one.matcher, Guide)}
        failed = {sequence: reason for sequence, reason in failed.items() if reason}
        if failed:
            raise GrammarFailed(list(failed), next(iter(failed.values())))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
