"""What grammars cost: tokens of 32 streams under grammars of every kind, against the same streams without a grammar.

1. Build a Llama of 30 million parameters beside a vocabulary of 32,000 tokens, with random weights, and load it as a
   worker does. The engine runs with one torch thread; masks are filled in a thread of their own.
2. In every round, give the engine 32 prompts without a grammar and under each grammar, in turn. All tokens are sampled,
   so that every contestant takes the same way through the sampling stage.
3. Compare tokens a second and processor time a token within each round.

Processor time is that of all threads, so that masks which are filled while the model runs count in full. Grammars that
force tokens save forward passes and may be faster than none; the target counts for those that do not.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import corpus
from benchmarks.options import parser
from benchmarks.report import Report
from ipc.settings import Generation
from ipc.wire.messages import Ending, GenerateCall, Grammar, Sampling, ToolUse
from ipc.wire.streams import FINISHED
from workers.adapters.base import LoadContext
from workers.adapters.causal import CausalAdapter
from workers.generation.request import GenerationRequest

VOCABULARY, STREAMS, TOKENS = 32_000, 32, 64
MOST_COST = 0.10
"""Part of the throughput that masks may cost."""
_TARGETED = ("any text", "any object", "strict functions")
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer"},
    },
    "required": ["title", "tags", "count"],
    "additionalProperties": False,
}
_FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": f"function_{number}", "parameters": _SCHEMA}}
    for number in range(16)
]
_STRICT = [function["function"]["name"] for function in _FUNCTIONS]
CONTESTANTS: dict[str, dict[str, Any]] = {
    "no grammar": {},
    "any text": {"grammar": Grammar("regex", "(?s:.*)")},
    "any object": {"grammar": Grammar("json_object")},
    "schema": {"grammar": Grammar("json_schema", json.dumps(_SCHEMA))},
    "words": {"grammar": Grammar("regex", "([A-Z][a-z]+ ){400}")},
    "strict functions": {"tools": ToolUse(_FUNCTIONS, strict=_STRICT)},
    "forced calls": {"tools": ToolUse(_FUNCTIONS, "required")},
}
"""Fields of the calls by contestant."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contestant."""

    contestant: str
    round: int
    tokens: int
    wall_s: float
    cpu_s: float


def save_model(directory: Path) -> None:
    """Write the model and its tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|begin|>", "<|end|>", "<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=special,
        min_frequency=1,
    )
    backend.train_from_iterator(corpus.passages(), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}<tool_call>"
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def load(directory: Path) -> CausalAdapter:
    """The model as a worker loads it."""
    context = LoadContext(
        directory=directory,
        model_id="bench/30m",
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=None,
        options={},
        progress=lambda phase, fraction: None,
        generation=Generation(max_sequences=STREAMS),
        free_bytes=lambda: 8 << 30,
    )
    return CausalAdapter.load(context)


def requests(adapter: CausalAdapter, contestant: str, seed: int) -> Iterator[GenerationRequest]:
    """The requests of one turn; their prompts are the same for all contestants."""
    texts = corpus.passages()[STREAMS * seed : STREAMS * (seed + 1)]
    for number, text in enumerate(texts):
        call = GenerateCall(
            messages=[{"role": "user", "content": text[:200]}],
            sampling=Sampling(temperature=1.0, seed=1000 * seed + number),
            ending=Ending(max_tokens=TOKENS),
            **CONTESTANTS[contestant],
        )
        [prepared] = adapter.prepare(call.items, call)
        request: GenerationRequest = prepared.payload  # type: ignore[union-attr]
        request.key = number
        yield request


def turn(adapter: CausalAdapter, contestant: str, number: int) -> Sample:
    """All streams of one contestant, from the first prompt to the last token."""
    for request in requests(adapter, contestant, number):
        adapter.engine.add(request)
    tokens = 0
    began, cpu = time.perf_counter(), time.process_time()
    while adapter.engine.has_work:
        for emission in adapter.engine.step():
            if emission.kind == FINISHED and emission.finish is not None:
                tokens += emission.finish.tokens
    return Sample(contestant, number, tokens, time.perf_counter() - began, time.process_time() - cpu)


def ratio(samples: list[Sample], contestant: str, field: str) -> float:
    """Median over rounds of the time a token without a grammar divided by the time of a contestant."""
    times: dict[str, list[float]] = {
        name: [getattr(one, field) / one.tokens for one in samples if one.contestant == name]
        for name in ("no grammar", contestant)
    }
    return median(plain / mine for plain, mine in zip(times["no grammar"], times[contestant], strict=True))


def run(rounds: int) -> Report:
    """Measure and save the report."""
    settings = {
        "streams": STREAMS,
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "threads": 1,
        "rounds": rounds,
    }
    report = Report("grammars", "Grammars", settings)
    torch.set_num_threads(1)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        save_model(Path(place))
        adapter = load(Path(place))
        names = list(CONTESTANTS)
        for name in names:
            turn(adapter, name, 0)
        for number in range(1, rounds + 1):
            shift = number % len(names)
            samples += [turn(adapter, name, number) for name in (*names[shift:], *names[:shift])]
            report.say(f"round {number}")
    rows = []
    for name in CONTESTANTS:
        mine = [one for one in samples if one.contestant == name]
        rows.append(
            (
                name,
                median(one.tokens / one.wall_s for one in mine),
                median(one.cpu_s / one.tokens for one in mine) * 1e3,
                ratio(samples, name, "wall_s"),
                ratio(samples, name, "cpu_s"),
            )
        )
    headers = ("grammar", "tokens/s", "cpu ms/token", "tokens/s to none", "cpu to none")
    report.table(f"{STREAMS} streams, vocabulary of {VOCABULARY} tokens", headers, rows)
    for name in _TARGETED:
        cost = 1 - ratio(samples, name, "cpu_s")
        verdict = "met" if cost <= MOST_COST else "missed"
        report.note(f"Target: {name} takes at most {MOST_COST:.0%} of the throughput: {cost:.1%}, {verdict}.")
    report.save([asdict(one) for one in samples])
    return report


def main() -> None:
    """Read the command line and run."""
    run(9 if parser(__doc__).parse_args().full else 3)


if __name__ == "__main__":
    main()
