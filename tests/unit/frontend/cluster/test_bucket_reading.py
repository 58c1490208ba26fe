"""A whole reading of a bucket at the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.js.kv import KeyValue

from frontend.cluster.bucket import LOST, entries_of


class Early:
    """A bucket of three values whose watcher says at once that all have come."""

    async def status(self) -> Any:
        return SimpleNamespace(values=3)

    async def watchall(self) -> Early:
        return self

    async def __aiter__(self) -> AsyncIterator[None]:
        yield None

    async def stop(self) -> None:
        """Nothing was begun."""


def test_fewer_values_than_the_brokers_counted_are_no_answer() -> None:
    with pytest.raises(LOST, match="0 of 3 values"):
        asyncio.run(entries_of(cast(KeyValue, Early())))
