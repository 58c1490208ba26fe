"""Run a model through our own adapter in this process, in batches, as a worker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ipc.catalog.entries import ModelEntry
from ipc.errors import InferenceFailed
from ipc.settings import Settings
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from penstock.files import ignore_progress
from workers import operations
from workers.adapters.base import Adapter, ItemFailure, LoadContext, Prepared
from workers.adapters.registry import resolve
from workers.adapters.shared.building import resolve_dtype
from workers.device import devices
from workers.inputs import NOTHING
from workers.operations.items import Results

BATCH_ITEMS = 8


class Ours:
    """A model in our adapter."""

    def __init__(self, entry: ModelEntry, settings: Settings, directory: Path) -> None:
        """Load the model, whose files `directory` holds. Exceptions of the adapter pass."""
        family = resolve(entry.adapter, files=settings.worker.trust_remote_code)
        self.device = devices.select(settings).torch
        self.dtype = resolve_dtype(entry.precision or settings.worker.precision, self.device)
        self.entry = entry
        self.adapter: Adapter = family.load(
            LoadContext(
                directory=directory,
                model_id=entry.id,
                device=self.device,
                dtype=self.dtype,
                max_sequence_length=entry.max_sequence_length,
                options={**entry.runtime, **entry.loadtime},
                progress=ignore_progress,
                trust_remote_code=settings.worker.trust_remote_code,
            )
        )

    def encode(
        self, items: Sequence[InputItem], output: str, *, is_query: bool
    ) -> list[np.ndarray[Any, Any]]:
        """Per item: dense [dims], sparse [vocabulary], or multivector [tokens, dims], float32."""
        call = EncodeCall(list(items), [output], is_query=is_query, options=self.entry.runtime)
        return self._each(call, lambda results, prepared: self._vectors(results, prepared, output))

    def score(self, query: str, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """float32 [texts]."""
        call = ScoreCall([InputItem(text) for text in texts], InputItem(query), options=self.entry.runtime)
        return np.stack(self._each(call, lambda results, _: list(_host(results.rows["score"]))))

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """The findings in each text."""
        items = [InputItem(text) for text in texts]
        call = ExtractCall(items, list(labels), options=self.entry.runtime)
        operations.check(self.adapter, call)
        extractions: list[Extraction] = []
        for batch in self._batches(call):
            for one in self.adapter.extract(self.adapter.collate(batch)):
                if isinstance(one, ItemFailure):
                    raise InferenceFailed(one.message)
                extractions.append(one)
        return extractions

    def _each(
        self, call: Call, read: Callable[[Results, list[Prepared]], list[np.ndarray[Any, Any]]]
    ) -> list[np.ndarray[Any, Any]]:
        operations.check(self.adapter, call)
        operation, answers = operations.operation_of(call), []
        for batch in self._batches(call):
            results = operation.run(self.adapter, self.adapter.collate(batch), call)
            answers.extend(read(results, batch))
        return answers

    def _batches(self, call: Call) -> list[list[Prepared]]:
        operation = operations.operation_of(call)
        ready: list[Prepared] = []
        for one in operation.prepare(self.adapter, call, 0, len(call.items), NOTHING):
            if isinstance(one, ItemFailure):
                raise InferenceFailed(one.message)
            ready.append(one)
        return [ready[start : start + BATCH_ITEMS] for start in range(0, len(ready), BATCH_ITEMS)]

    def _vectors(self, results: Results, prepared: list[Prepared], output: str) -> list[np.ndarray[Any, Any]]:
        if output == "sparse":
            width = self.adapter.dims["sparse"]
            pairs = zip(results.loose["sparse.indices"], results.loose["sparse.values"], strict=True)
            return [_spread(indices, values, width) for indices, values in pairs]
        if output == "multivector":
            ends = np.cumsum([item.rows for item in prepared])[:-1]
            return np.split(_host(results.ragged["multivector"]), ends)
        return list(_host(results.rows[output]))


def _spread(indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """A sparse vector as a dense one."""
    vector = np.zeros(width, dtype=np.float32)
    vector[indices] = values
    return vector


def _host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().float().cpu().numpy()
