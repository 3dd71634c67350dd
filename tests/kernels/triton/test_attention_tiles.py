"""How attention is cut into programs, by bounds that every choice keeps."""

import pytest
import torch

from moeflow.kernels.triton.attention_tiles import num_splits_of, tile_of
from moeflow.kernels.triton.launching import GPU, gpu_of

H100 = GPU(90, 132)


@pytest.mark.parametrize("num_programs", [1, 4, 5, 64, 264, 300])
def test_splits_fill_the_gpu_and_no_more(num_programs: int) -> None:
    num_splits = num_splits_of(H100, num_programs)
    assert 1 <= num_splits <= 64
    assert num_splits == 64 or num_splits * num_programs >= 264 > (num_splits - 1) * num_programs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_a_tile_fits_what_a_gpu_has(capability: int, dtype: torch.dtype) -> None:
    for value_dim in (16, 64, 96, 128, 256, 512):
        sizes = [tile_of(GPU(capability, 1), num_rows=it, value_dim=value_dim, dtype=dtype) for it in (1, 17, 64, 999)]
        for tile in sizes:
            assert tile.rows >= 16 <= tile.tokens, "tl.dot takes no less"
            assert tile.rows * value_dim <= tile.num_warps * 32 * 128, "sums of half the registers"
        assert sizes[0].rows == 16, "a decode wastes no rows"


def test_the_interpreter_runs_a_program_at_a_time() -> None:
    assert gpu_of(torch.zeros(1)) == GPU(90, 1)
