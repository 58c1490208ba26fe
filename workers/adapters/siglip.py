"""SigLIP: dense vectors of texts and images in one space."""

from __future__ import annotations

from typing import ClassVar, Self

from ipc.catalog.option_names import FAMILY_OPTIONS
from ipc.extras import require
from workers.adapters.base import AdapterSpec, LoadContext
from workers.adapters.shared.two_towers import TwoTowersAdapter


class SiglipAdapter(TwoTowersAdapter):
    """Texts are padded to the model's full length, as in training, and the padding is attended."""

    pads_to_limit = True
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="siglip",
        operations=("encode",),
        inputs=("text", "image"),
        outputs=("dense",),
        options=FAMILY_OPTIONS["siglip"],
    )

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """As the base. Raises ImportError that names the extra when the tokenizer needs a package that is missing."""
        if (context.directory / "spiece.model").exists():
            require("sentencepiece", "siglip")
            require("google.protobuf", "siglip", package="protobuf")
        return super().load(context)
