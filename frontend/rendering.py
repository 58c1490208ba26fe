"""Threads of their own for large bodies and answers, which so hold up neither metrics nor the joining of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="render")


async def off_loop(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` in one of the rendering threads."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: work(*args, **kwargs))


async def off_loop_if(long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`, in one of the rendering threads when it is `long`."""
    if long:
        return await off_loop(work, *args, **kwargs)
    return work(*args, **kwargs)
