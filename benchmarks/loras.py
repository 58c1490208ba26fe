"""What LoRA adapters of a generating model cost: 32 streams over eight adapters, against the same streams without.

1. Build a Llama in the shape of SmolLM2-135M with random weights, and load it as a worker does. The engine runs with
   one torch thread. Eight adapters of rank 16 on all linear layers are installed, except for the first contestant.
2. In every round, give the engine 32 prompts with the adapters of each contestant, in turn. Answers are greedy.
3. Compare tokens a processor second within each round. Time of prompts counts as well.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import transformers
from safetensors.torch import save_file

from benchmarks import llamas
from benchmarks.options import parser
from benchmarks.report import Report
from ipc.settings import Generation
from ipc.wire.messages import Ending, GenerateCall, Sampling
from workers.adapters.base import LoadContext
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared.lora import FittedLora
from workers.generation.request import GenerationRequest

STREAMS, ADAPTERS, RANK = 32, 8, 16
PROMPT = 32
LEAST = 0.8
"""Tokens a processor second with all adapters, as a part of those of the bare model."""
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""That of SmolLM2-135M."""
BARE, LOADED = "no adapter", "no adapter, eight loaded"
CONTESTANTS: dict[str, list[str]] = {
    BARE: [""] * STREAMS,
    LOADED: [""] * STREAMS,
    "one adapter": ["0"] * STREAMS,
    "half with eight adapters": [str(at // 2 % ADAPTERS) if at % 2 else "" for at in range(STREAMS)],
    "eight adapters": [str(at % ADAPTERS) for at in range(STREAMS)],
}
"""The adapter of each stream, by contestant."""
TARGETED = "eight adapters"


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contestant."""

    contestant: str
    round: int
    tokens: int
    wall_s: float
    cpu_s: float


def save_model(directory: Path) -> None:
    """Write the model, and the adapters beside."""
    base = directory / "base"
    llamas.tokenizer().save_pretrained(base)
    (base / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=1))
    model.save_pretrained(base)
    layers = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and path != "lm_head"
    }
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    for number in range(ADAPTERS):
        place = directory / str(number)
        place.mkdir()
        weights = {}
        for path, layer in layers.items():
            name = f"base_model.model.{path}.lora"
            weights[f"{name}_A.weight"] = torch.randn(RANK, layer.in_features) * 0.02
            weights[f"{name}_B.weight"] = torch.randn(layer.out_features, RANK) * 0.02
        save_file(weights, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(config))


def load(directory: Path) -> CausalAdapter:
    """The model as a worker loads it."""
    context = LoadContext(
        directory=directory,
        model_id="bench/135m",
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=None,
        options={},
        progress=lambda phase, fraction: None,
        generation=Generation(max_sequences=STREAMS),
        free_bytes=lambda: 16 << 30,
    )
    return CausalAdapter.load(context)


def requests(contestant: str, seed: int, tokens: int) -> Iterator[GenerationRequest]:
    """The requests of one turn; their prompts are the same for all contestants."""
    draw = torch.Generator().manual_seed(seed)
    for number, lora in enumerate(CONTESTANTS[contestant]):
        prompt = torch.randint(5, 300, (PROMPT,), generator=draw).tolist()
        ending = Ending(max_tokens=tokens, ignore_eos=True)
        call = GenerateCall(ids=prompt, sampling=Sampling(temperature=0.0), ending=ending, lora=lora)
        yield GenerationRequest(number, prompt, call, tokens, frozenset())


class Contest:
    """The model, its adapters, and the turns of all contestants."""

    def __init__(self, directory: Path) -> None:
        self._adapter, layers = load(directory / "base"), {}
        for number in range(ADAPTERS):
            layers[str(number)] = self._adapter.loras.fit(directory / str(number))
        self._fitted: dict[str, FittedLora] = layers

    def turn(self, contestant: str, number: int, tokens: int) -> Sample:
        """All streams of one contestant, from the first prompt to the last token."""
        self._install(contestant != BARE)
        engine = self._adapter.engine
        for request in requests(contestant, number, tokens):
            engine.add(request)
        began, cpu = time.perf_counter(), time.process_time()
        while engine.has_work:
            engine.step()
        spent = time.perf_counter() - began, time.process_time() - cpu
        # NOTE: the next contestant has the same prompts, and must not find their blocks.
        engine.pool.forget()
        return Sample(contestant, number, STREAMS * tokens, *spent)

    def _install(self, installed: bool) -> None:
        layers = self._adapter.loras
        for name, fitted in self._fitted.items():
            if installed:
                layers.install(name, fitted)
            else:
                layers.remove(name, fitted)


def part(samples: list[Sample], contestant: str) -> float:
    """Median over rounds of the tokens a processor second, as a part of those of the bare model."""
    times = {name: [one.cpu_s for one in samples if one.contestant == name] for name in (BARE, contestant)}
    return median(bare / mine for bare, mine in zip(times[BARE], times[contestant], strict=True))


def run(rounds: int, tokens: int) -> Report:
    """Measure and save the report."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = {
        "threads": 1,
        "rounds": rounds,
        "streams": STREAMS,
        "rank": RANK,
        "prompt and answer": f"{PROMPT} + {tokens}",
    }
    report = Report("loras", "LoRA adapters of a generating model", settings)
    samples = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        save_model(Path(place))
        contest = Contest(Path(place))
        for contestant in CONTESTANTS:
            contest.turn(contestant, -1, 2)
        for number in range(rounds):
            # NOTE: contestants change places, so that a change of the machine's pace meets all of them.
            names = list(CONTESTANTS)
            for contestant in names[number % len(names) :] + names[: number % len(names)]:
                samples.append(contest.turn(contestant, number, tokens))
                report.say(f"round {number}, {contestant}: {samples[-1].cpu_s:.1f} s of processor time")
    rows = []
    for contestant in CONTESTANTS:
        mine = [one for one in samples if one.contestant == contestant]
        rows.append(
            (
                contestant,
                median(one.tokens / one.cpu_s for one in mine),
                median(one.tokens / one.wall_s for one in mine),
                part(samples, contestant),
            )
        )
    report.table("Llama of 135 M, float32", ("streams", "tokens/core-s", "tokens/s", "to no adapter"), rows)
    found = part(samples, TARGETED)
    verdict = "met" if found >= LEAST else "missed"
    report.note(
        f"Target: {TARGETED}, tokens a processor second at least {LEAST} of no adapter: {found:.2f}, {verdict}."
    )
    report.save([asdict(one) for one in samples])
    return report


def main() -> None:
    """Read the command line and run."""
    full = parser(__doc__).parse_args().full
    run(rounds=10 if full else 3, tokens=64 if full else 16)


if __name__ == "__main__":
    main()
