"""Llama 4: a picture on a canvas of tiles, with the whole picture as the last tile.

transformers has its image processor for torchvision only. `Llama4Images` does the same with Pillow, by the same rules
(image_processing_llama4.py): the canvas that shrinks the picture least, or else enlarges it least, padded with black on
the right and below. Values are those of bfloat16, in which the original computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers import image_settings
from workers.generation.pictures.family import Family, Features, Layout, Picture, shared_out
from workers.image_settings import NotServed
from workers.images import require_vision

_DEFAULTS: dict[str, Any] = {
    "size": {"height": 336, "width": 336},
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The settings that are read, with the values of transformers."""
_ALWAYS = ("do_resize", "do_rescale", "do_normalize")


class Llama4Images:
    """The image processor."""

    def __init__(self, stored: Mapping[str, Any], name: str = image_settings.IMAGES) -> None:
        """Take the values of the file `name`. Raises `NotServed` for steps that are switched off."""
        require_vision()
        off = [name for name in _ALWAYS if not stored.get(name, True)]
        if off:
            raise NotServed(f"{name}: {', '.join(off)} must not be false")
        self._settings = {name: stored.get(name, value) for name, value in _DEFAULTS.items()}
        self.side = int(self._settings["size"]["height"])
        if self._settings["size"]["width"] != self.side:
            raise ValueError("size has other values for height and width")
        self._canvases = np.array(_canvases(int(self._settings["max_patches"]))) * self.side

    def to_dict(self) -> dict[str, Any]:
        """The settings."""
        return self._settings

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels of the canvas for a picture."""
        # NOTE: float32, as in the original: which canvases scale equally depends on rounding.
        sides = self._canvases.astype(np.float32)
        scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
        larger = scales[scales >= 1]
        if len(larger):
            chosen = larger.max() if self._settings["resize_to_max_canvas"] else larger.min()
        else:
            chosen = scales.max()
        fitting = self._canvases[scales == chosen]
        smallest = fitting[fitting.prod(axis=1).argmin()]
        return int(smallest[0]), int(smallest[1])

    def tiles(self, image: Any) -> torch.Tensor:
        """fp32 [tiles, 3, side, side] of a PIL image in RGB, row by row, the whole picture last if there are more."""
        tall, wide = self.canvas(image.height, image.width)
        height, width = self._scaled(image.height, image.width, tall, wide)
        ground = require_vision().new("RGB", (wide, tall))
        ground.paste(image.resize((width, height), self._settings["resample"]), (0, 0))
        rows, columns = tall // self.side, wide // self.side
        cut = self._values(ground).view(3, rows, self.side, columns, self.side)
        found = cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, self.side, self.side)
        if len(found) == 1:
            return found
        whole = self._values(image.resize((self.side, self.side), self._settings["resample"]))
        return torch.cat([found, whole[None]])

    def _scaled(self, height: int, width: int, tall: int, wide: int) -> tuple[int, int]:
        """The size of the picture on its canvas. Small pictures are enlarged to one tile at most."""
        most = None if self._settings["resize_to_max_canvas"] else self.side
        down, across = (
            np.float32(side) if most is None or max(own, most) > side else max(own, most)
            for own, side in ((height, tall), (width, wide))
        )
        # NOTE: sides of the canvas are float32 and others are not, as in the original.
        by_width, by_height = across / width, down / height
        if by_width < by_height:
            return max(min(math.floor(height * by_width), int(down)), 1), int(across)
        return int(down), max(min(math.floor(width * by_height), int(across)), 1)

    def _values(self, image: Any) -> torch.Tensor:
        """fp32 [3, height, width], normalised in bfloat16."""
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).to(torch.bfloat16)
        mean, spread = (
            torch.tensor(self._settings[name], dtype=torch.bfloat16)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        values: torch.Tensor = (
            ((pixels * self._settings["rescale_factor"] - mean) / spread).float().contiguous()
        )
        return values


class Llama4(Family):
    """Pictures of Llama 4."""

    def __init__(self, config: Any, tokenizer: Any, images: Llama4Images) -> None:
        """Take the parts, see `Family`."""
        super().__init__(config, tokenizer, images)
        sight = config.vision_config
        self._patches = (sight.image_size // sight.patch_size) ** 2
        self._tokens = self._patches // round(1 / sight.pixel_shuffle_ratio**2)
        self.word, self._across, self._down = self.in_vocabulary(
            "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
        )
        self._begins, self._ends = self.in_vocabulary("<|image_start|>", "<|image_end|>")

    @classmethod
    def load_images(cls, directory: Path, *, trust_remote_code: bool, **pixels: int) -> Llama4Images:
        """The image processor of a directory. Raises FileNotFoundError without the file of its settings."""
        name, settings = image_settings.read(directory)
        if not settings:
            raise FileNotFoundError(f"{name}: the model has no settings of an image processor")
        return Llama4Images(settings, name)

    @property
    def words(self) -> frozenset[str]:
        """Placeholders and the marks around tiles."""
        return super().words | {self._across, self._down, self._begins, self._ends}

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """Rows of tiles, and the whole picture behind the word of the template."""
        tall, wide = self.images.canvas(height, width)
        rows, columns = tall // self.images.side, wide // self.images.side
        tiles = (
            ""
            if rows * columns == 1
            else (self._across.join([self.image_word] * columns) + self._down) * rows
        )
        count = 1 if not tiles else rows * columns + 1
        text = f"{self._begins}{tiles}{self.word}{self.image_word}{self._ends}"
        return Layout(text, (self._tokens,) * count, count * self._patches)

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The tiles."""
        return {"pixel_values": self.images.tiles(image)}

    @torch.inference_mode()
    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture, in the width of the text model."""
        output = model.get_image_features(**self.joined(model, pictures), return_dict=True)
        seen = output.last_hidden_state
        projected = model.multi_modal_projector(seen.reshape(-1, seen.shape[-1]))
        return [Features(rows) for rows in shared_out(projected, pictures)]


def _canvases(most: int) -> list[tuple[int, int]]:
    """Grids (rows, columns) of at most `most` tiles, grouped by their form in the original's order."""
    by_form: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_form.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_form.values() for grid in grids]
