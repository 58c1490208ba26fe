"""Results of items in SIE's form, with our own part beside, as one life of a box says them."""

from __future__ import annotations

from typing import Any

import msgspec

from ipc.errors import PenstockError
from ipc.wire.cluster import VERSION, Carried, Item, ItemResult, Outcome
from ipc.wire.messages import Result, Timing

MOST_ERROR_NCHARS, MOST_DETAIL_NBYTES = 4096, 8192
"""Brokers drop what is larger than a message, and the gateway would wait for its deadline."""
EMPTY = Result(0, None, [], [], [], [], Timing())


class Results:
    """The results of one life of a box."""

    def __init__(self, box: str, life: str) -> None:
        self._box, self._life = box, life

    def outcome(
        self, carried: Carried, uuid: str, result: bytes = b"", data: bytes = b"", loose: bytes = b""
    ) -> Outcome:
        """Our own part of a result: an answer in three parts, by a device with this uuid."""
        return Outcome(VERSION, self._box, self._life, carried.attempt, uuid, result, data, loose)

    def answered(
        self, item: Item, result: Result, outcome: Outcome, worker: str, fetched_ms: float = 0.0
    ) -> ItemResult:
        """The answer of a worker; inputs that no message holds came within `fetched_ms`."""
        timing = result.timing
        return ItemResult(
            item.work_item_id,
            item.request_id,
            True,
            f"{self._box}/{worker}" if worker else self._box,
            item.item_index,
            inference_ms=timing.device_ns / 1e6,
            queue_ms=timing.queue_ns / 1e6,
            tokenization_ms=timing.prepare_ns / 1e6,
            postprocessing_ms=timing.copy_ns / 1e6,
            payload_fetch_ms=fetched_ms,
            penstock=outcome,
        )

    def failed(self, item: Item, attempt: int, error: PenstockError) -> ItemResult:
        """The error that ended an item."""
        outcome = Outcome(
            VERSION,
            self._box,
            self._life,
            attempt,
            retry_after_s=error.retry_after_s,
            detail=_sayable(error.detail),
        )
        return ItemResult(
            item.work_item_id,
            item.request_id,
            False,
            self._box,
            item.item_index,
            error=error.message[:MOST_ERROR_NCHARS],
            error_code=error.code,
            penstock=outcome,
        )


def _sayable(detail: dict[str, Any]) -> dict[str, Any]:
    """The fields of an error that a message can hold, and a small one."""
    try:
        nbytes = len(msgspec.msgpack.encode(detail))
    except (OverflowError, RecursionError, TypeError, ValueError):
        return {}
    return detail if nbytes <= MOST_DETAIL_NBYTES else {}
