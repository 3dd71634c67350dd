"""Sizes of tiles of the expert kernels, by a small table: trials at run time would synchronize, and vary.

The floor of a pass is the bytes of the chosen experts. One token of Qwen3-30B-A3B (8 of 128 experts, gate and up 768 x
2048 in bfloat16) reads 50 MB of gates and ups and 25 MB of downs, 20 us at 3.7 TB/s. To keep 3.7 TB/s busy over a
latency of 0.7 us, each of 132 SMs needs 20 KB on the way.

- *pair*: A step of a program reads 16 KB. With 16 units each, 384 programs are 3 on an SM: 48 KB on the way.
- *expert*: A step reads 16 to 20 KB in each of 3 stages. An SM holds 2 programs (sm_89, 99 KB) to 5 (sm_90).
- *tiles*: 64 to 128 rows reuse each weight. Arithmetic is the limit, not memory.
- Without tensor cores, each thread keeps operands of products in registers. So tiles are small.
"""

from __future__ import annotations

from typing import NamedTuple

from moeflow.kernels.triton.launching import GPU


class Tile(NamedTuple):
    """Rows, outputs and columns of a step, and how a kernel is started."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def pair_tile(gpu: GPU, top_k: int, num_outputs: int, size: int, weight_bits: int, num_matrices: int) -> Tile:
    """Return the tile for pairs one by one: up to 16 KB of weights a step, and 2 programs or more for each SM.

    That is for one token, so that a token's sums have the same order in any batch.
    """
    block_n, most_columns = 32 // num_matrices, {32: 128, 16: 256, 8: 512, 4: 512}[weight_bits]
    while block_n > 4 and top_k * -(-num_outputs // block_n) < 2 * gpu.num_multiprocessors:
        block_n, most_columns = block_n // 2, 2 * most_columns
    return Tile(1, block_n, _columns(size, most_columns), 4, 1)


def expert_tile(gpu: GPU, size: int, input_bits: int, num_matrices: int, *, is_float: bool) -> Tile:
    """Return the tile for the few rows of an expert. 16 rows are the fewest that tensor cores take.

    To unpack 64 rows of integers takes the registers of 256 threads.
    """
    if not _has_tensor_cores(gpu, input_bits):
        return Tile(16, 32, _columns(size, 32), 4, 3)
    return Tile(16, 64 // num_matrices, _columns(size, 128), 4 if is_float else 8 // num_matrices, 3)


def prompt_tile(
    gpu: GPU, rows_an_expert: int, size: int, input_bits: int, num_matrices: int, *, is_float: bool
) -> Tile:
    """Return the tile for many rows, so that the stages fit into 99 KB before sm_90, and into 227 KB on it."""
    if not _has_tensor_cores(gpu, input_bits):
        return Tile(32, 64 // num_matrices, _columns(size, 32), 4, 2)
    block_m, num_warps = (128, 8) if rows_an_expert > 64 else (64, 4)
    if gpu.capability >= 90:
        block_n = 128 if is_float or num_warps == 8 else 128 // num_matrices
        return Tile(block_m, block_n, _columns(size, 64), num_warps, 3 if is_float else 2)
    block_n = 128 // num_matrices if is_float else 64
    return Tile(block_m, block_n, _columns(size, 64), num_warps, 2)


def _has_tensor_cores(gpu: GPU, input_bits: int) -> bool:
    """Return whether Triton uses tensor cores: not for float32 in full precision, and not before sm_80."""
    return input_bits == 16 and gpu.capability >= 80


def _columns(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`, or `most` if that were less than a quarter."""
    most = min(most, max(1 << (size - 1).bit_length(), 32))
    found = most
    while size % found and found > max(most // 4, 32):
        found //= 2
    return found if size % found == 0 else most
