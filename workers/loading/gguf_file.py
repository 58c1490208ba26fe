"""The head of a GGUF file: the fields that describe a model, and the place of each tensor.

1. A file is the magic word, a version, two counts, fields such as `general.architecture`, a table of tensors, and from
   the next multiple of the alignment the tensors. All numbers are little-endian.
2. `read_model` reads the heads of all parts of a model; `...-00001-of-00003.gguf` is the first of three parts. A file
   may come from anybody: each count and length is held against the bytes that are there. Nothing is mapped.
3. `refuse_unserved` names what no family here runs. No model library is imported, so a start can refuse a file that a
   load would refuse.

The package `gguf` knows the block types and their sizes.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ipc import extras

SUFFIX = ".gguf"
ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
"""Values of `general.architecture` that the family `causal` runs."""
VOCABULARIES = ("gpt2", "llama")
"""Values of `tokenizer.ggml.model`: byte-level BPE, and SentencePiece's BPE."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
"""Values of `<architecture>.rope.scaling.type`."""
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_MAGIC, _POINTER = b"GGUF", b"version "
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9
_MOST_HEAD_BYTES, _MOST_PARTS, _MOST_DIMENSIONS = 512 << 20, 1000, 8
_LEAST_ENTRY_BYTES = 24
"""Least bytes of a field or a tensor in the head."""
_ALIGNMENT = 32


_kept: deque[tuple[list[tuple[Path, int, int, int]], GgufModel]] = deque(maxlen=1)
"""The model that was read last, behind inode, size and time of its files."""


class GgufRefused(Exception):
    """A GGUF file is cut off, damaged, or of a kind that is not served; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: `shape` in the order of torch, the names of block type and tensor, where its bytes are."""

    shape: tuple[int, ...]
    kind: str
    file: Path
    start: int
    nbytes: int
    name: str = ""


class GgufModel(NamedTuple):
    """A model in one file or in several parts: fields of the first part, tensors of all parts, by name."""

    name: str
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """The family of models, in the words of llama.cpp."""
        return str(self.fields["general.architecture"])

    @property
    def values(self) -> int:
        """Numbers in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def kind(self) -> str:
        """The block type of most numbers of tensors with several dimensions, such as Q4_1."""
        counts = Counter[str]()
        for tensor in self.tensors.values():
            counts[tensor.kind] += prod(tensor.shape) * (len(tensor.shape) > 1)
        return max(counts, key=counts.__getitem__, default="")

    def get(self, field: str, otherwise: Any = None) -> Any:
        """A field of the architecture, such as `block_count`."""
        return self.fields.get(f"{self.architecture}.{field}", otherwise)


def parts_of(name: str) -> tuple[str, ...]:
    """The names of all files of a model, of which `name` is one; `name` may have folders before."""
    part = _PART.match(name)
    if part is None:
        return (name,)
    count = min(int(part["count"]), _MOST_PARTS)
    return tuple(f"{part['stem']}-{number:05d}-of-{part['count']}.gguf" for number in range(1, count + 1))


def stem_of(name: str) -> str:
    """The name of a model's file without folders, ending and number of the part."""
    file = name.rpartition("/")[2]
    part = _PART.match(file)
    return part["stem"] if part else file[: -len(SUFFIX)]


def choices(names: Sequence[str]) -> list[str]:
    """One name for each model among the GGUF files in `names`: of parts the first. Image projectors are left out."""
    files = sorted(name for name in names if name.lower().endswith(SUFFIX))
    models = (name for name in files if not name.rpartition("/")[2].lower().startswith("mmproj"))
    return list(dict.fromkeys(parts_of(name)[0] for name in models))


