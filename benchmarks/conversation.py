"""Long prompts: what a second turn computes, and what running streams notice of a long prompt.

1. Serve a Llama with random weights in one worker: a tiny one, or one of 30 M parameters with --full.
   A conversation begins with a prompt of 2,048 tokens. Its second turn sends the prompt, the answer and a new question;
   the server tells how many tokens of the prompt were known.
2. A prompt of 8,192 tokens is sent alone: its time to the first token, divided by its chunks, is a chunk's own time.
   Later chunks look back at more tokens: what a prompt that is one chunk shorter takes less is the time of the last.
3. The same happens beside running streams, whose times between tokens are noted from the moment that the long prompt
   is sent until its first token. Each round has new prompts.
"""

from __future__ import annotations

import string
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks import llamas
from benchmarks.chat_models import generator, letters
from benchmarks.load import percentile
from benchmarks.options import parser
from benchmarks.processes import Server
from benchmarks.report import Report
from benchmarks.serving import Settings, penstock
from benchmarks.streaming import Readers, Streamed, chat, read

MODEL = "bench/llama"
TURN, QUESTION, ANSWER = 2048, 64, 32
LONG, CHUNK = 8192, 512
BLOCK = 16
STREAMS = 8
MOST_RATIO = 2.0
_QUIET = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """One round. Times are milliseconds, gaps are times between the tokens of running streams."""

    first_turn_ms: float
    second_turn_ms: float
    second_prompt: int
    second_cached: int
    chunk_ms: float
    last_chunk_ms: float
    gap_alone_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


def turns(server: Server, turn: int) -> tuple[Streamed, Streamed, int]:
    """Both turns of a conversation, and the tokens of the second prompt."""
    # NOTE: an answer of letters becomes the same tokens again; other words of a random model need not.
    ids = llamas.tokenizer().convert_tokens_to_ids(list(string.ascii_uppercase))
    bias = {"logit_bias": {str(number): 100 for number in ids}}
    prompt = letters(TURN, f"turn {turn}")
    [first] = read(server.address, [chat(MODEL, prompt, ANSWER, **bias)], keep=True)
    prompt += first.answer.decode() + letters(QUESTION, f"question {turn}")
    [second] = read(server.address, [chat(MODEL, prompt, ANSWER, **bias)])
    return first, second, len(prompt)


def gaps_beside(server: Server, turn: int) -> tuple[list[float], list[float]]:
    """Times between tokens of running streams, without and with a long prompt beside them."""
    with Readers(server.address) as readers:
        running = [readers.send(chat(MODEL, letters(64, f"{turn} {at}"), 4096)) for at in range(STREAMS)]
        while any(len(stream.arrivals) < _QUIET for stream in running):
            readers.look()
        quiet = [gap for stream in running for gap in stream.gaps_s[_QUIET // 2 :]]
        before = [len(stream.gaps_s) for stream in running]
        long = readers.send(chat(MODEL, letters(LONG, f"beside {turn}"), 2))
        while not long.answered_at:
            readers.look()
        busy = [gap for stream, at in zip(running, before, strict=True) for gap in stream.gaps_s[at:]]
    return quiet, busy


def measure(server: Server, turn: int) -> Sample:
    """One round."""
    first, second, prompt = turns(server, turn)
    [long] = read(server.address, [chat(MODEL, letters(LONG, f"alone {turn}"), 2)])
    [shorter] = read(server.address, [chat(MODEL, letters(LONG - CHUNK, f"shorter {turn}"), 2)])
    quiet, busy = gaps_beside(server, turn)
    return Sample(
        first.first_s * 1e3,
        second.first_s * 1e3,
        prompt,
        second.cached_tokens,
        long.first_s / (LONG // CHUNK) * 1e3,
        (long.first_s - shorter.first_s) * 1e3,
        percentile(quiet, 50) * 1e3,
        percentile(busy, 50) * 1e3,
        percentile(busy, 99) * 1e3,
    )


def run(rounds: int, size: str) -> Report:
    """Measure and save the report."""
    chosen = {"size": size, "rounds": rounds, "threads": 1, "chunk": CHUNK}
    report = Report("conversation", "Long prompts of chat", chosen)
    with generator(MODEL, size) as (_, catalog):
        settings: Settings = {
            "catalog.dirs": str(catalog),
            "server.frontends": 1,
            "worker.count": 1,
            "worker.torch_threads": 1,
            "worker.precision": "float32",
            "generation.prefill_tokens": CHUNK,
            "generation.block_tokens": BLOCK,
        }
        samples = []
        with penstock(MODEL, settings) as server:
            for turn in range(rounds):
                samples.append(measure(server, turn))
                report.say(f"round {turn + 1}/{rounds}: {samples[-1]}")
    show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def show(report: Report, samples: list[Sample]) -> None:
    """Both tables, and the targets."""

    def middle(name: str) -> float:
        return median(float(getattr(sample, name)) for sample in samples)

    computed = max(sample.second_prompt - sample.second_cached for sample in samples)
    share = median(sample.second_cached / sample.second_prompt for sample in samples)
    report.table(
        f"Two turns, {TURN} tokens and {QUESTION} more",
        ["first token ms, turn 1", "turn 2", "prompt of turn 2", "computed", "known"],
        [[middle("first_turn_ms"), middle("second_turn_ms"), samples[0].second_prompt, computed, share]],
    )
    # NOTE: the last chosen token was never computed, and a block that is not full cannot be found again.
    text = f"the second turn computes its {QUESTION} new tokens and less than a block more"
    met = "met" if computed <= QUESTION + BLOCK else "missed"
    report.note(f"Target: {text}: {computed} of {samples[0].second_prompt}, {met}.")
    report.table(
        f"{STREAMS} streams beside a prompt of {LONG:,} tokens",
        ["a chunk alone ms", "the last chunk", "gap without the prompt, p50", "gap beside, p50", "p99"],
        [
            [
                middle("chunk_ms"),
                middle("last_chunk_ms"),
                middle("gap_alone_ms"),
                middle("gap_p50_ms"),
                middle("gap_p99_ms"),
            ]
        ],
    )
    for of, name in (("a chunk", "chunk_ms"), ("the last chunk", "last_chunk_ms")):
        ratio = middle("gap_p99_ms") / middle(name)
        text = f"p99 between tokens under {MOST_RATIO:g} times the time of {of}"
        report.note(f"Target: {text}: {ratio:.2f}, {'met' if ratio < MOST_RATIO else 'missed'}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((7, "30M") if chosen.full else (3, "tiny")))


if __name__ == "__main__":
    main()
