"""A directory of several hosts in this process: each box with one worker, which has loaded some models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from frontend.engine.interface import BoxView, WorkerView
from frontend.scope import ANY_BOX, Choice
from ipc.wire.messages import Credits, ModelStatus
from tests.fakes.engine import InProcessDirectory


class BoxesDirectory(InProcessDirectory):
    """The models of some boxes; `loaded_at` names the loaded models of each box."""

    def __init__(self, models: InProcessDirectory, loaded_at: Mapping[str, Sequence[str]]) -> None:
        super().__init__(models.catalog, [ModelStatus(name, "loaded") for name in models.catalog])
        self._loaded_at = dict(loaded_at)
        self._boxes = {name: BoxView(name, "default", "default", True, False) for name in loaded_at}
        self.loaded = {model for models in loaded_at.values() for model in models}
        self.choices: list[Choice] = []
        """What requests have chosen that waited for a model."""

    async def ensure_loaded(
        self, model: str, deadline_ns: int, others: Collection[str] = (), choice: Choice = ANY_BOX
    ) -> ModelStatus:
        self.choices.append(choice)
        return await super().ensure_loaded(model, deadline_ns, others, choice)

    def change(self, box: str, **fields: object) -> None:
        """A box has other fields from now on."""
        self._boxes[box] = replace(self._boxes[box], **fields)  # type: ignore[arg-type]

    def boxes(self) -> Sequence[BoxView]:
        return [self._boxes[name] for name in sorted(self._boxes)]

    def workers(self) -> Sequence[WorkerView]:
        return [
            WorkerView(
                f"{box}/worker-0",
                0,
                "ready" if self._boxes[box].alive else "absent",
                self._boxes[box].alive,
                True,
                "NVIDIA L4",
                1,
                {
                    model: ModelStatus(model, "loaded" if model in loaded else "available")
                    for model in self.catalog
                },
                Credits(1, 0, 1.0),
                None,
                box=box,
            )
            for box, loaded in sorted(self._loaded_at.items())
        ]
