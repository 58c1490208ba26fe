"""A fake family that works step by step, as models that write texts do.

Options beside those of `FakeAdapter`: `steps` (of a batch) and `step_ms` (time of each).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec
from workers.device import stepping


class WritingAdapter(FakeAdapter):
    """Vectors by hash after many steps."""

    spec: ClassVar[AdapterSpec] = replace(
        FakeAdapter.spec,
        family="writing",
        options=(*FakeAdapter.spec.options, "steps", "step_ms"),
        builds_alone=False,
    )

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        super().__init__(options, longest)
        self._steps = int(options.get("steps", 1))
        self._step_s = float(options.get("step_ms", 0)) / 1e3

    def run(self, texts: Sequence[str], tokens: int) -> None:
        """One step after another."""
        super().run(texts, tokens)
        steps = stepping.current()
        for _ in range(self._steps):
            time.sleep(self._step_s)
            steps.step()
