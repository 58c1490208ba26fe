"""What the families share that encode both texts and images with one model."""

from __future__ import annotations

from typing import Any

from ipc.errors import InvalidInput
from ipc.messages import Call
from workers.adapters.base import Adapter
from workers.adapters.shared.precision import parameter_bytes

_OVERFLOWS = ("truncate", "error")


class VisualEncoder(Adapter):
    """Base of these families: an item with an image is an image, of which the first counts; any other is a text."""

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
        """Refuse to split texts, which are queries here, or to cut them on the left."""
        super().check(call)
        if call.overflow not in _OVERFLOWS:
            raise InvalidInput(
                f"{call.options_field}.overflow_policy: this model offers default, truncate_text and error"
            )
