"""The files of a skill, read from a zip or from single files, and checked before anything is stored.

1. Bytes are counted while they are inflated: the sizes that a zip declares may lie.
2. A path is relative, in one form only, and distinct from all others also where case does not count. Links and other
   special files are refused, as are encrypted members and rare ways of compressing.
3. The files lie under one top folder, or with SKILL.md at the root.
4. SKILL.md begins with a block of YAML between lines of `---`, with `name` and `description`. Aliases and deep levels
   are refused.
"""

from __future__ import annotations

import io
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import yaml

from ipc.errors import InvalidInput

MAX_FILES = 500
MAX_NBYTES = 50 << 20
"""Bytes of all files of a skill, inflated."""
MAX_PATH_NBYTES = 512
MAX_PART_NBYTES = 255
MAX_DEPTH = 16
MAX_FRONT_NBYTES = 16 << 10
MAX_LEVELS = 16
"""Levels of the block of YAML."""
MAX_NAME, MAX_DESCRIPTION = 128, 4096
"""Characters."""
GUIDE = "SKILL.md"
ZIP_MAGIC = b"PK\x03\x04"
_MAX_DIRECTORY_NBYTES = 1 << 20
"""Bytes of the directory of a zip, which is read whole before its members are known."""
_END, _END_64, _END_NBYTES, _MOST_COMMENT = b"PK\x05\x06", b"PK\x06\x07", 22, 1 << 16
_KNOWN_WAYS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
)


class BadSkill(InvalidInput):
    """The files are no skill."""

    status = 422


@dataclass(frozen=True, slots=True)
class SkillFiles:
    """A checked skill; `files` are the bytes by path below the top folder `directory`, which may be empty."""

    name: str
    description: str
    directory: str
    files: dict[str, bytes]


def from_zip(body: bytes) -> SkillFiles:
    """The skill in a zip. Raises `BadSkill`."""
    try:
        _check_directory(body)
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return _checked(_members(archive))
    except _BROKEN as error:
        raise BadSkill(f"the zip cannot be read: {str(error)[:200]}") from None


def from_parts(parts: Iterable[tuple[str, bytes]]) -> SkillFiles:
    """The skill of single files, by path. Raises `BadSkill`."""
    return _checked(parts)


def packed(skill: SkillFiles) -> bytes:
    """The skill as a zip with its files under one folder."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in skill.files.items():
            archive.writestr(
                zipfile.ZipInfo(f"{skill.directory or 'skill'}/{path}"), data, zipfile.ZIP_DEFLATED
            )
    return target.getvalue()


def unpacked(body: bytes) -> dict[str, bytes]:
    """The files of a zip that `packed` made, by path below the folder."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


def _check_directory(body: bytes) -> None:
    """Refuse a zip whose directory would take much memory to read."""
    tail = body[-_END_NBYTES - _MOST_COMMENT :]
    at = tail.rfind(_END, 0, len(tail) - _END_NBYTES + len(_END))
    if at < 0:
        raise BadSkill("the zip cannot be read: it has no directory")
    (nbytes,) = struct.unpack_from("<L", tail, at + 12)
    if nbytes > _MAX_DIRECTORY_NBYTES or _END_64 in tail[max(at - 20, 0) : at]:
        raise BadSkill(f"the directory of the zip has more than {_MAX_DIRECTORY_NBYTES} bytes")


def _members(archive: zipfile.ZipFile) -> Iterable[tuple[str, bytes]]:
    left = MAX_NBYTES
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise BadSkill(f"{info.filename[:100]!a} is a link or a special file")
        if not info.filename:
            raise BadSkill("a file of the zip has no name")
        if info.is_dir():
            continue
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _KNOWN_WAYS:
            raise BadSkill(f"{info.filename[:100]!a} is encrypted, or compressed in an unknown way")
        with archive.open(info) as member:
            data = member.read(left + 1)
        left -= len(data)
        if left < 0:
            raise BadSkill(f"the files have more than {MAX_NBYTES} bytes")
        # NOTE: zipfile ends names at a NUL, so that the name of the head is the one that counts.
        yield info.orig_filename, data


