"""Families that cut a picture into tiles: SmolVLM and Idefics 3, InternVL, LLaVA-OneVision.

Behind the tiles, or before them, stands the whole picture as one more tile.

- SmolVLM, Idefics 3: the longest side becomes `size.longest_edge`, also where the picture is smaller, and both sides
  multiples of the tile. Each tile is named by row and column.
- InternVL: the grid of `min_patches` to `max_patches` tiles whose form is nearest to that of the picture. The whole
  picture is left out where there is one tile.
- LLaVA-OneVision: the canvas of `image_grid_pinpoints` that loses least. Rows and columns of padding take no tokens,
  and more than `anyres_max_N` tiles are shrunk. A picture beside others in the prompt is one tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from workers.generation.pictures.family import Family, Features, Layout, Picture

_MOST_SIDE = 4096
"""Idefics 3 scales no side over this, whatever its files say (image_processing_idefics3.py)."""

_CROPS = {"crop_to_patches": True}
"""The processor of InternVL sets the option, whatever preprocessor_config.json says (processing_internvl.py)."""


class Idefics3(Family):
    """Pictures of SmolVLM and Idefics 3."""

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the parts, see `Family`."""
        super().__init__(config, tokenizer, images)
        sight = config.vision_config
        patches = (sight.image_size // sight.patch_size) ** 2
        self._tokens = int(patches / config.scale_factor**2)
        self._tile_cost = patches
        self._longest = self.stored_size("longest_edge")
        self._tile = int(images.max_image_size["longest_edge"])
        self._fake, self._whole = self.in_vocabulary("<fake_token_around_image>", "<global-img>")

    @property
    def words(self) -> frozenset[str]:
        """Placeholders and the marks around tiles. Names of tiles are special tokens of the tokenizer."""
        return super().words | {self._fake, self._whole}

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """Rows of named tiles and the whole picture."""
        rows, columns = self._grid(height, width) if self.images.do_image_splitting else (0, 0)
        tiles = [
            "".join(
                f"{self._fake}<row_{row}_col_{column}>{self.image_word}" for column in range(1, columns + 1)
            )
            for row in range(1, rows + 1)
        ]
        text = "".join(f"{row}\n" for row in tiles) + ("\n" if tiles else "")
        count = rows * columns + 1
        whole = f"{self._fake}{self._whole}{self.image_word}{self._fake}"
        return Layout(text + whole, (self._tokens,) * count, count * self._tile_cost)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tiles; (0, 0) for a picture of one tile."""
        height, width = _scaled(height, width, self._longest)
        if max(height, width) > _MOST_SIDE:
            ratio = width / height
            height, width = (
                (int(_MOST_SIDE / ratio), _MOST_SIDE)
                if width >= height
                else (_MOST_SIDE, int(_MOST_SIDE * ratio))
            )
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self._tile)
            rows = math.ceil(int(columns * self._tile / ratio) / self._tile)
        else:
            rows = math.ceil(height / self._tile)
            columns = math.ceil(int(rows * self._tile * ratio) / self._tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def joined(self, model: Any, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """All tiles as those of one prompt, fp [1, tiles, 3, side, side]."""
        tiles = torch.cat([picture.inputs["pixel_values"] for picture in pictures], dim=1)
        return {"pixel_values": tiles.to(model.device, model.dtype)}


def _scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """A size with this longest side. The short one becomes even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


class InternVL(Family):
    """Pictures of InternVL in the form of transformers."""

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the parts, see `Family`."""
        super().__init__(config, tokenizer, images)
        self._tokens = int(config.image_seq_length)
        sight = config.vision_config
        self._tile_cost = math.prod(
            side // patch
            for side, patch in zip(_both(sight.image_size), _both(sight.patch_size), strict=True)
        )
        names = (getattr(tokenizer, f"{end}_image_token", None) for end in ("start", "end"))
        begin, end = (name or own for name, own in zip(names, ("<img>", "</img>"), strict=True))
        self._begins, self._ends = self.in_vocabulary(begin, end)

    @property
    def words(self) -> frozenset[str]:
        """Placeholders, begin and end of a picture."""
        return super().words | {self._begins, self._ends}

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """All tiles in one run."""
        tiles = int(self.images.get_number_of_image_patches(height, width, _CROPS))
        text = f"{self._begins}{self.image_word}{self._ends}"
        return Layout(text, (tiles * self._tokens,), tiles * self._tile_cost)

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The tiles, [tiles, 3, side, side]."""
        found = self.images(images=[image], return_tensors="pt", **_CROPS)
        return {"pixel_values": found["pixel_values"]}


class LlavaOnevision(Family):
    """Pictures of LLaVA-OneVision, which sees one picture in detail and several as small ones."""

    names = ("pixel_values", "image_sizes")
    by_company = True

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the parts, see `Family`."""
        super().__init__(config, tokenizer, images)
        self._side = config.vision_config.image_size // config.vision_config.patch_size
        self._canvases = [tuple(canvas) for canvas in config.image_grid_pinpoints]
        self._tile = int(config.vision_config.image_size)
        self._most_tiles = int(str(config.vision_aspect_ratio).removeprefix("anyres_max_"))

    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """One run: the whole picture, then the rows of the canvas, each with a token for its end."""
        patches = self._side**2
        if not alone:
            return Layout(self.image_word, (patches + 1,), patches)
        from transformers.image_processing_utils import select_best_resolution

        tall, wide = select_best_resolution((height, width), self._canvases)
        tiles = (tall // self._tile) * (wide // self._tile)
        rows, columns = self._kept(height, width, tall // self._tile, wide // self._tile)
        return Layout(self.image_word, (patches + rows * (columns + 1),), (tiles + 1) * patches)

    def _kept(self, height: int, width: int, tiles_down: int, tiles_across: int) -> tuple[int, int]:
        """(rows, columns) of tokens without padding, shrunk to the most tiles (modeling_llava_onevision.py)."""
        rows, columns = self._side * tiles_down, self._side * tiles_across
        if width / height > columns / rows:
            kept = int(round(height * (columns / width), 7))
            rows -= (rows - kept) // 2 * 2
        else:
            kept = int(round(width * (rows / height), 7))
            columns -= (columns - kept) // 2 * 2
        ratio = math.sqrt(rows * columns / (self._most_tiles * self._side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The tiles, [1, tiles, 3, side, side], and the size of the picture in pixels."""
        # NOTE: the processor cuts the pictures of prompts with one picture; a second one of one pixel costs nothing.
        given = [image] if alone else [[image, image.resize((1, 1))]]
        found = self.images(images=given, return_tensors="pt")
        return {name: found[name][:1] for name in self.names}

    @torch.inference_mode()
    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture, those of prompts with one picture and the others in a call each."""
        found: dict[int, Features] = {}
        for alone in (True, False):
            places = [at for at, picture in enumerate(pictures) if picture.alone is alone]
            if places:
                features = super().encode(model, [pictures[at] for at in places])
                found.update(zip(places, features, strict=True))
        return [found[at] for at in range(len(pictures))]

    def joined(self, model: Any, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The tiles of each picture, padded with zeros, their sizes, and how many pictures each prompt has.

        NOTE: the model asks of these numbers only whether they are 1. Two pictures stand for one that had company.
        """
        alone = pictures[0].alone
        tiles = pad_sequence([picture.inputs["pixel_values"][0] for picture in pictures], batch_first=True)
        sizes = torch.cat([picture.inputs["image_sizes"] for picture in pictures])
        counts = (
            torch.ones(len(pictures), dtype=torch.long) if alone else torch.tensor([max(2, len(pictures))])
        )
        return {
            "pixel_values": tiles.to(model.device, model.dtype),
            "image_sizes": sizes,
            "batch_num_images": counts,
        }


def _both(side: Any) -> tuple[int, int]:
    """(height, width) of a number or a pair."""
    return (int(side), int(side)) if isinstance(side, int) else (int(side[0]), int(side[1]))
