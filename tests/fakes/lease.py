"""A lease on bytes that a test owns: it counts what is done to it, and can be revoked."""

from __future__ import annotations

import asyncio

from ipc.errors import LeaseRevoked


class FakeLease:
    """The right to read `block` until it is released or revoked; a revoked block holds other bytes at once."""

    def __init__(self, data: bytes) -> None:
        self.block = bytearray(data)
        self.checks = self.releases = 0
        self.leased = True
        self.revoked = False
        self.released = asyncio.Event()

    @property
    def view(self) -> memoryview:
        """Read-only view of the block."""
        return memoryview(self.block).toreadonly()

    def revoke(self) -> None:
        """Give the block to somebody else, who writes to it."""
        self.revoked = True
        self.block[:] = b"\xee" * len(self.block)

    def check(self) -> None:
        """Raise `LeaseRevoked` once revoked."""
        self.checks += 1
        if self.revoked:
            raise LeaseRevoked("the block was taken back")

    def release(self) -> None:
        """End the right; from now on the bytes may change."""
        self.releases += 1
        self.released.set()
        self.block[:] = b"\xee" * len(self.block)

    def close(self) -> None:
        """Check, then end the right."""
        try:
            self.check()
        finally:
            self.release()
