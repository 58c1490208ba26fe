"""The settings and models of the KServe server with low limits, which several files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny.programs import SCRIPTED, tensor, write_model, write_repository

LOADED = (
    "add_sub",
    "broken",
    "classifier",
    "classifier_nhwc",
    "identity_bytes",
    "identity_fp16",
    "identity_fp32",
    "raising",
    "slow",
    "versions_all",
    "zero_size",
)
UNLOADED = "unloaded"
"""A model that nobody asks to be loaded."""
LATE = "late"
"""A model that is not loaded at the start, and whose load ends when the file `go` appears."""
MAX_BODY_BYTES = 8 << 20
MAX_JSON_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20
SECRET = {"X-Penstock-Trace": "a-secret-of-some-length"}
"""The header that opens the settings of traces."""
_SOURCE = """
import time
from pathlib import Path

from penstock.model import Model


class Late(Model):
    def __init__(self, context):
        while not Path({go!r}).exists():
            time.sleep(0.01)

    def infer(self, batch):
        return {{"OUTPUT": batch.array("INPUT")}}
"""


def settings(place: Path) -> dict[str, Any]:
    """Write the models and the restricted endpoints below `place`; returns the settings of a server that has them."""
    repository = write_repository(place / "models", LOADED, SCRIPTED)
    write_model(repository, "add_sub", UNLOADED, SCRIPTED)
    _write_late(repository / LATE, place / "go")
    return {
        "repository.dirs": repository,
        "repository.allow_python": "true",
        "repository.control": "explicit",
        "repository.models": ",".join(LOADED),
        "limits.load_wait_s": 0.2,
        "limits.max_body_bytes": MAX_BODY_BYTES,
        "kserve.max_json_bytes": MAX_JSON_BYTES,
        "kserve.restricted_file": _restricted(place / "restricted.yaml"),
        "queue.min_tokens": 64,
        "queue.max_wait_s": 0.001,
        "grpc.max_message_bytes": MAX_MESSAGE_BYTES,
    }


def _write_late(directory: Path, go: Path) -> None:
    (directory / "1").mkdir(parents=True)
    sides = tensor("input", "INPUT", "FP32", [1]) + tensor("output", "OUTPUT", "FP32", [1])
    (directory / "config.pbtxt").write_text(sides)
    (directory / "1" / "model.py").write_text(_SOURCE.format(go=str(go)))


def _restricted(path: Path) -> Path:
    [(header, value)] = SECRET.items()
    path.write_text(f"[{{apis: [trace], header: {header}, value: {value}}}]")
    path.chmod(0o600)
    return path
