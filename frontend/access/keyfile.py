"""The file that `server.keys_file` names: a YAML or JSON list of hashed keys.

Every mistake is a `ConfigError` that names file, entry and field, and never shows what looks like a key.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from frontend.access import keys, private_file
from ipc.errors import ConfigError

SETTING = "server.keys_file"
NAME_PATTERN = r"\A(?!pk_)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z"

Scope = Literal["infer", "admin"]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key. `requests_per_s` 0 = no limit, `burst` 0 = what one second gives; `share` is a weight."""

    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
    hash: Annotated[str, msgspec.Meta(pattern=keys.HASH_PATTERN)]
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)] = ("infer",)
    requests_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    burst: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    share: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0

    @property
    def id(self) -> str:
        """The public id of the key."""
        return self.hash.split(":")[1]

    @property
    def digest(self) -> str:
        """SHA-256 of the key in hex."""
        return self.hash.split(":")[2]

    @property
    def allowed_burst(self) -> int:
        """Requests that may come at once after a rest."""
        return self.burst or max(1, math.ceil(self.requests_per_s))


def read(path: Path) -> tuple[KeyEntry, ...]:
    """All entries of a file. Raises `ConfigError`."""
    entries = tuple(_entry(path, number, raw) for number, raw in enumerate(_list(path), 1))
    for field in ("name", "id"):
        seen: dict[str, int] = {}
        for number, entry in enumerate(entries, 1):
            before = seen.setdefault(getattr(entry, field), number)
            if before != number:
                shown = "hash" if field == "id" else field
                raise _mistake(path, f"entry {number} ({entry.name}), field {shown}: as in entry {before}")
    return entries


def _list(path: Path) -> list[Any]:
    try:
        raw = msgspec.yaml.decode(private_file.read(path, SETTING))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _mistake(path, f"neither YAML nor JSON: {error}") from None
    if not isinstance(raw, list) or not raw:
        raise _mistake(
            path,
            "expected a list of at least one key; to switch authentication off, leave server.keys_file empty",
        )
    return raw


def _entry(path: Path, number: int, raw: Any) -> KeyEntry:
    try:
        return msgspec.convert(raw, KeyEntry)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = raw.get("name") if isinstance(raw, dict) else None
        called = f" ({name[:64]})" if isinstance(name, str) else ""
        field = f", field {place.rstrip('`')}" if place else ""
        raise _mistake(path, f"entry {number}{called}{field}: {reason}") from None


def _mistake(path: Path, text: str) -> ConfigError:
    return ConfigError(keys.redact(f"{SETTING} {path}: {text}"))
