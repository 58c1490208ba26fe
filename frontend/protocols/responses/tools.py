"""Tools of a request: functions, functions in namespaces, and what is refused or left out.

1. A function of a namespace is known to the model as `namespace.name`. Its calls are told with both parts.
2. A web search that may not reach the internet can find nothing here, so such a tool is left out.
3. All other tools that run on the server are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.generation.errors import InvalidField
from frontend.generation.tools import MAX_FUNCTIONS, Function, function_of, refuse_hosted

NAMESPACE = "namespace"


def functions_of(tools: Sequence[Any] | None) -> list[Function]:
    """All functions of a request. Raises `InvalidField`."""
    _check_number(len(tools or ()), "tools")
    functions = [
        function for index, tool in enumerate(tools or ()) for function in _functions(tool, f"tools[{index}]")
    ]
    _check_number(len(functions), "tools")
    return functions


def _check_number(given: int, field: str) -> None:
    if given > MAX_FUNCTIONS:
        raise InvalidField(field, f"{given} given, the limit is {MAX_FUNCTIONS}")


def _functions(tool: Any, where: str) -> list[Function]:
    if not isinstance(tool, dict):
        raise InvalidField(where, "expected an object")
    kind = tool.get("type")
    if kind == NAMESPACE:
        return _in_namespace(tool, where)
    if kind == "web_search" and tool.get("external_web_access") is False:
        return []
    if kind != "function":
        refuse_hosted(kind, where, {})
    return [function_of(tool, where)]


def _in_namespace(namespace: dict[str, Any], where: str) -> list[Function]:
    name, tools = namespace.get("name"), namespace.get("tools")
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{where}.name", "expected the name of the namespace")
    if not isinstance(tools, list):
        raise InvalidField(f"{where}.tools", "expected a list of functions")
    _check_number(len(tools), f"{where}.tools")
    functions = []
    for index, tool in enumerate(tools):
        place = f"{where}.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidField(f"{place}.type", "a namespace holds functions only")
        inner = tool.get("function", tool)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise InvalidField(f"{place}.name", "expected the name of a function")
        functions.append(function_of({**inner, "name": joined(name, inner["name"])}, place))
    return functions


def joined(namespace: Any, name: str) -> str:
    """The name of a function as the model knows the function."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class Names:
    """Takes names of called functions apart, by the tools of their request."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self._namespaces = {
            joined(tool["name"], (inner.get("function") or inner)["name"]): tool["name"]
            for tool in tools
            if tool.get("type") == NAMESPACE
            for inner in tool["tools"]
        }

    def fields(self, name: str) -> dict[str, str]:
        """`name`, and `namespace` where the function has one."""
        namespace = self._namespaces.get(name)
        if namespace is None:
            return {"name": name}
        return {"name": name[len(namespace) + 1 :], "namespace": namespace}
