"""Keeps Python code of a model's repository from running through libraries that allow such code themselves.

transformers runs code that `auto_map` of a configuration names if its caller passes `trust_remote_code`. The libraries
of GLiNER, GLiNER2 and GLiClass pass true for the encoders of their models, whatever the operator has set.

All ways of transformers to such code fetch the file by `get_cached_module_file`. The fetch is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import dynamic_module_utils

_refused: ContextVar[bool] = ContextVar("own_code_refused", default=False)
_fetch = dynamic_module_utils.get_cached_module_file


class OwnCodeRefused(ValueError):
    """The model needs code of its own repository, and `worker.trust_remote_code` is off."""


@contextmanager
def own_code(*, allowed: bool) -> Iterator[None]:
    """Unless `allowed`, code of a repository raises `OwnCodeRefused` within, in this thread alone."""
    token = _refused.set(not allowed)
    try:
        yield
    finally:
        _refused.reset(token)


def _guarded(*arguments: Any, **named: Any) -> str:
    if _refused.get():
        # NOTE: `workers.loading.failure` knows these words, which are those of transformers.
        raise OwnCodeRefused("the model contains custom code which must be executed")
    return _fetch(*arguments, **named)


dynamic_module_utils.get_cached_module_file = _guarded
