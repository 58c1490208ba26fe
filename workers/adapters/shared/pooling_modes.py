"""Names of the ways to make one vector of a text's token vectors, as sentence-transformers 6.2 has them."""

from __future__ import annotations

from collections.abc import Iterable

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_ALIASES = {"last": "lasttoken", "last_token": "lasttoken", "mean_sqrt_len": "mean_sqrt_len_tokens"}


def resolve_modes(names: str | Iterable[str]) -> tuple[str, ...]:
    """Canonical mode names; raises ValueError for an unknown one."""
    given = (names,) if isinstance(names, str) else tuple(names)
    modes = tuple(_ALIASES.get(name, name) for name in given)
    unknown = [name for name in modes if name not in MODES]
    if unknown or not modes:
        raise ValueError(
            f"unknown pooling {', '.join(unknown) or '(none)'}: use {', '.join((*MODES, 'last'))}"
        )
    return modes
