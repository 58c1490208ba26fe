"""A fake family with a bug of its own in a place where only errors on purpose are expected."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from ipc.wire.messages import Call
from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec

SECRET = "secret detail of a bug"


class FaultyAdapter(FakeAdapter):
    """Vectors by hash; the option `bug` makes the check of a request raise."""

    spec: ClassVar[AdapterSpec] = replace(FakeAdapter.spec, family="faulty", builds_alone=False)

    def refuse_unsupported(self, call: Call) -> None:
        """Raise what no caller expects."""
        super().refuse_unsupported(call)
        if call.options.get("bug"):
            raise KeyError(SECRET)
