"""Changes values in a settings file and leaves all other lines, comments too, as they are."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ipc import settings
from ipc.errors import ConfigError

Values = Mapping[str, str | int]


def changed(text: str, values: Values) -> str:
    """`text` with `values` (`{"section.field": value}`) put in; sections and fields that are missing are added."""
    lines = text.splitlines()
    for name, value in values.items():
        section, _, field = name.partition(".")
        _put(lines, section, f"  {field}:", str(value))
    return "\n".join(lines) + "\n"


def _put(lines: list[str], section: str, key: str, value: str) -> None:
    """Set one field. A comment behind the old value stays."""
    start = next((at for at, line in enumerate(lines) if re.match(rf"{section}:\s*(#.*)?$", line)), None)
    if start is None:
        lines += [f"{section}:", f"{key} {value}"]
        return
    end = next((at for at in range(start + 1, len(lines)) if re.match(r"[^\s#]", lines[at])), len(lines))
    indent = next(
        (re.match(r"\s+", line) for line in lines[start + 1 : end] if re.match(r"\s+\w", line)), None
    )
    key = (indent[0] if indent else "  ") + key.strip()
    for at in range(start + 1, end):
        if lines[at].startswith(key):
            comment = re.search(r"\s+#.*$", lines[at])
            lines[at] = f"{key} {value}" + (comment[0] if comment else "")
            return
    last = max((at for at in range(start, end) if re.match(r"\s*[^\s#]", lines[at])), default=start)
    lines.insert(last + 1, f"{key} {value}")


def difference(path: Path, before: str, after: str) -> str:
    """Both texts as a unified diff; empty when they are equal."""
    names = (str(path), f"{path} (tuned)")
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names))


def write(path: Path, text: str, values: Values) -> None:
    """Replace the file in one step. Raises `ConfigError` when `text` does not say `values`, or there is no room."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o777)
        found = msgspec.to_builtins(settings.load(draft, None, {}))
        for name, value in values.items():
            section, _, field = name.partition(".")
            if found[section][field] != value:
                raise ConfigError(f"{path}: {name} cannot be changed line by line; set it to {value} by hand")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
