"""A fake family whose texts do real harm on a CUDA device. Commands besides those of `FakeAdapter`:

    #assert     a kernel fails an assertion on the device, after which the context is of no use

Each token of a batch takes `TOKEN_NBYTES` of device memory, and the process may take `TOKENS` times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import LoadContext

TOKENS = 64
TOKEN_NBYTES = 8 << 20


class CudaFaults(FakeAdapter):
    """Vectors by hash, computed on a device that has little memory."""

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Limit the memory of this process."""
        total = torch.cuda.get_device_properties(context.device).total_memory
        torch.cuda.set_per_process_memory_fraction((TOKENS + 1) * TOKEN_NBYTES / total, context.device)
        return super().load(context)

    def run(self, texts: Sequence[str], tokens: int) -> None:
        """Take memory, and fail on the device where a text says so."""
        super().run(texts, tokens)
        room = torch.zeros(tokens * TOKEN_NBYTES, dtype=torch.uint8, device="cuda")
        if any("#assert" in text for text in texts):
            room[torch.tensor([len(room)], device="cuda")].cpu()
