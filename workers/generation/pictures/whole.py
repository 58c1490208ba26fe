"""Families that see a picture as one: Qwen2-VL to Qwen3-VL, Mistral 3, Gemma 3.

- Qwen: both sides become multiples of patch size times merge size, of which each square takes one token. The area is
  brought between `min_pixels` and `max_pixels`, which files of Qwen3-VL call `size.shortest_edge` and
  `size.longest_edge`. The tower of Qwen2.5-VL looks at windows of one picture, never across pictures.
- Mistral 3: the longest side is brought down to `size.longest_edge`, and both sides up to multiples of patch size times
  merge size. One token for each such square, and one behind each row.
- Gemma 3: every picture is squeezed to the same square, and takes `mm_tokens_per_image` tokens.
"""

from __future__ import annotations

import math
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

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The patches, fp32 [patches, channels, pixels], and (1, rows, columns) of patches.

        PERF: the processor repeats each patch for the frames of a video. Once is enough for what waits in memory: a
        picture of the largest size has 154 MB.
        """
        found = super().inputs(image, alone)
        patches, frames = found["pixel_values"], int(self.images.temporal_patch_size)
        channels = len(self.images.image_mean)
        once = patches.view(len(patches), channels, frames, -1)[:, :, 0].contiguous()
        return found | {"pixel_values": once}

    def joined(self, model: Any, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The inputs of all pictures, with the patches as the processor gives them."""
        found = super().joined(model, pictures)
        once = found["pixel_values"][:, :, None]
        frames = once.expand(-1, -1, int(self.images.temporal_patch_size), -1)
        return found | {"pixel_values": frames.flatten(1)}

    @torch.inference_mode()
    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture, with those that Qwen3-VL adds behind its first text layers."""
        output = model.get_image_features(**self.joined(model, pictures))
        rows = shared_out(output.pooler_output, pictures)
        layers = [shared_out(found, pictures) for found in getattr(output, "deepstack_features", None) or ()]
        return [Features(own, tuple(layer[at] for layer in layers)) for at, own in enumerate(rows)]


class Mistral3(Family):
    """Pictures of Mistral 3, whose tower is Pixtral."""

    names = ("pixel_values", "image_sizes")

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the parts, see `Family`."""
        super().__init__(config, tokenizer, images)
        self._merge = int(config.spatial_merge_size)
        self._unit = int(config.vision_config.patch_size) * self._merge
        self._row_ends, self._ends = self.in_vocabulary("[IMG_BREAK]", "[IMG_END]")
        self._most = self.stored_size("longest_edge")

    @property
    def words(self) -> frozenset[str]:
        """Placeholders and ends of rows."""
        return super().words | {self._row_ends, self._ends}

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """Rows of tokens with their ends; raises ValueError for a side that would be scaled below one pixel."""
        ratio = max(height / self._most, width / self._most, 1.0)
        sides = math.floor(height / ratio), math.floor(width / ratio)
        if min(sides) < 1:
            raise ValueError(f"scaled to a longest side of {self._most}, the short side is below one pixel")
        rows, columns = (-(-side // self._unit) for side in sides)
        row = f"{self.image_word}{self._row_ends}"
        text = row * (rows - 1) + f"{self.image_word}{self._ends}"
        return Layout(text, (columns,) * rows, rows * columns * self._merge**2)

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The picture and its size in pixels."""
        found = self.images(images=[image], patch_size=self._unit, return_tensors="pt")
        return {name: torch.as_tensor(found[name]) for name in self.names}

    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture.

        PERF: one by one. The tower would compare all patches of a call with one another, and mask most of that.
        """
        return [self._alone(model, picture) for picture in pictures]

    def _alone(self, model: Any, picture: Picture) -> Features:
        """NOTE: with one placeholder in all transformers 5.23 splits the wrong dimension; with two it does not."""
        twice = 2 if len(picture.places) == 1 else 1
        rows = super().encode(model, [picture] * twice)[0].rows
        return Features(rows)


class Gemma3(Family):
    """Pictures of Gemma 3. The template writes the token that begins a picture."""

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the parts, see `Family`. Raises ValueError for files that ask for crops of pictures."""
        super().__init__(config, tokenizer, images)
        if getattr(images, "do_pan_and_scan", None):
            raise ValueError(
                "preprocessor_config.json sets do_pan_and_scan, which is not built: set it to false"
            )
        ends = [config.boi_token_index, config.eoi_token_index]
        self.word, self._ends = map(str, tokenizer.convert_ids_to_tokens(ends))
        self._tokens = int(config.mm_tokens_per_image)
        self._cost = (config.vision_config.image_size // config.vision_config.patch_size) ** 2

    @property
    def words(self) -> frozenset[str]:
        """Placeholders, begin and end of a picture."""
        return super().words | {self._ends}

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """The same for all sizes."""
        text = f"\n\n{self.word}{self.image_word}{self._ends}\n\n"
        return Layout(text, (self._tokens,), self._cost)
