"""Moves of keys and values by Triton are the reference's, to the byte."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.attention.attention import move_kv
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.triton import kv_moves
from tests.kernels.triton.launches import last_program_first, triton_alone

MOVES = [(5, 4), (7, 5), (9, 6), (10, 7)]  # the second one writes where the first has read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "latent_dim"), [(8, 2, 0), (10, 3, 0), (12, 1, 8)])
def test_tokens_are_copied_with_their_scales(dtype: str, head_dim: int, num_kv_heads: int, latent_dim: int) -> None:
    sizes = {"num_kv_heads": num_kv_heads, "block_size": 4, "head_dim": head_dim, "latent_dim": latent_dim}
    torch.manual_seed(0)
    stored = torch.randint(0, 256, (3 * kv_block_bytes(dtype, **sizes),), dtype=torch.uint8)
    want, found = (KVBlocks(stored.clone(), dtype, **sizes) for _ in range(2))
    for move in MOVES:
        want.handle = None
        want.move(*(torch.tensor([slot]) for slot in move))
    from_slots, to_slots = (torch.tensor(slots) for slots in zip(*MOVES, strict=True))
    with triton_alone(kv_moves) as started, last_program_first():
        move_kv(found, from_slots, to_slots)
    assert len(started) == 1
    assert not torch.equal(found.storage, stored)
    assert torch.equal(found.storage, want.storage)
