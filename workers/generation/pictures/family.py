"""What a family of models does with a picture: its place in a prompt, the inputs of the vision tower, its features.

1. `layout` tells by the size alone what stands in the prompt for a picture, and what its encoding costs.
2. `inputs` makes the tensors of one picture, by the checkpoint's image processor in its Pillow form.
3. `encode` runs the vision tower over some pictures at once. The features of a picture do not depend on the others.

`layout` and `inputs` run on preparing threads and change nothing. `encode` runs on the device thread.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from workers.image_settings import IMAGES, NotServed
from workers.images import load_image_processor, require_vision

USUAL_SIZE = (768, 1024)
"""Height and width in pixels."""
_TRIED_SIZE = (64, 48)
"""Width and height in pixels."""
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class Layout(NamedTuple):
    """What stands in a prompt for one picture.

    `text` has the family's `image_word` once for each run of placeholders, and `runs` are the lengths of the runs in
    tokens. `cost` is the number of tokens of the vision tower. `grid` is (rows, columns) of placeholders where
    positions depend on them.
    """

    text: str
    runs: tuple[int, ...]
    cost: int
    grid: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One picture of a prompt.

    `digest` tells the picture and all that changes its features: equal digests have equal features in one model.
    `places` are the indexes of its placeholders in the prompt, int64 [tokens], ascending. `cost` and `grid` are those
    of the `Layout`. `inputs` are the tensors of the tower for this picture alone, empty until
    `PictureReader.processed`. `number` counts the pictures of the prompt from 1. `alone`: the prompt has no other.
    """

    digest: bytes
    places: np.ndarray
    cost: int
    grid: tuple[int, int] | None
    number: int
    alone: bool
    data: bytes = field(repr=False)
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)


class Features(NamedTuple):
    """What the tower makes of one picture, in the order of its places, on the device and in the model's dtype.

    `rows` [tokens, width of the text model] replace the embeddings at the places, without the scale that some models
    put on embeddings of words. `deep`: the k-th, of the same shape, is added to the hidden states at the places behind
    text layer k.
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


class Family(ABC):
    """The pictures of one model. `word` is what its chat template writes for a picture."""

    word: str
    image_word: str
    """The token whose embeddings are replaced."""
    names: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Outputs of the image processor that the tower takes, each to be joined along its first dimension."""
    file: str = IMAGES
    """The file with the settings of the image processor."""
    by_company: ClassVar[bool] = False
    """Whether a picture is seen in another way where the prompt has others."""

    def __init__(self, config: Any, tokenizer: Any, images: Any) -> None:
        """Take the model's configuration, its tokenizer and its image processor.

        Raises `NotServed` for settings that the family cannot serve.
        """
        self.config, self.tokenizer, self.images = config, tokenizer, images
        self.image_id = self._image_id()
        self.image_word = str(tokenizer.convert_ids_to_tokens(self.image_id))
        self.word = self.image_word

    @classmethod
    def load_images(cls, directory: Path, *, trust_remote_code: bool, **pixels: int) -> Any:
        """The image processor of a model directory, with bounds of its own on the area of pictures.

        Raises OSError without the file, ImportError without pillow.
        """
        return load_image_processor(directory, trust_remote_code=trust_remote_code, **pixels)

    @property
    def settings(self) -> bytes:
        """All that changes the inputs of a picture, for digests."""
        stored = json.dumps(self.images.to_dict(), sort_keys=True, default=str)
        return f"{type(self).__name__}\n{stored}".encode()

    @property
    def words(self) -> frozenset[str]:
        """Tokens that stand for pictures, which texts of requests must not become."""
        return frozenset((self.word, self.image_word))

    @property
    def usual_tokens(self) -> int:
        """Placeholders of a picture of a usual size, for estimates."""
        return sum(self.layout(*USUAL_SIZE, alone=True).runs)

    def try_out(self) -> None:
        """Lay out and process a small picture, alone and in company. Raises what the image processor raises.

        Raises ValueError for pixels that are not finite.
        """
        width, height = _TRIED_SIZE
        image = require_vision().linear_gradient("L").resize(_TRIED_SIZE).convert("RGB")
        for alone in (True, False):
            self.layout(height, width, alone)
            tensors = self.inputs(image, alone)
            if not all(bool(tensor.isfinite().all()) for tensor in map(torch.as_tensor, tensors.values())):
                raise ValueError("pixels are not finite")

    @abstractmethod
    def layout(self, height: int, width: int, alone: bool) -> Layout:
        """What stands for an upright picture of a size in pixels. Raises ValueError for a size that is not served."""

    def inputs(self, image: Any, alone: bool) -> dict[str, torch.Tensor]:
        """The tensors of a PIL image in RGB. Raises what the image processor raises."""
        processed = self.images(images=[image], return_tensors="pt")
        return {name: processed[name] for name in self.names}

    @torch.inference_mode()
    def encode(self, model: Any, pictures: Sequence[Picture]) -> list[Features]:
        """The features of each picture, whose `inputs` must be there."""
        output = model.get_image_features(**self.joined(model, pictures))
        return [Features(rows) for rows in shared_out(output.pooler_output, pictures)]

    def joined(self, model: Any, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """The inputs of all pictures on the model's device; numbers with a fraction have the model's dtype."""
        joined = {name: torch.cat([picture.inputs[name] for picture in pictures]) for name in self.names}
        return {
            name: tensor.to(model.device, model.dtype)
            if tensor.is_floating_point()
            else tensor.to(model.device)
            for name, tensor in joined.items()
        }

    def in_vocabulary(self, *words: str) -> tuple[str, ...]:
        """The words. Raises `NotServed` for one that is no token, which the family would write in vain."""
        known = self.tokenizer.get_vocab()
        missing = [word for word in words if word not in known]
        if missing:
            raise NotServed(f"the tokenizer lacks tokens that stand around pictures: {', '.join(missing)}")
        return words

    def stored_size(self, name: str) -> int:
        """A side of the image processor's `size` in pixels. Raises ValueError where the file has another form."""
        side = (
            self.images.size.get(name)
            if isinstance(self.images.size, dict)
            else getattr(self.images.size, name, None)
        )
        if not side:
            raise ValueError(f"size has no {name}")
        return int(side)

    def _image_id(self) -> int:
        """The id of the placeholders; the name of its field differs between families and releases."""
        for name in ("image_token_id", "image_token_index"):
            number = getattr(self.config, name, None)
            if number is not None:
                return int(number)
        raise NotServed("the configuration of the model names no token for pictures (image_token_id)")


def arguments_of(
    model: Any, family: Family, length: int, pictures: Sequence[Picture]
) -> dict[str, torch.Tensor]:
    """What a whole model takes for the pictures of a text of so many tokens, beside the ids.

    Types of tokens are 1 at placeholders.
    """
    types = torch.zeros(1, length, dtype=torch.long, device=model.device)
    for picture in pictures:
        types[0, torch.from_numpy(picture.places).to(model.device)] = 1
    names = inspect.signature(model.forward).parameters
    return family.joined(model, pictures) | {name: types for name in _TOKEN_TYPES if name in names}


def shared_out(
    found: torch.Tensor | Sequence[torch.Tensor], pictures: Sequence[Picture]
) -> list[torch.Tensor]:
    """The rows of each picture, [tokens, width], from those of all pictures in their order.

    NOTE: copies. A view would keep the rows of all pictures for as long as one of them is stored.
    """
    parts = [found] if isinstance(found, torch.Tensor) else found
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    counts = [len(picture.places) for picture in pictures]
    return [part.clone() for part in rows.split(counts)]
