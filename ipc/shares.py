"""How much of a bound each caller and each model may fill: the whole bound while there is room, then a part.

Both sides of the socket use shares: frontends for their credits at a worker, workers for the bound of their queue.
Without shares, a caller that floods the server, or a slow model, would fill the bound, and all others would be refused
before they can take turns.

Work is kept in tokens by model, and weighed in seconds when somebody asks: the price of a token follows the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MODELS_MOST = 1.5
"""Models below their part may fill the bound so many times in all."""

Price = Callable[[str], float]
"""Seconds of the device for a token of a model, by its name."""


@dataclass(slots=True)
class Held:
    """Tokens of requests in flight by model, and of a caller also the number of its requests and its share."""

    tokens: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    share: float = 1.0

    def add(self, tokens: int, model: str) -> None:
        """So many tokens more, or fewer, of a model."""
        left = self.tokens.get(model, 0) + tokens
        if left:
            self.tokens[model] = left
        else:
            self.tokens.pop(model, None)

    def seconds(self, price: Price) -> float:
        """Time of the device for all of it."""
        return sum([tokens * price(model) for model, tokens in self.tokens.items()])


class Shares:
    """Work under one bound, in total, by model and by caller. The caller "" is anonymous and has no part of its own."""

    def __init__(self) -> None:
        self.all = Held()
        self._callers: dict[str, Held] = {}

    @property
    def cost(self) -> int:
        """Tokens in all."""
        return sum(self.all.tokens.values())

    def allows(self, limit_s: float, price: Price, model: str, caller: str = "", share: float = 1.0) -> bool:
        """Whether `caller` may have more work of `model`: there is room, or one of the two is below its part.

        The parts of callers follow the shares of those with requests in flight; the parts of models are equal. The sum
        may exceed `limit_s`: by a half for the second caller, by a third for the third, and so on, and for models by
        a half at most.
        """
        total = self.all.seconds(price)
        if total < limit_s:
            return True
        if total < MODELS_MOST * limit_s:
            models = len(self.all.tokens.keys() | {model})
            if self.all.tokens.get(model, 0) * price(model) < limit_s / models:
                return True
        if not caller:
            return False
        mine = self._callers.get(caller)
        others = sum(held.share for held in self._callers.values() if held is not mine)
        return (mine.seconds(price) if mine else 0.0) < limit_s * share / (share + others)

    def begin(self, tokens: int, model: str, caller: str = "", share: float = 1.0) -> None:
        """A request begins."""
        self.all.add(tokens, model)
        if caller:
            held = self._callers.setdefault(caller, Held())
            held.add(tokens, model)
            held.requests += 1
            held.share = share

    def change(self, tokens: int, model: str, caller: str = "") -> None:
        """A request in flight turned out to have `tokens` more, or fewer."""
        self.all.add(tokens, model)
        if caller:
            self._callers[caller].add(tokens, model)

    def end(self, tokens: int, model: str, caller: str = "") -> None:
        """A request ends that has `tokens` left."""
        self.all.add(-tokens, model)
        if caller:
            held = self._callers[caller]
            held.add(-tokens, model)
            held.requests -= 1
            if not held.requests:
                del self._callers[caller]
