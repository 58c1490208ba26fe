"""The small tensors of quantised weights are held against what they must hold: scales, and the groups of inputs.

Scales are about a thirtieth of the weights. Nothing but numpy reads them, so a start can refuse what a load would
refuse.
"""

from __future__ import annotations

from math import prod

import numpy as np

from workers.loading.quantized_files import Plan
from workers.loading.quantized_parts import FLOATS, Part, QuantizedRefused, Weight, short

_EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits that are all set in what is no finite number."""


def refuse_numbers(plan: Plan) -> None:
    """Raise `QuantizedRefused` for scales that are no finite numbers, and for groups that do not exist; OSError."""
    for weight in plan.quantized.values():
        for end, part in weight.parts.items():
            if end.endswith("g_idx"):
                _refuse_groups(weight, part)
            elif "scale" in end and part.kind in FLOATS:
                _refuse_unfinite(weight, part)


def _refuse_unfinite(weight: Weight, part: Part) -> None:
    words = np.frombuffer(part.data(), f"<u{4 if part.kind == 'F32' else 2}")
    mask = _EXPONENT[part.kind]
    wrong = np.flatnonzero(words & mask == mask)
    if wrong.size:
        first = [int(each) for each in np.unravel_index(wrong[0], part.shape or (1,))]
        raise QuantizedRefused(
            f"{weight.scheme.method}: {short(part.name)} has {wrong.size} of {words.size} numbers that are not finite, "
            f"first {first}"
        )


def _refuse_groups(weight: Weight, part: Part) -> None:
    order = np.frombuffer(part.data(), "<i8" if part.kind == "I64" else "<i4")
    scales = next(each for end, each in weight.parts.items() if "scale" in end)
    # NOTE: compressed-tensors writes -1 throughout where inputs stand in their order.
    if part.name.endswith("weight_g_idx") and (order == -1).all():
        return
    count = prod(scales.shape) // weight.shape[0]
    least, most = int(order.min()), int(order.max())
    if least < 0 or most >= count:
        raise QuantizedRefused(
            f"{weight.scheme.method}: {short(part.name)} has groups from {least} to {most}, and there are {count} "
            "groups"
        )
