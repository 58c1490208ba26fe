"""Calls as adapters see them, for tests that use an adapter without a server."""

from __future__ import annotations

from ipc.wire.messages import EncodeCall


def asked(instruction: str | None = None, *, is_query: bool | None = False) -> EncodeCall:
    """An encode call for dense vectors; the items are given to `prepare` beside it."""
    return EncodeCall([], ["dense"], instruction, is_query)
