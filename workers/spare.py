"""A spare: a worker process that has imported the model libraries, and waits for the slot of a worker that dies.

1. Import what every worker needs. No device is asked for, since the slot says which GPU is visible.
2. Read the assignment from the life pipe, and put its variables into the environment.
3. `workers.main` goes on as for a process that was started for the slot.
"""

from __future__ import annotations

import importlib
import os

import msgspec

from ipc.processes import starting as processes
from workers import libraries

TITLE = "spare worker"
PRELOADED = ("workers.runtime", "workers.adapters.shared.text_model")
"""Modules that take most of a worker's start, beside transformers."""
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Keeps model libraries from writing lines and bars between ours, unless the environment asks for them."""
_READ_NBYTES = 4096


class Assignment(msgspec.Struct, frozen=True):
    """What makes a worker of a spare: the number of its slot, and variables that its environment lacks."""

    slot: int
    environment: dict[str, str]


def prepare_libraries() -> None:
    """Set what the model libraries read from the environment when they are imported."""
    # PERF: OpenMP threads spin for some 20 us between the steps of a forward pass, which keeps them on their cores, and
    # then sleep, which leaves the cores to the frontends. Every preparing thread tokenizes alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # PERF: every token count has its own oneDNN primitives; making one takes a millisecond. Keeping one takes half a
    # megabyte, so a worker on CPU grows by up to half a gigabyte.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def wait_for_slot(life_fd: int) -> int | None:
    """Import the libraries, then wait for a slot; None when the supervisor has died before it gave one."""
    processes.title(TITLE)
    prepare_libraries()
    with processes.importing():
        libraries.import_transformers()
        for module in PRELOADED:
            importlib.import_module(module)
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(life_fd, _READ_NBYTES)
        if not more:
            return None
        line += more
    assignment = msgspec.json.decode(line, type=Assignment)
    os.environ.update(assignment.environment)
    return assignment.slot
