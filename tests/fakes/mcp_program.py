"""A scripted MCP server: a program on its own, run as `python -c SOURCE`, and the answers for fakes over networks.

The tools do what their names say. `begin` tells that the call has begun, and never answers. `die`, `rubbish`, `huge`
and `flood` break the rules of the protocol.
"""

import json
import os
import sys
from pathlib import Path

WORDS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    "echo",
    "wait",
    "error",
    "fail",
    "env",
    "more",
    "die",
    "rubbish",
    "huge",
    "flood",
    "ask",
    "parts",
    "begin",
    "write",
]


def tool(name: str) -> "dict[str, object]":
    """A tool as servers list tools."""
    return {"name": name, "description": f"Does {name}.", "inputSchema": WORDS}


def said(number: object, text: str, **more: object) -> "dict[str, object]":
    """The answer of a call."""
    return {
        "jsonrpc": "2.0",
        "id": number,
        "result": {"content": [{"type": "text", "text": text}], **more},
    }


class Script:
    """The answers of one connection."""

    def __init__(self) -> None:
        self.tools = list(TOOLS)
        self.heard: list[dict[str, object]] = []

    def answers(self, message: "dict[str, object]") -> "list[object]":
        """Messages and bare texts that answer one message."""
        self.heard.append(message)
        number, method = message.get("id"), message.get("method")
        if method == "initialize":
            result = {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "s"},
            }
            return [{"jsonrpc": "2.0", "id": number, "result": result}]
        if method == "tools/list":
            half = len(self.tools) // 2
            params = message.get("params")
            assert isinstance(params, dict)
            page = self.tools[half:] if params.get("cursor") == "second" else self.tools[:half]
            more = {} if params.get("cursor") == "second" else {"nextCursor": "second"}
            return [{"jsonrpc": "2.0", "id": number, "result": {"tools": list(map(tool, page)), **more}}]
        if method == "tools/call":
            return self.call(number, message["params"])
        if method == "ping":
            return [{"jsonrpc": "2.0", "id": number, "result": {}}]
        return []

    def call(self, number: object, params: object) -> "list[object]":
        """The answer of a call of a tool."""
        assert isinstance(params, dict)
        name, text = params["name"], str(params["arguments"].get("text", ""))
        error = {"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "no such thing"}}
        listed = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        if name in ("more", "begin"):
            self.tools.append("added")
        parts = [
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "of a resource"}},
            {"type": "resource_link", "uri": "file:///b"},
        ]
        found: dict[str, list[object]] = {
            "echo": [said(number, f"you said {text}")],
            "wait": [],
            "error": [said(number, "it went wrong", isError=True)],
            "fail": [error],
            "env": [said(number, json.dumps([dict(os.environ), str(Path.cwd())]))],
            "more": [listed, said(number, "there is more")],
            "begin": [listed],
            "rubbish": ["this is no message"],
            "huge": [said(number, "x" * (5 << 20))],
            "flood": [listed] * 5000,
            "ask": [
                {"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": {}},
                said(number, ""),
            ],
            "parts": [{"jsonrpc": "2.0", "id": number, "result": {"content": parts}}],
        }
        if name == "write":
            Path("written").write_bytes(bytes(int(text)))
            return [said(number, "it is written")]
        if name == "die":
            print("the end is near", file=sys.stderr, flush=True)
            os._exit(3)
        return found[name]


def main() -> None:
    """Serve standard input and output."""
    script = Script()
    for line in sys.stdin:
        for answer in script.answers(json.loads(line)):
            sys.stdout.write((answer if isinstance(answer, str) else json.dumps(answer)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
