"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a picture keeps its form and takes one token for some patches in a square.

The sides become multiples of patch size times merge size. The area is brought between `min_pixels` and `max_pixels`,
which files of Qwen3-VL call `size.shortest_edge` and `size.longest_edge`. The tower of Qwen2.5-VL looks at windows of
one picture, never across pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workers.generation.pictures.family import Family, Features, Layout, Picture, shared_out


class Qwen(Family):
    """Pictures of the Qwen families. The grid is that of the placeholders."""

    names = ("pixel_values", "image_grid_thw")

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """One token per merged square of patches; raises ValueError for sides of a ratio over 200."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        merge, size = int(self.images.merge_size), self.images.size
        unit = int(self.images.patch_size) * merge
        resized = smart_resize(
            height, width, unit, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
        )
        rows, columns = resized[0] // unit, resized[1] // unit
        return Layout(self.image_word, (rows * columns,), rows * columns * merge**2, (rows, columns))

    @torch.inference_mode()
    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture, with those that Qwen3-VL adds behind its first text layers."""
        output = model.get_image_features(**self.joined(model, pictures))
        rows = shared_out(output.pooler_output, pictures)
        layers = [shared_out(found, pictures) for found in getattr(output, "deepstack_features", None) or ()]
        return [Features(own, tuple(layer[at] for layer in layers)) for at, own in enumerate(rows)]
