"""CLIP: dense vectors of texts and images in one space."""

from __future__ import annotations

from typing import ClassVar

from ipc.catalog.option_names import FAMILY_OPTIONS
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.two_towers import TwoTowersAdapter


class ClipAdapter(TwoTowersAdapter):
    """Contrastive language-image pretraining: texts are padded to the longest of a batch and end with a marker."""

    pads_to_limit = False
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="clip",
        operations=("encode",),
        inputs=("text", "image"),
        outputs=("dense",),
        options=FAMILY_OPTIONS["clip"],
    )
