"""Errors without the frames that they came through.

The traceback of an error refers to those frames, and they to the body and the tensors of the request. A frame that
refers to the error as well, or to a task or future that has ended with it, closes a circle: all of it would stay until
the cyclic collector runs, which many megabytes in few objects do not make it do. So whoever tells a client of an error
lets go of its traceback.
"""

from __future__ import annotations


def forget(error: BaseException) -> None:
    """Let go of an error's traceback, and of the errors that it came from with theirs. A bug is logged before."""
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None:
            left += (one.__cause__, one.__context__)
            one.__traceback__ = one.__cause__ = one.__context__ = None
