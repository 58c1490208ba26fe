"""The small files that describe a model, read within bounds. Nothing in the files is run.

A file may come from anybody: a file that is too large, is no JSON, or has another type than expected, is told by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ipc.errors import ConfigError

MOST_BYTES = 8 << 20
"""Of one file that describes a model."""
MOST_FILES = 10_000
"""In the directory of a model."""
DESCRIBING = (
    "config.json",
    "modules.json",
    "*/config.json",
    "sentence_*_config.json",
    "*/sentence_*_config.json",
    "config_sentence_transformers.json",
    "gliner_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "artifact.metadata",
)
"""Patterns of the files that are read to describe a model."""
_SHOWN = 80


class CannotTell(ConfigError):
    """The files of a model do not say something that serving needs."""


def undecided(reason: str, fields: str) -> CannotTell:
    """The refusal of files that leave a choice open; `fields` of a catalog entry decide."""
    return CannotTell(
        f"{reason}. State {fields}, in an entry that `penstock models add` writes with --field NAME=VALUE"
    )


def shown(value: object, longest: int = _SHOWN) -> str:
    """A value of a file in a message: short, and without characters that a terminal obeys."""
    text = str(value)[: longest + 1]
    text = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return text[:longest] + "..." if len(text) > longest else text


class ModelFiles:
    """Files of one model; `names` lists all files of the model; `root` need only hold the small files."""

    def __init__(self, root: Path, names: Collection[str]) -> None:
        self.root, self.names = root, frozenset(names)

    @classmethod
    def of_directory(cls, root: Path) -> ModelFiles:
        """Files of a directory and of the directories in it. Raises `CannotTell` if listing fails."""
        try:
            names = list(islice(_names(root), MOST_FILES + 1))
        except OSError as error:
            raise CannotTell(f"{error.filename}: cannot be read: {error.strerror}") from error
        if len(names) > MOST_FILES:
            raise CannotTell(f"there are more than {MOST_FILES} files; name the directory of one model")
        return cls(root, [name for name in names if name])

    def object(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; empty without the file. Raises `CannotTell`."""
        content = self._json(name, {})
        if not isinstance(content, dict):
            raise CannotTell(f"{name}: expected a JSON object, got {type(content).__name__}")
        return content

    def list(self, name: str) -> list[dict[str, Any]]:
        """The JSON list of objects in a file; empty without the file. Raises `CannotTell`."""
        content = self._json(name, [])
        if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
            raise CannotTell(f"{name}: expected a JSON list of objects")
        return content

    def _json(self, name: str, absent: Any) -> Any:
        path = self.root / name
        if name not in self.names or not path.is_file():
            return absent
        try:
            with path.open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise CannotTell(f"{name}: larger than {MOST_BYTES} bytes")
            return json.loads(data)
        except OSError as error:
            raise CannotTell(f"{name}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CannotTell(f"{name}: no JSON: {shown(error)}") from error


def _names(root: Path) -> Iterator[str]:
    """Names of files in a directory and one level below, empty for what is no file.

    A link to a directory is not followed.
    """
    with os.scandir(root) as listed:
        for entry in listed:
            yield entry.name if _is_file(entry) else ""
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                with os.scandir(entry) as below:
                    yield from (f"{entry.name}/{each.name}" if _is_file(each) else "" for each in below)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file, or a link to a file; no for a link that leads in a circle."""
    try:
        return entry.is_file()
    except OSError:
        return False


def text_of(fields: dict[str, Any], name: str, where: str) -> str:
    """A text field; empty when absent. Raises `CannotTell`."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise CannotTell(f"{where}: {name}: expected a text, got {shown(value)}")
    return value or ""


def number_of(fields: dict[str, Any], *names: str) -> int | None:
    """The first of these fields that is a positive whole number."""
    values = (fields.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 2**31), None)
