"""docs/cards.md: the smallest card for each model of the shipped catalog, by the memory of its weights."""

from __future__ import annotations

import msgspec

from ipc.catalog.entries import ModelEntry
from ipc.catalog.reading import read_entries
from ipc.settings import Settings
from penstock.files import decimal_size, weights_nbytes
from tools.model_reference import CATALOG

CARDS = {
    8: "RTX 4060",
    12: "RTX 3060",
    16: "RTX 4080",
    24: "L4, A10, RTX 4090",
    48: "L40S, RTX A6000",
    80: "A100, H100",
    141: "H200",
}
"""Cards that are sold, by their memory in GB."""
_WEIGHTS_SHARE = 0.7
"""Part of a card that weights may take, so that batches and the cache of chat models have room."""
_HEAD = """# Which model fits which card

Look for the section of your card: the models of that section and of all sections above fit. A model runs on one
card, never on several together. Several models on a card need the sum of their memory.

Made by `make docs` from `config/models/`. Nothing here was measured. The memory is that of `penstock models list`:
the number of parameters times two bytes in half precision, the default on a card, or four in float32, the default on
a CPU. An entry of the catalog may choose one precision for both. A card fits when the weights take at most {percent}
% of its memory. The rest is for batches, and for the cache of a chat model, which takes half of what is free once
the weights are loaded ([generation.cache_bytes](settings.md#generation)).

- **GGUF** files, and weights in GPTQ, AWQ and FP8, are small on the disk, but their numbers are turned into floats at
  load: the memory is that of the table. With `precision: int8` or `int4` chat models need less: about a byte, or 0.6
  bytes, for a parameter ([quantization.md](quantization.md)).
- **On a CPU** a worker needs the memory of the last column, and every worker holds its own copy
  ([capacity.md](capacity.md#capacity)).
- **Long contexts** need more cache. The log of a load says how many tokens the cache holds.
"""


def render() -> str:
    """The whole page."""
    entries = read_entries([str(CATALOG)]).entries.values()
    known = {entry.id: nbytes for entry in entries if (nbytes := _nbytes(entry, "cuda")) is not None}
    chosen = sorted(
        (one for one in entries if one.id in known), key=lambda one: (known[one.id], one.id.lower())
    )
    parts = [_HEAD.format(percent=round(100 * _WEIGHTS_SHARE))]
    smaller = 0.0
    for gigabytes, names in CARDS.items():
        room = gigabytes * 1e9 * _WEIGHTS_SHARE
        parts.append(
            _section(f"{gigabytes} GB: {names}", [one for one in chosen if smaller < known[one.id] <= room])
        )
        smaller = room
    parts.append(_section("No single card", [one for one in chosen if known[one.id] > smaller]))
    unknown = [f"- `{name}`" for name in sorted(entry.id for entry in entries if entry.id not in known)]
    parts.append("## Unknown\n\nThe catalog has no number of parameters for these models.\n")
    return "\n".join([*parts, *unknown, ""])


def _nbytes(entry: ModelEntry, device: str) -> int | None:
    """Memory of the weights on a kind of device, by default settings."""
    settings = Settings()
    worker = msgspec.structs.replace(settings.worker, device=device)
    return weights_nbytes(entry, msgspec.structs.replace(settings, worker=worker))


def _section(title: str, entries: list[ModelEntry]) -> str:
    if not entries:
        return f"## {title}\n\nNo model of the catalog needs this card.\n"
    rows = ["| model | gives | on a card | on a CPU |", "|---|---|---|---|", *map(_row, entries)]
    return f"## {title}\n\n" + "\n".join(rows) + "\n"


def _row(entry: ModelEntry) -> str:
    card, cpu = (decimal_size(_nbytes(entry, device)) for device in ("cuda", "cpu"))
    return f"| `{entry.id}` | {', '.join(entry.outputs)} | {card} | {cpu} |"
