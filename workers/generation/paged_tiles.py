"""Attention of parts of prompts over the blocks of the cache, for steps that CUDA captures.

1. `tiles_of` cuts the rows of a step into tiles: some rows of one sequence that follow one another.
2. `PagedTiles` starts a Triton program for each tile and key head. The number of tiles is that of a full step, so a
   captured step serves parts of any lengths. Rows that pad a step belong to no sequence, and become zeros.
3. `select_tiles` compares the program with plain torch on the device, with and without a window, a soft cap and sinks.
   A program that differs is not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workers.device.oom import obstacle_of
from workers.device.varlen import HALF
from workers.generation.heads import Heads

log = logging.getLogger(__name__)

NOBODY = -1
"""The sequence of rows that pad a step."""
_LANES, _MOST_QUERIES = 128, 64
"""Rows of the product of a program, queries times their heads; queries of a tile at most."""
_TILE = 64
"""Keys that a program reads at once."""
_WIDEST = 256
_TOLERANCE = 3e-2
_STALE = 30.0
"""Fills the cells that no query may see."""


class TileLayout(NamedTuple):
    """`tiles` int32 [tiles, 4] as `tiles_of` makes these, and `table` int32 [sequences, pages]."""

    tiles: torch.Tensor
    table: torch.Tensor


class Piece(NamedTuple):
    """The tokens `start` to `stop` at `row` of a step; `sequence` is a row of the table, or `NOBODY`."""

    row: int
    start: int
    stop: int
    sequence: int


Tiles = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TileLayout, Heads], torch.Tensor]
"""Attention of parts of prompts, with the arguments of `PagedTiles`."""


def queries_of(group: int) -> int:
    """Queries of a tile, where at most `group` query heads share a key head."""
    return max(1, min(_MOST_QUERIES, _LANES // _power(group)))


def most_tiles(rows: int, sequences: int, queries: int) -> int:
    """Tiles of a step of so many rows: each sequence, and the rows that pad, have one that is not full."""
    return rows // queries + sequences + 1


def tiles_of(pieces: Sequence[Piece], queries: int, count: int) -> NDArray[np.int32]:
    """int32 [count, 4]: the first row of each tile, its rows (0: none), the position of the first, and the sequence."""
    tiles = np.zeros((count, 4), np.int32)
    at = 0
    for row, start, stop, sequence in pieces:
        firsts = np.arange(start, stop, queries)
        mine = tiles[at : at + len(firsts)]
        mine[:, 0], mine[:, 1] = row + firsts - start, np.minimum(queries, stop - firsts)
        mine[:, 2], mine[:, 3] = firsts, sequence
        at += len(firsts)
    return tiles


class PagedTiles:
    """The program for caches whose blocks have `page_tokens` tokens, and tiles of `queries` queries."""

    def __init__(self, page_tokens: int, queries: int) -> None:
        """Raises ImportError without Triton."""
        from workers.generation.decode_kernels import attend_tiles

        self._attend, self._page, self._queries = attend_tiles, page_tokens, queries

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: TileLayout, heads: Heads
    ) -> torch.Tensor:
        """q [rows, heads, dim] to [rows, heads, value dim]; keys and values [slots, key heads, dim] are the cache."""
        rows, query_heads, dim = q.shape
        key_heads, value_dim = values.shape[1:]
        q = q if q.stride(2) == 1 else q.contiguous()
        out = q.new_empty(rows, query_heads, value_dim)
        group = _power(query_heads // key_heads)
        lanes = max(16, self._queries * group)
        self._attend[len(layout.tiles), key_heads](
            q,
            keys,
            values,
            layout.tiles,
            layout.table,
            q if heads.sinks is None else heads.sinks,
            out,
            dim**-0.5 if heads.scaling is None else heads.scaling,
            heads.softcap or 0.0,
            q.stride(0),
            q.stride(1),
            layout.table.shape[1],
            HEADS=query_heads,
            KEY_HEADS=key_heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            PADDED_DIM=max(16, _power(dim)),
            PADDED_VALUE_DIM=max(16, _power(value_dim)),
            QUERIES=self._queries,
            GROUP=lanes // self._queries,
            PAGE=self._page,
            TILE=_TILE,
            WINDOW=heads.window,
            SOFTCAP=bool(heads.softcap),
            SINKS=heads.sinks is not None,
            num_warps=8 if lanes >= _LANES else 4,
        )
        return out


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


@functools.cache
def select_tiles(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key: torch.Size,
    value: torch.Size,
    page_tokens: int,
    queries: int,
) -> PagedTiles | None:
    """The program for heads of one shape, `key` and `value` being heads and dim; None where it does not serve."""
    if device.type != "cuda" or dtype not in HALF or max(key[1], value[1]) > _WIDEST:
        return None
    try:
        attend = PagedTiles(page_tokens, queries)
        compare_tiles(attend, device, dtype, heads, key, value, page_tokens, queries)
    except Exception as error:
        log.warning("prompts are not captured, as their attention fails: %s", obstacle_of(error))
        return None
    return attend


def compare_tiles(
    attend: Tiles,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key: torch.Size,
    value: torch.Size,
    page_tokens: int,
    queries: int,
) -> None:
    """Raise RuntimeError if parts of several lengths differ from `Heads.masked`, or rows that pad are not zeros."""
    generator = torch.Generator().manual_seed(0)
    size = page_tokens
    parts = [
        (size + 4, size + 5),
        (0, 2 * queries + 3),
        (3, size + 6),
        (2 * size + 70, 2 * size + 70 + queries),
    ]
    pages = [-(-stop // size) for _, stop in parts]
    # NOTE: page 0, which fills the table up, belongs to no sequence.
    order = (1 + torch.randperm(sum(pages), generator=generator)).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    keys, values = (
        torch.full(((1 + sum(pages)) * size, *shape), _STALE, dtype=dtype) for shape in (key, value)
    )
    pieces, row = [], 0
    cells = []
    for number, ((start, stop), own) in enumerate(zip(parts, order, strict=True)):
        pieces.append(Piece(row, start, stop, number))
        row += stop - start
        cells.append((own[:, None] * size + torch.arange(size)).flatten()[:stop])
        keys[cells[-1]] = torch.randn(stop, *key, generator=generator).to(dtype)
        values[cells[-1]] = torch.randn(stop, *value, generator=generator).to(dtype)
    rows = row + 5
    pieces.append(Piece(row, 0, 5, NOBODY))
    q = torch.randn(rows, heads, key[1], generator=generator).to(dtype).to(device)
    tiles = tiles_of(pieces, queries, most_tiles(rows, len(parts), queries) + 2)
    layout = TileLayout(torch.from_numpy(tiles).to(device), table.int().to(device))
    keys, values = keys.to(device), values.to(device)
    sinks = torch.randn(heads, generator=generator).to(device)
    for formula in (
        Heads(None, None, None, 0, None),
        Heads(0.2, 5.0, None, size + 5, None),
        Heads(None, None, sinks, 3, None),
    ):
        got = attend(q, keys, values, layout, formula).float()
        for piece, mine in zip(pieces, cells, strict=False):
            at = torch.arange(piece.stop)
            seen = formula.allows(at[piece.start :, None], at[None]).to(device)
            here = slice(piece.row, piece.row + piece.stop - piece.start)
            k, v = (states[mine.to(device)].float() for states in (keys, values))
            wanted = formula.masked(q[here].float(), k, v, seen)
            if not torch.allclose(got[here], wanted, atol=_TOLERANCE, rtol=_TOLERANCE):
                raise RuntimeError(f"the results of {piece} differ from those of torch ({formula})")
        if bool(got[row:].any()):
            raise RuntimeError("rows that pad a step are not zeros")
