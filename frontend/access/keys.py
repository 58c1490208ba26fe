"""API keys: `pk_<id>_<secret>`, and what a file keeps of them.

The secret is 256 random bits, so nobody can try all of them, and a fast hash is right: slow hashes (bcrypt, Argon2)
make guessing dear where people choose the secret, and would cost each request tens of milliseconds. The id is public.
It finds the entry, so that no comparison depends on how much of a secret is right, and it salts the hash, since it is
part of what is hashed.
"""

from __future__ import annotations

import hashlib
import re
import secrets

SECRET_NBYTES = 32
ID_NBYTES = 8
KEY_PATTERN = re.compile(r"pk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
HASH_PATTERN = r"\Asha256:[0-9a-f]{16}:[0-9a-f]{64}\Z"
_REDACTED = re.compile(r"pk_[0-9A-Za-z_-]{8,}")


def fresh() -> str:
    """A new random key."""
    return f"pk_{secrets.token_hex(ID_NBYTES)}_{secrets.token_urlsafe(SECRET_NBYTES)}"


def id_of(key: str) -> str | None:
    """The public id of a key, or None when the text has not the form of one."""
    found = KEY_PATTERN.fullmatch(key)
    return found[1] if found else None


def digest(key: str) -> str:
    """SHA-256 of the whole key in hex: what `printf %s KEY | sha256sum` prints."""
    return hashlib.sha256(key.encode()).hexdigest()


def hashed(key: str) -> str:
    """`sha256:<id>:<hex>`, the form that a file keeps. `key` is one of `fresh`."""
    return f"sha256:{id_of(key)}:{digest(key)}"


def redact(text: str) -> str:
    """`text` with everything that looks like a key cut out, for messages about files that people wrote."""
    return _REDACTED.sub("pk_[redacted]", text)
