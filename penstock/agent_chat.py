"""`penstock chat --agent`: a conversation whose model uses tools of the server.

1. Each request asks for Python, a shell and a web search. What the server does not offer is left out from then on.
2. Rounds and tools are told on standard error as they begin and end. Before each call the terminal asks whether the
   call may run, unless `--no-ask`: y, n with a reason for the model, or always, for the rest of the session.
3. Files that tools make are listed; `/save` fetches them into the working directory.
4. The session has an id of our own. The end of the conversation, and `/reset`, delete the session at the server, so
   that its interpreter and work directory end. An answer that is broken off ends its run: no later call begins.
"""

from __future__ import annotations

import json
import sys
import termios
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from penstock import terminal
from penstock.conversation import Conversation, NoAnswer, Refused, Server

HELP = "/files lists files of tools, /save NUMBER [PATH] fetches one, /save all new ones"
_FEATURES: dict[str, dict[str, Any]] = {
    "tools": {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    "enable_shell": {"enable_shell": True},
    "web_search_options": {"web_search_options": {}},
}
"""What a request asks for, by the field that a refusal names."""
_OTHERS = "max_tool_rounds"
_MOST_ROUNDS = 256
"""What a request asks for where none of the above is offered: tools of MCP servers join by themselves."""
_REFUSED = 422
_GONE = 404
MOST_LINES = 12
"""Lines of the output of a tool that are shown."""
_ALWAYS = ("a", "always")
_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, **dict.fromkeys(_ALWAYS, True)}


class AgentConversation(Conversation):
    """A conversation with a session at the server. `files` are those that tools have made, in their order."""

    def __init__(
        self, server: Server, model: str, system: str | None, fields: dict[str, Any], *, asks: bool
    ) -> None:
        """`asks`: whether each call waits for a decision."""
        super().__init__(server, model, system, fields)
        self._features = dict(_FEATURES)
        self._permission = "ask" if asks else "auto"
        self._session = _new_session()
        self._is_begun = False
        self.files: list[dict[str, Any]] = []

    def fields(self) -> dict[str, Any]:
        """As the base, with the session and the tools that are left."""
        body = {**super().fields(), "session_id": self._session, "agent_permission": self._permission}
        for fields in self._features.values():
            body |= fields
        return body if self._features else {**body, _OTHERS: _MOST_ROUNDS}

    def ask(self, text: str) -> Generator[tuple[str, Any], None, None]:
        """As the base. A tool that the server does not offer is left out, and the message is sent again."""
        self._is_begun = True
        while True:
            try:
                yield from super().ask(text)
                return
            except Refused as error:
                feature = error.field.partition("[")[0]
                if error.status == _REFUSED and feature == _OTHERS:
                    raise NoAnswer("this server runs no tools: start the server with --agent") from None
                if error.status != _REFUSED or feature not in self._features:
                    raise
                del self._features[feature]

    def reset(self) -> None:
        """As the base; the next message begins another session."""
        super().reset()
        self.end()
        self._session, self.files = _new_session(), []

    def end(self) -> None:
        """End the session at the server. A server that is away ends the session by itself later."""
        if not self._is_begun:
            return
        self._is_begun = False
        try:
            with self.server.asked("DELETE", f"/v1/sessions/{self._session}"):
                pass
        except NoAnswer as error:
            print(f"penstock: the session ends later: {error}", file=sys.stderr)

    def decide(self, id_: str, *, approves: bool, always: bool, reason: str) -> bool:
        """Decide about a call; false where nobody waits any more. Raises `NoAnswer`."""
        body: dict[str, Any] = {"decision": "approve" if approves else "deny", "remember_for_session": always}
        if reason:
            body["message"] = reason
        try:
            with self.server.asked("POST", f"/v1/agent/approvals/{quote(id_, safe='')}", body):
                return True
        except Refused as error:
            if error.status != _GONE:
                raise
            return False

    def fetch(self, id_: str, path: Path) -> int:
        """Write a file to `path`, which must not be there; its bytes. Raises `NoAnswer` and `OSError`."""
        with self.server.asked("GET", f"/v1/files/{quote(id_, safe='')}/content") as response:
            content = response.read()
        with path.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except (OSError, KeyboardInterrupt):
                path.unlink()
                raise
        return len(content)


def _new_session() -> str:
    return f"chat-{uuid4()}"


