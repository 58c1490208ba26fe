"""Which floating-point type a model runs in."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype for a precision setting on a device.

    "auto" is float32 on CPU, where it is exact and every kernel exists, and half precision on CUDA: bfloat16
    where the card has it, else float16.  Raises ValueError for another word.
    """
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    try:
        return DTYPES[precision]
    except KeyError:
        raise ValueError(f"unknown precision {precision!r}: use auto, {', '.join(DTYPES)}") from None


def parameter_bytes(*modules: torch.nn.Module) -> int:
    """Bytes held by the parameters and buffers of `modules`; shared tensors count once."""
    tensors = {
        tensor.data_ptr() or id(tensor): tensor.numel() * tensor.element_size()
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(tensors.values())
