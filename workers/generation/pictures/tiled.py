"""Families that cut a picture into tiles: SmolVLM and Idefics 3, InternVL, LLaVA-OneVision, Llama 4.

Behind the tiles, or before them, stands the whole picture as one more tile.

- SmolVLM, Idefics 3: the longest side becomes `size.longest_edge`, also where the picture is smaller, and both sides
  multiples of the tile. Each tile is named by row and column.
- InternVL: the grid of `min_patches` to `max_patches` tiles whose form is nearest to that of the picture. The whole
  picture is left out where there is one tile.
- LLaVA-OneVision: the canvas of `image_grid_pinpoints` that loses least. Rows and columns of padding take no tokens,
  and more than `anyres_max_N` tiles are shrunk. A picture beside others in the prompt is one tile.
- Llama 4: transformers has its image processor for torchvision only. `Llama4Images` does the same with Pillow, by the
  same rules (image_processing_llama4.py): the canvas that shrinks the picture least, or else enlarges it least, padded
  with black on the right and below. Values are those of bfloat16, in which the original computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from workers import image_settings
from workers.generation.pictures.family import Family, Features, Layout, Picture, shared_out
from workers.image_settings import NotServed
from workers.images import require_vision

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
        by_place: dict[int, Features] = {}
        for alone in (True, False):
            places = [at for at, picture in enumerate(pictures) if picture.alone is alone]
            if places:
                features = super().encode(model, [pictures[at] for at in places])
                by_place.update(zip(places, features, strict=True))
        return [by_place[at] for at in range(len(pictures))]

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
        tiles = cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, self.side, self.side)
        if len(tiles) == 1:
            return tiles
        whole = self._values(image.resize((self.side, self.side), self._settings["resample"]))
        return torch.cat([tiles, whole[None]])

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
