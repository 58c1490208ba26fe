"""What the families share that encode both texts and images with one model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from ipc.wire.messages import Call
from workers.adapters.base import Adapter
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.precision import parameter_bytes


class VisualEncoder(Adapter):
    """Base of these families: an item with an image is an image, of which the first counts; any other is a text.

    `overflows` is what may be done with texts that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`).
    """

    overflows: ClassVar[Collection[str]] = ("truncate", "error")

    def __init__(self, model: Any, limit: int) -> None:
        """Take over a loaded model; `limit` is its longest text in tokens."""
        self._model, self._limit = model, limit

    @property
    def max_sequence_length(self) -> int:
        """Longest text in tokens, with all that the model puts around it."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model)

    def check(self, call: Call) -> None:
        """Refuse to split texts, which are queries here."""
        super().check(call)
        OptionReader(call).check_overflow(self.overflows)
