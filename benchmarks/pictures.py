"""Streams of text and an encoder beside pictures of 4096 x 4096 pixels: the time between tokens with and without.

1. Serve all-MiniLM-L6-v2 and a tiny Qwen2.5-VL with random weights in one worker with one torch thread. The second is
   told how many tokens a picture may have.
2. In every round, for each number of tokens: 8 streams that do not end beside 16 clients of the encoder, then the same
   streams and clients beside one client that sends pictures, one after the other. No picture comes twice.
3. A phase lasts until each stream has written some hundreds of tokens. All streams share the steps of the engine, so
   fewer steps would make the 99th percentile the longest step.
4. The 99th percentile of the time between two tokens of a stream is compared within each round.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from benchmarks.chat_models import list_model
from benchmarks.load import Address, closed_loop, post
from benchmarks.options import parser
from benchmarks.peers.servers import MODEL_DIR
from benchmarks.processes import Server, ServerFailed
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, penstock
from benchmarks.sharing import ENCODER, GENERATOR, encoding, measure, talking
from benchmarks.streaming import Readers
from tests.tiny import seeing

SIDE = 4096
TOKENS = (64, 1024)
"""Most tokens of a picture."""
_PIXELS = 16 * 16
"""Pixels of a token of the model."""
MOST_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One round with pictures of so many tokens: times between tokens, and what the encoder did."""

    tokens: int
    p99_ms: float
    p99_beside_ms: float
    encoder_tokens_per_s: float
    encoder_beside_tokens_per_s: float
    pictures_per_s: float

    @property
    def ratio(self) -> float:
        """How much longer the time between tokens is beside pictures."""
        return self.p99_beside_ms / self.p99_ms


def _file() -> bytes:
    image = Image.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB")
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


def _request(picture: bytes) -> bytes:
    data = base64.b64encode(picture).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "what"}]}
    return post("/v1/chat/completions", {"model": GENERATOR, "messages": [message], "max_tokens": 1})


def _sent(address: Address, salt: str, done: Any) -> None:
    """Send pictures without end. Bytes behind the end of a file make the pictures differ."""
    picture = _file()
    for at in itertools.count():
        closed_loop(address, [_request(picture + f"{salt} {at}".encode())], 1)
        done.value += 1


@contextlib.contextmanager
def looking(address: Address, salt: str, readers: Readers) -> Iterator[Any]:
    """A client that sends pictures, entered with its first answer; `value` of what it gives counts its answers."""
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Value("i", 0)
    process = spawn.Process(target=_sent, args=(address, salt, done), daemon=True)
    process.start()
    try:
        while not done.value:
            if not process.is_alive():
                raise ServerFailed("no picture was answered")
            readers.look()
        yield done
    finally:
        process.kill()
        process.join()


def round_of(address: Address, tokens: int, turn: int, gaps: int) -> Sample:
    """Streams beside the encoder, without and with pictures."""
    with talking(address, f"{tokens} {turn}") as readers, encoding(address):
        readers.look()
        alone = measure(address, "", 0, readers, gaps)
        with looking(address, f"{tokens} {turn}", readers) as done:
            before, begun = done.value, time.perf_counter()
            beside = measure(address, "", 0, readers, gaps)
            pictures_per_s = (done.value - before) / (time.perf_counter() - begun)
    return Sample(
        tokens,
        alone.gap_p99_ms,
        beside.gap_p99_ms,
        alone.encoder_tokens_per_s,
        beside.encoder_tokens_per_s,
        pictures_per_s,
    )


@contextlib.contextmanager
def served(tokens: int) -> Iterator[Server]:
    """A server whose pictures have at most so many tokens."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        weights, catalog = seeing.save("qwen2_5_vl", Path(place) / "model"), Path(place) / "catalog"
        stored = weights / "preprocessor_config.json"
        stored.write_text(json.dumps(json.loads(stored.read_text()) | {"max_pixels": tokens * _PIXELS}))
        catalog.mkdir()
        list_model(catalog, GENERATOR, weights, "causal", {"chat": {}})
        more = {"max_sequence_length": 256, "loadtime": {"pooling": "mean", "normalize": True}}
        list_model(catalog, ENCODER, MODEL_DIR, "dense", {"dense": {"dims": 384}}, **more)
        settings: Settings = {
            "catalog.dirs": str(catalog),
            "server.frontends": 1,
            "worker.count": 1,
            "worker.torch_threads": 1,
            "worker.precision": "float32",
        }
        with penstock(f"{ENCODER},{GENERATOR}", settings) as server:
            yield server


def run(rounds: int, gaps: int) -> Report:
    """Measure and save the report."""
    report = Report("pictures", "Streams beside pictures", {"rounds": rounds, "gaps": gaps})
    samples: list[Sample] = []
    for tokens in TOKENS:
        with served(tokens) as server:
            for turn in range(rounds):
                samples.append(round_of(server.address, tokens, turn, gaps))
                report.say(f"{tokens} tokens, round {turn + 1}/{rounds}: {samples[-1]}")
    show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def show(report: Report, samples: list[Sample]) -> None:
    """A row for each number of tokens, and the ratio of each."""
    rows: list[Row] = []
    for tokens in TOKENS:
        of_these = [sample for sample in samples if sample.tokens == tokens]
        names = [name for name in Sample.__slots__ if name != "tokens"]
        rows.append(
            [tokens, *(median(float(getattr(each, name)) for each in of_these) for name in (*names, "ratio"))]
        )
    heads = ["tokens of a picture", "gap p99 ms without", "with", "encoder tokens/s without", "with"]
    report.table(
        f"8 streams, 16 clients of the encoder, pictures of {SIDE} x {SIDE}",
        [*heads, "pictures/s", "ratio"],
        rows,
    )
    for most, *_, ratio in rows:
        text = f"pictures of {most} tokens, p99 between tokens at most {MOST_RATIO:g} of that without"
        assert isinstance(ratio, float)
        report.note(f"Target: {text}: {ratio:.2f}, {'met' if ratio <= MOST_RATIO else 'missed'}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((5, 400) if chosen.full else (1, 300)))


if __name__ == "__main__":
    main()
