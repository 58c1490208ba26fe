"""Groups of endpoints that answer only to requests with a secret header: the file that `kserve.restricted_file` names.

    - apis: [model-repository, shared-memory]
      header: x-penstock-admin
      value: at least sixteen characters

It stands beside API keys and their scopes: a request must pass both.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from frontend.access import api_keys
from ipc.errors import ConfigError, Forbidden

Api = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
]
APIS: tuple[str, ...] = get_args(Api)
SETTING = "kserve.restricted_file"


class Restriction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret, and the groups that it opens."""

    apis: Annotated[tuple[Api, ...], msgspec.Meta(min_length=1)]
    header: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9-]{1,64}\Z")]
    value: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{16,256}\Z")]


class Restrictions:
    """The restricted groups; none without a file."""

    def __init__(self, restrictions: tuple[Restriction, ...] = ()) -> None:
        self._by_api = {api: one for one in restrictions for api in one.apis}

    @classmethod
    def of(cls, file: str) -> Restrictions:
        """The restrictions of a file; none for "". Raises `ConfigError` for mistakes, or a file open to others."""
        return cls(_read(Path(file))) if file else cls()

    def require_secret(self, api: Api, header: Callable[[str], str | None]) -> None:
        """Raise `Forbidden` if the group has a secret and `header` does not give it."""
        restriction = self._by_api.get(api)
        if restriction is None:
            return
        given = header(restriction.header) or ""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), restriction.value.encode()):
            raise Forbidden(f"this endpoint is restricted: '{api}' needs the header {restriction.header}")


def _read(path: Path) -> tuple[Restriction, ...]:
    try:
        restrictions = msgspec.yaml.decode(
            api_keys.read_private_file(path, SETTING), type=tuple[Restriction, ...]
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SETTING} {path}: {error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        # NOTE: the message of the parser would show the secrets of the line.
        raise ConfigError(f"{SETTING} {path}: neither YAML nor JSON") from None
    apis = [api for one in restrictions for api in one.apis]
    twice = next((api for api in apis if apis.count(api) > 1), None)
    if twice is not None:
        raise ConfigError(f"{SETTING} {path}: '{twice}' is restricted twice")
    return restrictions
