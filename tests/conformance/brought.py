"""A model that public clients bring with a load: its configuration, its file, and a request to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.tiny.program_sources import IDENTITY


def config_of(batch: int) -> str:
    """The configuration, as text."""
    side = {"data_type": "TYPE_INT32", "dims": [-1]}
    return json.dumps(
        {
            "backend": "python",
            "max_batch_size": batch,
            "input": [{"name": "INPUT", **side}],
            "output": [{"name": "OUTPUT", **side}],
        }
    )


def files() -> dict[str, bytes]:
    """The file, under the name of its parameter."""
    return {"file:1/model.py": IDENTITY.encode()}


def infer_brought(tensor: Callable[[str, Any, str], Any]) -> list[Any]:
    """Inputs of a request that the model gives back as they are."""
    return [tensor("INPUT", np.array([[5]], np.int32), "INT32")]
