"""`penstock chat [MODEL]`: a conversation with a running server in the terminal, over /v1/chat/completions.

1. Each line of standard input is a message; a line that begins with `/` is a command (`_HELP`).
2. The answer is printed as its stream arrives. Reasoning is printed dim on a terminal and left out elsewhere.
3. Ctrl-C ends an answer: the connection is closed, so the server stops, and what has arrived stays in the conversation.
   At the prompt, Ctrl-C clears the line, and Ctrl-D ends the program.

Exit codes: 0 fine, 1 when the last message got no answer, 3 for an address or key that is none.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import target, terminal

_PATH = "/v1/chat/completions"
_SILENCE_S = 120.0
"""A server that works sends a comment every few seconds (`generation.keep_alive_s`)."""
_HELP = (
    "/model NAME and /system TEXT change both, /reset forgets the conversation, /exit or Ctrl-D ends, "
    "Ctrl-C stops an answer"
)
_KINDS = ("reasoning_content", "content")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class NoAnswer(Exception):
    """The server is not there, refused the request, or broke off the stream."""


def add_parser(commands: Any) -> None:
    """Add `chat` to the subcommands of the command line."""
    parser = commands.add_parser("chat", help="talk to a model of a running server")
    parser.add_argument("model", metavar="MODEL", nargs="?", default="default", help="default: the server's")
    add_arguments(parser)
    target.add_arguments(parser)
    terminal.with_examples(
        parser,
        ("chat", "talks to the server's model"),
        ("chat my-model --system 'Answer in one sentence.' --temperature 0", "with a message of the system"),
        ("chat < question.txt", "each line of a file is a question"),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how the model should answer."""
    parser.add_argument("--system", metavar="TEXT", help="the message of the system, before all others")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")


def run(options: argparse.Namespace, config: Settings) -> int:
    """Talk until the input ends; returns the exit code. Raises `ConfigError` for wrong flags."""
    check(options)
    return talk(options, target.url_of(options, config), target.key_of(options), options.model)


def check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for a wrong flag of `add_arguments`."""
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"chat: --max-tokens {options.max_tokens}: expected a number from 1")
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise ConfigError(f"chat: --temperature {options.temperature:g}: expected a number from 0")


def talk(options: argparse.Namespace, url: str, key: str, model: str, question: str = "") -> int:
    """Talk to a model of the server at `url` until the input ends, or ask one `question`; returns the exit code."""
    asked = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    fields = {name: value for name, value in asked.items() if value is not None}
    conversation = Conversation(Server(url, key), model, options.system, fields)
    if question:
        return _answer(conversation, question)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # the line can be edited, and lines before come back
        print(f"{model} at {url}; {_HELP}", file=sys.stderr)
    return _talk(conversation, "> " if interactive else "")


def _talk(conversation: Conversation, prompt: str) -> int:
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
        if line in ("/exit", "/quit"):
            return code
        if line.startswith("/"):
            _command(line, conversation)
        elif line:
            code = _answer(conversation, line)


def _command(line: str, conversation: Conversation) -> None:
    """Do what a line that begins with `/` says, and say so."""
    name, _, value = line.partition(" ")
    value = value.strip()
    said = _HELP
    if name == "/reset":
        conversation.reset()
        said = "the conversation is empty"
    elif name == "/model":
        conversation.model = value or conversation.model
        said = f"the model is {conversation.model}"
    elif name == "/system":
        conversation.instruct(value)
        said = "the message of the system is set" if value else "there is no message of the system"
    print(said, file=sys.stderr)


def _answer(conversation: Conversation, text: str) -> int:
    shown = _Shown()
    try:
        for kind, piece in conversation.ask(text):
            shown.add(kind, piece)
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
    """Tokens, tokens a second and the time to the first token of an answer; empty where the server tells no counts."""
    try:
        tokens, rate, first_s = (
            usage["completion_tokens"],
            float(usage["avg_compl_tok_per_sec"]),
            float(usage["total_prompt_time_sec"]),
        )
    except (KeyError, TypeError, ValueError):
        return ""
    return f"{tokens} tokens, {rate:.1f} tokens/s, the first after {first_s:.2f} s"


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


class Server:
    """The address of a server, and one request at a time to it."""

    def __init__(self, url: str, key: str) -> None:
        """`url` and `key` as `target` gives them."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self.url, self._tls, self._prefix = url, parts.scheme == "https", parts.path
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @contextlib.contextmanager
    def posted(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """The response to a request; leaving the context closes the connection. Raises `NoAnswer`."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_SILENCE_S)
        try:
            connection.request("POST", self._prefix + _PATH, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise NoAnswer(
                    target.message_of(response.read())
                    or target.redirection(response.status, response.getheader("Location"))
                    or f"{response.status} {terminal.one_line(response.reason)}"
                )
            yield response
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or terminal.one_line(str(error)) or type(error).__name__
            raise NoAnswer(f"no answer from {self.url}: {why}; is a server running there?") from error
        finally:
            connection.close()


class Conversation:
    """The messages so far. A message without any answer is forgotten, so that it can be sent again.

    `usage` are the counts and times of the last answer, as far as the server tells them.
    """

    def __init__(self, server: Server, model: str, system: str | None, fields: dict[str, Any]) -> None:
        self._server, self.model = server, model
        self._fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        self._system: list[dict[str, str]] = []
        self._said: list[dict[str, str]] = []
        self.usage: dict[str, Any] = {}
        self.instruct(system or "")

    def instruct(self, text: str) -> None:
        """Replace the message of the system; no text: there is none."""
        self._system = [{"role": "system", "content": text}] if text else []

    def reset(self) -> None:
        """Forget all messages but that of the system."""
        self._said = []

    def ask(self, text: str) -> Iterator[tuple[str, str]]:
        """Send a message; gives the pieces of the answer: (`content` or `reasoning_content`, text).

        What has arrived is part of the conversation even if the caller stops. Raises `NoAnswer`.
        """
        said, answer = [*self._said, {"role": "user", "content": text}], ""
        self.usage = {}
        body = {**self._fields, "model": self.model, "messages": [*self._system, *said]}
        try:
            with self._server.posted(body) as response:
                for kind, piece in _pieces(response, self.usage):
                    answer += piece if kind == "content" else ""
                    yield kind, piece
        finally:
            if answer:
                self._said = [*said, {"role": "assistant", "content": answer}]


def _pieces(response: http.client.HTTPResponse, usage: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts of a stream of chunks; the counts go into `usage`.

    Raises `NoAnswer` for an error event, and for a stream without its end.
    """
    for line in response:
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        if field != b"data":
            continue
        value = value.strip()
        if value == b"[DONE]":
            return
        try:
            chunk = json.loads(value)
            failed = chunk.get("error")
            deltas = [] if failed else [choice["delta"] for choice in chunk["choices"]]
            pieces = [(kind, str(delta[kind])) for delta in deltas for kind in _KINDS if delta.get(kind)]
            usage |= chunk.get("usage") or {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise NoAnswer("the stream cannot be read: this is no server of chat completions") from None
        if failed:
            raise NoAnswer(target.message_of(value) or "the answer failed, and the server did not say why")
        yield from pieces
    raise NoAnswer("the stream ended before the answer did")
