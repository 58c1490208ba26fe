"""What the preparing threads say of an item that cannot be used: which one it is, in the words of the route."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ipc.errors import PenstockError
from ipc.settings import Settings
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import Call, EncodeCall, InputItem, ScoreCall
from tests.fakes.jobs import make_job
from tests.fakes.scorer import FakeScorer
from workers.adapters.base import ItemFailure, ItemRefused, Prepared
from workers.scheduling.preparing import Preparer

ITEMS = [InputItem("a"), InputItem(ids=[1 << 40])]
QUERY = InputItem(ids=[1 << 41])
NAMES = FieldNames("documents[{}]", "documents[{}].text", "query")


class Refusing(FakeScorer):
    """Refuses one item, or the query."""

    def __init__(self, refused: InputItem) -> None:
        super().__init__({}, 512)
        self._refused = refused

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        raise ItemRefused(self._refused, "token id 7 is outside this model's vocabulary of 5")


@pytest.mark.parametrize(
    ("call", "refused", "place"),
    [
        (ScoreCall(ITEMS, QUERY, names=NAMES), ITEMS[1], "documents[1]"),
        (ScoreCall(ITEMS, QUERY, names=NAMES), QUERY, "query"),
        (EncodeCall(ITEMS, ["dense"]), ITEMS[0], "items[0]"),
    ],
)
def test_the_item_that_cannot_be_used_is_named(call: Call, refused: InputItem, place: str) -> None:
    failures: list[PenstockError] = []
    table: Any = SimpleNamespace(
        claim=lambda job: True, unclaim=lambda job: None, fail=lambda job, error: failures.append(error)
    )
    arena: Any = SimpleNamespace(record_preparing=lambda *_: None)
    context: Any = SimpleNamespace(queue=None, jobs=table, arena=arena, settings=Settings())
    job = make_job(call, of=Refusing(refused))
    job.prepared = [Prepared(None, 0)] * len(ITEMS)
    preparer = Preparer(context, lambda job: None)
    preparer.prepare_now(job)
    preparer.close()
    [error] = failures
    assert error.code == "INVALID_INPUT"
    assert error.message == f"{place}: token id 7 is outside this model's vocabulary of 5"
