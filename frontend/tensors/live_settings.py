"""Settings of log and tracing that clients change while the server runs: one state for all frontends.

1. `LogSettings` (`/v2/logging`) chooses the levels that frontends log. Workers keep `log.level`.
2. `TraceSettings` (`/v2/trace/setting`) chooses the requests that `frontend.tracing` takes, of a model or of the whole
   server: none at level OFF, one in `trace_rate` at TIMESTAMPS.
3. The frontend that makes a change follows the change at once, the others within a second (`apply`).

`Extensions` are these settings with all else that both tensor protocols offer besides inference.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from frontend.engine.interface import Engine
from frontend.records.statistics import RequestCounters, StatisticsReader
from frontend.tensors.control import ControlServices, RepositoryControl
from frontend.tensors.regions import ClientRegions
from frontend.tracing import Tracer
from ipc.errors import InvalidInput, Unsupported
from ipc.metrics.registry import FrontendMetrics
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
        """The complete state, in the order of the protocol."""
        return msgspec.structs.asdict(self._state())

    async def update(self, changes: Mapping[str, object], until_ns: int) -> dict[str, LogValue]:
        """Change the named settings and return the new state; unknown names are ignored.

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
        """Log by the present state, if the state has changed since the last call."""
        state = self._state()
        if state is self._applied:
            return
        self._applied = state
        root = logging.getLogger()
        root.setLevel(logging.DEBUG if state.log_verbose_level else logging.INFO)
        for handler in root.handlers:
            for old in [known for known in handler.filters if isinstance(known, _LevelFilter)]:
                handler.removeFilter(old)
            handler.addFilter(_LevelFilter(state))

    def _state(self) -> LogState:
        return self._table.rows().get("", self._start)


class _LevelFilter(logging.Filter):
    """Lets through the levels that are switched on. Levels above error always pass."""

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
    """The state that the settings of the server stand for."""
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


TraceValue = str | list[str]
LEVELS = ("OFF", "TIMESTAMPS")
FIXED = {"trace_count": "-1", "trace_file": "", "trace_mode": "opentelemetry"}
"""Settings with a single possible value in this server."""
NAMES = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")
MAX_RATE = 2**32 - 1
MAX_MODELS = 4096


