"""ColPali: page images and text queries as token vectors, compared by late interaction."""

from __future__ import annotations

from typing import ClassVar

from workers.adapters.base import AdapterSpec
from workers.adapters.shared.page_retriever import PageRetriever


class ColPaliAdapter(PageRetriever):
    """PaliGemma with a projection: a page is a fixed number of patches (arXiv 2407.01449)."""

    model_class = "ColPaliForRetrieval"
    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="colpali",
        operations=("encode", "score"),
        inputs=("text", "image"),
        outputs=("multivector", "score"),
    )
