"""How attention is cut into programs: sizes of tiles by GPU and shape, and how many programs share a sequence.

A decode reads every key and value of a sequence once: Qwen3-30B-A3B 2 KiB a position and layer, 8 MiB at 4,096
positions, 2.5 us of an H100's 3.35 TB/s. Its latency hides 18 KiB of loads in flight on each multiprocessor. A program
of 16 rows and 64 tokens keeps two tiles of 32 KiB in flight, and two programs run on each multiprocessor.

A prompt of 4,096 tokens takes 137 GFLOP in such a layer. An H100's multiprocessor multiplies a tile of 128 rows and 64
tokens in 1,024 cycles. The softmax takes 512 cycles for powers of two and about 800 for other numbers. Even with no
overlap that is 43% of the peak. Each such tile reads 32 KiB through the L2 cache: 14 of about 24 bytes a cycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import GPU

if TYPE_CHECKING:
    from torch import dtype as DType

_PROGRAMS_PER_MULTIPROCESSOR = 2
_MOST_SPLITS = 64
_WITH_160_KIB = (80, 90, 100, 103)  # capabilities with so much shared memory for a program; others have at least 64 KiB


class AttentionTile(NamedTuple):
    """The numbers that a program multiplies at a time."""

    rows: int  # a token and a query head each
    tokens: int
    num_warps: int
    num_stages: int  # 3: block numbers are loaded a tile ahead of the blocks


def fits(gpu: GPU, value_dim: int) -> bool:
    """Return whether the shared memory of a program holds a tile: 64 KiB before 8.0 are too few for latents."""
    return gpu.capability >= 80 or value_dim <= 256


def tile_of(gpu: GPU, *, num_rows: int, value_dim: int, dtype: DType) -> AttentionTile:
    """Return the tile for sequences of at most so many rows."""
    if gpu.capability < 80 or dtype is torch.float32:  # no tensor cores
        return AttentionTile(16, 16, 4 if value_dim <= 128 else 8, 2 if value_dim <= 256 else 1)
    if value_dim > 256:  # latents
        return (
            AttentionTile(32, 32, 8, 3)
            if num_rows > 16 and gpu.capability in _WITH_160_KIB
            else AttentionTile(16, 16, 4, 3)
        )
    if num_rows <= 16:
        return AttentionTile(16, 64 if value_dim <= 128 else 32, 4, 3)
    if value_dim > 128:
        return AttentionTile(64, 32, 8, 3)
    if num_rows <= 64:
        return AttentionTile(64, 32, 4, 3)
    return AttentionTile(128, 64 if value_dim <= 64 or gpu.capability // 10 in (9, 10) else 32, 8, 3)


def num_splits_of(gpu: GPU, num_programs: int) -> int:
    """Return how many programs share a sequence, if there were `num_programs` otherwise.

    Context lengths do not matter: a CUDA graph of a decode pass serves all.
    """
    return min(-(-_PROGRAMS_PER_MULTIPROCESSOR * gpu.num_multiprocessors // num_programs), _MOST_SPLITS)
