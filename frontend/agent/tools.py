"""The tools of this server: names, schemas, labels, and what a call of each is given.

1. A request is offered the tools of its features (`CODE`, `SHELL`, `SEARCH`, `FILES`), each as a strict function.
2. `tools_of` says which tools run here for a request: built-in ones, and those of other programs (`outside.py`).
3. `arguments_of` reads the arguments of a call. Arguments that break the schema are an error that the model reads.
4. `calling` is the data of the progress event before a call, `recorded` the arguments of the call's record.

The names begin with `PREFIX`, which no function of a client may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from frontend.generation.conversation import Function
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import CODE, FILES, SEARCH, SHELL, AgentPlan
from frontend.generation.nested import check_depth
from frontend.http.fields import mismatch_of
from ipc.errors import InvalidInput
from ipc.wire.tools import RemoteTool

PREFIX = "mistralrs_"
BUILT_IN, EXTERNAL, MCP = "built_in", "external", "mcp"
"""Sources of tools: this server, the operator's dispatch URL, MCP servers."""
MAX_OUTPUTS = 64
MAX_COMMANDS = 256
MAX_QUERY_CHARS, MAX_URL_CHARS = 1024, 4096
MAX_USES = "max_uses_exceeded"
"""Why a search beyond `max_uses` of its request does not run: the code of Anthropic."""
MAX_SLICE = 65536
"""Characters that one read of a file gives."""
MOST = (1 << 31) - 1


class Output(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A file that the call is expected to leave."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    format: Annotated[str, Meta(max_length=64)] | None = None


Outputs = Annotated[list[Output], Meta(max_length=MAX_OUTPUTS)]


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing."""


class PythonArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Code for the interpreter of the session."""

    code: str
    outputs: Outputs | None = None


class ShellArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Commands for one shell, one on each line."""

    commands: Annotated[list[str], Meta(min_length=1, max_length=MAX_COMMANDS)]
    outputs: Outputs | None = None
    timeout_ms: Annotated[int, Meta(gt=0, le=MOST)] | None = None
    max_output_length: Annotated[int, Meta(gt=0, le=MOST)] | None = None


class SurfaceArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Files of the work directory that become files of the answer."""

    outputs: Annotated[list[Output], Meta(min_length=1, max_length=MAX_OUTPUTS)]


class ReadArguments(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a file, from character `start` to before character `end`."""

    file_id: str
    start: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    end: Annotated[int, Meta(ge=0, le=MOST)] | None = None


class SearchArguments(msgspec.Struct, forbid_unknown_fields=True):
    """What to search the web for."""

    query: Annotated[str, Meta(min_length=1, max_length=MAX_QUERY_CHARS)]


class ExtractArguments(msgspec.Struct, forbid_unknown_fields=True):
    """The page whose text is wanted."""

    url: Annotated[str, Meta(min_length=1, max_length=MAX_URL_CHARS)]


OfFiles = PythonArguments | ShellArguments | SurfaceArguments
"""Arguments of calls that may make files."""
Arguments = NoArguments | OfFiles | ReadArguments | SearchArguments | ExtractArguments


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `tool_type` stands in progress events; `source`, `kind` and `label` in requests for approval.

    `server` is the name of the tool's MCP server.
    """

    name: str
    tool_type: str
    kind: str
    label: str
    source: str = field(default=BUILT_IN, kw_only=True)
    server: str = field(default="", kw_only=True)

    @property
    def approval(self) -> dict[str, str]:
        """The tool as a request for approval names the tool."""
        return {"source": self.source, "kind": self.kind, "label": self.label}

    @property
    def metric(self) -> str:
        """The tool as metrics name the tool: names of other programs are no labels."""
        return self.name if self.source == BUILT_IN else self.source


@dataclass(frozen=True, slots=True)
class BuiltIn(Tool):
    """A tool of this server, for requests with `feature`; `properties` and `required` are of its JSON schema."""

    feature: str
    description: str
    properties: dict[str, Any]
    required: list[str]
    arguments: type[Arguments]


_OUTPUT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "Path of the file below the work directory."},
        "format": {"type": "string", "description": "Format, such as csv or png."},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_OUTPUTS = {"type": "array", "items": _OUTPUT, "description": "Files that the user should get."}
_WHOLE = {"type": "integer", "minimum": 0}
TOOLS = {
    tool.name: tool
    for tool in (
        BuiltIn(
            f"{PREFIX}execute_python",
            "code_execution",
            "code_execution",
            "Python code",
            CODE,
            "Run Python code in an interpreter that keeps its variables between calls. Print what you want to read. "
            "Files that the code writes into its work directory go to the user.",
            {"code": {"type": "string", "description": "The code."}, "outputs": _OUTPUTS},
            ["code"],
            PythonArguments,
        ),
        BuiltIn(
            f"{PREFIX}reset_python_session",
            "code_execution",
            "code_execution",
            "Python code",
            CODE,
            "Begin with a new Python interpreter without variables. Files stay.",
            {},
            [],
            NoArguments,
        ),
        BuiltIn(
            f"{PREFIX}shell",
            "shell",
            "shell",
            "Shell command",
            SHELL,
            "Run commands in a shell, one after another, in the work directory. Files that they write go to the user.",
            {
                "commands": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "outputs": _OUTPUTS,
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Longest time in milliseconds.",
                },
                "max_output_length": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Most characters of each output stream.",
                },
            },
            ["commands"],
            ShellArguments,
        ),
        BuiltIn(
            f"{PREFIX}surface_outputs",
            "custom",
            "file",
            "File outputs",
            SHELL,
            "Give files of the work directory to the user, also those of earlier calls.",
            {"outputs": {**_OUTPUTS, "minItems": 1}},
            ["outputs"],
            SurfaceArguments,
        ),
        BuiltIn(
            f"{PREFIX}read_file",
            "custom",
            "file",
            "File access",
            FILES,
            f"Read text of a file by its id, at most {MAX_SLICE} characters at once.",
            {
                "file_id": {"type": "string"},
                "start": {**_WHOLE, "description": "First character."},
                "end": {**_WHOLE, "description": "Character behind the last."},
            },
            ["file_id"],
            ReadArguments,
        ),
        BuiltIn(
            f"{PREFIX}list_files",
            "custom",
            "file",
            "File access",
            FILES,
            "List the files of this conversation.",
            {},
            [],
            NoArguments,
        ),
        BuiltIn(
            f"{PREFIX}search_the_web",
            "web_search",
            "web_search",
            "Web search",
            SEARCH,
            "Search the web. Use this where an answer needs facts that are recent, or that you do not know.",
            {"query": {"type": "string", "description": "What to search for."}},
            ["query"],
            SearchArguments,
        ),
        BuiltIn(
            f"{PREFIX}website_content_extractor",
            "web_search",
            "web_search",
            "Web page extraction",
            SEARCH,
            "Read the text of a web page, such as one that a search has found.",
            {"url": {"type": "string", "description": "URL of the page, with http or https."}},
            ["url"],
            ExtractArguments,
        ),
    )
}
EXECUTE, RESET, SHELL_TOOL, SURFACE, READ, LIST, SEARCH_TOOL, EXTRACT = TOOLS
"""The names."""


