"""Strings for models that take and give bytes, as OpenVINO Model Server has them.

1. A UINT8 input of two dimensions gets a row for each string, with zeros behind it: one at least, or as many as fill
   the width that the model states.
2. A UINT8 input of one dimension of any size gets all of them packed: their number, where the first begins and where
   each ends, four bytes each (little-endian), then the strings one after another.
3. A UINT8 output of two dimensions whose name ends with `_string` becomes BYTES: each row up to its first zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frontend.http.rendering import Steps
from frontend.tensors.request import Plan
from frontend.tensors.result import OutputTensor, TensorResult
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES

MARKER = "_string"
"""End of the name of an output that is text."""
MOST_NBYTES = 1 << 30
MOST_GROWTH = 8
"""How many times the sent bytes the rows may take, above `FREE_NBYTES`: one long string makes all rows long."""
FREE_NBYTES = 16 << 20
LONG_NBYTES = 64 << 10
"""Rows to be made strings above this size are work for a thread."""
_TYPE = "UINT8"


def takes_packed(config: ModelConfig, expected: TensorConfig) -> bool:
    """Whether an input has the form of packed strings."""
    return not config.batches and expected.datatype == _TYPE and expected.dims == (-1,)


def check_datatype(expected: TensorConfig, where: str) -> None:
    """Raise `InvalidInput` for an input that takes no rows of strings."""
    if expected.datatype != _TYPE:
        raise InvalidInput(
            f"{where}: strings need a model input of {_TYPE} or {BYTES}, not {expected.datatype}"
        )


@dataclass(slots=True, frozen=True)
class Rows:
    """Makes rows of `count` strings, uint8 [count, width]; a `width` of -1 is one byte more than the longest has."""

    count: int
    width: int
    where: str

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """Raises `InvalidInput` for strings that are too long, or that take much more as rows than they have."""
        where = self.where
        elements = datatypes.split(data, self.count, where)
        longest, width = max(map(len, elements)), self.width
        if 0 <= width < longest:
            raise InvalidInput(f"{where}: a string of {longest} bytes, the model takes {width}")
        width = longest + 1 if width < 0 else width
        _check_nbytes(width * len(elements), where)
        _check_growth(width * len(elements), sum(map(len, elements)) + 4 * len(elements), where)
        yield
        return Plan([self.count, width])

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """Each string and zeros behind it."""
        made = np.frombuffer(place, np.uint8).reshape(shape)
        for row, element in zip(made, datatypes.split(data, self.count, self.where), strict=True):
            row[: len(element)] = np.frombuffer(element, np.uint8)
            row[len(element) :] = 0
            yield


@dataclass(slots=True, frozen=True)
class Packed:
    """Puts `count` strings one after another behind the table of their ends, uint8 [bytes]."""

    count: int
    where: str

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """Raises `InvalidInput` for strings that are too long together."""
        elements = datatypes.split(data, self.count, self.where)
        nbytes = self._table_nbytes + sum(map(len, elements))
        _check_nbytes(nbytes, self.where)
        yield
        return Plan([nbytes])

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """The table, and the strings."""
        elements = datatypes.split(data, self.count, self.where)
        ends = np.cumsum(np.fromiter(map(len, elements), np.int64, self.count))
        at = self._table_nbytes
        place[:at] = np.array([self.count, 0, *ends], "<u4").tobytes()
        for element in elements:
            place[at : at + len(element)] = element
            at += len(element)
            yield

    @property
    def _table_nbytes(self) -> int:
        return 4 * (self.count + 2)


def is_marked(name: str, datatype: str, rank: int) -> bool:
    """Whether an output is text by its name and form; `rank` counts the batch dimension."""
    return datatype == _TYPE and rank == 2 and name.endswith(MARKER)


def is_long(result: TensorResult) -> bool:
    """Whether making strings of a result is work for a thread."""
    marked = (one for one in result.outputs if is_marked(one.name, one.datatype, len(one.shape)))
    return sum(one.data.nbytes for one in marked if one.data is not None) > LONG_NBYTES


def texts_of(output: OutputTensor) -> tuple[str, list[int], memoryview]:
    """Datatype, shape and raw bytes of a marked output. Raises `InvalidInput` for too many strings."""
    assert output.data is not None
    count, width = output.shape
    datatypes.check_counts([(f"output '{output.name}'", count)])
    data = bytes(output.data)
    texts = (data[at : at + width].split(b"\0", 1)[0] for at in range(0, count * width, width or 1))
    parts = list(texts) if width else [b""] * count
    return BYTES, [count], memoryview(datatypes.join(parts))


def _check_growth(nbytes: int, sent: int, where: str) -> None:
    most = max(FREE_NBYTES, MOST_GROWTH * sent)
    if nbytes > most:
        raise InvalidInput(
            f"{where}: {sent} bytes of strings take {nbytes} bytes as rows of one width, the limit is {most}; "
            "send strings of like length together"
        )


def _check_nbytes(nbytes: int, where: str) -> None:
    if nbytes > MOST_NBYTES:
        raise InvalidInput(f"{where}: strings take {nbytes} bytes as a tensor, the limit is {MOST_NBYTES}")
