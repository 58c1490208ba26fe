"""Which requests are traced: by the flag of a valid `traceparent`, otherwise by a share of all trace ids.

A model may have a share of its own. It is not known yet when a request begins, so the largest share decides there, and
that of the model when the request has ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from ipc.metrics.infer_families import split_id

_ALL = 1 << 64


class Sampling:
    """The shares in force, 0 to 1; None: no request at all, whatever its `traceparent` says."""

    def __init__(self, share: float | None) -> None:
        self.choose(share, {})

    def choose(self, share: float | None, by_model: Mapping[str, float | None]) -> None:
        """Trace these shares from now on."""
        self._bound = _bound_of(share)
        self._by_model = {model: _bound_of(own) for model, own in by_model.items()}
        self._most = max(self._bound, *self._by_model.values()) if self._by_model else self._bound

    def begins(self, trace_id: str, parent: str) -> bool:
        """Whether a request is traced as far as one can tell when it begins."""
        return _within(self._most, trace_id, parent)

    def keeps(self, trace_id: str, parent: str, model: str) -> bool:
        """Whether one that has ended is exported; `model` is its catalog id."""
        return not self._by_model or _within(
            self._by_model.get(split_id(model)[0], self._bound), trace_id, parent
        )


def _bound_of(share: float | None) -> int:
    return -1 if share is None else round(share * _ALL)


def _within(bound: int, trace_id: str, parent: str) -> bool:
    if parent:
        return bound >= 0 and bool(int(parent[-2:], 16) & 1)
    # The lower half of the trace id decides, as in OpenTelemetry's TraceIdRatioBased.
    return int(trace_id[16:], 16) < bound