class Chosen(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings that a client chose; None: the default holds."""

    trace_level: str | None = None
    trace_rate: int | None = None
    log_frequency: int | None = None


class TraceState(msgspec.Struct, frozen=True):
    """Choices for the server and for single models."""

    server: Chosen = Chosen()
    models: dict[str, Chosen] = {}


class TraceSettings:
    """`trace_level`, `trace_rate`, `trace_count`, `log_frequency`, `trace_file`, `trace_mode`."""

    def __init__(self, settings: Settings, store: Store, tracer: Tracer | None) -> None:
        """`tracer` is None where tracing is not configured: the level is OFF and cannot be changed."""
        self._tracer = tracer
        self._table, self._start = Table(store, "trace settings", TraceState), TraceState()
        ratio = settings.tracing.sample_ratio
        self._level = "TIMESTAMPS" if tracer is not None and ratio else "OFF"
        self._ratio = ratio
        self._applied: TraceState | None = None

    def get(self, model: str = "") -> dict[str, TraceValue]:
        """The state of the server, or of a model: settings of the model first, then those of the server."""
        return self._shown(self._state(), model)

    async def update(
        self, changes: Mapping[str, str | Sequence[str] | None], until_ns: int, model: str = ""
    ) -> dict[str, TraceValue]:
        """Change the named settings and return the new state; None resets to the default (of a model: to the server's).

        Raises `DeadlineExceeded` as `Table.change` does, `InvalidInput` for an unknown name or a wrong value,
        `Unsupported` for a value that this server does not offer.
        """

        def change(rows: dict[str, TraceState]) -> TraceState:
            rows[""] = state = self._changed(rows.get("", self._start), changes, model)
            return state

        state = await self._table.change(change, until_ns)
        self.apply()
        return self._shown(state, model)

    def apply(self) -> None:
        """Trace by the present state, if the state has changed since the last call."""
        state = self._state()
        if state is self._applied or self._tracer is None:
            return
        self._applied = state
        ratios = {model: self._ratio_of(self._of(state, model)) for model in state.models}
        self._tracer.sampling.choose(self._ratio_of(state.server), ratios)

    def _state(self) -> TraceState:
        return self._table.rows().get("", self._start)

    def _changed(
        self, known: TraceState, changes: Mapping[str, str | Sequence[str] | None], model: str
    ) -> TraceState:
        read = {name: self._read(name, value) for name, value in changes.items()}
        chosen = {name: value for name, value in read.items() if name not in FIXED}
        before = known.models.get(model, Chosen()) if model else known.server
        after = msgspec.structs.replace(before, **chosen)
        if not model:
            return msgspec.structs.replace(known, server=after)
        models = {**known.models, model: after}
        if after == Chosen():
            del models[model]
        if len(models) > MAX_MODELS:
            raise InvalidInput(f"{MAX_MODELS} models have trace settings of their own")
        return msgspec.structs.replace(known, models=models)

    def _read(self, name: str, value: str | Sequence[str] | None) -> str | int | None:
        """One value as the state keeps it. Raises as `update`."""
        if name not in NAMES:
            raise InvalidInput(f"unknown trace setting {name[:100]!a}: expected one of {', '.join(NAMES)}")
        if value is None:
            return None
        if not isinstance(value, str) and not (
            isinstance(value, list) and all(isinstance(one, str) for one in value)
        ):
            raise InvalidInput(f"{name}: expected text, a list of texts, or null, got {type(value).__name__}")
        if name == "trace_level":
            return self._read_level(value)
        text = value if isinstance(value, str) else ",".join(value)
        if name in FIXED:
            if text != FIXED[name]:
                raise Unsupported(f"{name}: this server offers {FIXED[name]!a} only, got {text[:100]!a}")
            return None
        # This server writes no trace files. `log_frequency` is kept for clients and has no effect.
        least = 1 if name == "trace_rate" else 0
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= MAX_RATE):
            raise InvalidInput(
                f"{name}: expected a whole number from {least} to {MAX_RATE}, got {text[:100]!a}"
            )
        return int(text)

    def _read_level(self, value: str | Sequence[str]) -> str:
        levels = [value] if isinstance(value, str) else list(value)
        if len(levels) != 1 or levels[0] not in LEVELS:
            raise InvalidInput(f"trace_level: expected one of {', '.join(LEVELS)}, got {levels!a:.100}")
        if levels[0] != "OFF" and self._tracer is None:
            raise Unsupported("trace_level: tracing is not configured (tracing.endpoint)")
        return levels[0]

    @staticmethod
    def _of(state: TraceState, model: str) -> Chosen:
        own, server = state.models.get(model, Chosen()), state.server
        frequency = server.log_frequency if own.log_frequency is None else own.log_frequency
        return Chosen(own.trace_level or server.trace_level, own.trace_rate or server.trace_rate, frequency)

    def _ratio_of(self, chosen: Chosen) -> float | None:
        if chosen.trace_level == "OFF":
            return None
        if chosen.trace_level is None and self._level == "OFF":
            # Without a chosen level, requests whose `traceparent` is sampled are traced, as configured.
            return self._ratio
        return 1 / chosen.trace_rate if chosen.trace_rate else self._ratio

    def _shown(self, state: TraceState, model: str) -> dict[str, TraceValue]:
        chosen = self._of(state, model)
        rate = chosen.trace_rate or (round(1 / self._ratio) if self._ratio else MAX_RATE)
        shown: dict[str, TraceValue] = {
            **FIXED,
            "trace_level": [chosen.trace_level or self._level],
            "trace_rate": str(rate),
            "log_frequency": str(chosen.log_frequency or 0),
        }
        return {name: shown[name] for name in NAMES}


@dataclass(slots=True, frozen=True)
class Extensions:
    """Statistics, client memory, repository control, log and trace settings."""

    counters: RequestCounters
    statistics: StatisticsReader
    regions: ClientRegions
    control: RepositoryControl
    log_settings: LogSettings
    trace_settings: TraceSettings

    def apply(self) -> None:
        """Follow changes of other frontends; called twice a second."""
        self.log_settings.apply()
        self.trace_settings.apply()


def make(
    services: ControlServices, engine: Engine, metrics: FrontendMetrics, tracer: Tracer | None
) -> Extensions:
    """Make the extensions of a frontend."""
    settings = services.settings
    return Extensions(
        RequestCounters(metrics, services.catalog, lambda name: services.tensor_models.known(name)),
        StatisticsReader(settings.paths),
        ClientRegions(settings, services.store, are_read=engine.reads_regions),
        RepositoryControl(services),
        LogSettings(settings, services.store),
        TraceSettings(settings, services.store, tracer),
    )
