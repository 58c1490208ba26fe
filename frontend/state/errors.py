"""Errors of stored objects.

    InvalidInput (ipc.errors)
    +-- FileNotFound       404   in ipc.errors, since clients know its code
    +-- FileElided         410   the file was imported without its bytes
    +-- FilePlaceholder    422   the file stands for one that could not be made
    PenstockError (ipc.errors)
    +-- StateUnavailable   503   stored objects cannot be read or written now
    +-- StateFull          507   in ipc.errors; there is no room to store the object

`reached` gives the result of a database with its errors as clients may see them.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable
from typing import TypeVar

from ipc.errors import InvalidInput, PenstockError, StateFull
from ipc.store.store import StoreUnreadable

T = TypeVar("T")
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class FileElided(InvalidInput):
    """The file was imported without its bytes."""

    status = 410


class FilePlaceholder(InvalidInput):
    """The file stands for an expected one that could not be made."""

    status = 422


class StateUnavailable(PenstockError):
    """Stored objects cannot be read or written now."""

    status, retryable = 503, True


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room."""
    return error.errno in _NO_ROOM


async def reached(asked: Awaitable[T]) -> T:
    """The result of a database. Raises `StateFull` and `StateUnavailable`."""
    try:
        return await asked
    except StoreUnreadable as error:
        if is_full(error):
            raise StateFull("the server has no room left to store this") from error
        raise StateUnavailable(
            f"stored objects cannot be reached: {error.strerror}", retry_after_s=error.retry_after_s
        ) from error
