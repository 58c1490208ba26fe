"""`penstock chat [MODEL]`: a conversation with a running server in the terminal, over /v1/chat/completions.

1. The server is asked whether the model is there. A name that is none ends the program with the names that are.
   Then each line of standard input is a message; a line that begins with `/` is a command (`_HELP`).
2. The answer is printed as its stream arrives. Reasoning is printed dim on a terminal and left out elsewhere.
3. Ctrl-C ends an answer: the connection is closed, so the server stops, and what has arrived stays in the conversation.
   Ctrl-C ends a command too. At the prompt, Ctrl-C clears the line, and Ctrl-D ends the program.
4. `--image` and `/image` send pictures with the next message, for models that see.
5. With `--agent` the model uses tools of the server (`penstock.agent_chat`).

Exit codes: 0 fine, 1 where no server or no such model is there and when the last message got no answer, 3 for an
address or key that is none.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import agent_chat, target, terminal
from penstock.agent_chat import AgentConversation, ToolScreen
from penstock.conversation import TEXTS, Conversation, NoAnswer, Server, listing

_HELP = (
    "/model NAME and /system TEXT change both, /image FILE sends a picture with the next message, "
    "/reset forgets the conversation, /exit or Ctrl-D ends, "
    "Ctrl-C stops an answer"
)
_LEAST_WRITING_S = 0.1
"""Tokens that all come in a shorter time than this have no rate that says anything about the model."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_parser(commands: Any) -> None:
    """Add `chat` to the subcommands of the command line."""
    parser = commands.add_parser("chat", help="talk to a model of a running server")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="default", type=target.text, help="default: the server's"
    )
    add_arguments(parser)
    parser.add_argument(
        "--agent", action="store_true", help="let the model use tools of the server; asks before each call"
    )
    parser.add_argument("--no-ask", action="store_true", help="with --agent: calls run without asking")
    target.add_arguments(parser)
    terminal.with_examples(
        parser,
        ("chat", "talks to the server's model"),
        ("chat --agent", "the model runs code and commands on the server, each after a question"),
        ("chat my-model --system 'Answer in one sentence.' --temperature 0", "with a message of the system"),
        ("chat --image photo.jpg", "a picture goes with the first message"),
        ("chat < question.txt", "each line of a file is a question"),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how the model should answer."""
    parser.add_argument("--system", metavar="TEXT", help="the message of the system, before all others")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="a picture for the first message; repeatable",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")


def run(options: argparse.Namespace, config: Settings) -> int:
    """Talk until the input ends; returns the exit code. Raises `ConfigError` for wrong flags."""
    check(options)
    if options.no_ask and not options.agent:
        raise ConfigError("chat: --no-ask needs --agent")
    if options.agent and not options.no_ask and not sys.stdin.isatty():
        raise ConfigError(
            "chat: --agent asks before each call and needs a terminal; --no-ask lets calls run without asking"
        )
    server = Server(target.url_of(options, config), target.key_of(options))
    if absence := _absence(server, options.model):
        print(f"penstock: {absence}", file=sys.stderr)
        return 1
    if not options.agent:
        conversation = Conversation(server, options.model, options.system, _fields(options))
        _show(conversation, options.image)
        return _converse(conversation, None)
    asks = not options.no_ask
    conversation = AgentConversation(server, options.model, options.system, _fields(options), asks=asks)
    _show(conversation, options.image)
    try:
        return _converse(conversation, ToolScreen(conversation))
    finally:
        conversation.end()


def check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for a wrong flag of `add_arguments`."""
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"chat: --max-tokens {options.max_tokens}: expected a number from 1")
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise ConfigError(f"chat: --temperature {options.temperature:g}: expected a number from 0")
    for image in options.image:
        if not Path(image).is_file():
            raise ConfigError(f"chat: --image {image}: no such file")


def talk(options: argparse.Namespace, url: str, key: str, model: str, question: str = "") -> int:
    """Talk to a model of the server at `url` until the input ends, or ask one `question`; returns the exit code."""
    conversation = Conversation(Server(url, key), model, options.system, _fields(options))
    _show(conversation, options.image)
    return _answer(conversation, None, question) if question else _converse(conversation, None)


def _show(conversation: Conversation, images: Sequence[str]) -> None:
    """Send pictures with the first message. Raises `ConfigError` for a file that cannot be read."""
    for image in images:
        try:
            conversation.show(Path(image))
        except OSError as error:
            raise ConfigError(f"chat: --image {image}: {error.strerror}") from None


