"""Tries grammars in a process of their own, since a hostile grammar can take hours or overflow the stack.

1. `Trial` starts `python -m workers.generation.grammar_trial`, sends the tokenizer once, then grammars one by one.
2. The child compiles a grammar, follows it for a few tokens, and answers with the error of llguidance, or nothing.
3. The child may use `MOST_SECONDS` of processor time and `MOST_NBYTES` of address space for a grammar. The kernel ends
   a child that wants more; the grammar is refused, and the next one gets a new child.

A child ends when its worker does, since its input ends then. Messages are the length in 8 bytes and that many bytes.
"""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ipc.errors import DeadlineExceeded
from ipc.processes import starting as processes
from workers.generation.grammar_formats import plain

MOST_SECONDS = 3
MOST_NBYTES = 4 << 30
STACK_NBYTES = 2 << 20
PATIENCE_S = 30.0
"""How long a worker waits for a child that gets too little processor time."""
LIMITS = LLParserLimits(
    max_items_in_row=5000, max_lexer_states=20_000, step_lexer_fuel=50_000, verbose_errors=False
)
"""Limits of compiling and of each step; the rest are those of llguidance."""
_STEPS = 8
_REASONS: dict[int, str] = {
    signal.SIGXCPU: f"takes more than {MOST_SECONDS} s to compile",
    signal.SIGSEGV: "is nested too deeply",
}
_TOO_LARGE = "needs too much memory to compile"


class Trial:
    """Tries the grammars of one model. Thread-safe."""

    def __init__(self, tokenizer: str, vocabulary: int, end_ids: list[int]) -> None:
        """`tokenizer` is JSON text of the tokenizers library."""
        self._head = [str(MOST_SECONDS), tokenizer, str(vocabulary), ",".join(map(str, end_ids))]
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def error(self, grammar: str) -> str:
        """What is wrong with a grammar; empty for a good one.

        Raises `DeadlineExceeded` if the child gets too little processor time for an answer.
        """
        with self._lock:
            child = self._child or self._started()
            try:
                _write(child.stdin, grammar)
                return _answer(child)
            except TimeoutError:
                self._ended(child)
                raise DeadlineExceeded(f"the grammar was not compiled in {PATIENCE_S:g} s") from None
            except (OSError, EOFError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(PATIENCE_S)
                code = self._ended(child)
                return f"the grammar {_REASONS.get(-code, _TOO_LARGE)}"

    def close(self) -> None:
        """End the process, as the end of this object does."""
        self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            processes.command("workers.generation.grammar_trial"),
            env=processes.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._child, self._end = child, weakref.finalize(self, _stop, child)
        with contextlib.suppress(OSError):
            for part in self._head:
                _write(child.stdin, part)
        return child

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        """The child has ended, or ends now; returns its code."""
        self._end()
        self._child = None
        return child.returncode


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child and close the pipes."""
    if child.poll() is None:
        child.kill()
    child.communicate()


def _answer(child: subprocess.Popen[bytes]) -> str:
    """The next message of the child. Raises `TimeoutError`."""
    assert child.stdout is not None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    if not poll.poll(PATIENCE_S * 1e3):
        raise TimeoutError
    return _read(child.stdout)


def _write(pipe: IO[bytes] | None, text: str) -> None:
    assert pipe is not None
    data = text.encode()
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> str:
    assert pipe is not None
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pipe.read(int.from_bytes(head, "little")).decode()


def error_of(matcher: LLMatcher) -> str:
    """The error of llguidance in plain words; empty if there is none."""
    error = matcher.get_error().partition("\n<backtrace>")[0].removesuffix("<non-verbose/>").strip()
    return plain(error)


def _tried(tokenizer: LLTokenizer, grammar: str) -> str:
    """The error of a grammar when it is compiled, or within the first tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for _ in range(_STEPS):
        if matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            allowed &= ~(1 << end)
        if allowed:
            matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return error_of(matcher)


def _run(source: IO[bytes], sink: IO[bytes]) -> None:
    """Try grammars until the input ends."""
    seconds, text, vocabulary, ends = (_read(source) for _ in range(4))
    tokenizer = LLTokenizer(text, n_vocab=int(vocabulary), eos_token=[int(end) for end in ends.split(",")])
    resource.setrlimit(resource.RLIMIT_AS, (MOST_NBYTES, MOST_NBYTES))
    while True:
        grammar = _read(source)
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime) + 1 + int(seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        _write(sink, _tried(tokenizer, grammar))


def _serve() -> None:
    with contextlib.suppress(EOFError):
        _run(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # NOTE: what fits this stack fits that of any thread of a worker.
    threading.stack_size(STACK_NBYTES)
    served = threading.Thread(target=_serve)
    served.start()
    served.join()
