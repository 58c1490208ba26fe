"""The files of a model in a directory: which weights belong to the model, and whether the files are whole.

1. A safetensors file is 8 bytes of header length (little-endian), a JSON header with the shape and the byte range of
   each tensor, and the tensors. So the size alone shows a file that was cut off, or a file of another format.
2. Pickled files are used only without others, and only if torch reads them with `weights_only`, which runs no code.
3. A `tokenizer.json` must be a tokenizer of the library tokenizers.

A file may come from anybody. A message names file, field and value, and no directory. No model library is imported but
for pickled files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ipc.decoding import learnt
from workers.loading.gguf_file import parts_of

PICKLED = "pytorch_model*.bin"
_WEIGHTED = ("Transformer", "StaticEmbedding", "Dense", "LayerNorm")
"""Ends of the kinds of modules that have weights."""
_KEPT_STEPS = "checkpoint-"
_LENGTH_BYTES = 8
_MOST_NUMBER = 1 << 63
"""Above every size and every place in a file."""
_MOST_SHOWN = 80
_MOST_HEADER_BYTES = 100_000_000
_POINTER = b"version "
_MOST_POINTER_BYTES = 1024
"""First bytes and size of the text file that Git LFS leaves in place of a large file."""


class DamagedWeightsError(Exception):
    """A weight file is missing, cut off or not in the safetensors format; the message names no directory."""


class DamagedTokenizerError(Exception):
    """A file of the tokenizer is none; the message names no directory."""


def weight_files(directory: Path, gguf: str = "") -> list[Path]:
    """All safetensors files under `directory`, and pickled weights of modules that have no others; sorted.

    Files that a trainer kept of its steps, in `checkpoint-...`, are no part of the model. With `gguf` the weight files
    are this file and its other parts.
    """
    if gguf:
        return [directory / name for name in parts_of(gguf)]
    files = sorted(path for path in directory.rglob("*.safetensors") if _belongs(path, directory))
    having = {path.parent for path in files}
    without = [place for place in module_directories(directory) if place not in having]
    return files + sorted(path for place in without for path in place.glob(PICKLED) if path.is_file())


def _belongs(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts[:-1]
    return path.is_file() and not any(part.startswith(_KEPT_STEPS) for part in parts)


def module_directories(directory: Path) -> list[Path]:
    """The directories of the modules with weights that modules.json names; `directory` without such modules."""
    stored = directory / "modules.json"
    try:
        listed = _bounded_json(stored) if stored.is_file() else []
        paths = [Path(str(each["path"])) for each in listed if str(each["type"]).endswith(_WEIGHTED)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        paths = []
    inside = [path for path in paths if not path.is_absolute() and ".." not in path.parts]
    return [directory / path for path in dict.fromkeys(inside)] or [directory]


def is_plain(path: Path) -> bool:
    """Whether a pickled file is a map of names to tensors and nothing else."""
    import torch

    try:
        # On the device "meta" tensors have no data, so only what describes them is read.
        stored = torch.load(path, map_location="meta", weights_only=True)
    except Exception:
        return False
    return isinstance(stored, dict) and all(isinstance(value, torch.Tensor) for value in stored.values())


def check_weights(directory: Path) -> None:
    """Raise DamagedWeightsError unless every weight file is whole and every shard of an index exists."""
    files = weight_files(directory)
    pickled = [path for path in files if path.suffix == ".bin"]
    unusable = next((path.name for path in pickled if not is_plain(path)), None)
    if unusable is not None:
        raise DamagedWeightsError(
            f"the model has no safetensors weights; {unusable} is damaged or holds more than tensors and is not loaded"
        )
    check_whole(directory)


def check_whole(directory: Path) -> None:
    """As `check_weights`, without a look into pickled files and without an import of a model library."""
    files = weight_files(directory)
    if not files:
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.h5") for path in directory.glob(pattern))
        more = f"; {other[0]} is in a format that is not loaded" if other else ""
        raise DamagedWeightsError(f"the model has no safetensors weights{more}")
    pickled = {path.parent for path in files if path.suffix == ".bin"}
    indices = [*directory.rglob("*.safetensors.index.json")]
    indices += [path for place in pickled for path in place.glob("*.bin.index.json")]
    for index in indices:
        if _belongs(index, directory):
            _refuse_incomplete(index)
    for path in files:
        if path.suffix != ".bin":
            _refuse_damaged(path)


def _refuse_incomplete(index: Path) -> None:
    """Raise DamagedWeightsError unless every shard of an index exists."""
    try:
        shards = set(_bounded_json(index)["weight_map"].values())
        missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedWeightsError(f"{index.name} is damaged: no map of weights to files") from error
    if missing:
        raise DamagedWeightsError(
            f"{len(missing)} of {len(shards)} weight files are missing, first {missing[0]}"
        )


def _bounded_json(path: Path) -> Any:
    """The content of a file about weights. Raises `ValueError` for a file that is no JSON, or larger than any such."""
    with path.open("rb") as stream:
        data = stream.read(_MOST_HEADER_BYTES + 1)
    if len(data) > _MOST_HEADER_BYTES:
        raise ValueError(f"larger than {_MOST_HEADER_BYTES} bytes")
    return json.loads(data)


class StoredTensor(NamedTuple):
    """What the header of a safetensors file says of a tensor; `begin` and `end` are bytes behind the header."""

    shape: list[int]
    begin: int
    end: int
    kind: str
    """The type of its numbers in the format's words, such as `F16`; empty where the header does not say."""


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a safetensors file, by its header. Raises DamagedWeightsError."""
    return {name: tensor.shape for name, tensor in stored_tensors(path).items()}


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by its header. Raises DamagedWeightsError."""
    return placed_tensors(path)[0]


