"""How far a scaled rope reaches, by the configuration of a transformer.

transformers 5 stores `rope_parameters`, one map or one for each kind of layer; older files store `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = ("default", None)


def scaled_positions(config: Mapping[str, Any], positions: int) -> int:
    """Positions of a transformer with `positions` plain ones: the factor times the original positions, if that is more.

    The original positions are those before scaling; `positions` where the configuration states none.
    """
    reached = [positions]
    for rope in _ropes(config):
        factor = rope.get("factor")
        if rope.get("rope_type", rope.get("type")) in _PLAIN or not isinstance(factor, int | float):
            continue
        original = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        reached.append(int(factor * (original if isinstance(original, int) else positions)))
    return max(reached)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of each rope of a configuration."""
    for name in ("rope_parameters", "rope_scaling"):
        stored = config.get(name)
        if isinstance(stored, Mapping):
            yield stored
            yield from (part for part in stored.values() if isinstance(part, Mapping))
