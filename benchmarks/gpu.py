"""One script for a machine with one CUDA card: all figures of the card within eight minutes.

1. Parts run one after the other, each in processes of its own and for a bounded time; one that fails stops no other.
2. `steps`: the time of a generation step by the clock, Llama 1 B shape in bfloat16, prompts and answers of 64 tokens,
   and prompts as a share of the peak; also with the host and the device in turn, without kernels of layers, and without
   captured prompts, so that the gain of each is told. `large`: a step of the 8 B shape
   against the time that reading its weights takes. `encoder`: the dense output of an encoder in the shape of bge-m3 in
   bfloat16, as a share of the direct packed loop and of the peak, which is what a large matrix product of the same run
   reaches. `cycles`: `benchmarks.cycles`. `tests`: `tests/gpu`.
3. All reports and outcomes are saved in one file; `--device cpu` runs small shapes and no tests, to see it start, and
   with `--least` the smallest shapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks import llamas, outputs
from benchmarks.generation import jobs_of
from benchmarks.loops import torch_generators
from benchmarks.loops.jobs import Run
from benchmarks.loops.packed import PackedBert
from benchmarks.options import parser
from benchmarks.report import Report
from ipc.wire.messages import EncodeCall, InputItem
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.bge_m3 import BgeM3Adapter

ROOT = Path(__file__).resolve().parent.parent
MODES: dict[str, dict[str, Any]] = {
    "without kernels": {"kernels": False},
    "whole": {},
    "in turn": {"run_ahead": "never"},
    "prompts not captured": {"prompt_graphs": False},
}
"""What differs from the whole engine. Kernels stay with the modules of a model, so the engine without comes first."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The shapes of all parts.

    `streams` and `prompts` (number, tokens each) are those of `steps` with a model of `size`, `large_streams` those of
    `large`; answers have `answer` tokens. `encoder`: width, layers, texts. Turns after those that warm up are `rounds`,
    `large_rounds` and `encoder_rounds`. `side` is that of the square matrices of the peak, `rows` that of the matrix
    whose reading is timed. `cycles` and `control` are counts of `benchmarks.cycles`.
    """

    size: str
    streams: tuple[int, ...]
    prompts: tuple[int, int]
    rounds: int
    large: str
    large_streams: tuple[int, ...]
    large_rounds: int
    encoder: tuple[int, int, int]
    encoder_rounds: int
    side: int
    rows: int
    cycles: int
    control: int
    answer: int = 64


SCALES = {
    "cuda": Scale("1B", (1, 32, 128), (16, 512), 3, "8B", (1, 8), 2, (1024, 24, 128), 7, 8192, 32768, 30, 10),
    "cpu": Scale("tiny", (1, 4), (4, 96), 1, "30M", (1,), 1, (64, 2, 8), 1, 256, 2048, 4, 4),
    "least": Scale("tiny", (1,), (1, 16), 1, "tiny", (1,), 1, (64, 1, 2), 1, 64, 256, 3, 3, answer=4),
}
STOP_S = 10.0
"""Seconds that a part has to stop its servers after its time, before it is killed."""


@dataclass(frozen=True, slots=True)
class Part:
    """What runs with the interpreter, and for how many seconds at most."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`code` is the exit status of a part; None: its time ran out. `report` is what the part saved."""

    part: str
    code: int | None
    seconds: float
    output: str
    report: dict[str, Any] | None

    @property
    def told(self) -> str:
        """The outcome in words."""
        if self.code is None:
            return "out of time"
        return "done" if self.code == 0 else f"failed with {self.code}"


def parts_of(device: str, least: bool = False) -> list[Part]:
    """The parts for `device`, on a CPU maybe of the least scale; on CUDA they take 475 seconds at most, with all their
    times to stop.
    """
    own = ("-m", "benchmarks.gpu", "--device", device, *(["--least"] if least else []), "--part")
    scale = SCALES["least" if least else device]
    count = ("--cycles", str(scale.cycles), "--control", str(scale.control))
    if device == "cpu":
        return [
            Part("steps", (*own, "steps"), 250),
            Part("large", (*own, "large"), 250),
            Part("encoder", (*own, "encoder"), 250),
            Part("cycles", ("-m", "benchmarks.cycles", *count), 250),
        ]
    return [
        Part("steps", (*own, "steps"), 130),
        Part("large", (*own, "large"), 60),
        Part("encoder", (*own, "encoder"), 60),
        Part("cycles", ("-m", "benchmarks.cycles", "--device", "cuda", *count), 75),
        Part("tests", ("-m", "pytest", "-q", "-rs", "-m", "gpu", "tests/gpu"), 100),
    ]


