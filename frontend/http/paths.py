"""The path of a request, decoded and brought into one form before ports, keys and routes look at it.

1. Percent-encoding is decoded once, as UTF-8; slashes may be encoded too, since names of models have slashes.
2. Slashes at the start become one. Further ones stay: keys of shared memory in paths begin with a slash.
3. A path that a proxy could read in another way is refused: a segment `.` or `..`, a backslash, a control character,
   percent signs that encode nothing.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

from ipc.errors import InvalidInput

_ERROR_KEY = "penstock.path_error"
_NO_ENCODING = re.compile(r"%(?![0-9A-Fa-f]{2})")
_REFUSED = re.compile(r"[\x00-\x1f\x7f\\]|(?:^|/)\.\.?(?:/|$)")


def normalized(raw: bytes) -> str:
    """The path of a request target. Raises `InvalidInput` for a path with two readings."""
    try:
        path = raw.decode("ascii")
        if "%" in path:
            if _NO_ENCODING.search(path):
                raise InvalidInput("path: every percent sign must begin an encoded byte such as %2F")
            path = unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput("path: expected percent-encoded UTF-8") from None
    if _REFUSED.search(path):
        raise InvalidInput("path: the segments '.' and '..', backslashes and control characters are refused")
    return path if path == "*" else "/" + path.lstrip("/")


def normalize(scope: dict[str, Any]) -> bool:
    """Put the normalized path into an ASGI scope, or keep the reason for `check_path`; returns whether it has one."""
    try:
        scope["path"] = normalized(scope.get("raw_path") or quote(scope["path"]).encode())
    except InvalidInput as error:
        scope[_ERROR_KEY] = error
        return False
    return True


def check_path(scope: dict[str, Any]) -> None:
    """Raise the `InvalidInput` that `normalize` met."""
    error = scope.get(_ERROR_KEY)
    if error is not None:
        raise error
