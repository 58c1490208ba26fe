"""The head of a GGUF file: what is read of any file, and what is refused with the file's name and the reason."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import gguf_models
from workers.loading import gguf_file
from workers.loading.gguf_file import GgufRefused, choices, parts_of, read_model, refuse_unserved


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a whole file."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    gguf_models.write(path, "qwen2", "Q8_0")
    return path.read_bytes()


def opened(path: Path) -> None:
    refuse_unserved(read_model(path))


def test_a_file_cut_off_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    opened(path)
    for length in {0, 3, 8, 20, 100, 5000, *range(0, len(whole), len(whole) // 23), len(whole) - 40}:
        path.write_bytes(whole[:length])
        with pytest.raises(GgufRefused, match=r"model\.gguf is (cut off|not a GGUF file)"):
            opened(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian numbers are not read"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(60), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cut off inside its head"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cut off inside its head"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(60), "cut off inside its head"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(60), "no UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77) + bytes(60),
            "unknown type 77",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) + bytes(60),
            "unknown type 9",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQQ", 3, 0, 1, 1)
            + b"a"
            + struct.pack("<IIQ", 9, 4, 1 << 61)
            + bytes(60),
            "cut off inside its head",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQQ", 3, 1, 0, 1)
            + b"w"
            + struct.pack("<IQIQ", 1, 32, 99, 0)
            + bytes(60),
            "the tensor w has the block type 99",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"w" + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(60),
            "rows of 33 values, which is no multiple of the 32",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQQ", 3, 1, 0, 1)
            + b"w"
            + struct.pack("<IQIQ", 1, 1 << 50, 0, 0)
            + bytes(60),
            "is cut off: .* the tensor w ends at",
        ),
    ],
)
def test_a_damaged_head_is_refused_with_the_reason(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufRefused, match=why) as caught:
        opened(path)
    assert str(caught.value).startswith("model.gguf")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"general.architecture": "bert"},
            "the architecture 'bert' is not served from GGUF; served are .*qwen3",
        ),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not served"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model 'None' is not served"),
        ({"qwen2.pooling_type": 1}, "a model of vectors"),
        ({"qwen2.expert_count": 8}, "qwen2 with experts"),
        ({"qwen2.rope.scaling.type": "twisted"}, "rope.scaling.type 'twisted' is not served"),
        ({"qwen2.block_count": None}, "there is no qwen2.block_count"),
        ({"tokenizer.ggml.tokens": None}, "there is no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": 5}, "there is no tokenizer.ggml.tokens"),
    ],
)
def test_what_no_family_runs_is_refused_by_field(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "qwen2", fields=fields)
    with pytest.raises(GgufRefused, match=why):
        opened(path)


def test_missing_and_foreign_parts_are_refused(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "model.gguf", "qwen2", parts=3)
    paths = [tmp_path / name for name in parts_of("model-00002-of-00003.gguf")]
    assert len(read_model(paths[1]).tensors) == len(read_model(paths[0]).tensors)
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(GgufRefused, match=r"model-00002-of-00003\.gguf calls itself part 2 of 3"):
        opened(paths[0])
    paths[1].unlink()
    with pytest.raises(GgufRefused, match=r"1 of 3 files are missing, first model-00002-of-00003\.gguf"):
        opened(paths[0])
    paths[1].write_bytes(second)
    opened(paths[2])


def test_one_name_stands_for_each_model_of_a_directory() -> None:
    parts = [f"big/m-{number:05d}-of-00002.gguf" for number in (2, 1)]
    assert choices([*parts, "a.Q4_0.gguf", "mmproj-a.gguf", "README.md"]) == ["a.Q4_0.gguf", parts[1]]
    assert gguf_file.stem_of(parts[0]) == "m" and gguf_file.stem_of("x/a.Q4_0.gguf") == "a.Q4_0"
