"""A fake family for the lifecycle of models: it takes memory, counts its loads, can be told to crash while it loads.

Options beside those of `FakeAdapter`: `hold_bytes` (memory that the model really takes), `leak` (and never gives back),
`crash_file` (the process dies in the load while that file exists), `oom_file` (the load runs out of memory while it
exists, and removes it), `hold_file` (the load lasts as long as it exists), `prefix` (read from each call: what stands
before every text).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from msgspec.structs import replace

from ipc.wire.messages import Call, InputItem
from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared

_LEAKED: list[torch.Tensor] = []


class WeighingAdapter(FakeAdapter):
    """Vectors by hash, and weights of any size."""

    spec: ClassVar[AdapterSpec] = replace(
        FakeAdapter.spec,
        family="weighing",
        options=(
            *FakeAdapter.spec.options,
            "hold_bytes",
            "leak",
            "crash_file",
            "oom_file",
            "hold_file",
            "prefix",
        ),
        per_call=("prefix",),
        builds_alone=False,
    )

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        super().__init__(options, longest)
        self._held = torch.ones(int(options.get("hold_bytes", 1 << 20)), dtype=torch.uint8)
        if options.get("leak"):
            _LEAKED.append(self._held)

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Wait as long as the options say, listening to those who no longer want the model; then die or load."""
        options = dict(context.options)
        until = time.monotonic() + float(options.pop("load_s", 0))
        hold = Path(str(options.get("hold_file", "")))
        while time.monotonic() < until or hold.is_file():
            time.sleep(0.01)
            context.progress("weights", 0.0)
        if Path(str(options.get("crash_file", ""))).is_file():
            os.kill(os.getpid(), signal.SIGKILL)
        full = Path(str(options.get("oom_file", "")))
        if full.is_file():
            full.unlink()
            raise torch.OutOfMemoryError("out of memory (fake)")
        return super().load(replace_options(context, options))

    @property
    def memory_bytes(self) -> int:
        """What `hold_bytes` says."""
        return len(self._held)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """The texts with the call's prefix before them."""
        before = str(call.options.get("prefix", ""))
        return super().prepare([replace(item, text=f"{before}{item.text}") for item in items], call)


def replace_options(context: LoadContext, options: dict[str, Any]) -> LoadContext:
    """The same load with other options."""
    return LoadContext(
        context.directory,
        context.model_id,
        context.device,
        context.dtype,
        context.max_sequence_length,
        options,
        context.progress,
        context.trust_remote_code,
    )
