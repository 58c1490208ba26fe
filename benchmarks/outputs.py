"""The cost of several outputs of one model: dense, sparse and token vectors in one pass against each of them alone.

1. Build an encoder of BGE-M3's kind with random weights: 6 layers of width 384, a vocabulary of 250,002, two heads.
2. In every round, run the same batches through the adapter for each output alone and for all three.

No server takes part: this is the device's share of a request. Preparing and batching are the same for all outputs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.corpus import passages
from benchmarks.options import parser
from benchmarks.report import Report
from ipc.wire.messages import EncodeCall, InputItem
from tests.tiny import vocabularies
from workers.adapters.base import LoadContext
from workers.adapters.bge_m3 import BgeM3Adapter

OUTPUTS = ("dense", "sparse", "multivector")
SETS = (*((name,) for name in OUTPUTS), OUTPUTS)
TARGET = 1.10
_WIDTH, _LAYERS, _VOCABULARY = 384, 6, 250_002
_BATCHES, _BATCH_ITEMS = 4, 16
_LONGEST = 256


def build(directory: Path, width: int = _WIDTH, layers: int = _LAYERS, longest: int = _LONGEST) -> None:
    """A checkpoint in BGE-M3's layout with random weights, of the benchmark's size unless told otherwise.

    A layer has `width` / 32 heads, at most 16. `longest` is the number of tokens that a text may have.
    """
    vocabularies.unigram(directory)
    config = transformers.XLMRobertaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=min(16, width // 32),
        intermediate_size=4 * width,
        max_position_embeddings=longest + 2,
        type_vocab_size=1,
        pad_token_id=1,
    )
    transformers.XLMRobertaModel(config).save_pretrained(str(directory))
    for name, rows in (("sparse_linear.pt", 1), ("colbert_linear.pt", width)):
        torch.save({"weight": torch.randn(rows, width) * 0.1, "bias": torch.ones(rows)}, directory / name)


def load() -> BgeM3Adapter:
    """The adapter over such a checkpoint, on CUDA where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as place:
        build(Path(place))
        context = LoadContext(
            Path(place), "bench/outputs", device, dtype, _LONGEST, {}, lambda phase, share: None
        )
        return BgeM3Adapter.load(context)


def seconds(adapter: BgeM3Adapter, batches: Sequence[Any], outputs: Sequence[str]) -> float:
    """Time for all batches, results on the host included."""
    began = time.perf_counter()
    for batch in batches:
        for values in adapter.encode(batch, frozenset(outputs)).values():
            if isinstance(values, torch.Tensor):
                values.cpu()
    return time.perf_counter() - began


def run(rounds: int) -> Report:
    """Measure and save the report."""
    torch.set_num_threads(1)
    settings = {"rounds": rounds, "width": _WIDTH, "layers": _LAYERS, "items": _BATCHES * _BATCH_ITEMS}
    report = Report("outputs", "Outputs of one model in one pass", settings)
    adapter = load()
    texts = passages()[: _BATCHES * _BATCH_ITEMS]
    items = [InputItem(text) for text in texts]
    prepared = adapter.prepare(items, EncodeCall(items, list(OUTPUTS)))
    batches = [adapter.collate(prepared[at::_BATCHES]) for at in range(_BATCHES)]  # type: ignore[arg-type]
    found: dict[tuple[str, ...], list[float]] = {outputs: [] for outputs in SETS}
    for turn in range(rounds + 1):
        for outputs in SETS:
            took_s = seconds(adapter, batches, outputs)
            if turn:
                found[outputs].append(took_s)
        report.say(f"round {turn}/{rounds}")
    dearest = max(SETS[:3], key=lambda outputs: median(found[outputs]))
    ratios = {
        outputs: median(took / most for took, most in zip(times, found[dearest], strict=True))
        for outputs, times in found.items()
    }
    rows = [(" + ".join(one), median(found[one]) * 1e3 / _BATCHES, ratios[one]) for one in SETS]
    report.table("One batch of 16 texts", ("outputs", "ms", "to the dearest single output"), rows)
    verdict = "met" if ratios[OUTPUTS] <= TARGET else "missed"
    report.note(f"Target: all three at most {TARGET:g} of the dearest: {ratios[OUTPUTS]:.2f}, {verdict}.")
    report.save([{"outputs": one, "seconds": times} for one, times in found.items()])
    return report


def main() -> None:
    """Read the command line and run."""
    run(15 if parser(__doc__).parse_args().full else 5)


if __name__ == "__main__":
    main()
