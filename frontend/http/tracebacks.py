"""Drops the tracebacks of errors that were answered.

The traceback of an error refers to frames, and the frames refer to body and tensors of the request. A frame that refers
to the error, or to a task or future that ended with the error, closes a circle. Such a circle stays until the
cyclic collector runs, and a few large objects do not make the collector run. So the code that renders an error drops
its traceback.
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
