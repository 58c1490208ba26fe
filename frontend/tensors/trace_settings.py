"""The trace settings of the tensor protocols (`/v2/trace/setting`, `TraceSetting`): one state for all frontends.

They decide which requests the server's own tracing (`frontend.tracing`) takes: none at level OFF, one in `trace_rate`
at TIMESTAMPS; of a model or of the whole server. A change is seen by the frontend that made it at once and by the
others within a second (`apply`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from frontend.tracing.tracer import Tracer
from ipc.errors import InvalidInput, Unsupported
from ipc.settings import Settings
from ipc.store.store import Store, Table

TraceValue = str | list[str]
LEVELS = ("OFF", "TIMESTAMPS")
FIXED = {"trace_count": "-1", "trace_file": "", "trace_mode": "opentelemetry"}
"""Settings that have one value here."""
NAMES = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")
MAX_RATE = 2**32 - 1
MAX_MODELS = 4096


class Chosen(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was set; None: nothing."""

    trace_level: str | None = None
    trace_rate: int | None = None
    log_frequency: int | None = None


class TraceState(msgspec.Struct, frozen=True):
    """What was set for the server and for single models."""

    server: Chosen = Chosen()
    models: dict[str, Chosen] = {}


class TraceSettings:
    """`trace_level`, `trace_rate`, `trace_count`, `log_frequency`, `trace_file`, `trace_mode`."""

    def __init__(self, settings: Settings, store: Store, tracer: Tracer | None) -> None:
        """`tracer` is None where tracing is not configured: then the level is OFF and stays so."""
        self._tracer = tracer
        self._table, self._start = Table(store, "trace settings", TraceState), TraceState()
        ratio = settings.tracing.sample_ratio
        self._level = "TIMESTAMPS" if tracer is not None and ratio else "OFF"
        self._ratio = ratio
        self._applied: TraceState | None = None

    def get(self, model: str = "") -> dict[str, TraceValue]:
        """The state of the server, or of a model that exists: its own settings over those of the server."""
        return self._shown(self._state(), model)

    async def update(
        self, changes: Mapping[str, str | Sequence[str] | None], until_ns: int, model: str = ""
    ) -> dict[str, TraceValue]:
        """Change what is named and return the new state; None resets to the default (of a model: to the server's).

        Raises `DeadlineExceeded` as `Table.change` does, `InvalidInput` for an unknown name or a wrong value,
        `Unsupported` for what cannot be had here.
        """

        def change(rows: dict[str, TraceState]) -> TraceState:
            rows[""] = state = self._changed(rows.get("", self._start), changes, model)
            return state

        state = await self._table.change(change, until_ns)
        self.apply()
        return self._shown(state, model)

    def apply(self) -> None:
        """Trace as the state says, if it was changed since the last call."""
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
        """One value as it is kept; raises what is wrong with it."""
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
        # Nothing is written to files here, so how often that would be done is kept and has no effect.
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
            # Nobody has changed the level: requests whose own `traceparent` is sampled are traced, as configured.
            return self._ratio
        return 1 / chosen.trace_rate if chosen.trace_rate else self._ratio

    def _shown(self, state: TraceState, model: str) -> dict[str, TraceValue]:
        chosen = self._of(state, model)
        rate = chosen.trace_rate or (round(1 / self._ratio) if self._ratio else MAX_RATE)
        found: dict[str, TraceValue] = {
            **FIXED,
            "trace_level": [chosen.trace_level or self._level],
            "trace_rate": str(rate),
            "log_frequency": str(chosen.log_frequency or 0),
        }
        return {name: found[name] for name in NAMES}
