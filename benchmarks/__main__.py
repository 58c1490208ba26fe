"""Run all benchmarks one after the other, then write the summary; quick by default, `--full` for the real figures."""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import report
from benchmarks.options import parser

NAMES = (
    "transfer",
    "frontend",
    "response",
    "multivector",
    "outputs",
    "scale",
    "latency",
    "fairness",
    "overload",
    "cycles",
    "growth",
    "encode",
    "embed",
    "score",
    "generation",
    "grammars",
    "loras",
    "tensors",
    "cached",
    "tools",
    "agent",
    "state",
    "large_tensors",
    "transport",
    "chat",
    "llama_cpp",
    "conversation",
    "sharing",
    "pictures",
    "cluster",
    "cluster_text",
    "cluster_deaths",
    "cluster_brokers",
    "deaths",
)


def main() -> None:
    """Run the benchmarks named on the command line (all without a name), each in a process of its own."""
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=" ".join(NAMES))
    chosen = options.parse_args()
    failed = []
    for name in chosen.names:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--full"] if chosen.full else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    report.main()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