def read_model(path: Path, *, last: bool = False) -> GgufModel:
    """The model of which `path` is a file. Raises `GgufRefused` and OSError.

    PERF: a load asks three times, and the words of a vocabulary take a tenth of a second. So the model that was read
    last is kept for as long as its files are the same, until the `last` of the askers.
    """
    files = [path.with_name(name) for name in parts_of(path.name)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise GgufRefused(f"{len(missing)} of {len(files)} files are missing, first {missing[0]}")
    state = [(file, (found := file.stat()).st_ino, found.st_size, found.st_mtime_ns) for file in files]
    cache = _taken()
    model = cache[1] if cache is not None and cache[0] == state else _read_parts(files)
    if not last:
        _kept.append((state, model))
    return model


def _taken() -> tuple[list[tuple[Path, int, int, int]], GgufModel] | None:
    try:
        return _kept.pop()
    except IndexError:
        return None


def _read_parts(files: Sequence[Path]) -> GgufModel:
    """The model of all its files. Raises `GgufRefused` and OSError."""
    fields: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(files):
        own, stored = _read_file(file)
        if (own.get("split.no", number), own.get("split.count", len(files))) != (number, len(files)):
            raise GgufRefused(
                f"{file.name} calls itself part {own.get('split.no')} of {own.get('split.count')}, counted from 0"
            )
        if twice := tensors.keys() & stored.keys():
            raise GgufRefused(f"{file.name}: the tensor {min(twice)[:100]} stands in another part too")
        fields = fields or own
        tensors |= stored
    promised = fields.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise GgufRefused(f"{files[0].name} promises {promised} tensors, its parts have {len(tensors)}")
    return GgufModel(files[0].name, fields, tensors)


def refuse_unserved(model: GgufModel) -> None:
    """Raise `GgufRefused` for a model that no family here runs, with the field and its value."""
    architecture = model.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise GgufRefused(
            f"{model.name}: the architecture {str(architecture)[:50]!r} is not served from GGUF; served are "
            f"{', '.join(ARCHITECTURES)}"
        )
    vocabulary = model.fields.get("tokenizer.ggml.model")
    if vocabulary not in VOCABULARIES:
        raise GgufRefused(
            f"{model.name}: tokenizer.ggml.model {str(vocabulary)[:50]!r} is not served; served are "
            f"{', '.join(VOCABULARIES)}"
        )
    if model.get("pooling_type", 0):
        raise GgufRefused(
            f"{model.name}: a model of vectors ({architecture}.pooling_type); only chat is served"
        )
    if model.get("expert_count", 0) and not architecture.endswith("moe"):
        raise GgufRefused(f"{model.name}: {architecture} with experts is not served from GGUF")
    scaling = model.get("rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        raise GgufRefused(
            f"{model.name}: {architecture}.rope.scaling.type {str(scaling)[:50]!r} is not served; served are "
            f"{', '.join(ROPE_SCALINGS)}"
        )
    needed = ("block_count", "context_length", "embedding_length", "attention.head_count")
    lacking = [f"{architecture}.{name}" for name in needed if not isinstance(model.get(name), int)]
    tokens = model.fields.get("tokenizer.ggml.tokens")
    lacking += [] if tokens and isinstance(tokens, list) else ["tokenizer.ggml.tokens"]
    lacking += [name for name in ("token_embd.weight",) if name not in model.tensors]
    if lacking:
        raise GgufRefused(f"{model.name}: there is no {lacking[0]}, so the file describes no whole model")
    _refuse_unfitting(model)


def _refuse_unfitting(model: GgufModel) -> None:
    """Raise `GgufRefused` for fields that contradict the tensors, with both shapes or counts."""
    architecture, blocks = model.architecture, model.get("block_count")
    table = list(model.tensors["token_embd.weight"].shape)
    described = [len(model.fields["tokenizer.ggml.tokens"]), model.get("embedding_length")]
    if table != described:
        raise GgufRefused(
            f"{model.name}: token_embd.weight is {table}, and {described} by tokenizer.ggml.tokens and "
            f"{architecture}.embedding_length"
        )
    stored = 1 + max((int(found[1]) for name in model.tensors if (found := _BLOCK.match(name))), default=-1)
    if stored != blocks:
        raise GgufRefused(
            f"{model.name}: {architecture}.block_count is {blocks}, and there are {stored} blocks of tensors"
        )


class _Head:
    """The bytes of a file from its beginning. Asking for more bytes than there are raises `GgufRefused`."""

    def __init__(self, stream: BinaryIO, name: str, size: int) -> None:
        self._stream, self._name = stream, name
        self._left = min(size, _MOST_HEAD_BYTES)
        self.place = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self._left:
            raise GgufRefused(f"{self._name} is cut off inside its head, or its head is damaged")
        self._left -= count
        self.place += count
        return self._stream.read(count)

    def number(self, form: str) -> Any:
        """A number of the format `form` of `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        """A text behind its length in bytes."""
        return self.take(self.number("<Q")).decode()

    def count(self, least_nbytes: int) -> int:
        """A number of things, each of at least `least_nbytes` bytes."""
        count: int = self.number("<Q")
        if count * least_nbytes > self._left:
            raise GgufRefused(f"{self._name} is cut off inside its head, or its head is damaged")
        return count

    def _texts(self, count: int) -> list[str]:
        """The next `count` texts, as `text` reads one."""
        # PERF: the words and merges of a vocabulary are some 100,000 texts, and a load reads them three times.
        read, left, texts = self._stream.read, self._left, list[str]()
        for _ in range(count):
            nbytes = int.from_bytes(read(8), "little")
            left -= 8 + nbytes
            if left < 0:
                raise GgufRefused(f"{self._name} is cut off inside its head, or its head is damaged")
            texts.append(read(nbytes).decode())
        self.place += self._left - left
        self._left = left
        return texts

    def value(self, kind: int) -> Any:
        """The value of a field."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_form(self._name, kind))
        element = self.number("<I")
        if element == _TEXT:
            return self._texts(self.count(8))
        form = _form(self._name, element)
        count = self.count(struct.calcsize(form))
        return list(struct.unpack(f"<{count}{form[1]}", self.take(count * struct.calcsize(form))))


def _form(name: str, kind: int) -> str:
    if kind not in _NUMBERS:
        raise GgufRefused(f"{name}: a field of the unknown type {kind}")
    return _NUMBERS[kind]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Fields and tensors of one file. Raises `GgufRefused` and OSError."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = _Head(stream, path.name, size)
        _refuse_foreign(stream, path.name)
        head.take(len(_MAGIC))
        version = head.number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big") in _VERSIONS
            kind = "big-endian numbers" if swapped else f"GGUF of the version {version}"
            raise GgufRefused(
                f"{path.name}: {kind} are not read; read are little-endian files of version 2 and 3"
            )
        try:
            counts = head.count(_LEAST_ENTRY_BYTES), head.count(12)
            fields: dict[str, Any] = {}
            for _ in range(counts[1]):
                name = head.text()
                fields[name] = head.value(head.number("<I"))
            tensors = dict(_tensors(head, path, size, counts[0], fields))
        except UnicodeDecodeError as error:
            raise GgufRefused(f"{path.name}: a name or text in its head is no UTF-8") from error
    if len(tensors) != counts[0]:
        raise GgufRefused(f"{path.name}: two tensors have the same name")
    return fields, tensors


def _refuse_foreign(stream: BinaryIO, name: str) -> None:
    first = stream.read(8)
    stream.seek(0)
    if first == _POINTER:
        raise GgufRefused(
            f"{name} is a pointer of Git LFS, not a GGUF file: fetch the file with `git lfs pull`"
        )
    if not first.startswith(_MAGIC):
        raise GgufRefused(f"{name} is not a GGUF file")


def _tensors(
    head: _Head, path: Path, size: int, count: int, fields: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensor]]:
    """The table of tensors of one file. Raises `GgufRefused` for types that are not read and for missing bytes."""
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise GgufRefused(f"{path.name}: general.alignment {alignment!r} is no positive number")
    listed = []
    for _ in range(count):
        name, dimensions = head.text(), head.number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise GgufRefused(f"{path.name}: the tensor {name[:100]} has {dimensions} dimensions")
        shape = tuple(reversed([head.number("<Q") for _ in range(dimensions)]))
        listed.append((name, shape, head.number("<I"), head.number("<Q")))
    data = -(-head.place // alignment) * alignment
    sizes = _block_sizes()
    for name, shape, kind, offset in listed:
        if kind not in sizes:
            raise GgufRefused(
                f"{path.name}: the tensor {name[:100]} has the block type {kind}, which is not read"
            )
        block = sizes[kind]
        if not shape or shape[-1] % block.values:
            raise GgufRefused(
                f"{path.name}: the tensor {name[:100]} has rows of {shape[-1] if shape else 0} values, which is no "
                f"multiple of the {block.values} of a block of {block.kind}"
            )
        nbytes = prod(shape) // block.values * block.nbytes
        end = data + offset + nbytes
        if end > size:
            raise GgufRefused(f"{path.name} is cut off: {size} bytes, the tensor {name[:100]} ends at {end}")
        yield name, StoredTensor(shape, block.kind, path, data + offset, nbytes, name[:100])


class _Block(NamedTuple):
    """A block type: its name, and the values and bytes of one block."""

    kind: str
    values: int
    nbytes: int


def _block_sizes() -> dict[int, _Block]:
    """The block types that can be turned into numbers, by their number in a file. Raises ImportError."""
    package = extras.require("gguf", "gguf")
    kinds = {kind for kind in package.GGMLQuantizationType if hasattr(package.quants, kind.name)}
    kinds |= {package.GGMLQuantizationType.F32, package.GGMLQuantizationType.F16}
    return {int(kind): _Block(kind.name, *package.GGML_QUANT_SIZES[kind]) for kind in kinds}
