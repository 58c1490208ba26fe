"""Models out of GGUF files: every weight and every logit is that of transformers on the same numbers."""

from __future__ import annotations

import math
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.tiny import gguf_models
from workers.adapters.shared import gguf_blocks, gguf_weights
from workers.loading.gguf_file import GgufRefused, StoredTensor, read_model, refuse_unserved

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 300, 41, 7, 7, 120, 64, *range(100, 160)]])


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    stored = read_model(path)
    refuse_unserved(stored)
    return gguf_weights.build(stored, gguf_weights.config_of(stored), dtype, lambda phase, part: None)


def assert_same(model: Any, wanted: Any) -> None:
    """All weights are equal, and so are the logits of a prompt."""
    assert_same_weights(model, wanted)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, wanted(IDS).logits)


def assert_same_weights(model: Any, wanted: Any) -> None:
    ours, theirs = model.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("family", gguf_models.FAMILIES)
def test_each_architecture_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_models.write(path, family)
    model = loaded(path)
    assert_same(model, wanted)
    tied = bool(wanted.config.tie_word_embeddings)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K"]
)
def test_each_block_type_gives_the_numbers_of_the_package(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_models.write(path, "llama", kind)
    assert_same(loaded(path), wanted)


def test_a_head_of_its_own_and_half_precision(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_models.write(path, "qwen3", "Q8_0", options={"tie_word_embeddings": False})
    model = loaded(path, torch.bfloat16)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert_same_weights(model, wanted.to(torch.bfloat16))


def test_parts_of_a_file_make_one_model(tmp_path: Path) -> None:
    wanted = gguf_models.write(tmp_path / "model.gguf", "qwen2", "Q4_0", parts=3)
    for number in (1, 2, 3):
        assert_same(loaded(tmp_path / f"model-{number:05d}-of-00003.gguf"), wanted)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(width: int) -> np.ndarray:
    """What llama.cpp stores of Llama 3's scaling for heads of so many numbers."""
    found = []
    for at in range(0, width, 2):
        wave = 2 * math.pi * LLAMA3["rope_theta"] ** (at / width)  # type: ignore[operator]
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(32.0)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "rope", "fields", "tensors"),
    [
        ("llama", LLAMA3, {}, {"rope_freqs.weight": llama3_factors(64)}),
        (
            "llama",
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {},
        ),
        (
            "qwen2",
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 128,
            },
            {},
        ),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "long_factor": [float(x) for x in np.linspace(1, 9, 24, dtype=np.float32)],
                "short_factor": [1.0] * 24,
                "attention_factor": 1.25,
                "original_max_position_embeddings": 32,
            },
            {
                "phi3.rope.scaling.original_context_length": 32,
                "phi3.rope.scaling.attn_factor": 1.25,
                "phi3.rope.dimension_count": 48,
            },
            {
                "rope_factors_long.weight": np.linspace(1, 9, 24, dtype=np.float32),
                "rope_factors_short.weight": np.ones(24, np.float32),
            },
        ),
    ],
)
def test_scaled_rotary_factors_are_those_of_the_file(
    family: str, rope: dict[str, Any], fields: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    options: dict[str, Any] = {"rope_parameters": rope}
    if family == "phi3":
        options["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    wanted = gguf_models.write(path, family, options=options, fields=fields, tensors=tensors)
    model = loaded(path)
    assert_same(model, wanted)
    plain = gguf_models.write(tmp_path / "plain.gguf", family)
    assert not torch.equal(model(IDS).logits, plain(IDS).logits)


def test_factors_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, tensors={"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32)})
    with pytest.raises(GgufRefused, match=r"model\.gguf: the rotary factors of rope_freqs\.weight"):
        loaded(path)


@pytest.mark.parametrize(
    ("fields", "tensors", "why"),
    [
        (
            {},
            {"blk.0.attn_q.bias": np.zeros(256, np.float32)},
            r"llama has no place for the tensor blk\.0\.attn_q\.bias",
        ),
        ({"llama.block_count": 3}, {}, r"llama\.block_count is 3, and there are 2 blocks of tensors"),
        ({"llama.block_count": 1}, {}, r"llama\.block_count is 1, and there are 2 blocks of tensors"),
        (
            {"llama.feed_forward_length": 128},
            {},
            r"blk\.0\.\w+\.weight has the shape \[256, 256\].*\[128, 256\]",
        ),
        ({"llama.rope.dimension_count": 32, "llama.attention.key_length": 64}, {}, "rope.dimension_count 32"),
    ],
)
def test_fields_that_contradict_the_tensors_are_refused_by_name(
    fields: dict[str, Any], tensors: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, fields=fields, tensors=tensors)
    with pytest.raises(GgufRefused, match=why):
        loaded(path)


def test_a_load_that_nobody_wants_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path)
    stored = read_model(path)

    def abandon(phase: str, part: float) -> None:
        raise LookupError("nobody wants the model")

    with pytest.raises(LookupError, match="nobody"):
        gguf_weights.build(stored, gguf_weights.config_of(stored), torch.float32, abandon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_any_blocks_give_the_bits_of_the_package(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    block = gguf.GGMLQuantizationType[kind]
    values, nbytes = gguf.GGML_QUANT_SIZES[block]
    data = np.random.default_rng(0).integers(0, 256, 300 * nbytes, np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"head" + data.tobytes())
    with np.errstate(invalid="ignore", over="ignore"):
        made = gguf_blocks.read_tensor(StoredTensor((3, 100 * values), kind, path, 4, data.size), dtype)
        wanted = torch.from_numpy(gguf.dequantize(data.reshape(3, -1), block)).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    defined = ~wanted.isnan()
    assert torch.equal(made.isnan(), ~defined)
    assert torch.equal(made.view(bits)[defined], wanted.view(bits)[defined])
    assert defined.sum() > 0.8 * defined.numel()


def test_tensors_made_ahead_give_the_same_model_and_are_given_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = gguf_models.write(path, "llama", "Q4_1")
    stored = read_model(path)
    with closing(gguf_blocks.Ahead(stored.tensors.values())) as ahead:
        config = gguf_weights.config_of(stored)
        model = gguf_weights.build(stored, config, torch.float32, lambda phase, part: None, None, ahead)
        assert_same(model, wanted)
        one = stored.tensors["blk.0.attn_v.weight"]
        assert torch.equal(ahead.take(one), ahead.take(one)), "made anew where it is asked for again"


def test_a_load_that_ends_early_ends_the_thread_that_makes_tensors_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path)
    tensors = list(read_model(path).tensors.values())
    begun, goes_on, made = threading.Event(), threading.Event(), list[StoredTensor]()
    read = gguf_blocks.read_tensor

    def slow(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        made.append(stored)
        begun.set()
        assert goes_on.wait(60)
        return read(stored, dtype)

    monkeypatch.setattr(gguf_blocks, "read_tensor", slow)
    ahead = gguf_blocks.Ahead(tensors)
    assert begun.wait(60)
    closing_thread = threading.Thread(target=ahead.close)
    closing_thread.start()
    while ahead._left:
        assert closing_thread.is_alive()
    goes_on.set()
    closing_thread.join(60)
    assert not closing_thread.is_alive() and made == tensors[:1]


def test_who_takes_a_tensor_ahead_gets_the_error_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path)
    stored = read_model(path)
    os.truncate(path, 100)
    with closing(gguf_blocks.Ahead(stored.tensors.values())) as ahead:
        for tensor in stored.tensors.values():
            with pytest.raises(OSError, match="cut off while the model was read"):
                ahead.take(tensor)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_a_tensor_is_made_in_pieces_and_no_file_is_mapped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "llama", kind)
    stored = read_model(path).tensors["blk.0.attn_v.weight"]
    whole = gguf_blocks.read_tensor(stored, torch.float32)
    read: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: Any, place: int) -> int:
        count = preadv(file, buffers, place)
        read.append(count)
        return count

    monkeypatch.setattr(gguf_blocks, "PIECE_VALUES", 1000)
    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(np, "memmap", None)
    assert torch.equal(gguf_blocks.read_tensor(stored, torch.float32), whole)
    assert max(read) <= 1000 and sum(read) == stored.nbytes and len(read) > 4
