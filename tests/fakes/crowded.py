"""A fake family whose models share one device memory: what one holds, a batch of another cannot have.

Options beside those of `FakeAdapter`: `device_tokens` (the memory of the device, in tokens of a batch), `hold_tokens`
(what the loaded model takes of it), `oom_file` (the next batch removes that file and runs out of memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from msgspec.structs import replace

from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec

_LIVING: weakref.WeakSet[CrowdedAdapter] = weakref.WeakSet()


class CrowdedAdapter(FakeAdapter):
    """Vectors by hash on a device that others share."""

    spec: ClassVar[AdapterSpec] = replace(
        FakeAdapter.spec,
        family="crowded",
        options=(*FakeAdapter.spec.options, "device_tokens", "hold_tokens", "oom_file"),
        builds_alone=False,
    )

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        super().__init__(options, longest)
        self._device_tokens = int(options.get("device_tokens", 1 << 20))
        self._hold_tokens = int(options.get("hold_tokens", 0))
        self._oom_file = Path(str(options.get("oom_file", "")))
        _LIVING.add(self)

    def run(self, texts: Sequence[str], tokens: int) -> None:
        """Run out of memory when what all models hold leaves too little."""
        if self._oom_file.is_file():
            self._oom_file.unlink()
            raise torch.OutOfMemoryError("CUDA out of memory (fake, once)")
        held = sum(model._hold_tokens for model in list(_LIVING))
        if tokens > self._device_tokens - held:
            raise torch.OutOfMemoryError("CUDA out of memory (fake, crowded)")
        super().run(texts, tokens)
