"""Start a loop process and give it commands. It waits in a read between commands and costs nothing then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ROOT, ensure
from benchmarks.peers.servers import MODEL_DIR

MODULES = {
    "torch": "torch_loop",
    "sentence-transformers": "sentence_loop",
    "openvino": "openvino_loop",
    "adapter": "score_loop",
    "CrossEncoder": "cross_encoder_loop",
}

QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


class LoopFailed(RuntimeError):
    """A loop process ended; its standard error has the reason."""


class LoopProcess:
    """One engine (a key of `MODULES`) with its loops over `texts`, on cpu or cuda.

    `texts` are whatever the engine's loop reads: texts, or queries with their documents.
    """

    def __init__(
        self,
        engine: str,
        texts: Sequence[Any],
        threads: int,
        precision: str,
        device: str = "cpu",
        model_dir: Path = MODEL_DIR,
    ) -> None:
        self.engine, self.precision = engine, precision
        python = str(ensure(engine)) if engine == "openvino" else sys.executable
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(list(texts), file)
            self._texts = Path(file.name)
        settings = {"THREADS": threads, "PRECISION": precision, "DEVICE": device, "TEXTS": self._texts}
        environment = {f"BENCHMARK_{name}": str(value) for name, value in settings.items()}
        environment["BENCHMARK_MODEL_DIR"] = str(model_dir)
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.loops.{MODULES[engine]}"],
            cwd=ROOT,
            env=os.environ | environment | QUIET | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = self._answer()["loops"]

    def __enter__(self) -> LoopProcess:
        return self

    def __exit__(self, *failure: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._texts.unlink(missing_ok=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoopFailed(f"the {self.engine} loop ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def run(self, name: str, count: int) -> dict[str, float]:
        """One pass of loop `name` over `count` texts: `wall_s` and `cpu_s`."""
        return self._ask({"run": name, "count": count})

    def lone(self, name: str, count: int) -> list[float]:
        """Seconds that loop `name` takes for each of `count` texts alone, tokenising included."""
        latencies: list[float] = self._ask({"lone": name, "count": count})["latencies_s"]
        return latencies

    def vectors(self, count: int) -> list[list[float]]:
        """Embeddings of the first `count` texts."""
        vectors: list[list[float]] = self._ask({"vectors": count})["vectors"]
        return vectors
