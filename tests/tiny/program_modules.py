"""The torch modules behind the tiny programs, with weights of a fixed seed; tests call them for expected numbers."""

from __future__ import annotations

import torch

SEED = 20240607
LABELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay")
SIDE = 32


class AddSub(torch.nn.Module):
    """Sum and difference."""

    def forward(self, INPUT0: torch.Tensor, INPUT1: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both of the shape and datatype of the inputs."""
        return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


class Identity(torch.nn.Module):
    """What came."""

    def forward(self, INPUT: torch.Tensor) -> dict[str, torch.Tensor]:
        """A copy."""
        return {"OUTPUT": INPUT.clone()}


class RowSums(torch.nn.Module):
    """Sums over the last dimension: [b, m, n] to [b, m]."""

    def forward(self, INPUT: torch.Tensor) -> dict[str, torch.Tensor]:
        """FP32 sums."""
        return {"OUTPUT": INPUT.sum(-1)}


class Nothing(torch.nn.Module):
    """An output without elements: [b, n] to [b, 0]."""

    def forward(self, INPUT: torch.Tensor) -> dict[str, torch.Tensor]:
        """A copy of nothing."""
        return {"OUTPUT": INPUT[:, :0].clone()}


class FlatSum(torch.nn.Module):
    """Sum of each row: [b, 4] to [b]."""

    def forward(self, INPUT: torch.Tensor) -> dict[str, torch.Tensor]:
        """FP32 sums, one a row."""
        return {"OUTPUT": INPUT.sum(-1)}


class Plus(torch.nn.Module):
    """Adds a number, by which versions can be told apart."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, INPUT: torch.Tensor) -> dict[str, torch.Tensor]:
        """The input plus the number."""
        return {"OUTPUT": INPUT + self.number}


class Classifier(torch.nn.Module):
    """Probabilities of ten classes for pictures of 32 x 32 pixels with values from 0 to 255."""

    def __init__(self, channels_last: bool) -> None:
        """`channels_last`: pictures come as [b, height, width, 3] instead of [b, 3, height, width]."""
        super().__init__()
        self.channels_last = channels_last
        torch.manual_seed(SEED)
        self.filters = torch.nn.Conv2d(3, 16, 5, stride=3)
        self.head = torch.nn.Linear(16 * 10 * 10, len(LABELS))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """FP32 [b, 10]."""
        pixels = image.permute(0, 3, 1, 2) if self.channels_last else image
        found = torch.relu(self.filters(pixels / 255 - 0.5))
        return {"scores": torch.softmax(self.head(found.flatten(1)) * 4, -1)}


class Counter(torch.nn.Module):
    """Keeps a total of all that came, in a buffer that it changes."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, INPUT: torch.Tensor) -> dict[str, torch.Tensor]:
        """The total so far, FP32 [4]."""
        self.total.add_(INPUT)
        return {"OUTPUT": self.total.clone()}


class Accumulator(torch.nn.Module):
    """Keeps the total of each sequence in the row of its slot; controls are [slots, 1] or [slots]."""

    totals: torch.Tensor

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.register_buffer("totals", torch.zeros(slots, 1, dtype=torch.int32))

    def forward(self, INPUT: torch.Tensor, START: torch.Tensor, READY: torch.Tensor) -> torch.Tensor:
        """Totals so far, INT32 [slots, 1]."""
        before = torch.where(START.view(-1, 1) > 0, torch.zeros_like(self.totals), self.totals)
        found = torch.where(READY.view(-1, 1) > 0, before + INPUT, self.totals)
        self.totals.copy_(found)
        return found.clone()


class Rates(torch.nn.Module):
    """The input [n] and two ones; n must be 2, and is refused in several ways."""

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        rate = INPUT.shape[0]
        assert rate > 1, "too short"
        if rate > 4:
            raise ValueError(f"the rate {rate} is none of 2 and 4")
        return INPUT + torch.ones(2)


class Windows(torch.nn.Module):
    """Windows of four values of an input [n]."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = torch.nn.Conv1d(1, 1, 4)

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.windows(INPUT[None, None])
        return found[0, 0]
