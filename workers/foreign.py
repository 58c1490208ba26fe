"""What code of models may raise, and what a boundary of the worker makes of that.

Code of models is foreign: Python models, adapters of packages, code of repositories, tokenizers, processors, and the
libraries under all of these. A library ends the process by `SystemExit`, Rust panics, a generator is closed too often.
None of that says anything about this process.

1. A boundary is the place where one request, one batch, one step or one load ends. A boundary catches `BaseException`
   and goes on with `error_of` what was raised: always an `Exception` whose text can be read.
2. A `PenstockError` stays what the error is, so that a model can refuse an input in its own words. Errors that tell a
   frontend what to do with a worker, and errors that cannot be told, do not.
3. Filters that make errors of warnings hold for the whole process, other models included. They are taken back.

What ends the process all the same comes from the operating system, or from a bug of the worker.

Words of foreign code leave the worker as follows:

- `line_of` is one line for clients: without directories, secrets, addresses in memory and control characters, and
  bounded. Of a traceback of TorchScript the line is the last one. Of onnxruntime the line is the operator and the
  innermost reason.
- `is_refusal` tells whether a program refuses its input. Python says so by ValueError and IndexError, onnxruntime by
  INVALID_ARGUMENT. Every runtime complains about shapes and indices with words of its own.
- `answer_of` is the error that a request is answered with. A refusal is told to the client. Other errors of runtimes
  are told too, and those of Python code are not: their words may be about anything.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ipc.errors import (
    Draining,
    InferenceFailed,
    InvalidInput,
    LoraLoading,
    ModelLoading,
    ModelNotLoaded,
    PenstockError,
    QueueFull,
    WorkerLost,
)
from ipc.wire import codec
from ipc.wire.messages import Failure

log = logging.getLogger(__name__)

T = TypeVar("T")

_STEERING = (Draining, LoraLoading, ModelLoading, ModelNotLoaded, QueueFull, WorkerLost)
"""Errors on which a frontend takes requests to another worker (`frontend.engine.local.retry`)."""
_own_filters = list(warnings.filters)
MOST_CHARACTERS = 300
_REFUSING = ("ValueError", "IndexError", "InvalidArgument", "InvalidArgumentError")
"""Classes of errors about an input; the last two are those of onnxruntime and TensorFlow."""
_RAISED_BY_SCRIPT = re.compile(r"(?:RuntimeError: )?(?:builtins\.)?(ValueError|IndexError|AssertionError): ")
"""What a program of TorchScript raises on purpose, which can come from its input only."""
_SCRIPT = "TorchScript interpreter"
_CLASSES = re.compile(r"^((builtins\.)?\w+Error: )+")
_ABOUT_INPUT = re.compile(
    r"\b(shapes?|sizes?|dims?|dimension(s|al)?|broadcast|axis|sto(d|f|i|ll?))\b|out of (data )?(range|bounds)",
    re.IGNORECASE,
)
"""Words about shapes, indices, and texts that are no numbers (`std::stod`), in errors of any class."""
_RUNTIME = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'.*?' Status Message: ")
_PLACE = re.compile(r"^\S+\.\w+:\d+ (?:.*? was false\. )?")
"""Place and condition in the code of onnxruntime."""
_SECRET = re.compile(r"(?<=://)[^/@\s]+@|\bhf_\w{8,}")
"""Names and passwords in addresses, and tokens of the hub."""
_PATH = re.compile(r"(?<![\w:/])/(?:[\w.+@~-]+/)+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class ForeignError(Exception):
    """Stands for what foreign code raised and nobody else could handle; the raised object is the cause."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(f"code of the model raised {type(raised).__name__}: {text_of(raised)}".rstrip(": "))
        self.__cause__ = raised


class TurnEnded(BaseException):
    """The worker ends a batch that has made way for others; passes through code of models and all boundaries."""


def error_of(raised: BaseException) -> Exception:
    """The error that a boundary goes on with. Raises `raised` where the worker itself raised it through the model."""
    if isinstance(raised, TurnEnded) or (isinstance(raised, KeyboardInterrupt) and _may_interrupt()):
        raise raised
    settle_warnings()
    if isinstance(raised, PenstockError):
        return _sayable(raised)
    return raised if isinstance(raised, Exception) and _is_readable(raised) else ForeignError(raised)


def ask(question: Callable[..., T], *arguments: Any) -> T:
    """What a function of foreign code answers. Raises `error_of` what the function raised."""
    try:
        return question(*arguments)
    except BaseException as raised:
        error = error_of(raised)
    raise error


