"""A configuration as the message of its schema: config.pbtxt (text protobuf), config.yaml or JSON (the same fields).

All are read up to 1 MiB and parsed by the protobuf library, which tells line and column, or the field, of a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import json_format, text_format

from ipc import yaml_text
from ipc.catalog.repository import CONFIGS, MOST_CONFIG_NBYTES
from ipc.protos import model_config_pb2 as schema
from workers.repository import layout
from workers.repository.layout import ModelRefused

MOST_VALUES = 100_000
"""Values of a YAML document, those counted again that an alias repeats."""
_MOST_CHARACTERS = 240


def read(root: Path, directory: Path, follow_links: bool) -> tuple[str, schema.ModelConfig] | None:
    """(file name, message) of a model's configuration, None where there is none. Raises `ModelRefused`."""
    found = [name for name in CONFIGS if (directory / name).is_symlink() or (directory / name).exists()]
    if not found:
        return None
    if len(found) > 1:
        raise ModelRefused(f"there are both {found[0]} and {found[1]}; keep one")
    path = layout.inside(root, directory / found[0], follow_links)
    data = read_bounded(path, MOST_CONFIG_NBYTES)
    return found[0], (parse_text if path.suffix == ".pbtxt" else parse_yaml)(found[0], data)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The content of a file. Raises `ModelRefused` when it is larger, no plain file, or cannot be read."""
    try:
        if not path.is_file():
            raise ModelRefused(f"{path.name} is no plain file")
        with path.open("rb") as stream:
            data = stream.read(most_bytes + 1)
    except OSError as error:
        raise ModelRefused(f"{path.name} cannot be read: {error.strerror or type(error).__name__}") from error
    if len(data) > most_bytes:
        raise ModelRefused(f"{path.name} has more than {most_bytes} bytes")
    return data


def parse_text(name: str, data: bytes) -> schema.ModelConfig:
    """Text protobuf. Raises `ModelRefused` with `name`, line and column."""
    try:
        return text_format.Parse(data.decode("utf-8"), schema.ModelConfig())
    except UnicodeDecodeError as error:
        lines, start = data.count(b"\n", 0, error.start), data.rfind(b"\n", 0, error.start)
        raise ModelRefused(f"{name}:{lines + 1}:{error.start - start}: no UTF-8") from error
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        where = f"{name}:{line}:{column}" if line else name
        prefix = f"{line}:{column} : " if line else ""
        raise ModelRefused(f"{where}: {_shown(str(error).removeprefix(prefix))}") from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise ModelRefused(f"{name}: {_shown(str(error) or type(error).__name__)}") from error


def parse_yaml(name: str, data: bytes) -> schema.ModelConfig:
    """YAML with the field names of the schema. Raises `ModelRefused` with `name`, and line or field."""
    return _parse(name, data, yaml_text.decode)


def parse_json(name: str, data: bytes) -> schema.ModelConfig:
    """JSON with the field names of the schema. Raises `ModelRefused` as `parse_yaml`."""
    if len(data) > MOST_CONFIG_NBYTES:
        raise ModelRefused(f"{name} has more than {MOST_CONFIG_NBYTES} bytes")
    return _parse(name, data, msgspec.json.decode)


def _parse(name: str, data: bytes, decode: Callable[[bytes], Any]) -> schema.ModelConfig:
    try:
        raw = decode(data)
        if not isinstance(raw, dict):
            raise ModelRefused(f"{name}: expected a map of fields")
        _count(name, raw)
        return json_format.ParseDict(raw, schema.ModelConfig())
    except (
        json_format.Error,
        msgspec.DecodeError,
        RecursionError,
        ValueError,
        OverflowError,
        TypeError,
    ) as error:
        raise ModelRefused(f"{name}: {_shown(str(error) or type(error).__name__)}") from error


def _count(name: str, raw: Any) -> None:
    """Refuse a document that its aliases make larger than any configuration."""
    values, places = 0, [raw]
    while places:
        place = places.pop()
        values += 1
        if values > MOST_VALUES:
            raise ModelRefused(f"{name}: more than {MOST_VALUES} values")
        if isinstance(place, dict):
            places += place.values()
        elif isinstance(place, list):
            places += place


def _shown(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
