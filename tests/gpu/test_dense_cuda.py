"""The packed path on CUDA in half precision, against fp32 on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ipc.wire.messages import InputItem
from tests.harness.calls import asked
from tests.tiny.models import build
from tests.tiny.texts import mixed_lengths
from workers.adapters.base import LoadContext
from workers.adapters.dense import DenseAdapter
from workers.adapters.shared.encoder import select_kernel

pytestmark = pytest.mark.gpu
MODELS = ("dense_mean", "dense_last", "dense_modernbert", "dense_xlmr", "dense_mpnet")


def vectors(directory: Path, device: str, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [n, dims] on CPU of the mixed texts, all in one batch."""
    adapter = DenseAdapter.load(
        LoadContext(directory, "m", torch.device(device), dtype, None, {}, lambda phase, fraction: None)
    )
    items = [InputItem(text=text) for text in mixed_lengths()]
    batch = adapter.collate(adapter.prepare(items, asked()))
    return adapter.encode(batch, frozenset({"dense"}))["dense"].cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [12, 4])
def test_the_varlen_kernel_passes_its_check(dtype: torch.dtype, kv_heads: int) -> None:
    assert select_kernel(torch.device("cuda", 0), dtype, 12, kv_heads, 64) is not None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_vectors_stay_close_to_fp32_on_cpu(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    directory = build(name, tmp_path / "model")
    wanted, got = vectors(directory, "cpu", torch.float32), vectors(directory, "cuda", dtype)
    assert (1 - torch.cosine_similarity(got, wanted)).max() < 1e-3