def _refuse_damaged(path: Path) -> None:
    """Raise DamagedWeightsError unless the file has the size that its header promises."""
    tensors, start = placed_tensors(path)
    promised, size = start + max((tensor.end for tensor in tensors.values()), default=0), path.stat().st_size
    if promised != size:
        raise DamagedWeightsError(
            f"{path.name} is damaged: {size} bytes where its header promises {promised}"
        )


def placed_tensors(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """What the header of a safetensors file says of each tensor, and where the tensors begin.

    Raises DamagedWeightsError.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if first == _POINTER and size < _MOST_POINTER_BYTES:
            raise DamagedWeightsError(
                f"{path.name} is a pointer of Git LFS, not a safetensors file: fetch the file with `git lfs pull`"
            )
        if size < _LENGTH_BYTES:
            raise _foreign(
                path, f"the file has {size} bytes, and the length of the header takes {_LENGTH_BYTES}"
            )
        if length > _MOST_HEADER_BYTES:
            raise _foreign(path, f"the length of the header is {length}, at most {_MOST_HEADER_BYTES}")
        if size < _LENGTH_BYTES + length:
            raise DamagedWeightsError(f"{path.name} is cut off inside its header")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise _foreign(path, "the header is no JSON") from error
    if not isinstance(header, dict):
        raise _foreign(path, f"the header is no object, but {_short(header)}")
    tensors = {name: _stored(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    return tensors, _LENGTH_BYTES + length


def _stored(path: Path, name: str, entry: Any) -> StoredTensor:
    """One entry of a header. Raises DamagedWeightsError with the field and its value."""
    tensor = f"the tensor {_short(name)}"
    if not isinstance(entry, dict):
        raise _foreign(path, f"{tensor}: expected an object, got {_short(entry)}")
    for field, wanted in (("shape", "a list of whole numbers"), ("data_offsets", "2 whole numbers")):
        numbers = entry.get(field)
        known = numbers if isinstance(numbers, list) else [None]
        wrong = field != "shape" and len(known) != 2
        if wrong or not all(type(each) is int and 0 <= each < _MOST_NUMBER for each in known):
            raise _foreign(
                path,
                f"{tensor}: {field}: expected {wanted} of 0 to {_MOST_NUMBER - 1}, got {_short(numbers)}",
            )
    begin, end = entry["data_offsets"]
    if begin > end:
        raise _foreign(path, f"{tensor}: data_offsets: {begin} is behind {end}")
    kind = entry.get("dtype")
    return StoredTensor(entry["shape"], begin, end, kind if isinstance(kind, str) else "")


def _foreign(path: Path, why: str) -> DamagedWeightsError:
    return DamagedWeightsError(f"{path.name} is not a safetensors file: {why}")


def _short(value: Any) -> str:
    """A value of a file that may come from anybody, in a message."""
    text = ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_tokenizer(directory: Path) -> None:
    """Raise DamagedTokenizerError for a `tokenizer.json`, here or one level below, that is no tokenizer.

    A tokenizer of the library tokenizers is an object whose `model` has the `vocab`.
    """
    for path in sorted([*directory.glob("tokenizer.json"), *directory.glob("*/tokenizer.json")]):
        name = str(path.relative_to(directory))
        try:
            with path.open("rb") as stream:
                data = stream.read(_MOST_HEADER_BYTES + 1)
            if len(data) > _MOST_HEADER_BYTES:
                raise DamagedTokenizerError(f"{name} is larger than {_MOST_HEADER_BYTES} bytes")
            msgspec.json.decode(data, type=learnt(_TokenizerFile))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedTokenizerError(f"{name} is no tokenizer: {error}") from error
        except RecursionError as error:
            raise DamagedTokenizerError(f"{name} is no tokenizer: nested too deeply") from error
        except OSError as error:
            raise DamagedTokenizerError(f"{name} cannot be read: {error.strerror}") from error


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, msgspec.Raw] | list[msgspec.Raw]


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
