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
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from workers.generation.pictures.family import Family, Features, Layout, Picture, shared_out
from workers.image_settings import NotServed
from workers.images import require_vision


class Qwen(Family):
    """Pictures of the Qwen families. The grid is that of the placeholders.

    PERF: what the processor makes of a level of a channel is a number, whatever stands beside it. So a picture waits as
    levels, one byte each, and becomes numbers on the device: those of the processor, bit by bit, for a fifth of the
    time and an eighth of the memory. The load compares both, and takes the processor where they differ.
    """

    names = ("pixel_values", "image_grid_thw")

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the parts, see `Family`."""
        super().__init__(config, tokenizer, images)
        self._merge = int(images.merge_size)
        self._patch = int(images.patch_size)
        self._numbers = self._learnt_numbers()

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """One token per merged square of patches; raises ValueError for sides of a ratio over 200."""
        tall, wide = self._resized(height, width)
        rows, columns = (side // (self._patch * self._merge) for side in (tall, wide))
        return Layout(self.image_word, (rows * columns,), rows * columns * self._merge**2, (rows, columns))

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The patches, uint8 [patches, 3, pixels] in levels, and (1, rows, columns) of patches."""
        if self._numbers is None:
            return super().inputs(image, alone)
        tall, wide = self._resized(image.height, image.width)
        levels = self._levels(image.resize((wide, tall), self.images.resample))
        return {
            "pixel_values": levels,
            "image_grid_thw": torch.tensor([[1, tall // self._patch, wide // self._patch]]),
        }

    def joined(self, model: Any, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The inputs of all pictures as the processor gives them, each patch repeated for the frames of a video."""
        inputs = super().joined(model, pictures)
        if self._numbers is None:
            return inputs
        numbers = _looked_up(inputs["pixel_values"], self._numbers.to(model.device, model.dtype))
        return inputs | {"pixel_values": self._repeated(numbers)}

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self.images.size
        tall, wide = smart_resize(
            height,
            width,
            self._patch * self._merge,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return tall, wide

    def _levels(self, image: Any) -> torch.Tensor:
        """uint8 [patches, 3, pixels] of an image with the right sides; patches of a square stand side by side."""
        merge, patch = self._merge, self._patch
        pixels = torch.from_numpy(np.array(image))
        rows, columns = len(pixels) // (patch * merge), pixels.shape[1] // (patch * merge)
        squares = pixels.view(rows, merge, patch, columns, merge, patch, 3)
        return squares.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns * merge**2, 3, patch**2)

    def _repeated(self, numbers: torch.Tensor) -> torch.Tensor:
        frames = numbers[:, :, None].expand(-1, -1, int(self.images.temporal_patch_size), -1)
        return frames.flatten(1)

    def _learnt_numbers(self) -> torch.Tensor | None:
        """fp32 [3, 256]: the number of each level, from a picture of all levels; None where there is no such table."""
        tall, wide = self._resized(256, 256)
        order = np.random.default_rng(0).permutation(tall * wide * 3)
        image = require_vision().fromarray((order % 256).astype(np.uint8).reshape(tall, wide, 3))
        levels = self._levels(image)
        given = super().inputs(image, alone=True)["pixel_values"]
        has_all = all(len(levels[:, channel].unique()) == 256 for channel in range(3))
        if not has_all or given.shape != self._repeated(levels).shape:
            return None
        numbers = torch.zeros(3, 256)
        once = given.view(*levels.shape[:2], -1, levels.shape[2])[:, :, 0]
        for channel in range(3):
            numbers[channel, levels[:, channel].long()] = once[:, channel]
        return numbers if torch.equal(self._repeated(_looked_up(levels, numbers)), given) else None

    @torch.inference_mode()
    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture, with those that Qwen3-VL adds behind its first text layers."""
        output = model.get_image_features(**self.joined(model, pictures))
        rows = shared_out(output.pooler_output, pictures)
        layers = [shared_out(found, pictures) for found in getattr(output, "deepstack_features", None) or ()]
        return [Features(own, tuple(layer[at] for layer in layers)) for at, own in enumerate(rows)]


def _looked_up(levels: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[patches, 3, pixels] in the numbers [3, 256] of the levels."""
    channels = [
        torch.nn.functional.embedding(levels[:, channel].int(), numbers[channel][:, None])[..., 0]
        for channel in range(3)
    ]
    return torch.stack(channels, dim=1)


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

    def joined(self, model: Any, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The inputs of all pictures, with zeros below and right of the smaller ones."""
        pixels = [picture.inputs["pixel_values"] for picture in pictures]
        height, width = (max(each.shape[side] for each in pixels) for side in (-2, -1))
        filled = [
            torch.nn.functional.pad(each, (0, width - each.shape[-1], 0, height - each.shape[-2]))
            for each in pixels
        ]
        return super().joined(
            model,
            [
                replace(picture, inputs={**picture.inputs, "pixel_values": each})
                for picture, each in zip(pictures, filled, strict=True)
            ],
        )

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
        """Take the parts, see `Family`. Raises `NotServed` for files that ask for crops of pictures."""
        super().__init__(config, tokenizer, images)
        if getattr(images, "do_pan_and_scan", None):
            raise NotServed(
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
