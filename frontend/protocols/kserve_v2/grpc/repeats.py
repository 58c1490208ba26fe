"""ModelInfer messages that repeat: the bytes before the raw contents are equal, and the contents have the same sizes.

A message whose head has been seen is not parsed: its bytes are compared with those of the earlier message, and the
plan runs that the model keeps for the head (`frontend.tensors.head_plans`). The head does not tell the sizes of BYTES
tensors, so the model keeps the plan by the head with the tag and the size of each of the raw contents behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from frontend.grpc import received
from frontend.scope import RequestScope
from frontend.tensors.head_plans import MOST_HEAD_NBYTES, HeadPlan
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModel
from ipc.protos import kserve_v2_pb2 as pb

RAW_INPUT = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
MOST_KNOWN = 256
"""Lengths of messages of which the last head is known."""
MOST_NBYTES = 16 << 10
"""Longer messages are always parsed."""


@dataclass(slots=True, frozen=True)
class KnownHead:
    """The head of a message, and `places` of its raw contents: begin and end, and the bytes that stand before."""

    head: bytes
    places: Sequence[tuple[int, int, bytes]]
    name: str
    version: int | None
    model: TensorModel
    """The model that the earlier message went to."""
    key: bytes
    """The message without its raw contents, by which the model keeps the plan."""

    def contents(self, data: bytes) -> memoryview | None:
        """The raw contents of a message one after another; None for a message with another head or other sizes."""
        if not data.startswith(self.head):
            return None
        for begin, _, before in self.places:
            if not data.startswith(before, begin - len(before)):
                return None
        return memoryview(b"".join([data[begin:end] for begin, end, _ in self.places]))


class Repeated(NamedTuple):
    """A message of which all but the raw contents is known."""

    model: TensorModel
    plan: HeadPlan
    contents: memoryview


class KnownHeads:
    """The heads that were seen last, one for each length of a message."""

    def __init__(self) -> None:
        self._by_nbytes: dict[int, KnownHead] = {}

    def known(self, data: bytes) -> KnownHead | None:
        """The head that this message may have."""
        return self._by_nbytes.get(len(data))

    def find(self, data: bytes, scope: RequestScope, inference: TensorInference) -> Repeated | None:
        """What a message repeats. None for a head that is not known, and for one without a plan any more."""
        known = self._by_nbytes.get(len(data))
        contents = None if known is None else known.contents(data)
        if known is None or contents is None:
            return None
        scope.model = known.name
        inference.begin(scope, known.name, known.version)
        model = inference.look(scope, known.name, known.version)
        plan = None if model is None else model.plans.get(known.key)
        return None if model is None or plan is None else Repeated(model, plan, contents)

    def note(
        self, data: bytes, raw: Sequence[bytes | memoryview], version: int | None, model: TensorModel
    ) -> bytes | None:
        """The key of a message that was answered by `model`; None if it is not worth to keep, or was noted already."""
        tail_nbytes = sum(len(received.prefix(RAW_INPUT, len(content))) + len(content) for content in raw)
        head_nbytes = at = len(data) - tail_nbytes
        if not raw or len(data) > MOST_NBYTES or not 0 < head_nbytes <= MOST_HEAD_NBYTES:
            return None
        places = []
        for content in raw:
            before = received.prefix(RAW_INPUT, len(content))
            at += len(before) + len(content)
            places.append((at - len(content), at, before))
        head = data[:head_nbytes]
        key = b"".join([head, *[before for _, _, before in places]])
        known = KnownHead(head, places, model.name, version, model, key)
        if self._is_known(known, data):
            return None
        # NOTE: a client may send the fields of a message in any order, and raw contents among the others.
        contents = known.contents(data)
        if contents is None or bytes(contents) != b"".join(raw) or not _is_whole(head):
            return None
        if len(self._by_nbytes) >= MOST_KNOWN:
            self._by_nbytes.clear()
        self._by_nbytes[len(data)] = known
        return key

    def _is_known(self, known: KnownHead, data: bytes) -> bool:
        found = self._by_nbytes.get(len(data))
        return found is not None and found.model is known.model and found.key == known.key


def _is_whole(head: bytes) -> bool:
    """Whether a head is a message by itself, without raw contents: no field of the head goes on behind the head."""
    try:
        return not pb.ModelInferRequest.FromString(head).raw_input_contents
    except DecodeError:
        return False
