"""What a job has besides when its answer comes in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ipc.wire.messages import TensorInfo, TensorRef
from ipc.wire.streams import PartFlow
from workers.operations.named import NamedOutput
from workers.scheduling.job import Output


@dataclass(slots=True, eq=False)
class PlacedPart:
    """The outputs of one part, written to their place."""

    infos: list[TensorInfo]
    refs: list[TensorRef]
    output: Output


@dataclass(slots=True, eq=False)
class Streamed:
    """State of one stream.

    `flow`, `resting`, `roomless` and `paused` belong to the `JobBook`: it rests while its frontend has enough parts,
    (`roomless`) while the arena has no room for the next one, or (`paused`) until `pause_until_ns` as the model asked,
    and the queue does not count it then. The rest is the device thread's: `batch` since it has begun, `steps` what the
    adapter gave, `unsent` a part that found no room. `queued_ns` is when it waited for the device first.
    """

    flow: PartFlow
    resting: bool = False
    roomless: bool = False
    paused: bool = False
    pause_until_ns: int = 0
    batch: Any = None
    steps: Iterator[Any] | None = None
    unsent: Mapping[str, NamedOutput] | None = None
    queued_ns: int = 0
