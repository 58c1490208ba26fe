"""Bodies of tool calls, in each notation that models write, as `Call`s.

A reader takes the text between the marks of a call and the schemas of the request's functions. A reader gives the
calls, or None where the text is no call: then the text is shown as it is. Arguments leave as compact JSON. Text is no
call either when no later request could bring its arguments back: too many levels, or a number beyond doubles.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ipc.wire.streams import MOST_LEVELS
from workers.generation.request import Call

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments by name of the function."""
Reader = Callable[[str, Schemas], list[Call] | None]
# NOTE: a model may write a mark thousands of times in one body. No pattern looks for an end behind each of them.
_QUOTED_BEGIN = re.compile(r'"(?:arguments|parameters)"\s*:\s*"(?=\{)')
_QUOTED_END = re.compile(r'\}"(?=\s*[,}])')
_XML_FUNCTION = re.compile(r"<function=([^<>\n]{1,512})>(.*?)(?:</function>|\Z)", re.DOTALL)
_XML_JSON = re.compile(r"\s*<function=([^>\n]+)>\s*(\{.*\})\s*(?:</function>\s*)?", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\n]{1,512})>")
XML_PARAMETER_END = "</parameter>"
XML_FUNCTION_END = "</function>"
_XML_ONLY_JSON = re.compile(r"\s*(?:<function=)?[^<>\n]+>\s*\{.*\}\s*", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.:-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_FENCED = re.compile(r"\s*([\w.:-]+)\s*(?:```(?:json)?\s*)?(\{.*\})\s*(?:```)?\s*", re.DOTALL)
_GEMMA = re.compile(r"\s*call:([\w.:-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_TOKEN = re.compile(r'<\|"\|>(.*?)<\|"\|>|([{}\[\],:])|([^{}\[\],:]+)', re.DOTALL)
_UNPORTABLE = re.compile("[\0\ud800-\udfff]")
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""The escape of NUL in JSON text."""
_PYTHON_PART = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<torn>['"])""",
    re.DOTALL,
)
_MOST_DEPTH, _MOST_PYTHON = 100, 64 << 10


def read_json(body: str, schemas: Schemas) -> list[Call] | None:
    """`{"name": ..., "arguments": {...}}`, or a list of those; `parameters` stands for `arguments` as well."""
    value = _loaded(body)
    if value is None:
        value = _loaded(_unquoted(body))
    return calls_of(value)


def _unquoted(body: str) -> str:
    """The text without quotes around an object of arguments: from its beginning to the last end that fits."""
    begin = _QUOTED_BEGIN.search(body)
    ends = [found.start() for found in _QUOTED_END.finditer(body, begin.end())] if begin else []
    if begin is None or not ends:
        return body
    return f"{body[: begin.end() - 1]}{body[begin.end() : ends[-1] + 1]}{body[ends[-1] + 2 :]}"


def calls_of(value: Any) -> list[Call] | None:
    """The calls of a parsed value: an object, or a list of them."""
    return _all([_call_of(item) for item in (value if isinstance(value, list) else [value])])


def read_named(body: str, schemas: Schemas) -> list[Call] | None:
    """Mistral: a list as `read_json` takes, or a name, `[ARGS]` or nothing, and the object of arguments."""
    named = _NAMED.fullmatch(body)
    if named is None:
        return read_json(body, schemas)
    return _all([_written(named[1], named[2])])


def read_fenced(body: str, schemas: Schemas) -> list[Call] | None:
    """DeepSeek: `name<sep>{...}`, or `function<sep>name` and the arguments in a JSON fence."""
    kind, bar, rest = body.partition("<｜tool▁sep｜>")
    if not bar:
        return None
    match = _FENCED.fullmatch(rest) if kind.strip() == "function" else None
    name, arguments = (match[1], match[2]) if match else (kind.strip(), rest)
    return _all([_written(name, arguments)])


def read_xml(body: str, schemas: Schemas) -> list[Call] | None:
    """Qwen3-Coder: `<function=name>` with `<parameter=key>` elements, whose values have the types of the schema.

    An object in JSON may stand in place of the elements.
    """
    whole = _XML_JSON.fullmatch(body)
    if whole is not None:
        return _all([_written(whole[1].strip(), whole[2])])
    functions = _XML_FUNCTION.findall(body)
    calls: list[Call | None] = []
    for name, inner in functions:
        properties = schemas.get(name.strip(), {}).get("properties")
        types = properties if isinstance(properties, Mapping) else {}
        values = {
            key.strip(): _typed(_unframed(text), types.get(key.strip())) for key, text in _parameters(inner)
        }
        calls.append(_called(name.strip(), values))
    return _all(calls) if calls else None


def _parameters(inner: str) -> Iterator[tuple[str, str]]:
    """Name and text of each parameter that is closed."""
    begin = XML_PARAMETER.search(inner)
    while begin is not None:
        end = inner.find(XML_PARAMETER_END, begin.end())
        if end < 0:
            return
        yield begin[1], inner[begin.end() : end]
        begin = XML_PARAMETER.search(inner, end + len(XML_PARAMETER_END))


def read_xml_function(body: str, schemas: Schemas) -> list[Call] | None:
    """The same for a body behind the mark `<function=`."""
    return read_xml(f"<function={body}</function>", schemas)


def whole_xml(body: str) -> str:
    """The functions of a cut body that are closed; an object in JSON shows by itself whether the object is whole."""
    if _XML_ONLY_JSON.fullmatch(body):
        return body
    end = body.rfind(XML_FUNCTION_END)
    return body[: end + len(XML_FUNCTION_END)] if end >= 0 else ""


def read_gemma(body: str, schemas: Schemas) -> list[Call] | None:
    """Gemma 4: `call:name{key:<|"|>text<|"|>,other:1}`, or a name and an object in JSON."""
    match = _GEMMA.fullmatch(body)
    if match is None:
        return None
    arguments = _loaded(match[2])
    if arguments is not None:
        return _all([_called(match[1], arguments)])
    tokens = [
        ("text", quoted)
        if mark == "" and other == ""
        else ("mark", mark)
        if mark
        else ("bare", other.strip())
        for quoted, mark, other in _GEMMA_TOKEN.findall(match[2])
    ]
    tokens = [(kind, text) for kind, text in tokens if kind != "bare" or text]
    try:
        value, end = _gemma_value(tokens, 0, 0)
    except (ValueError, IndexError):
        return None
    return _all([_called(match[1], value)]) if end == len(tokens) else None


def read_python(body: str, schemas: Schemas) -> list[Call] | None:
    """Python calls with literal arguments: one, a list of them, or one a line; `print(...)` around one is taken off.

    Calls as `read_json` takes them may stand in their place.
    """
    if body.lstrip().startswith(("{", "[{")):
        return read_json(body, schemas)
    if len(body) > _MOST_PYTHON:
        return None
    text = _PYTHON_PART.sub(_escaped, body.strip())
    if text.startswith("[") and not text.endswith("]"):
        text += "]"
    try:
        nodes = ast.parse(text, mode="exec").body
        expressions = [node.value for node in nodes if isinstance(node, ast.Expr)]
        if not nodes or len(expressions) != len(nodes):
            return None
        flat = [
            item for node in expressions for item in (node.elts if isinstance(node, ast.List) else [node])
        ]
        return _all([_python_call(node, schemas) for node in flat]) if flat else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def whole_python(body: str) -> str:
    """A cut body up to the end of its last whole call; JSON, which is read call by call, stays as it is."""
    if body.lstrip().startswith(("{", "[{")):
        return body
    depth, end = -1 if body.lstrip().startswith("[") else 0, 0
    for part in _PYTHON_PART.finditer(body):
        if part["torn"]:
            break
        depth += bool(part["open"]) - bool(part["close"])
        if part["close"] and not depth:
            end = part.end()
    return body[:end]


def _escaped(part: re.Match[str]) -> str:
    """A part of Python whose line breaks within text are escapes, as Python wants outside of triple quotes."""
    return part[0].replace("\r", "\\r").replace("\n", "\\n") if part["text"] else part[0]


def read_arguments(body: str) -> str | None:
    """The arguments of a call whose name stands elsewhere, compact; no text is no arguments."""
    value = _loaded(body) if body.strip() else {}
    call = None if value is None else _called("function", value)
    return call.arguments if call else None


def compact(value: Any) -> str:
    """The JSON text of arguments, without blanks. Raises ValueError for a number that JSON cannot express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _portable(_NUL.sub("\\1\N{REPLACEMENT CHARACTER}", text))


def _portable(text: str) -> str:
    """The text as UTF-8 can carry the text.

    NOTE: a model may write NUL or half of a character as an escape, `"\\ud83d"`, which no message could hold.
    """
    return _UNPORTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _loaded(text: str) -> Any:
    """A JSON value, or None if the text is none. NaN and Infinity are none.

    NOTE: models write line breaks and tabs as they are inside of strings, where JSON wants escapes.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _call_of(value: Any) -> Call | None:
    """A call from an object with a name and arguments, bare or under `function`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    if "arguments" not in value and "parameters" not in value:
        return None
    return _called(value["name"], value.get("arguments", value.get("parameters")))


def _called(name: str, arguments: Any) -> Call | None:
    """A call, whose arguments may be an object, an object in a string, or null for none."""
    if isinstance(arguments, str):
        arguments = _loaded(arguments) if arguments.strip() else {}
        arguments = arguments if isinstance(arguments, dict) else ()
    if arguments is None:
        arguments = {}
    if not name or not isinstance(arguments, dict):
        return None
    try:
        _check(arguments)
        return Call(name=_portable(name), arguments=compact(arguments))
    except (ValueError, RecursionError, OverflowError):
        return None


def _check(arguments: Any) -> None:
    """Raise ValueError for more than `MOST_LEVELS` levels, and OverflowError for an integer beyond doubles."""
    level = [arguments]
    for _ in range(MOST_LEVELS):
        values = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
        sum(float(value) for value in values if isinstance(value, int))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError("nested too deeply")


def _written(name: str, arguments: str) -> Call | None:
    """A call whose arguments are JSON text."""
    value = _loaded(arguments)
    return None if value is None else _called(name, value)


def _all(calls: list[Call | None]) -> list[Call] | None:
    """All calls, or None if one of them is none."""
    whole = [call for call in calls if call is not None]
    return whole if whole and len(whole) == len(calls) else None


def typed_parameter(text: str, schema: Any) -> str:
    """The compact JSON text of a parameter in XML; a value that no later request could bring back stays a text."""
    text = _unframed(text)
    value = _typed(text, schema)
    try:
        _check([value])
        return compact(value)
    except (ValueError, RecursionError, OverflowError):
        return compact(text)


def _unframed(text: str) -> str:
    """A value without the line breaks that stand around it."""
    text = text.removeprefix("\r\n") if text.startswith("\r\n") else text.removeprefix("\n")
    return text.removesuffix("\n")


def _typed(text: str, schema: Any) -> Any:
    """The value of a text for a property of this schema; a text that does not fit stays a text."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    types = declared if isinstance(declared, list) else [declared]
    if "string" in types or declared is None:
        return None if text == "null" and "null" in types else text
    value = _loaded(
        text.strip().lower() if "boolean" in types and text.strip() in ("True", "False") else text
    )
    return text if value is None and text.strip() != "null" else value


def _gemma_value(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a token, and the token after the value."""
    kind, text = tokens[at]
    if depth > _MOST_DEPTH:
        raise ValueError("nested too deeply")
    if kind == "text":
        return text, at + 1
    if kind == "bare":
        value = _loaded(text)
        return (value if value is not None or text == "null" else text), at + 1
    if text == "[":
        return _gemma_list(tokens, at + 1, depth)
    if text == "{":
        return _gemma_object(tokens, at + 1, depth)
    raise ValueError(text)


def _gemma_list(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while tokens[at] != ("mark", "]"):
        value, at = _gemma_value(tokens, at, depth + 1)
        values.append(value)
        at += tokens[at] == ("mark", ",")
    return values, at + 1


def _gemma_object(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while tokens[at] != ("mark", "}"):
        kind, key = tokens[at]
        if kind == "mark" or tokens[at + 1] != ("mark", ":"):
            raise ValueError(key)
        values[key], at = _gemma_value(tokens, at + 2, depth + 1)
        at += tokens[at] == ("mark", ",")
    return values, at + 1


def _python_call(node: ast.expr, schemas: Schemas) -> Call | None:
    """A call with literal arguments; arguments by position get the names of the schema, in its order."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
        return _python_call(node.args[0], schemas)
    properties = schemas.get(name, {}).get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    if len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
        return None
    values = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    values |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return _called(name, json.loads(compact(values)))
