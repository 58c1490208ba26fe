"""The tools of this server: names, schemas, labels, and what a call of each is given.

1. A request is offered the tools of its features (`CODE`, `SHELL`, `FILES`), each as a strict function.
2. `arguments_of` reads the arguments of a call. Arguments that break the schema are an error that the model reads.
3. `calling` is the data of the progress event before a call, `recorded` the arguments of the call's record.

The names begin with `PREFIX`, which no function of a client may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from frontend.generation.conversation import Function
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import CODE, FILES, SHELL, AgentPlan
from frontend.http.fields import mismatch_of
from ipc.errors import InvalidInput

PREFIX = "mistralrs_"
MAX_OUTPUTS = 64
MAX_COMMANDS = 256
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


Arguments = NoArguments | PythonArguments | ShellArguments | SurfaceArguments | ReadArguments


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `tool_type` stands in progress events, `kind` and `label` in requests for approval."""

    name: str
    feature: str
    tool_type: str
    kind: str
    label: str
    description: str
    properties: dict[str, Any]
    required: list[str]
    arguments: type[Arguments]

    @property
    def approval(self) -> dict[str, str]:
        """The tool as a request for approval names the tool."""
        return {"source": "built_in", "kind": self.kind, "label": self.label}


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
        Tool(
            f"{PREFIX}execute_python",
            CODE,
            "code_execution",
            "code_execution",
            "Python code",
            "Run Python code in an interpreter that keeps its variables between calls. Print what you want to read. "
            "Files that the code writes into its work directory go to the user.",
            {"code": {"type": "string", "description": "The code."}, "outputs": _OUTPUTS},
            ["code"],
            PythonArguments,
        ),
        Tool(
            f"{PREFIX}reset_python_session",
            CODE,
            "code_execution",
            "code_execution",
            "Python code",
            "Begin with a new Python interpreter without variables. Files stay.",
            {},
            [],
            NoArguments,
        ),
        Tool(
            f"{PREFIX}shell",
            SHELL,
            "shell",
            "shell",
            "Shell command",
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
        Tool(
            f"{PREFIX}surface_outputs",
            SHELL,
            "custom",
            "file",
            "File outputs",
            "Give files of the work directory to the user, also those of earlier calls.",
            {"outputs": {**_OUTPUTS, "minItems": 1}},
            ["outputs"],
            SurfaceArguments,
        ),
        Tool(
            f"{PREFIX}read_file",
            FILES,
            "custom",
            "file",
            "File access",
            f"Read text of a file by its id, at most {MAX_SLICE} characters at once.",
            {
                "file_id": {"type": "string"},
                "start": {**_WHOLE, "description": "First character."},
                "end": {**_WHOLE, "description": "Character behind the last."},
            },
            ["file_id"],
            ReadArguments,
        ),
        Tool(
            f"{PREFIX}list_files",
            FILES,
            "custom",
            "file",
            "File access",
            "List the files of this conversation.",
            {},
            [],
            NoArguments,
        ),
    )
}
EXECUTE, RESET, SHELL_TOOL, SURFACE, READ, LIST = TOOLS
"""The names."""


def names_of(plan: AgentPlan) -> set[str]:
    """The tools that run for a request. Whoever may run or bring files may read files."""
    wanted = {*plan.features, FILES} if plan.features else set()
    return {tool.name for tool in TOOLS.values() if tool.feature in wanted}


def with_own(functions: Sequence[Function], plan: AgentPlan | None) -> list[Function]:
    """The functions of a client, and the tools of its plan. Raises `InvalidField` for a client's function of our name.

    Descriptions name the files that the request asks for.
    """
    for function in functions:
        if function.name in TOOLS:
            raise InvalidField("tools", f"{function.name!a} is the name of a tool of this server")
    names = set() if plan is None else names_of(plan)
    requested = () if plan is None else plan.requested
    return [*functions, *(_function(tool, requested) for tool in TOOLS.values() if tool.name in names)]


def _function(tool: Tool, requested: Sequence[dict[str, Any]]) -> Function:
    text = tool.description
    if requested and tool.name in (EXECUTE, SHELL_TOOL):
        names = ", ".join(_named(each) for each in requested)
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


def arguments_of(tool: Tool, text: str) -> Arguments:
    """The arguments of a call. Raises `InvalidInput` with a text for the model."""
    try:
        return msgspec.json.decode(text or "{}", type=tool.arguments)
    except msgspec.ValidationError as error:
        raise InvalidInput(mismatch_of(error, tool.arguments).replace("`", "")) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the arguments are no JSON: {str(error)[:200]}") from None


def values_of(text: str) -> Any:
    """The JSON value of arguments, or their text where they are no JSON."""
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text


def values_of_outputs(given: SurfaceArguments) -> Any:
    """The arguments of a call for files, as JSON values."""
    return {"outputs": msgspec.to_builtins(given.outputs)}


def calling(tool: Tool, text: str) -> dict[str, Any]:
    """Data of the progress event before a call with these arguments."""
    values = values_of(text)
    given = values if isinstance(values, dict) else {}
    data: dict[str, Any] = {"tool_type": tool.tool_type}
    if tool.tool_type == "custom":
        data["arguments"] = values
        return data
    name = "commands" if tool.tool_type == "shell" else "code"
    return {**data, name: given[name]} if name in given else data


def recorded(tool: Tool, text: str) -> str:
    """JSON text of the arguments for the record of a call."""
    data = {name: value for name, value in calling(tool, text).items() if name != "tool_type"}
    if tool.tool_type == "custom" or not data:
        return text
    return orjson.dumps(data).decode()
