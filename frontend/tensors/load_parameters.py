"""What a load by name may bring: `config`, the model's configuration as JSON text, and its files, `file:<path>`.

Files are taken only where the operator allows them (`repository.allow_files`). A path leads below the model's
directory, as `1/model.onnx` does; over HTTP the content is base64, over gRPC bytes. With files nothing of the
repository's own model is used, so they need a configuration.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ipc.catalog.repository import CONFIGS, MOST_CONFIG_NBYTES, MOST_LEVELS
from ipc.errors import BodyTooLarge, InvalidInput, Unsupported
from ipc.settings import Settings

CONFIG = "config"
FILE = "file:"
MOST_FILES = 64
MOST_PART_NBYTES = 200


@dataclass(slots=True, frozen=True)
class Brought:
    """A configuration as JSON text, and files by their path below the model's directory."""

    config: str
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))


def nbytes_of(parameters: Mapping[str, Any]) -> int:
    """About what the texts and bytes in parameters take."""
    return sum(len(value) for value in parameters.values() if isinstance(value, str | bytes))


def read(parameters: Mapping[str, Any], settings: Settings) -> Brought | None:
    """What these parameters bring, None for nothing.

    Raises:
        InvalidInput: an unknown parameter, a wrong value or path, or files without a configuration.
        Unsupported: files where they are not allowed, or anything where files are not followed.
        BodyTooLarge: the files are larger than `repository.max_upload_bytes`.
    """
    if not parameters:
        return None
    for name in parameters:
        if name != CONFIG and not name.startswith(FILE):
            raise InvalidInput(f"load parameter {name[:100]!a}: expected '{CONFIG}' or '{FILE}<path>'")
    if not settings.catalog.watch:
        raise Unsupported(
            f"load parameter {min(parameters)[:100]!a}: this server follows no changes (catalog.watch)"
        )
    files = {name: value for name, value in parameters.items() if name.startswith(FILE)}
    if files and not settings.repository.allow_files:
        raise Unsupported(
            f"load parameter {min(files)[:100]!a}: models come from the repository only (repository.allow_files)"
        )
    if CONFIG not in parameters:
        raise InvalidInput(f"load parameter '{CONFIG}' is missing: files of a model need its configuration")
    return Brought(_config(parameters[CONFIG]), _files(files, settings.repository.max_upload_bytes))


def _config(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(
            f"load parameter '{CONFIG}': expected the JSON text of a model configuration, got {_kind(value)}"
        )
    if len(value) > MOST_CONFIG_NBYTES:
        raise InvalidInput(
            f"load parameter '{CONFIG}': {len(value)} characters, the limit is {MOST_CONFIG_NBYTES}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"load parameter '{CONFIG}': not valid Unicode") from None
    return value


def _files(given: Mapping[str, Any], most_nbytes: int) -> dict[str, bytes]:
    if len(given) > MOST_FILES:
        raise InvalidInput(f"load parameters: {len(given)} files, the limit is {MOST_FILES}")
    files = {_path(name): _content(name, value) for name, value in given.items()}
    nbytes = sum(map(len, files.values()))
    if nbytes > most_nbytes:
        raise BodyTooLarge(
            f"load parameters: the files have {nbytes} bytes, the limit is {most_nbytes} (repository.max_upload_bytes)"
        )
    for path in files:
        if any(other.startswith(f"{path}/") for other in files):
            raise InvalidInput(f"load parameter {(FILE + path)[:100]!a}: another file lies below it")
    return files


def _path(name: str) -> str:
    path = name.removeprefix(FILE)
    parts = path.split("/")
    if len(parts) > MOST_LEVELS or not all(map(_is_part, parts)) or path in CONFIGS:
        raise InvalidInput(
            f"load parameter {name[:100]!a}: expected a path below the model's directory, as {FILE}1/model.onnx"
        )
    return path


def _is_part(part: str) -> bool:
    """Whether this can be the name of a file or directory that counts as part of a model."""
    return (
        part.isprintable()
        and 0 < len(part.encode(errors="surrogatepass")) <= MOST_PART_NBYTES
        and not part.startswith(".")
        and "\\" not in part
    )


def _content(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"load parameter {name[:100]!a}: expected a file in base64, got {_kind(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"load parameter {name[:100]!a}: not valid base64") from None


def _kind(value: Any) -> str:
    names = {bool: "a truth value", dict: "an object", list: "a list", bytes: "bytes", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")
