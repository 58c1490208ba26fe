"""One virtual environment per peer under `.bench/<peer>`, with pinned packages.

1. `ensure(peer)` creates `.bench/<peer>` with the running interpreter, afresh when its pins have changed.
2. The pins go in through pip; torch is always the CPU build, named by its local version so that pip cannot
   choose a CUDA build. Where the configured indexes have no such build, PyTorch's own CPU index is added.
3. A stamp with the pins is written last, so a second call costs nothing and a changed pin installs again.

`python -m benchmarks.peers.environments` sets up all of them; names on the command line choose some.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".bench"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0+cpu"
SENTENCE_TRANSFORMERS = ("sentence-transformers==6.2.0", "transformers==5.23.0", "numpy==2.4.6")

PINS: dict[str, tuple[str, ...]] = {
    "mosec": (TORCH, *SENTENCE_TRANSFORMERS, "mosec==0.9.8"),
    "litserve": (TORCH, *SENTENCE_TRANSFORMERS, "litserve==0.2.19"),
    "infinity": (
        TORCH,
        "infinity-emb[server,torch]==0.0.78",
        "sentence-transformers==3.4.1",
        "transformers==4.48.3",
        "huggingface-hub==0.36.0",
        "numpy==1.26.4",
        "typer==0.12.5",
        "click==8.1.8",
    ),
    "transformers": (TORCH, "transformers[serving]==5.23.0", "accelerate==1.15.0", "numpy==2.4.6"),
    "mistralrs": ("mistralrs==0.9.5", "tokenizers==0.23.3"),
    "openvino": (TORCH, "transformers==5.23.0", "numpy==2.4.6", "openvino==2026.4.1"),
}


class EnvironmentFailed(RuntimeError):
    """pip could not install a peer's pins; carries the end of pip's output."""


def python_of(peer: str) -> Path:
    """Path of the interpreter of `peer`'s environment (which may not exist yet)."""
    return ENVIRONMENTS / peer / "bin" / "python"


def ensure(peer: str) -> Path:
    """Return the interpreter of `peer`'s environment, creating and filling the environment if needed.

    Raises KeyError for an unknown peer and EnvironmentFailed when pip cannot install its pins.
    """
    pins = "\n".join(PINS[peer])
    stamp = ENVIRONMENTS / peer / ".pins"
    if not (stamp.exists() and stamp.read_text() == pins):
        print(f"setting up {ENVIRONMENTS / peer}", file=sys.stderr, flush=True)
        venv.create(ENVIRONMENTS / peer, with_pip=True, clear=True)
        _install(peer)
        stamp.write_text(pins)
    return python_of(peer)


def _install(peer: str) -> None:
    """Install the pins of `peer`, on a second attempt with PyTorch's CPU index."""
    command = [str(python_of(peer)), "-m", "pip", "install", "--quiet", *PINS[peer]]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for extra in ([], ["--extra-index-url", CPU_INDEX]):
        done = subprocess.run(command + extra, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise EnvironmentFailed(f"pip failed for {peer}:\n{done.stderr[-2000:]}")


def main() -> None:
    """Set up the environments named on the command line, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", default=sorted(PINS), metavar="PEER", help=" ".join(sorted(PINS)))
    for peer in parser.parse_args().peers:
        print(ensure(peer))


if __name__ == "__main__":
    main()