def run_part(part: Part, directory: Path) -> Outcome:
    """Run a part, whose reports go to `directory`; print and return what it said."""
    began, log = time.monotonic(), directory / f"{part.name}.log"
    saved = directory / part.name
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=os.environ | {"BENCH_RESULTS": str(saved)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    print(f"== {part.name}\n{text}", flush=True)
    report = next((json.loads(path.read_text()) for path in saved.glob("*.json")), None)
    return Outcome(part.name, code, time.monotonic() - began, text[-4000:], report)


def run(parts: list[Part], device: str) -> bool:
    """Run all parts and save the file; whether all of them are done."""
    card = torch.cuda.get_device_name() if device == "cuda" else "none"
    report = Report("gpu", f"Figures of one card ({device})", {"device": device, "card": card})
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        found = [run_part(part, Path(place)) for part in parts]
    for one in found:
        for table in one.report["tables"] if one.report else []:
            report.table(f"{one.part}: {table['title']}", table["headers"], table["rows"])
    report.table("Parts", ("part", "outcome", "s"), [(one.part, one.told, one.seconds) for one in found])
    report.save([asdict(one) for one in found])
    return all(one.code == 0 for one in found)


def _seconds(work: Callable[[], object], device: str) -> float:
    """Time of `work` by the clock, until the device has done it."""
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _step_times(
    generate: Run, streams: int, size: str, rounds: int, answer_tokens: int, device: str
) -> tuple[float, float]:
    """Seconds of a step, and of the first tokens of all streams, by the clock."""
    times: dict[int, list[float]] = {1: [], answer_tokens: []}
    for turn in range(rounds + 1):
        for answer, kept in times.items():
            jobs = [(prompt, answer) for prompt, _ in jobs_of(streams, size, 2 * turn + (answer > 1))]
            took_s = _seconds(lambda jobs=jobs: generate(jobs), device)  # type: ignore[misc]
            if turn:
                kept.append(took_s)
    first_s, all_s = median(times[1]), median(times[answer_tokens])
    return (all_s - first_s) / (answer_tokens - 1), first_s


def steps(device: str, scale: Scale) -> None:
    """A step is the time of whole answers less that of answers of one token, over the steps between them.

    `in turn`: the host reads the tokens of a step before the next begins. Prompts are answered with one token. `MODES`
    are the engines.
    """
    size, streams, rounds, answer = scale.size, scale.streams, scale.rounds, scale.answer
    report = Report("gpu-steps", "Generation steps by the clock", {"size": size, "rounds": rounds})
    words = llamas.tokenizer()
    model = llamas.make(size, len(words), device, _dtype(device))
    found: dict[str, list[tuple[float, float]]] = {}
    shares: dict[str, tuple[int, int, float, float]] = {}
    for mode, options in MODES.items():
        # NOTE: the proof of an engine asks the model in its own form, and the engine before has left its attention.
        model.set_attn_implementation("sdpa")
        chosen = {"run_ahead": "always", **options}
        generate = torch_generators.penstock(model, words, seats=max(streams), step_tokens=0, **chosen)
        found[mode] = [_step_times(generate, count, size, rounds, answer, device) for count in streams]
        shares[mode] = _prompts(generate, model, scale, device)
    rows = []
    for at, count in enumerate(streams):
        step_s, first_s = found["whole"][at]
        others = (found[mode][at][0] * 1e3 for mode in ("in turn", "without kernels"))
        tokens_s = count * answer / (first_s + (answer - 1) * step_s)
        rows.append((str(count), step_s * 1e3, *others, first_s * 1e3, tokens_s))
    headers = ("streams", "ms a step", "in turn", "without kernels", "ms to the first tokens", "tokens/s")
    report.table("Steps", headers, rows)
    told = [(mode, *share) for mode, share in shares.items()]
    report.table("Prompts", ("engine", "prompts", "tokens each", "tokens/s", "of peak"), told)
    report.note(
        "The peak is that of a large matrix product; work is two FLOP a weight of the layers and token."
    )
    report.save([list(row) for row in [*rows, *told]])


def _prompts(generate: Run, model: Any, scale: Scale, device: str) -> tuple[int, int, float, float]:
    """Number and length of prompts, their tokens a second, and the share of the peak."""
    count, length = scale.prompts
    draw, took = random.Random(0), []
    for turn in range(scale.rounds + 1):
        jobs = [([draw.randint(10, 200) for _ in range(length)], 1) for _ in range(count)]
        took_s = _seconds(lambda jobs=jobs: generate(jobs), device)  # type: ignore[misc]
        took += [took_s] if turn else []
    per_s = count * length / median(took)
    weights = sum(one.numel() for one in model.model.layers.parameters() if one.dim() > 1)
    return count, length, per_s, 2 * weights * per_s / peak(device, model.dtype, scale.side)


def large(device: str, scale: Scale) -> None:
    """Steps of a larger model, against the time that one reading of its weights takes."""
    size, rounds, dtype = scale.large, scale.large_rounds, _dtype(device)
    report = Report("gpu-large", "Steps against the reading of weights", {"size": size, "rounds": rounds})
    words = llamas.tokenizer()
    model = llamas.make(size, len(words), device, dtype)
    generate = torch_generators.penstock(model, words, run_ahead="always", step_tokens=0)
    nbytes = sum(one.nbytes for one in model.model.layers.parameters())
    reading_s = nbytes / bandwidth(device, dtype, scale.rows)
    rows = []
    for count in scale.large_streams:
        step_s, _ = _step_times(generate, count, size, rounds, scale.answer, device)
        rows.append((str(count), step_s * 1e3, reading_s * 1e3, reading_s / step_s))
    report.table("Large", ("streams", "ms a step", "ms to read the weights", "reading to step"), rows)
    report.note(
        f"{nbytes / 1e9:.3g} GB of weights; the bandwidth is that of a product of a matrix with a vector."
    )
    report.save([list(row) for row in rows])


def bandwidth(device: str, dtype: torch.dtype, side: int) -> float:
    """Bytes/s at which the best of some products with a vector reads a matrix [side, side]."""
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    vector = torch.randn(side, device=device, dtype=dtype)
    return matrix.nbytes / min(_seconds(lambda: matrix @ vector, device) for _ in range(10))


def peak(device: str, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of the best of some products of matrices [side, side]."""
    one = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(_seconds(lambda: one @ one, device) for _ in range(10))


@torch.inference_mode()
def encoder(device: str, scale: Scale) -> None:
    """One batch of texts of 32 to 480 tokens, ordered by length, through the adapter and the direct packed loop."""
    (width, layers, texts), rounds, dtype = scale.encoder, scale.encoder_rounds, _dtype(device)
    settings = {"width": width, "layers": layers, "texts": texts, "rounds": rounds}
    report = Report("gpu-encoder", "The encoder path against the direct packed loop", settings)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        outputs.build(Path(place), width, layers, longest=512)
        context = LoadContext(
            Path(place), "m", torch.device(device), dtype, 512, {}, lambda phase, share: None
        )
        adapter = BgeM3Adapter.load(context)
        model = transformers.AutoModel.from_pretrained(place, dtype=dtype).eval().to(device)
    packed, draw = PackedBert(model), random.Random(0)
    lengths = sorted(draw.randint(32, 480) for _ in range(texts))
    items = [InputItem(ids=[draw.randint(10, 200) for _ in range(length)]) for length in lengths]
    prepared = [
        one for one in adapter.prepare(items, EncodeCall(items, ["dense"])) if isinstance(one, Prepared)
    ]
    ids = [[int(number) for number in row] for one in prepared for row in adapter.ids_of(one.payload)]
    batch = adapter.collate(prepared)
    turns: dict[str, Callable[[], object]] = {
        "adapter": lambda: adapter.encode(batch, frozenset({"dense"}))["dense"].cpu(),  # type: ignore[union-attr]
        "direct": lambda: packed(ids).cpu(),
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(rounds + 2):
        for name, work in turns.items():
            took_s = _seconds(work, device)
            if turn > 1:
                times[name].append(took_s)
    tokens, limit = sum(map(len, ids)), peak(device, dtype, scale.side)
    weights = sum(one.numel() for one in model.encoder.parameters() if one.dim() > 1)
    share = median(direct / ours for direct, ours in zip(times["direct"], times["adapter"], strict=True))
    rows = [
        (name, median(took) * 1e3, tokens / median(took), 2 * weights * tokens / median(took) / limit, ratio)
        for (name, took), ratio in zip(times.items(), (share, 1.0), strict=True)
    ]
    report.table("Encoder", ("path", "ms a batch", "tokens/s", "of peak", "of the direct loop"), rows)
    report.note(f"The peak is {limit / 1e12:.3g} TFLOP/s; work is two FLOP a weight of the layers and token.")
    report.save(times)


def main() -> None:
    """Read the command line; run all parts or one."""
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options.add_argument("--least", action="store_true", help="the smallest shapes, on a CPU")
    options.add_argument("--part", choices=("steps", "large", "encoder"), help="one part, in this process")
    chosen = options.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    elif chosen.least:
        options.error("--least is for --device cpu")
    scale = SCALES["least" if chosen.least else chosen.device]
    if chosen.part:
        {"steps": steps, "large": large, "encoder": encoder}[chosen.part](chosen.device, scale)
    elif chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here, nothing was run; --device cpu runs small shapes")
    elif not run(parts_of(chosen.device, chosen.least), chosen.device):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
