"""A reply of dense vectors in leased memory that a test owns."""

from __future__ import annotations

import numpy as np

from tests.fakes.lease import FakeLease


class FakeReply(FakeLease):
    """The result of an encode call, with float32 [n, d] rows."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(rows.astype(np.float32).tobytes())
        self.shape = rows.shape

    def tensors(self) -> dict[str, np.ndarray]:
        """A view on the leased rows."""
        return {"dense": np.frombuffer(self.view, np.float32).reshape(self.shape)}
