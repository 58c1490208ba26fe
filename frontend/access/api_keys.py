"""API keys, `pk_<id>_<secret>`, and the file of hashed keys that `server.keys_file` names: a YAML or JSON list.

1. The secret is 256 random bits, so nobody can try all of them, and a fast hash is right: slow hashes (bcrypt, Argon2)
   make guessing dear where people choose the secret, and would cost each request tens of milliseconds.
2. The id is public. The id finds the entry, so that no comparison depends on how much of a secret is right, and salts
   the hash, since the id is part of the hashed text.
3. No other user of the machine may read a file with secrets. Every mistake in the file is a `ConfigError` that names
   file, entry and field, and never shows text that looks like a key.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ipc.errors import ConfigError

MAX_FILE_NBYTES = 1 << 20


def read_private_file(path: Path, setting: str) -> bytes:
    """The content of a file that other users may not read. Raises `ConfigError` that names `setting` and the path."""
    try:
        # NOTE: non-blocking, since a pipe in the place of the file would hold up the start for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _private_mistake(setting, path, error.strerror or "cannot be opened") from None
    try:
        _refuse_exposed(setting, path, os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_FILE_NBYTES)
    finally:
        os.close(descriptor)


def _refuse_exposed(setting: str, path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _private_mistake(setting, path, "not a file")
    if found.st_mode & 0o007:
        mode = stat.S_IMODE(found.st_mode)
        raise _private_mistake(setting, path, f"mode {mode:04o} lets all users in; chmod 640 or stricter")
    if found.st_size > MAX_FILE_NBYTES:
        raise _private_mistake(setting, path, f"{found.st_size} bytes, the limit is {MAX_FILE_NBYTES}")


def _private_mistake(setting: str, path: Path, text: str) -> ConfigError:
    return ConfigError(f"{setting} {path}: {text}")


SECRET_NBYTES = 32
ID_NBYTES = 8
KEY_PATTERN = re.compile(r"pk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
HASH_PATTERN = r"\Asha256:[0-9a-f]{16}:[0-9a-f]{64}\Z"
_REDACTED = re.compile(r"pk_[0-9A-Za-z_-]{8,}")


def fresh() -> str:
    """A new random key."""
    return f"pk_{secrets.token_hex(ID_NBYTES)}_{secrets.token_urlsafe(SECRET_NBYTES)}"


def id_of(key: str) -> str | None:
    """The public id of a key, or None for a text without the form of a key."""
    match = KEY_PATTERN.fullmatch(key)
    return match[1] if match else None


def digest(key: str) -> str:
    """SHA-256 of the whole key in hex, as `printf %s KEY | sha256sum` prints."""
    return hashlib.sha256(key.encode()).hexdigest()


def hashed(key: str) -> str:
    """`sha256:<id>:<hex>`, the form in a file. `key` comes from `fresh`."""
    return f"sha256:{id_of(key)}:{digest(key)}"


def redact(text: str) -> str:
    """`text` with everything that looks like a key cut out, for messages about files that people wrote."""
    return _REDACTED.sub("pk_[redacted]", text)


SETTING = "server.keys_file"
NAME_PATTERN = r"\A(?!pk_)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z"
_EXPECTED = {
    "name": "1 to 64 letters, digits and ._@-, the first a letter or digit, without pk_ at the beginning",
    "hash": "a hash as `penstock keys new` prints",
}
"""Patterns of fields in words."""

_LONGEST_REST_S = 1e9
"""A burst comes back within this time, about 32 years: clocks of rates are 64 bits of nanoseconds."""
Scope = Literal["infer", "admin"]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key. `requests_per_s` 0 = no limit, `burst` 0 = the requests of one second; `share` is a weight."""

    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
    hash: Annotated[str, msgspec.Meta(pattern=HASH_PATTERN)]
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)] = ("infer",)
    requests_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    burst: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    share: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for a rate that is too low for its burst."""
        if self.requests_per_s and self.allowed_burst / self.requests_per_s > _LONGEST_REST_S:
            raise ValueError(
                f"requests_per_s: {self.requests_per_s:g} gives a burst of {self.allowed_burst} back in more than "
                f"{_LONGEST_REST_S:g} s, the limit"
            )

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
        raw = msgspec.yaml.decode(read_private_file(path, SETTING))
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
        name = raw.get("name") if isinstance(raw, dict) else None
        called = f" ({name[:64]})" if isinstance(name, str) else ""
        raise _mistake(path, f"entry {number}{called}{told(error)}") from None


def told(error: msgspec.ValidationError) -> str:
    """What a `KeyEntry` lacks: `, field NAME: reason`, or `: reason` where the whole entry is wrong."""
    reason, _, place = str(error).partition(" - at `$.")
    field = place.rstrip("`")
    if "matching regex" in reason:
        reason = f"expected {_EXPECTED[field]}"
    return f", field {field}: {reason}" if field else f": {reason}"


def _mistake(path: Path, text: str) -> ConfigError:
    return ConfigError(redact(f"{SETTING} {path}: {text}"))
