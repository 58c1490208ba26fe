"""Structs that several threads decode for the first time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ipc import decoding


class Kind(msgspec.Struct):
    """A struct that nobody has decoded."""

    name: str


def test_one_thread_at_a_time_learns_a_struct_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = list[Any]()

    def learn(kind: Any) -> None:
        assert decoding._LEARNING.locked()
        learnt.append(kind)

    monkeypatch.setattr(decoding, "msgspec", SimpleNamespace(json=SimpleNamespace(Decoder=learn)))
    assert decoding.learnt(Kind) is Kind and decoding.learnt(Kind) is Kind
    assert learnt == [Kind]
