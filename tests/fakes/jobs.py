"""Jobs of a worker without a frontend that planned them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from ipc.wire.messages import Call, EncodeCall, InputItem, Work
from workers.scheduling.job import Batch, Job, Strategy

LATER_NS = 1 << 62


class Plain(Strategy):
    """Jobs of no special kind, which nobody runs."""

    def run(self, batch: Batch) -> int:
        """Nothing runs."""
        return 0


PLAIN = Plain()


def adapter(**more: Any) -> Any:
    """What the queue asks of an adapter."""
    return SimpleNamespace(
        **{"gathering": None, "batch_tokens": None, "config": None, "engine": None, **more}
    )


ADAPTER = adapter()


def make_job(
    call: Call | None = None,
    *,
    session: bytes = b"s",
    tag: int = 1,
    number: int = 1,
    model: str = "m",
    cost: int = 16,
    deadline_ns: int = LATER_NS,
    of: Any = None,
    strategy: Any = None,
    solo: bool = False,
    **work: Any,
) -> Job:
    """A job of the adapter `of`; `work` are further fields of `Work`."""
    planned = Work(
        model, call or EncodeCall([InputItem("text")], ["dense"]), deadline_ns, cost, "req", **work
    )
    return Job(session, tag, number, planned, of or ADAPTER, strategy or PLAIN, solo)


def replan(job: Job, **changes: Any) -> None:
    """Give a job other plans, as if its frontend had made them."""
    job.work = msgspec.structs.replace(job.work, **changes)
