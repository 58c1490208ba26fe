"""ColQwen2: page images and text queries as token vectors, compared by late interaction."""

from __future__ import annotations

from typing import ClassVar

from ipc.catalog.option_names import FAMILY_OPTIONS
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.page_retriever import PageRetriever


class ColQwen2Adapter(PageRetriever):
    """Qwen2-VL with a projection: a page keeps its shape, so larger ones give more vectors."""

    model_class = "ColQwen2ForRetrieval"
    processor_options = ("min_pixels", "max_pixels")
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="colqwen2",
        operations=("encode", "score"),
        inputs=("text", "image"),
        outputs=("multivector", "score"),
        options=FAMILY_OPTIONS["colqwen2"],
    )
