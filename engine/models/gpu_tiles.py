"""Tiles of products with quantized weights on a GPU, by the number of rows of x.

Which one is the fastest depends on the GPU, and on a weight's form and shape: measured_tiles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tile(NamedTuple):
    """What a program of the kernel computes: rows of x and rows of the weight."""

    tokens: int
    rows: int
    warps: int
    stages: int  # one more than the steps that are loaded ahead
    slices: int = 1  # of a step


# The largest number of rows of x that the kernel multiplies. With more, reading the weight is a small part of the work:
# it is dequantized, and torch multiplies.
MOST_ROWS = 256
_MANY = Tile(64, 64, 4, 4), Tile(64, 64, 4, 3, 2), Tile(64, 128, 8, 3), Tile(64, 128, 8, 3, 2)
# The larger a tile of x is, the fewer programs convert the same numbers of the weight.
_MORE = *_MANY, Tile(128, 64, 8, 4)
# By the largest number of rows of x. The first one is used as long as nothing has been measured.
CANDIDATES = {
    16: (
        Tile(16, 64, 4, 6),
        Tile(16, 64, 4, 4, 2),
        Tile(16, 64, 4, 3, 4),
        Tile(16, 32, 4, 3, 4),
        Tile(16, 32, 2, 4, 2),
        Tile(16, 128, 8, 3, 2),
    ),
    32: (Tile(32, 64, 4, 6), Tile(32, 64, 4, 4, 2), Tile(32, 64, 4, 3, 4)),
    64: _MANY,
    128: _MORE,
    MOST_ROWS: _MORE,
}
LEAST_ROWS = 32  # of a weight in a tile
# A row has the same bits in all products of one of these ranges.
TILES: Mapping[int, Tile] = {most: tiles[0] for most, tiles in CANDIDATES.items()}
# Of products of any number of rows, if a row must have the same bits in all of them.
UNIFORM_TILE = TILES[MOST_ROWS]


def tile_of(tiles: Mapping[int, Tile], rows: int) -> Tile:
    """Return the tile of a product of this many rows."""
    return next(tile for most, tile in tiles.items() if rows <= most or most == MOST_ROWS)
