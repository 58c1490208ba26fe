"""How much of what slow readers have not taken yet is kept in private memory, so that it holds no shared memory."""

from __future__ import annotations


class CopyBudget:
    """Bytes that this frontend may hold as private copies for slow readers."""

    def __init__(self, nbytes: int) -> None:
        self.free_nbytes = nbytes

    def take(self, nbytes: int) -> bool:
        """Take `nbytes` if they are free."""
        if nbytes > self.free_nbytes:
            return False
        self.free_nbytes -= nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Give `nbytes` back."""
        self.free_nbytes += nbytes
