"""Keys files for servers under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frontend.access import api_keys

STRANGER = api_keys.fresh()
"""A key that no file has."""
SLOW_KEYS = 20
"""Keys of the shared server with a rate, by number."""


def write_keys(
    path: Path, entries: Mapping[str, Mapping[str, Any]], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a keys file with one entry per name, and return the keys by name; `known` ones are used again."""
    made = {name: (known or {}).get(name) or api_keys.fresh() for name in entries}
    listed = [
        {"name": name, "hash": api_keys.hashed(made[name]), **fields} for name, fields in entries.items()
    ]
    path.touch(mode=0o600)
    path.write_text(json.dumps(listed))  # JSON is YAML
    return made


def bearer(key: str) -> dict[str, str]:
    """The header that sends a key."""
    return {"Authorization": f"Bearer {key}"}