def tools_of(plan: AgentPlan) -> dict[str, Tool]:
    """The tools that run here for a request, by their names."""
    by_name: dict[str, Tool] = {tool.name: tool for tool in _built_in(plan)}
    by_name |= {name: Tool(name, "custom", EXTERNAL, name, source=EXTERNAL) for name in plan.dispatched}
    remote = plan.offer.remote.values()
    return by_name | {
        each.name: Tool(each.name, "custom", "custom", each.name, source=MCP, server=each.server)
        for each in remote
    }


def _built_in(plan: AgentPlan) -> list[BuiltIn]:
    """The tools of the features of a request. Whoever may run or bring files may read files."""
    features = {*plan.features, FILES} if plan.features - {SEARCH} else plan.features
    return [tool for tool in TOOLS.values() if tool.feature in features]


def with_own(functions: Sequence[Function], plan: AgentPlan | None) -> list[Function]:
    """The functions of a client, and the tools of its plan. Raises `InvalidField` for a client's function of our name.

    Descriptions name the files that the request asks for, and what the request says of searches.
    """
    remote = {} if plan is None else plan.offer.remote
    for function in functions:
        if function.name in TOOLS or function.name in remote:
            raise InvalidField("tools", f"{function.name!a} is the name of a tool of this server")
    if plan is None:
        return [*functions]
    own = (_function(tool, plan) for tool in _built_in(plan))
    return [*functions, *own, *map(_remote_function, remote.values())]


def _remote_function(tool: RemoteTool) -> Function:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return Function(tool.name, {"type": "function", "function": function}, tool.strict)


def _function(tool: BuiltIn, plan: AgentPlan) -> Function:
    text = tool.description
    if plan.search is not None and tool.name == SEARCH_TOOL:
        text = plan.search.search_description or text
        text = f"{text} The user is in: {plan.search.location}." if plan.search.location else text
    elif plan.search is not None and tool.name == EXTRACT:
        text = plan.search.extract_description or text
    elif plan.requested and tool.name in (EXECUTE, SHELL_TOOL):
        names = ", ".join(_named(each) for each in plan.requested)
        text = f"{text} The user expects these files: {names}."
    schema = {
        "type": "object",
        "properties": tool.properties,
        "required": tool.required,
        "additionalProperties": False,
    }
    function = {"name": tool.name, "description": text, "parameters": schema}
    return Function(tool.name, {"type": "function", "function": function}, True)


def _named(requested: dict[str, Any]) -> str:
    hint = requested.get("description")
    return f"{requested['name']} ({hint})" if hint else str(requested["name"])


def arguments_of(tool: BuiltIn, text: str) -> Arguments:
    """The arguments of a call. Raises `InvalidInput` with a text for the model."""
    try:
        return msgspec.json.decode(text or "{}", type=tool.arguments)
    except msgspec.ValidationError as error:
        raise InvalidInput(mismatch_of(error, tool.arguments).replace("`", "")) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the arguments are no JSON: {str(error)[:200]}") from None


def values_of(text: str) -> Any:
    """The JSON value of arguments, or their text where they are no JSON, or JSON of too many levels for an event."""
    try:
        value = orjson.loads(text or "{}")
        check_depth(value, "arguments")
    except (orjson.JSONDecodeError, InvalidField):
        return text
    return value


def values_of_outputs(given: SurfaceArguments) -> Any:
    """The arguments of a call for files, as JSON values."""
    return {"outputs": msgspec.to_builtins(given.outputs)}


_TOLD = {"code_execution": ("code",), "shell": ("commands",), "web_search": ("query", "url")}
"""Arguments that progress events tell."""


def calling(tool: Tool, text: str) -> dict[str, Any]:
    """Data of the progress event before a call with these arguments."""
    values = values_of(text)
    given = values if isinstance(values, dict) else {}
    data: dict[str, Any] = {"tool_type": tool.tool_type}
    if tool.tool_type == "custom":
        data["arguments"] = values
        return data
    return data | {name: given[name] for name in _TOLD[tool.tool_type] if name in given}


def recorded(tool: Tool, text: str) -> str:
    """JSON text of the arguments for the record of a call."""
    data = {name: value for name, value in calling(tool, text).items() if name != "tool_type"}
    if tool.tool_type == "custom" or not data:
        return text
    return orjson.dumps(data).decode()
