"""POST /similarity: how alike one text and each of several others are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.default_models import default_model
from frontend.engine.scope import RequestScope
from frontend.http.rendering import off_loop_if
from frontend.http.sending import Buffer
from frontend.http.texts import check_count, check_texts
from frontend.protocols.foreign.unit_vectors import normalized
from frontend.protocols.sie.outputs import INLINE_NBYTES
from frontend.protocols.sie.route import Form, Plan
from frontend.protocols.sie.vectors import VectorsResource, Wishes
from frontend.protocols.tei.schemas import SimilarityRequest
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem

_NAMES = FieldNames("inputs.sentences[{}]", "inputs.sentences[{}]", options="")


class SimilarityResource(VectorsResource[SimilarityRequest]):
    """The cosine of one text and each of several others."""

    operation = "similarity"
    body = SimilarityRequest

    def model_of(self, request: SimilarityRequest) -> str:
        """The model that gives dense vectors."""
        return default_model(self.services.catalog, self.services.settings, ("dense",))

    def examine(self, request: SimilarityRequest) -> None:
        """Texts that some model could take."""
        limits, given = self.services.settings.limits, request.inputs
        check_texts([given.source_sentence], "inputs.source_sentence", limits)
        check_count(len(given.sentences), "inputs.sentences", limits)
        check_texts(given.sentences, "inputs.sentences[{}]", limits)

    def check(self, request: SimilarityRequest, entry: ModelEntry) -> list[InputItem]:
        """The sentences, and behind them the text that they are compared with."""
        return [InputItem(text) for text in (*request.inputs.sentences, request.inputs.source_sentence)]

    def names_of(self, request: SimilarityRequest) -> FieldNames:
        """The sentences."""
        return _NAMES

    def wishes_of(self, request: SimilarityRequest) -> Wishes:
        """The prompt, and what becomes of long texts."""
        return request.chosen.wishes

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: SimilarityRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """A cosine for each sentence."""
        with reply:
            rows = reply.tensors()["dense"]
            return [await off_loop_if(rows.nbytes > INLINE_NBYTES, _cosines, rows)]


def _cosines(rows: np.ndarray) -> bytes:
    """JSON of the cosines of the last row and all others."""
    units = normalized(rows)
    return orjson.dumps((units[:-1] @ units[-1]).astype(np.float64).tolist())
