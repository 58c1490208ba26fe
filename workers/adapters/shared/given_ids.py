"""Token ids that callers send in place of a text.

The model reads the ids as they are. The tokens of a prompt go between the special tokens with which the ids begin, and
the other ids. Ids over the model's length are cut as texts are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipc.wire.messages import InputItem
from workers.adapters.base import ItemRefused
from workers.adapters.shared.known_ids import KnownIds
from workers.adapters.shared.long_texts import FittedText, Frame, Tokens, fit


class GivenIds:
    """Token ids of callers for one model.  Thread-safe after construction."""

    def __init__(self, known: KnownIds, frame: tuple[list[int], list[int]]) -> None:
        """`frame` are the special tokens that the tokenizer puts before and after a text."""
        self._known, self._frame = known, frame

    def fitted(
        self,
        item: InputItem,
        around: tuple[Sequence[int], Sequence[int]],
        overflow: str,
        limit: int,
    ) -> tuple[FittedText, Frame]:
        """The ids of an item with the tokens of a prompt `around` them, fitted into `limit` tokens as `long_texts.fit`.

        Beside them how many special tokens the caller has put before and after the text. Raises `ItemRefused` without
        ids, and for an id that the model cannot read.
        """
        ids = item.ids
        if not ids:
            raise ItemRefused(item, "needs at least one token id")
        unknown = next((number for number in ids if not 0 <= number < self._known.rows), None)
        if unknown is not None:
            raise ItemRefused(
                item, f"token id {unknown} is outside this model's vocabulary of {self._known.rows}"
            )
        before, after = self._frame
        head = len(before) if ids[: len(before)] == before else 0
        tail = len(after) if after and ids[head:][-len(after) :] == after else 0
        end = len(ids) - tail
        whole = [*ids[:head], *around[0], *ids[head:end], *around[1], *ids[end:]]
        frame = Frame(head, tail)
        return fit([Tokens(whole, None)], overflow, limit, frame), frame
