"""The log settings of the tensor protocols (`/v2/logging`, `LogSettings`): one state for all frontends.

A change is seen by the frontend that made it at once and by the others within a second (`apply`). Workers keep what
`log.level` says.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

import msgspec

from ipc.errors import InvalidInput, Unsupported
from ipc.settings import Settings
from ipc.store.store import Store, Table

LogValue = bool | int | str
MAX_VERBOSE = 2**32 - 1
LONG_INTEGER = 10**18
"""Integers from here on are not printed."""


class LogState(msgspec.Struct, frozen=True):
    """What is logged, in the order and under the names of the protocol."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"


class LogSettings:
    """`log_file`, `log_info`, `log_warning`, `log_error`, `log_verbose_level`, `log_format`."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._table, self._start = Table(store, "log settings", LogState), _start(settings)
        self._applied: LogState | None = None

    def get(self) -> dict[str, LogValue]:
        """The present state, complete and in the order of the protocol."""
        return msgspec.structs.asdict(self._state())

    async def update(self, changes: Mapping[str, object], until_ns: int) -> dict[str, LogValue]:
        """Change what is named and return the new state; unknown names are ignored.

        Raises `DeadlineExceeded` as `Table.change` does, `InvalidInput` for a wrong type or value, `Unsupported`
        for a change of `log_file` or `log_format`.
        """

        def change(rows: dict[str, LogState]) -> LogState:
            rows[""] = state = _changed(rows.get("", self._start), changes)
            return state

        state = await self._table.change(change, until_ns)
        self.apply()
        return msgspec.structs.asdict(state)

    def apply(self) -> None:
        """Log as the state says, if it was changed since the last call."""
        state = self._state()
        if state is self._applied:
            return
        self._applied = state
        root = logging.getLogger()
        root.setLevel(logging.DEBUG if state.log_verbose_level else logging.INFO)
        for handler in root.handlers:
            for old in [known for known in handler.filters if isinstance(known, _Chosen)]:
                handler.removeFilter(old)
            handler.addFilter(_Chosen(state))

    def _state(self) -> LogState:
        return self._table.rows().get("", self._start)


class _Chosen(logging.Filter):
    """Lets through the levels that are switched on; what is worse than an error always."""

    def __init__(self, state: LogState) -> None:
        super().__init__()
        self._state = state

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        state = self._state
        if record.levelno < logging.INFO:
            return state.log_verbose_level > 0
        if record.levelno < logging.WARNING:
            return state.log_info
        if record.levelno < logging.ERROR:
            return state.log_warning
        return record.levelno > logging.ERROR or state.log_error


def _start(settings: Settings) -> LogState:
    """What the settings of the server mean in these words."""
    level, form = settings.log.level, settings.log.format
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    return LogState(
        log_info=level in ("debug", "info"),
        log_warning=level != "error",
        log_verbose_level=int(level == "debug"),
        log_format="default" if text else "ISO8601",
    )


def _changed(known: LogState, changes: Mapping[str, object]) -> LogState:
    named = {name: value for name, value in changes.items() if name in known.__struct_fields__}
    for name, value in named.items():
        expected = type(getattr(known, name))
        if type(value) is not expected:
            raise InvalidInput(f"{name}: expected a value of type {expected.__name__}, got {_shown(value)}")
        if name in ("log_file", "log_format") and value != getattr(known, name):
            raise Unsupported(f"{name} cannot be changed while the server runs")
        if name == "log_verbose_level" and not (isinstance(value, int) and 0 <= value <= MAX_VERBOSE):
            raise InvalidInput(f"{name}: expected 0 to {MAX_VERBOSE}, got {_shown(value)}")
    return msgspec.structs.replace(known, **named)


def _shown(value: object) -> str:
    # NOTE: Python refuses to print integers of more than 4300 digits.
    short = isinstance(value, str | float) or (isinstance(value, int) and abs(value) < LONG_INTEGER)
    return ascii(value)[:100] if short else type(value).__name__
