"""Object detection with the model's own labels: DETR, RT-DETR and their kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ipc.wire.messages import ExtractCall
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.image_extracting import Detector, Found, Scene
from workers.adapters.shared.options import OptionReader


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Least score, and the labels of the request; without labels all count."""

    threshold: float
    labels: frozenset[str]


class DetectionAdapter(Detector):
    """A ...ForObjectDetection model with labels of its own."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="detection",
        operations=("extract",),
        inputs=("image",),
        outputs=("json",),
    )
    labels = "own"
    model_class = "AutoModelForObjectDetection"
    reads_words = False

    @property
    def own_labels(self) -> Sequence[str]:
        """Labels of the model's classes."""
        return tuple(self._model.config.id2label.values())

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Threshold and labels of a call."""
        return _Wanted(OptionReader(call).threshold("score_threshold", 0.5), frozenset(call.labels))

    def inputs_of(self, image: Any, wanted: Any) -> Mapping[str, np.ndarray]:
        """Pixel values float32 [3, h, w], and the mask of real pixels where the model has one."""
        processed = self._processor(images=image, return_tensors="np")
        return {
            name: np.asarray(processed[name][0])
            for name in ("pixel_values", "pixel_mask")
            if name in processed
        }

    def read(self, output: Any, scenes: Sequence[Scene]) -> list[list[Found]]:
        """The detections of each scene above its threshold and among its labels."""
        results = self._processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=[tuple(scene.size) for scene in scenes]
        )
        return [self._detections(result, scene.wanted) for result, scene in zip(results, scenes, strict=True)]

    def _detections(self, result: Mapping[str, Any], wanted: _Wanted) -> list[Found]:
        names = self._model.config.id2label
        columns = (result[name].tolist() for name in ("labels", "scores", "boxes"))
        return [
            Found(names[label], score, corners)
            for label, score, corners in zip(*columns, strict=True)
            if score >= wanted.threshold and (not wanted.labels or names[label] in wanted.labels)
        ]
