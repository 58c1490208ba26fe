"""Building models: one at a time, their precision, and their bytes.

One model is built at a time (`BUILDING`). While transformers builds a model it takes methods off its classes, for every
thread, and it imports modules on first use, which two threads at once may find half-imported. Little is lost: weights
come from the page cache by then, and several builds would share its bandwidth.

A worker imports this module at its start, and transformers only with the first model that needs transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from ipc.catalog.entries import QUANTIZED
from workers.adapters.shared.gguf_blocks import Ahead
from workers.adapters.shared.quantized_linears import QuantizedLinear
from workers.loading.gguf_file import read_model

BUILDING = threading.RLock()
"""Held while an adapter is imported and its model is built."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype for a precision setting on a device.

    "auto" is float32 on CPU, which is exact and has every kernel, and half precision on CUDA: bfloat16 where the card
    has bfloat16, else float16. The words of `QUANTIZED` are of weights; all else has the dtype of "auto" then. Raises
    ValueError for another word.
    """
    if precision == "auto" or precision in QUANTIZED:
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    try:
        return DTYPES[precision]
    except KeyError:
        raise ValueError(
            f"unknown precision {precision!r}: use auto, {', '.join((*DTYPES, *QUANTIZED))}"
        ) from None


def parameter_bytes(*modules: torch.nn.Module) -> int:
    """Bytes held by the parameters and buffers of `modules`, and by packed weights; shared tensors count once."""
    tensors = {
        tensor.data_ptr() or id(tensor): tensor.numel() * tensor.element_size()
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    packed = sum(getattr(part, "packed_nbytes", 0) for module in modules for part in module.modules())
    return sum(tensors.values()) + packed


def parameter_count(model: torch.nn.Module) -> int:
    """The number of weights and biases of a model, quantised ones too; shared ones count once."""
    quantised = (part for part in model.modules() if isinstance(part, QuantizedLinear))
    packed = sum(part.weight.numel() + (0 if part.bias is None else part.bias.numel()) for part in quantised)
    return packed + sum(parameter.numel() for parameter in model.parameters())


def precision_of(model: Any) -> str:
    """What the linear layers of a model are in memory: the kinds of quantised layers, else the type of the numbers."""
    kinds = {layer.kind for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    return "+".join(sorted(kinds)) or str(model.dtype).removeprefix("torch.")


@contextmanager
def tensors_ahead(file: Path | None) -> Iterator[Ahead | None]:
    """Numbers of a GGUF file, which a thread makes in this block; none without a file. Raises as `read_model`."""
    if file is None:
        yield None
        return
    with closing(Ahead(read_model(file).tensors.values())) as ahead:
        yield ahead


class WeightCount:
    """Reports how many of all numbers of a model are made, as the phase "weights", and keeps the first error.

    transformers makes weights in threads and changes the class of what they raise.
    """

    def __init__(self, whole: int, progress: Callable[[str, float], None]) -> None:
        """`whole` is the number of all numbers."""
        self._whole, self._progress, self._done = whole, progress, 0
        self._stopped: Exception | None = None

    def make(self, numbers: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `numbers` returns. Raises what `numbers` or the progress raises."""
        try:
            tensor = numbers()
            self._done += tensor.numel()
            self._progress("weights", min(1.0, self._done / self._whole))
        except Exception as error:
            self._stopped = self._stopped or error
            raise
        return tensor

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise the first error of `make` in place of what transformers made of the error."""
        try:
            yield
        except Exception:
            if self._stopped is None:
                raise
        if self._stopped is not None:
            raise self._stopped
