"""Log lines as JSON or text, with the request id, written by a thread of their own: a blocked pipe blocks no request.

When the reader of the log falls behind, lines are dropped and counted. The next written line is preceded by the count.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

import msgspec

from ipc.settings import Log

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")
"""Name of the API key that the present request was made with."""

AGAIN_S = 60.0
"""Time between two lines of one kind of warning; see `Seldom`."""
_QUEUE_LINES = 10000
_EXTRA = ("model", "worker", "status", "event", "method", "route", "path", "duration_ms")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, source, message, request id, and known extra fields."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """One record as one line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "source": self._source,
            "message": record.getMessage(),
        }
        rid = request_id.get()
        if rid:
            line["request_id"] = rid
        name = caller.get()
        if name:
            line["key"] = name
        line |= {name: record.__dict__[name] for name in _EXTRA if name in record.__dict__}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """`12:00:00 INFO  worker-0  message`, for terminals."""

    def __init__(self, source: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {source:<11} %(message)s", "%H:%M:%S")


class _Writer(logging.Handler):
    """Hands formatted lines to a thread; drops and counts them when the thread cannot keep up."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        threading.Thread(target=self._write, name="log-writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line, or count it as dropped."""
        # NOTE: the stack of an error runs code of the error's class, which may raise anything. The line goes without.
        for stack in (record.exc_info, None):
            record.exc_info = stack
            with contextlib.suppress(BaseException):
                self.put(self.format(record))
                return

    def put(self, text: str) -> None:
        """Queue a text as it is, or count it as dropped."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait briefly until the queued lines are written."""
        until = time.monotonic() + 1.0
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._dropped = self._dropped, 0
            note = f"{dropped} log lines dropped: the reader of the log was too slow\n" if dropped else ""
            try:
                self._stream.write(f"{note}{line}\n")
                self._stream.flush()
            except (OSError, ValueError):
                self._dropped += 1
            finally:
                self._lines.task_done()


class Seldom:
    """Warnings that lasting trouble or strangers would repeat: each kind is written at once, then once in `AGAIN_S`.

    A line that is not the first has the number of warnings of its kind since the line before.
    """

    def __init__(self, log: logging.Logger, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._log, self._now_ns = log, now_ns
        self._kinds: dict[str, tuple[int, int]] = {}
        """By kind: when a line was written last, and the warnings since."""

    def warning(self, kind: str, why: object) -> None:
        """Warn of `kind`, one of a few fixed sentences, and of its reason this time."""
        now_ns = self._now_ns()
        written_ns, count = self._kinds.get(kind, (0, 0))
        if count and now_ns - written_ns < AGAIN_S * 1e9:
            self._kinds[kind] = written_ns, count + 1
            return
        self._log.warning("%s: %s%s", kind, why, f" ({count} times since the last line)" if count else "")
        self._kinds[kind] = now_ns, 1

    def over(self, kind: str) -> None:
        """The trouble has passed: the next warning of this kind is written at once."""
        self._kinds.pop(kind, None)


def is_text(settings: Log, stream: TextIO) -> bool:
    """Whether lines to `stream` are text for people; otherwise JSON."""
    return settings.format == "text" or (settings.format == "auto" and stream.isatty())


def configure(settings: Log, source: str, stream: TextIO | None = None, *, forks: bool = False) -> None:
    """Send all logging of this process to `stream` (stderr) in the configured form; `source` names the process.

    A process that forks writes its lines without the thread, since its children would lack the thread. Warnings of
    libraries are lines of level debug, since they help developers only.
    """
    out = stream or sys.stderr
    handler: logging.Handler = logging.StreamHandler(out) if forks else _Writer(out)
    handler.setFormatter(TextFormatter(source) if is_text(settings, out) else JsonFormatter(source))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.level.upper())
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "asyncio", "websockets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.NOTSET if settings.level == "debug" else logging.ERROR)


def write(text: str) -> None:
    """Write a text as it is, by the thread of the log, so that a blocked reader blocks nothing else."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Writer):
            handler.put(text)


def flush() -> None:
    """Give queued lines a moment to be written, before the process ends."""
    for handler in logging.getLogger().handlers:
        handler.flush()