def _absence(server: Server, model: str) -> str:
    """Why the model cannot be asked; empty where nothing is known against the model."""
    try:
        return server.absence(model)
    except NoAnswer as error:
        return str(error)


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    asked = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    return {name: value for name, value in asked.items() if value is not None}


def _converse(conversation: Conversation, screen: ToolScreen | None) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # the line can be edited, and lines before come back
        print(f"{conversation.model} at {conversation.server.url}; {_help(screen)}", file=sys.stderr)
    return _talk(conversation, screen, "> " if interactive else "")


def _help(screen: ToolScreen | None) -> str:
    return _HELP if screen is None else f"{_HELP}, {agent_chat.HELP}"


def _talk(conversation: Conversation, screen: ToolScreen | None, prompt: str) -> int:
    code = 0
    while True:
        try:
            line = input(prompt).strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            if prompt:
                print()
            return code
        if line in ("/exit", "/quit", "/bye"):
            return code
        if line.startswith("/"):
            try:
                _command(line, conversation, screen)
            except KeyboardInterrupt:
                print("stopped", file=sys.stderr)
        elif line:
            code = _answer(conversation, screen, line)


def _command(line: str, conversation: Conversation, screen: ToolScreen | None) -> None:
    """Do what a line that begins with `/` says, and say so."""
    name, _, value = line.partition(" ")
    value = value.strip()
    said = (None if screen is None else screen.command(line)) or _help(screen)
    if name == "/reset":
        conversation.reset()
        said = "the conversation is empty"
    elif name == "/model":
        said = _choose(conversation, value)
    elif name == "/image" and value:
        try:
            said = conversation.show(Path(value).expanduser())
        except OSError as error:
            said = f"{value}: {error.strerror}"
    elif name == "/system":
        conversation.instruct(value)
        said = "the message of the system is set" if value else "there is no message of the system"
    print(said, file=sys.stderr)


def _choose(conversation: Conversation, model: str) -> str:
    """Ask `model` from here on, if the server has such a model; what to say. No name: the models that there are."""
    absence, names = "", None
    if model:
        absence = _absence(conversation.server, model)
    else:
        with contextlib.suppress(NoAnswer):
            names = conversation.server.models()
    if absence:
        return f"{absence}; the model is still {conversation.model}"
    conversation.model = model or conversation.model
    return f"the model is {conversation.model}" + ("" if names is None else f"; {listing(names)}")


def _answer(conversation: Conversation, screen: ToolScreen | None, text: str) -> int:
    shown = _Shown()
    try:
        with contextlib.closing(conversation.ask(text)) as pieces:
            for kind, piece in pieces:
                if kind in TEXTS:
                    shown.add(kind, piece)
                elif screen is not None:
                    shown.end()
                    screen.tell(kind, piece)
    except KeyboardInterrupt:
        shown.end()
        print("stopped", file=sys.stderr)
        return 0
    except NoAnswer as error:
        shown.end()
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    shown.end()
    if sys.stdin.isatty() and sys.stdout.isatty() and (speed := _speed(conversation.usage)):
        print(terminal.styled(speed, "dim", sys.stderr), file=sys.stderr)
    return 0


def _speed(usage: dict[str, Any]) -> str:
    """Tokens, tokens a second and the time to the first token of an answer; empty where the server tells no counts.

    The rate is left out where the tokens behind the first came within `_LEAST_WRITING_S`.
    """
    try:
        tokens, rate, first_s, writing_s = (
            usage["completion_tokens"],
            float(usage["avg_compl_tok_per_sec"]),
            float(usage["total_prompt_time_sec"]),
            float(usage["total_completion_time_sec"]),
        )
    except (KeyError, TypeError, ValueError):
        return ""
    pace = f"{rate:.1f} tokens/s, " if writing_s >= _LEAST_WRITING_S else ""
    return f"{tokens} tokens, {pace}the first after {first_s:.2f} s"


class _Shown:
    """One answer on standard output; reasoning is dim, so a line ends where the kind of text changes."""

    def __init__(self) -> None:
        self._kind = ""
        self._styled = sys.stdout.isatty()

    def add(self, kind: str, piece: str) -> None:
        """Print more text of the answer (`content`) or of its reasoning."""
        if kind == "reasoning_content" and not self._styled:
            return
        if kind != self._kind:
            self.end()
            self._kind = kind
            if kind == "reasoning_content":
                sys.stdout.write(_DIM)
        sys.stdout.write(terminal.harmless(piece) if self._styled else piece)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line, if there is one."""
        if self._kind:
            sys.stdout.write((_PLAIN if self._kind == "reasoning_content" else "") + "\n")
            sys.stdout.flush()
        self._kind = ""
