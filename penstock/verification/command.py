"""`penstock verify MODEL`: our results beside those of the reference library, over the same texts.

1. Our adapter loads the model in this process and answers, then makes room.
2. The reference of the family answers the same calls, in float32.
3. Every output is compared; exit code 1 when one is below its limits.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import msgspec

from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.settings import Settings
from penstock.verification.comparing import Agreement

Limits = tuple[float, float]
FULL_LIMITS: Limits = (0.9999, 0.99)
HALF_LIMITS: Limits = (0.99, 0.95)
"""Least cosine and least rank agreement, in float32 and in half precision."""


class Report(msgspec.Struct, frozen=True):
    """What was compared with what, and how well it agrees."""

    model: str
    device: str
    precision: str
    reference: str
    outputs: list[Agreement]

    @property
    def fine(self) -> bool:
        """Whether every output keeps its limits."""
        return bool(self.outputs) and all(output.fine for output in self.outputs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(entry: ModelEntry, settings: Settings, *, as_json: bool) -> int:
    """Compare and print; 0 when everything agrees, else 1."""
    from workers.adapters.registry import UnknownAdapterError
    from workers.loading import failure

    try:
        report = compare(entry, settings)
    except PenstockError:
        raise
    except UnknownAdapterError as error:
        print(f"penstock: {entry.id}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        found = failure.classify(error)
        print(f"penstock: {entry.id}: {found.error_class}: {found.message}", file=sys.stderr)
        return 1
    _print(report, as_json=as_json)
    return 0 if report.fine else 1


def compare(entry: ModelEntry, settings: Settings) -> Report:
    """Load both sides in turn and compare what they answer.

    Raises `Unsupported` for a family without a reference, `DependencyConflict` for a missing extra, `ConfigError` for a
    missing device, and what adapters and libraries raise.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from penstock.verification import comparing, references
    from penstock.verification.ours import Ours

    chatter: Any = transformers_logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    references.refuse_unsupported(entry.adapter)
    ours = Ours(entry, settings)
    device, precision = ours.device, str(ours.dtype).removeprefix("torch.")
    opening = references.Opening(
        entry, ours.directory, device, ours.adapter.max_sequence_length, settings.worker.trust_remote_code
    )
    mine = comparing.answers(ours, entry)
    del ours
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reference = references.open_reference(opening)
    theirs = comparing.answers(reference, entry)
    limits = FULL_LIMITS if precision == "float32" else HALF_LIMITS
    outputs = comparing.compared(mine, theirs, entry, limits)
    return Report(entry.id, str(device), precision, reference.name, outputs)


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        fields: dict[str, Any] = {**msgspec.to_builtins(report), "fine": report.fine}
        print(msgspec.json.format(msgspec.json.encode(fields)).decode())
        return
    print(f"{report.model} on {report.device} in {report.precision}, against {report.reference} in float32")
    print("  output         items    closest       mean       rank   limits")
    for one in report.outputs:
        limits = f"{one.least_closest:g}, {one.least_rank:g}"
        numbers = f"{one.items:6d} {one.closest:10.6f} {one.mean:10.6f} {one.rank:10.4f}"
        print(f"  {one.output:<13} {numbers}   {limits:<12} {'ok' if one.fine else 'BAD'}")
