"""Check the weight files of a model directory without building anything: safetensors, else plain pickled tensors.

A safetensors file is 8 bytes of header length (little-endian), a JSON header with the byte range of each tensor,
and the tensors.  So a file that was cut off, or that is no safetensors file at all, shows by its size alone.  Pickled
files count only where there are no others, and only when torch reads them with `weights_only`, which runs no code.
"""

from __future__ import annotations

import json
from pathlib import Path

PICKLED = "pytorch_model*.bin"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000


class DamagedWeightsError(Exception):
    """A weight file is missing, cut off or not in the safetensors format; the message names the file only."""


def weight_files(directory: Path) -> list[Path]:
    """All safetensors files under `directory`, sorted; where there are none, its pickled weights."""
    found = sorted(path for path in directory.rglob("*.safetensors") if path.is_file())
    return found or sorted(path for path in directory.glob(PICKLED) if path.is_file())


def is_plain(path: Path) -> bool:
    """Whether a pickled file is a map of names to tensors and nothing else."""
    import torch

    for mmap in (True, False):
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception:
            continue
        return isinstance(stored, dict) and all(isinstance(value, torch.Tensor) for value in stored.values())
    return False


def check_weights(directory: Path) -> None:
    """Raise DamagedWeightsError unless every weight file is whole and every shard of an index is there."""
    files = weight_files(directory)
    pickled = [path for path in files if path.suffix == ".bin"]
    unusable = next((path.name for path in pickled if not is_plain(path)), None)
    if unusable is not None:
        raise DamagedWeightsError(
            f"the model has no safetensors weights; {unusable} is damaged or holds more than tensors and is not loaded"
        )
    if not files:
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.h5") for path in directory.glob(pattern))
        found = f"; {other[0]} is in a format that is not loaded" if other else ""
        raise DamagedWeightsError(f"the model has no safetensors weights{found}")
    kind = "*.bin.index.json" if pickled else "*.safetensors.index.json"
    for index in directory.rglob(kind):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
        if missing:
            raise DamagedWeightsError(
                f"{len(missing)} of {len(shards)} weight files are missing, first {missing[0]}"
            )
    for path in files:
        if path not in pickled:
            _check_file(path)


def _check_file(path: Path) -> None:
    """Compare the size a header promises with the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise DamagedWeightsError(f"{path.name} is not a safetensors file")
        if size < _LENGTH_BYTES + length:
            raise DamagedWeightsError(f"{path.name} is cut off inside its header")
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedWeightsError(f"{path.name} is not a safetensors file") from error
    promised = _LENGTH_BYTES + length + max(ends, default=0)
    if promised != size:
        raise DamagedWeightsError(
            f"{path.name} is damaged: {size} bytes where its header promises {promised}"
        )
