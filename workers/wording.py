"""The words of foreign code that leave the worker: what a model says of an input, or why a load failed.

1. `line_of` is one line for clients: without directories, secrets, addresses in memory and control characters, and
   bounded. Of a traceback of TorchScript the line is the last one. Of onnxruntime the line is the operator and the
   innermost reason.
2. `is_refusal` tells whether a program refuses its input. Python says so by ValueError and IndexError, onnxruntime by
   INVALID_ARGUMENT. Every runtime complains about shapes and indices with words of its own.
3. `answer_of` is the error that a request is answered with. A refusal is told to the client. Other errors of runtimes
   are told too, and those of Python code are not: their words may be about anything.
"""

from __future__ import annotations

import logging
import re

from ipc.errors import InferenceFailed, InvalidInput, PenstockError
from workers import foreign

log = logging.getLogger(__name__)

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


def line_of(error: BaseException) -> str:
    """One line that says what was raised, of at most `MOST_CHARACTERS`."""
    # NOTE: the text need not be readable, and the name of a file in the text need not be UTF-8.
    text = foreign.text_of(error)
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
    lines = foreign.text_of(error).strip().splitlines() or [""]
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
    error = foreign.error_of(raised)
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
