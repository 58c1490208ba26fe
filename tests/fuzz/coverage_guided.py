"""Explores a target with atheris, which sees what code an input reaches: `python -m tests.fuzz.coverage_guided NAME S`.

It runs for S seconds from the kept inputs. A crash, an input over the time limit and growth over the memory limit end
it with an error, and the input is written into the corpus of the target.
"""

from __future__ import annotations

import sys
import tempfile

import atheris

from tests.fuzz import corpus

LONGEST_S, MOST_MIB, LONGEST_NBYTES = 10, 2048, 8192

with atheris.instrument_imports(include=["frontend", "ipc", "google.protobuf.text_format"]):
    from tests.fuzz.targets import TARGETS


def main(name: str, seconds: int, seed: int) -> None:
    """Explore one target; ends the process."""
    target = TARGETS[name]
    place = corpus.ROOT / name
    place.mkdir(parents=True, exist_ok=True)
    found = tempfile.mkdtemp(prefix="penstock-fuzz-")
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={LONGEST_S}",
        f"-rss_limit_mb={MOST_MIB}",
        f"-max_len={LONGEST_NBYTES}",
        f"-artifact_prefix={place}/found-",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, found, str(place)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