class ToolScreen:
    """What runs with tools say and ask on the terminal. Texts of others obey no terminal."""

    def __init__(self, conversation: AgentConversation) -> None:
        self._conversation = conversation
        self._saved = set[str]()
        """Ids of files that were saved."""

    def tell(self, name: str, event: dict[str, Any]) -> None:
        """A named event of the stream; an event of another name says nothing. Raises `NoAnswer`."""
        if name == "agentic_tool_call_progress":
            self._progress(event)
        elif name == "agentic_tool_approval_required":
            self._decide(event)
        elif name == "file_produced":
            self._produced(event)

    def _progress(self, event: dict[str, Any]) -> None:
        data = _object(event.get("data"))
        head = f"round {_whole(event.get('round')) + 1}, {_shown(event.get('tool_name'))}"
        if event.get("phase") == "calling":
            _say(f"{head}: {terminal.one_line(_given(data))}"[:200])
            return
        _say(f"{head}: {_outcome(data)}")
        lines = [
            line for part in ("stdout", "stderr", "content") for line in _shown(data.get(part)).splitlines()
        ]
        for line in lines[:MOST_LINES]:
            _say(f"  {line}")
        if len(lines) > MOST_LINES:
            _say(f"  {len(lines) - MOST_LINES} more lines")

    def _produced(self, file: dict[str, Any]) -> None:
        if "code" in file:
            _say(f"file {_shown(file.get('name'))}: {_shown(file.get('message'))}")
            return
        self._conversation.files.append(file)
        _say(f"file {self._line(len(self._conversation.files))}")

    def _line(self, number: int) -> str:
        file = self._conversation.files[number - 1]
        return f"{number}: {_shown(file.get('name'))}, {terminal.size(_whole(file.get('bytes')))}"

    def _decide(self, event: dict[str, Any]) -> None:
        """Ask, and send the decision. Raises `NoAnswer`."""
        label = terminal.one_line(_shown(_object(event.get("tool")).get("label")))
        print(f"\n{label} wants to run:", file=sys.stderr)
        text = _whole_call(event.get("arguments"))
        print("\n".join(f"  {line}" for line in text.splitlines()), file=sys.stderr)
        approves, always, reason = self._asked()
        sent = self._conversation.decide(
            str(event.get("approval_id")), approves=approves, always=always, reason=reason
        )
        if not sent:
            _say("the decision comes too late: the call was denied or has ended")

    def _asked(self) -> tuple[bool, bool, str]:
        """Whether the call may run, whether all later calls may, and the reason of a denial. No answer denies."""
        if sys.stdin.isatty():
            # What was typed before the question answers no question.
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        try:
            while (given := input("May it run? yes, no, always: ").strip().lower()) not in _ANSWERS:
                print("Type y, n or a.", file=sys.stderr)
            approves = _ANSWERS[given]
            reason = "" if approves else input("Reason for the model (may be empty): ").strip()
        except EOFError:
            return False, False, ""
        return approves, given in _ALWAYS, reason

    def command(self, line: str) -> str | None:
        """Do what `/files` and `/save` say; what to print, None for another command."""
        words = line.split(maxsplit=2)
        if words[0] == "/files":
            numbers = range(1, len(self._conversation.files) + 1)
            return "\n".join(map(self._line, numbers)) or "no tool has made a file"
        if words[0] != "/save":
            return None
        files = self._conversation.files
        if len(words) == 1:
            fresh = [number for number, file in enumerate(files, 1) if file.get("id") not in self._saved]
            return "\n".join(self._save(number, None) for number in fresh) or "there is no new file"
        if not words[1].isascii() or not words[1].isdigit() or not 1 <= int(words[1]) <= len(files):
            return f"expected /save NUMBER [PATH] with a number from 1 to {len(files)}, see /files"
        return self._save(int(words[1]), Path(words[2]).expanduser() if len(words) > 2 else None)

    def _save(self, number: int, path: Path | None) -> str:
        file = self._conversation.files[number - 1]
        id_, place = str(file.get("id")), path or Path(_base_name(file.get("name")) or f"file-{number}")
        try:
            nbytes = self._conversation.fetch(id_, place)
        except NoAnswer as error:
            return f"file {number} was not saved: {error}"
        except OSError as error:
            hint = "; name another path behind the number" if isinstance(error, FileExistsError) else ""
            return f"file {number} was not saved: {place}: {error.strerror}{hint}"
        self._saved.add(id_)
        return f"saved {place}, {terminal.size(nbytes)}"


def _say(text: str) -> None:
    print(terminal.styled(terminal.harmless(text), "dim", sys.stderr), file=sys.stderr)


def _base_name(name: Any) -> str:
    """The last part of a name that the server tells, without what moves a terminal or leaves the directory.

    Dots at the beginning go: a file such as `.profile` would be hidden, and programs would obey the file.
    """
    return PurePosixPath(terminal.one_line(_shown(name)).replace("\\", "/")).name.lstrip(".")


def _whole_call(arguments: Any) -> str:
    """All arguments of a call, for a decision: one text, or lines of a list, as they are; else each with its name."""
    if not isinstance(arguments, dict):
        return _shown(arguments)
    if len(arguments) == 1 and (text := _text_of(*arguments.values())) is not None:
        return text
    return "\n".join(
        f"{terminal.one_line(name)}:\n{_text_of(value) or json.dumps(value)}"
        for name, value in arguments.items()
    )


def _text_of(value: Any) -> str | None:
    """A text, or the lines of a list of texts; None for another value."""
    texts = value if isinstance(value, list) else [value]
    return "\n".join(map(_shown, texts)) if texts and all(isinstance(text, str) for text in texts) else None


def _given(data: dict[str, Any]) -> str:
    """Arguments of a call on one line, as progress tells them."""
    values = [value for name, value in data.items() if name not in ("tool_type", "outputs")]
    lines = [line for value in values for line in (value if isinstance(value, list) else [value])]
    return "\n".join(_shown(line) for line in lines)


def _outcome(data: dict[str, Any]) -> str:
    """How a call has ended, in few words."""
    if exception := _shown(data.get("exception")).strip():
        return terminal.one_line(exception.splitlines()[-1])[:200]
    if data.get("timed_out"):
        return "took too long"
    if data.get("exit_code"):
        return f"exit code {_shown(data['exit_code'])}"
    if data.get("status") in ("denied", "error"):
        return _shown(data["status"])
    took = data.get("execution_time_ms")
    return f"done in {took / 1000:.2f} s" if isinstance(took, int | float) else "done"


def _shown(value: Any) -> str:
    return "" if value is None else terminal.harmless(value if isinstance(value, str) else str(value))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
