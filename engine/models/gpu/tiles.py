"""Tiles of products with quantized weights on a GPU, by the number of rows of x.

Which one is the fastest depends on the GPU, and on a weight's form and shape: measured_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .form import Form
from .scaled import ByTorch, Narrow
from .single import ROWS, Row


class Tile(NamedTuple):
    """What a program of the kernel computes: rows of x and rows of the weight."""

    tokens: int
    rows: int
    warps: int
    stages: int  # one more than the steps that are loaded ahead
    slices: int = 1  # of a step
    turned: bool = False  # see matmul.multiply
    folded: bool = False  # as well; of small groups alone


MOST_SLICES = 4  # of a step
# The largest number of rows of x that the kernel multiplies. With more, reading the weight is a small part of the work:
# it is dequantized, unless it is in fp8, and torch multiplies.
MOST_ROWS = 256
# The first tile of each has further uses, see below.
_FEW = (
    Tile(16, 64, 4, 6),
    Tile(16, 64, 4, 4, 2),
    Tile(16, 64, 4, 3, 4),
    Tile(16, 32, 4, 3, 4),
    Tile(16, 32, 2, 4, 2),
    Tile(16, 128, 8, 3, 2),
    Tile(16, 64, 4, 4, turned=True),
    Tile(16, 64, 4, 3, 4, turned=True),
    Tile(16, 32, 2, 4, 2, folded=True),
    Tile(16, 64, 4, 3, 4, folded=True),
    Tile(16, 64, 4, 3, 4, turned=True, folded=True),
)
_SOME = (
    Tile(32, 64, 4, 6),
    Tile(32, 64, 4, 4, 2),
    Tile(32, 64, 4, 3, 4),
    Tile(32, 64, 4, 4, turned=True),
    Tile(32, 64, 4, 3, 2, turned=True),
    Tile(32, 128, 8, 4, turned=True),
    Tile(32, 64, 4, 3, 4, folded=True),
    Tile(32, 64, 4, 3, 4, turned=True, folded=True),
    Tile(32, 128, 8, 3, 2, turned=True, folded=True),
)
_MANY = (
    Tile(64, 64, 4, 4),
    Tile(64, 64, 4, 3, 2),
    Tile(64, 128, 8, 3, 2),
    Tile(64, 64, 4, 4, turned=True),
    Tile(64, 64, 4, 3, 2, turned=True),
    Tile(64, 128, 8, 4, turned=True),
    Tile(64, 128, 8, 3, 2, turned=True),
    Tile(64, 64, 4, 4, turned=True, folded=True),
    Tile(64, 64, 4, 3, 4, turned=True, folded=True),
    Tile(64, 128, 8, 3, 2, turned=True, folded=True),
)
# The larger a tile of x is, the fewer programs convert the same numbers of the weight.
_MORE = (
    *_MANY,
    Tile(128, 64, 8, 4),
    Tile(128, 64, 4, 4, turned=True),
    Tile(128, 128, 8, 4, turned=True),
    Tile(128, 128, 8, 3, 2, turned=True),
    Tile(128, 64, 4, 4, 2, turned=True, folded=True),
    Tile(128, 128, 8, 4, 2, turned=True, folded=True),
)
AnyTile = Tile | Row | Narrow | ByTorch  # a Row is for a single row of x alone; see scaled.py for the last two
# By the largest number of rows of x. The first one is used as long as nothing has been measured; of weights in fp8 that
# of scaled.CANDIDATES.
CANDIDATES: Mapping[int, tuple[AnyTile, ...]] = {
    1: (*ROWS, _FEW[0]),
    16: _FEW,
    32: _SOME,
    64: _MANY,
    128: _MORE,
    MOST_ROWS: _MORE,
}


def candidates(rows: int, form: Form) -> tuple[AnyTile, ...]:
    """Return those of CANDIDATES for a weight of this form.

    A product of a whole slice needs one multiplication by a scale per row of x; folding would save nothing.
    """
    may_fold = 0 < form.group < form.slice
    return tuple(tile for tile in CANDIDATES[rows] if may_fold or not (isinstance(tile, Tile) and tile.folded))


# With at least this many rows, dequantizing the weight for each product is measured as well; with more than MOST_ROWS
# it is what is done.
TRIED_PLAIN_ROWS = 128
LEAST_ROWS = 32  # of a weight in a tile
Tiles = Mapping[int, AnyTile | None]  # None: the weight is dequantized
# A row has the same bits in all products of one of these ranges.
TILES: Tiles = {most: tiles[0] for most, tiles in CANDIDATES.items()}
# Of products of any number of rows, if a row must have the same bits in all of them.
UNIFORM_TILE = _MANY[0]
ROUTED_TILES = _FEW[0], _MANY[0]  # of few and of many pairs of an expert


def tile_of(tiles: Tiles, rows: int) -> AnyTile | None:
    """Return the tile of a product of this many rows."""
    return next(tile for most, tile in tiles.items() if rows <= most or most == MOST_ROWS)
