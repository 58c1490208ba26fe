"""What a model family can do, stated as data.

Operations read it to refuse what the family does not offer, before anything reaches the device.
"""

from __future__ import annotations

import msgspec


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one model family.

    family      name used in the catalog, for example "dense"
    operations  operations it serves: "encode", "score", "extract", ...
    inputs      input kinds it accepts: "text", "image", ...
    outputs     outputs it can give: "dense", "sparse", ...
    options     keys of a model's `options` that the family understands
    per_call    those of them that are read from each call only; profiles that differ in nothing else share the weights
    builds_alone whether a load must not overlap others (`shared.building`)
    lora        whether LoRA adapters can be applied to its models
    needs_proof whether a load fails when none of the canned inferences suits the model (`lifecycle.proof`)
    """

    family: str
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    per_call: tuple[str, ...] = ()
    builds_alone: bool = True
    lora: bool = False
    needs_proof: bool = True
