"""What one run does now, told to operators: the counts of runs, and the place of the run on the live page.

A `Progress` is entered with the run. The exit counts the end: finished, failed, or cancelled by its client.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

import msgspec
import orjson

from frontend.records.recent import Doing, LiveRun, LiveRuns, cut
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.errors import Cancelled

_LEAVING = (asyncio.CancelledError, GeneratorExit, Cancelled)
"""What ends a run whose client goes away."""


class Progress:
    """The progress of one run of a model."""

    def __init__(self, services: Services, scope: RequestScope, model: str) -> None:
        self._recorder, self._board = services.recorder, services.finisher.runs
        now = time.time()
        self._run = LiveRun(scope.request_id, model, scope.grant.caller, now, "model", now)
        self._place: int | None = None

    def __enter__(self) -> Progress:
        self._recorder.agent_doing(None, self._run.doing)
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outcome = "finished" if kind is None else "cancelled" if issubclass(kind, _LEAVING) else "failed"
        self._recorder.agent_doing(self._run.doing, None)
        self._recorder.agent_run(self._run.model, outcome)
        if self._board is not None and self._place is not None:
            self._board.give_back(self._place)

    def asks_model(self, round_: int) -> None:
        """The turn of the model begins."""
        self._does("model", round=round_, tool="", arguments="", arguments_chars=0, approval_id="")

    def waits(self, tool: str, data: dict[str, Any], approval_id: str) -> None:
        """The run waits for a decision about a call of `tool`, a label; `data` is that of the progress event."""
        self._does("approval", tool=tool, approval_id=approval_id, **_arguments(data))

    def calls(self, tool: str, data: dict[str, Any]) -> None:
        """A call of `tool` runs now."""
        self._does("tool", tool=tool, approval_id="", **_arguments(data))

    def made(self, files: int) -> None:
        """So many more files are there."""
        self._run = msgspec.structs.replace(self._run, files=self._run.files + files)

    def _does(self, doing: Doing, **fields: Any) -> None:
        self._recorder.agent_doing(self._run.doing, doing)
        self._run = msgspec.structs.replace(self._run, doing=doing, since=time.time(), **fields)
        self._show()

    def _show(self) -> None:
        board: LiveRuns | None = self._board
        if board is None:
            return
        if self._place is None:
            self._place = board.take()
        if self._place is not None:
            board.show(self._place, self._run)


def _arguments(data: dict[str, Any]) -> dict[str, Any]:
    text = _text_of(data)
    return {"arguments": cut(text), "arguments_chars": len(text)}


def _text_of(data: dict[str, Any]) -> str:
    """The arguments of a call for people: a lone text or lines as they are, all else as JSON."""
    values = [value for name, value in data.items() if name != "tool_type"]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    if len(values) == 1 and isinstance(values[0], list) and all(isinstance(line, str) for line in values[0]):
        return "\n".join(values[0])
    shown = values[0] if len(values) == 1 else {name: data[name] for name in data if name != "tool_type"}
    return orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode() if values else ""