def _checked(members: Iterable[tuple[str, bytes]]) -> SkillFiles:
    files: dict[str, bytes] = {}
    seen: dict[str, str] = {}
    nbytes = 0
    for path, data in members:
        _check_path(path)
        files[path] = data
        nbytes += len(data)
        if nbytes > MAX_NBYTES:
            raise BadSkill(f"the files have more than {MAX_NBYTES} bytes")
        folded = unicodedata.normalize("NFC", path).casefold()
        if folded in seen:
            raise BadSkill(
                f"{path[:100]!a} and {seen[folded][:100]!a} are one path where case does not count"
            )
        seen[folded] = path
        if len(files) > MAX_FILES:
            raise BadSkill(f"more than {MAX_FILES} files")
    _check_folders(seen)
    directory = "" if GUIDE in files else _top_of(files)
    below = {path.removeprefix(f"{directory}/"): data for path, data in files.items()} if directory else files
    if GUIDE not in below:
        raise BadSkill(f"{GUIDE} is not in the top folder")
    return SkillFiles(*_front_of(below[GUIDE]), directory, below)


def _check_path(path: str) -> None:
    shown = f"the path {path[:100]!a}"
    if len(path.encode(errors="replace")) > MAX_PATH_NBYTES or not path.isprintable():
        raise BadSkill(f"{shown} has control characters or more than {MAX_PATH_NBYTES} bytes")
    parts = path.split("/")
    if "\\" in path or path[1:2] == ":" or any(part in ("", ".", "..") for part in parts):
        raise BadSkill(f"{shown} is not a plain relative path")
    if len(parts) > MAX_DEPTH or any(len(part.encode(errors="replace")) > MAX_PART_NBYTES for part in parts):
        raise BadSkill(
            f"{shown} has more than {MAX_DEPTH} folders, or one of more than {MAX_PART_NBYTES} bytes"
        )


def _check_folders(seen: dict[str, str]) -> None:
    for folded, path in seen.items():
        parts = folded.split("/")
        if any("/".join(parts[:depth]) in seen for depth in range(1, len(parts))):
            raise BadSkill(f"{path[:100]!a} lies in a folder that is a file too")


def _top_of(files: Iterable[str]) -> str:
    tops = {path.partition("/")[0] if "/" in path else "" for path in files}
    if len(tops) != 1 or "" in tops:
        raise BadSkill(f"expected one top folder with {GUIDE}, or {GUIDE} at the root")
    return tops.pop()


def _front_of(guide: bytes) -> tuple[str, str]:
    """Name and description in SKILL.md."""
    block = _block_of(guide)
    try:
        _check_events(block)
        front = yaml.safe_load(block)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadSkill(f"{GUIDE}: the block is no YAML: {str(error)[:200]}") from None
    if not isinstance(front, dict):
        raise BadSkill(f"{GUIDE}: the block of YAML has no fields")
    return _field(front, "name", MAX_NAME), _field(front, "description", MAX_DESCRIPTION)


def _check_events(block: str) -> None:
    """Refuse aliases, and levels that would cost the scanner a time that grows with their square."""
    level = 0
    for event in yaml.parse(block, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise BadSkill(f"{GUIDE}: the block of YAML may not have aliases")
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MAX_LEVELS:
            raise BadSkill(f"{GUIDE}: the block of YAML has more than {MAX_LEVELS} levels")


def _block_of(guide: bytes) -> str:
    head = guide[:MAX_FRONT_NBYTES]
    try:
        # A cut through the last character is no mistake of the file.
        text = head.decode("utf-8-sig", errors="ignore" if len(guide) > len(head) else "strict")
    except UnicodeDecodeError:
        raise BadSkill(f"{GUIDE} is not UTF-8") from None
    first, *lines = text.splitlines() or [""]
    if first.rstrip() != "---":
        raise BadSkill(f"{GUIDE} does not begin with a line of ---")
    for index, line in enumerate(lines):
        if line.rstrip() == "---":
            return "\n".join(lines[:index])
    raise BadSkill(f"{GUIDE}: no line of --- ends the block within {MAX_FRONT_NBYTES} bytes")


def _field(front: dict[object, object], name: str, most: int) -> str:
    value = front.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadSkill(f"{GUIDE}: {name} is required, a text that is not empty")
    if len(value) > most:
        raise BadSkill(f"{GUIDE}: {name} has {len(value)} characters, the limit is {most}")
    return value.strip()
