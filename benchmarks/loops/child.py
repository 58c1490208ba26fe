"""Inside a loop process: answer commands on standard input, one JSON line each, with one JSON line on standard output.

- `{"run": name, "count": n}`: one pass over the first n texts; answers `{"wall_s", "cpu_s"}`.
- `{"lone": name, "count": n}`: n texts one at a time, tokenising included; answers `{"latencies_s": [...]}`.
- `{"vectors": n}`: the embeddings of the first n texts; answers `{"vectors": [[...], ...]}`.

Tokenising happens once at the start and is no part of a pass, so a pass is a little faster than any server can be.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Tokens = list[int]
Vectors = NDArray[np.float32]
Forward = Callable[[list[Tokens]], Vectors]
Run = Callable[[str, int], Vectors]
Split = Callable[[Sequence[int], Sequence[int]], list[list[int]]]
MAX_TOKENS = 256


class Loop:
    """One way to run a model: `split` makes batches of text numbers ordered by length, `forward` runs one batch."""

    def __init__(self, forward: Forward, split: Split) -> None:
        self._forward, self._split = forward, split

    def run(self, tokens: Sequence[Tokens]) -> Vectors:
        """Embeddings [texts, 384] in input order."""
        lengths = [len(ids) for ids in tokens]
        order = sorted(range(len(tokens)), key=lengths.__getitem__)
        result = np.empty((len(tokens), 384), np.float32)
        for batch in self._split(order, lengths):
            result[batch] = self._forward([tokens[index] for index in batch])
        return result


def by_count(size: int) -> Split:
    """Batches of `size` texts."""
    return lambda order, _: [list(order[start : start + size]) for start in range(0, len(order), size)]


def by_tokens(budget: int) -> Split:
    """Batches of as many texts as stay within `budget` tokens; one text at least."""

    def split(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        used = 0
        for index in order:
            if batches[-1] and used + lengths[index] > budget:
                batches.append([])
                used = 0
            batches[-1].append(index)
            used += lengths[index]
        return batches

    return split


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The model's tokenizer, truncating to `MAX_TOKENS`, without padding."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def tokenise(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Token ids of each text."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def take_output() -> TextIO:
    """The real standard output. From now on output of libraries goes to standard error."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return output


def serve(output: TextIO, names: Sequence[str], run: Run, lone: Run) -> None:
    """Announce the loops by name, then answer commands until standard input ends.

    `run(name, count)` makes one pass; `lone(name, index)` embeds the text of that number alone.
    """
    print(json.dumps({"loops": list(names)}), file=output)
    for line in sys.stdin:
        command = json.loads(line)
        if "run" in command:
            wall, cpu = time.perf_counter(), time.process_time()
            run(command["run"], command["count"])
            answer: dict[str, Any] = {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
            }
        elif "lone" in command:
            latencies = []
            for index in range(command["count"]):
                since = time.perf_counter()
                lone(command["lone"], index)
                latencies.append(time.perf_counter() - since)
            answer = {"latencies_s": latencies}
        else:
            answer = {"vectors": run(names[0], command["vectors"]).tolist()}
        print(json.dumps(answer), file=output)


def setting(name: str) -> str:
    """A setting from the parent process: MODEL_DIR, THREADS, DEVICE, PRECISION, TEXTS (a file name)."""
    return os.environ[f"BENCHMARK_{name}"]


def read_questions() -> list[tuple[str, list[str]]]:
    """Queries, each with its documents."""
    return [(query, documents) for query, documents in json.loads(Path(setting("TEXTS")).read_text())]


def read_texts() -> list[str]:
    """The texts to embed."""
    texts: list[str] = json.loads(Path(setting("TEXTS")).read_text())
    return texts
