"""Hundreds of labels are tokenized without the interpreter's lock, so that the worker goes on answering meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.wire.messages import ExtractCall, InputItem
from tests.conformance.extractors import required_library
from tests.tiny.models import build
from workers.adapters import registry
from workers.adapters.base import LoadContext, Prepared


class Unlocked:
    """A Rust tokenizer without `encode`, which keeps the lock for as long as it takes; `encode_batch` does not."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        assert name != "encode", "this keeps the interpreter's lock"
        return getattr(self._backend, name)


@pytest.mark.parametrize("family", ["gliclass", "gliner"])
def test_no_label_is_tokenized_under_the_lock(tmp_path: Path, family: str) -> None:
    required_library(family)
    context = LoadContext(
        build(family, tmp_path / family),
        "m",
        torch.device("cpu"),
        torch.float32,
        None,
        {},
        lambda phase, part: None,
    )
    adapter: Any = registry.resolve(family).load(context)
    holder = adapter if family == "gliclass" else adapter._words
    holder._backend = Unlocked(holder._backend)
    call = ExtractCall([InputItem("Marie Curie lives in Paris")], ["person", "city"])
    adapter.refuse_unsupported(call)
    [prepared] = adapter.prepare(call.items, call)
    assert isinstance(prepared, Prepared) and prepared.cost > 4
