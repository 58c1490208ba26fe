"""Paths below `/v2/models/`: a model's name, which may hold slashes, then perhaps a version, then perhaps an action."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

ACTIONS = ("ready", "infer", "config", "stats", "generate", "generate_stream", "trace/setting")
_TAIL = re.compile(
    rf"(?P<name>.+?)(?:/versions/(?P<version>[0-9]{{1,18}}))?(?:/(?P<action>{'|'.join(ACTIONS)}))?/?",
    re.DOTALL,
)
_NUMBER = "/versions/"
_CACHED_CHARACTERS = 512


class Target(NamedTuple):
    """The target of a path; `version` None is the latest, `action` "" the model itself."""

    name: str
    version: int | None
    action: str


def parse(tail: str) -> Target | None:
    """The target of the rest of a path after `/v2/models/`, read from its end; None for an impossible path.

    A version that is no number makes the path unknown.
    """
    return _remembered(tail) if len(tail) <= _CACHED_CHARACTERS else _parse(tail)


def _parse(tail: str) -> Target | None:
    found = _TAIL.fullmatch(tail)
    if found is None or _NUMBER in found["name"]:
        return None
    return Target(found["name"], int(found["version"]) if found["version"] else None, found["action"] or "")


_remembered = lru_cache(maxsize=4096)(_parse)
