"""How much of a batch only fills sequences up to the length of others that they run with."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def padding_share(tokens: int, places: int) -> float:
    """Share of the `places` of a batch that none of its `tokens` takes, 0 to 1; 0 where there are no places."""
    return 1 - tokens / places if places else 0.0


def masked_share(masks: Iterable[torch.Tensor], beside: int = 0) -> float:
    """The same of masks on the host that are 1 at tokens; `beside` tokens more run without padding."""
    kept = list(masks)
    tokens, places = sum(int(mask.sum()) for mask in kept), sum(mask.numel() for mask in kept)
    return padding_share(tokens + beside, places + beside)
