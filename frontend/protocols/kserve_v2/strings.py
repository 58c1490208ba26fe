"""Strings for models that take and give bytes, as OpenVINO Model Server has them.

1. A UINT8 input of two dimensions gets a row for each string, with zeros behind it: one at least, or as many as fill
   the width that the model states.
2. A UINT8 input of one dimension of any size gets all of them packed: their number, where the first begins and where
   each ends, four bytes each (little-endian), then the strings one after another.
3. A UINT8 output of two dimensions whose name ends with `_string` is told as BYTES: each row up to its first zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frontend.tensors.result import OutputTensor, TensorResult
from ipc import bytes_elements
from ipc.datatypes import BYTES
from ipc.errors import InvalidInput
from ipc.model_config import ModelConfig, TensorConfig

MARKER = "_string"
"""End of the name of an output that is text."""
MOST_NBYTES = 1 << 30
MOST_GROWTH = 8
"""How many times what was sent rows may take, above `FREE_NBYTES`: one long string makes all rows long."""
FREE_NBYTES = 16 << 20
LONG_NBYTES = 64 << 10
"""Rows to be made strings above this size are work for a thread."""
_TYPE = "UINT8"


def takes_packed(config: ModelConfig, expected: TensorConfig) -> bool:
    """Whether an input has the one form that packed strings have."""
    return not config.batches and expected.datatype == _TYPE and expected.dims == (-1,)


def rows(elements: Sequence[memoryview], expected: TensorConfig, where: str) -> np.ndarray:
    """The strings as rows, uint8 [strings, width]. Raises `InvalidInput`."""
    if expected.datatype != _TYPE:
        raise InvalidInput(
            f"{where}: strings need a model input of {_TYPE} or {BYTES}, not {expected.datatype}"
        )
    longest, width = max(map(len, elements)), expected.dims[-1]
    if 0 <= width < longest:
        raise InvalidInput(f"{where}: a string of {longest} bytes, the model takes {width}")
    width = longest + 1 if width < 0 else width
    _check_nbytes(width * len(elements), where)
    _check_growth(width * len(elements), sum(map(len, elements)) + 4 * len(elements), where)
    made = np.zeros((len(elements), width), np.uint8)
    for row, element in zip(made, elements, strict=True):
        row[: len(element)] = np.frombuffer(element, np.uint8)
    return made


def packed(elements: Sequence[memoryview], where: str) -> np.ndarray:
    """The strings one after another behind the table of their ends, uint8 [bytes]. Raises `InvalidInput`."""
    lengths = np.fromiter(map(len, elements), np.int64, len(elements))
    table_nbytes = 4 * (len(elements) + 2)
    _check_nbytes(table_nbytes + int(lengths.sum()), where)
    table = np.array([len(elements), 0, *np.cumsum(lengths)], "<u4")
    return np.frombuffer(b"".join([table.tobytes(), *elements]), np.uint8)


def is_marked(name: str, datatype: str, rank: int) -> bool:
    """Whether an output is text by its name and form; `rank` counts the batch dimension."""
    return datatype == _TYPE and rank == 2 and name.endswith(MARKER)


def is_long(result: TensorResult) -> bool:
    """Whether making strings of a result is work for a thread."""
    marked = (one for one in result.outputs if is_marked(one.name, one.datatype, len(one.shape)))
    return sum(one.data.nbytes for one in marked if one.data is not None) > LONG_NBYTES


def texts_of(output: OutputTensor) -> tuple[str, list[int], memoryview]:
    """Datatype, shape and raw bytes that an output with the marker is told as. Raises `InvalidInput` for too many."""
    assert output.data is not None
    count, width = output.shape
    bytes_elements.check_counts([(f"output '{output.name}'", count)])
    data = bytes(output.data)
    texts = (data[at : at + width].split(b"\0", 1)[0] for at in range(0, count * width, width or 1))
    parts = list(texts) if width else [b""] * count
    return BYTES, [count], memoryview(bytes_elements.join(parts))


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