def text_of(error: BaseException) -> str:
    """The text of an error as UTF-8 can say it, whatever its class makes of `str`."""
    try:
        return str(error).encode("utf-8", "replace").decode()
    except BaseException as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and its causes, the outermost first, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__context__ if link.__cause__ is None else link.__cause__


def log_uncaught() -> None:
    """From now on errors that nobody can catch, such as those of finalizers and of a model's threads, are logged."""

    def note(uncaught: sys.UnraisableHookArgs | threading.ExceptHookArgs) -> None:
        if not isinstance(uncaught.exc_value, SystemExit):
            log.error("an error that nobody could catch", exc_info=uncaught.exc_value)

    sys.unraisablehook, threading.excepthook = note, note


def settle_warnings() -> None:
    """Take back filters of code of models by which every warning would become an error, in all threads."""
    if any(_is_foreign(*entry) for entry in warnings.filters):
        log.warning("code of a model has made errors of warnings, for all models; the filters are taken back")
        warnings.filters[:] = [entry for entry in warnings.filters if not _is_foreign(*entry)]  # type: ignore[index]


def _is_foreign(action: str, message: object, category: object, module: object, line: int) -> bool:
    """Whether a filter makes errors of the warnings of all modules, and was not there when the process began."""
    entry = (action, message, category, module, line)
    return action == "error" and message is None and module is None and entry not in _own_filters


def _may_interrupt() -> bool:
    """Whether a `KeyboardInterrupt` here may be the operator's: Python's own handler raises in the main thread only."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _is_readable(error: Exception) -> bool:
    """Whether the log can take an error: text, and truth, which `logging` asks for."""
    try:
        str(error), bool(error)
    except BaseException:
        return False
    return True


def _sayable(error: PenstockError) -> Exception:
    """The same error if a frontend can read the error, and answers the request with it."""
    if isinstance(error, _STEERING):
        return ForeignError(error)
    try:
        failure = Failure(0, error.code, error.message, error.retry_after_s, error.detail)
        codec.decode_to_frontend(codec.encode(failure))
    except BaseException:
        return InvalidInput(text_of(error)) if isinstance(error, InvalidInput) else ForeignError(error)
    return error


def line_of(error: BaseException) -> str:
    """One line that says what was raised, of at most `MOST_CHARACTERS`."""
    # NOTE: the text need not be readable, and the name of a file in the text need not be UTF-8.
    text = text_of(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if _RUNTIME.match(lines[0]):
        line = _of_onnxruntime(" ".join(lines))
    elif _SCRIPT in lines[0]:
        line = _CLASSES.sub("", lines[-1])
    else:
        line = lines[0]
    line = _CONTROL.sub(" ", _ADDRESS.sub("", _SECRET.sub("", _PATH.sub("", line))))
    if not line or isinstance(error, KeyError):
        line = f"{type(error).__name__}: {line}".rstrip(": ")
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 3] + "..."


def is_refusal(error: BaseException) -> bool:
    """Whether an error of a program is about its input."""
    if any(base.__name__ in _REFUSING for base in type(error).__mro__):
        return True
    lines = text_of(error).strip().splitlines() or [""]
    if _SCRIPT in lines[0] and _RAISED_BY_SCRIPT.match(lines[-1]):
        return True
    of_runtime = isinstance(error, RuntimeError) or _RUNTIME.match(lines[0])
    return bool(of_runtime and _ABOUT_INPUT.search(line_of(error)))


def answer_of(
    raised: BaseException, place: str, message: str, *, may_refuse: bool = False, tells: bool = False
) -> PenstockError:
    """The error with which a request is answered; `place` begins the line of the log.

    What the model raised for its client stays as it is. Where the model `may_refuse` its input, a refusal is the
    client's error, with its line. Else the error has `message`, the line only if the model `tells`, and a stack in the
    log.
    """
    error = error_of(raised)
    if isinstance(error, PenstockError):
        return error
    if may_refuse and is_refusal(error):
        log.info("%s: %s", place, line_of(error))
        return InvalidInput(f"the model refuses this input: {line_of(error)}")
    log.error("%s", place, exc_info=error)
    return InferenceFailed(f"{message}: {line_of(error)}" if tells else message)


def _of_onnxruntime(text: str) -> str:
    """Operator and innermost reason of an error of onnxruntime, which names all operators around it."""
    *before, reason = _NODE.split(_RUNTIME.sub("", text, count=1))
    reason = _PLACE.sub("", reason)
    return f"{before[-1]}: {reason}" if before else reason
