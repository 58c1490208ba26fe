"""Norms and gates of tiny models through Triton's interpreter; run as a program, with TRITON_INTERPRET=1.

Prints one line of JSON for each family and precision: modules with a kernel, and how far the logits are from the plain.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.tiny import causal
from workers.generation import fused


def main() -> None:
    """The families are the arguments."""
    kernels = fused.Kernels()
    for family in sys.argv[1:]:
        for dtype in (torch.float32, torch.float16):
            model = causal.make(family).to(dtype)
            ids = torch.arange(5, 25)[None]
            with torch.inference_mode():
                plain = model(input_ids=ids).logits.float()
                count = fused.fuse_with(model, kernels)
                found = model(input_ids=ids).logits.float()
            error = float((found - plain).abs().max() / plain.abs().max())
            kept = [
                type(one).__name__ for one in model.modules() if fused._forms_of(one, kernels, model.dtype)
            ]
            print(json.dumps([family, str(dtype), count, error, kept]), flush=True)


if __name__ == "__main__":
    main()
