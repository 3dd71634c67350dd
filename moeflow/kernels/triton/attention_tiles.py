"""How attention is cut into programs: sizes of tiles by GPU and shape, and how many programs share a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton

from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.triton.launching import GPU

if TYPE_CHECKING:
    import torch

_PROGRAMS_PER_MULTIPROCESSOR = 2
_MOST_SPLITS = 64


class Tile(NamedTuple):
    """What a program multiplies at a time."""

    rows: int  # a token and a query head each
    tokens: int
    num_warps: int
    num_stages: int


def tile_of(gpu: GPU, num_rows: int, blocks: KVBlocks, dtype: torch.dtype) -> Tile:
    """Return the tile for sequences of at most so many rows."""
    return Tile(16 if num_rows <= 16 else 64, 32, 4, 2)


def num_splits_of(gpu: GPU, num_programs: int) -> int:
    """Return how many programs share a sequence, if there were `num_programs` otherwise.

    Context lengths do not matter: a CUDA graph of a decode pass serves all.
    """
    return min(triton.cdiv(_PROGRAMS_PER_MULTIPROCESSOR * gpu.num_multiprocessors, num_programs), _MOST_SPLITS)
