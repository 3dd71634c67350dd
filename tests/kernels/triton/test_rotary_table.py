"""The table of rotary positions by Triton against the table in main memory."""

import pytest
import torch

from moeflow.kernels.rotary import inverse_frequencies, rotary_table
from moeflow.kernels.triton import rotary_table as triton_rotary_table
from tests.kernels.triton.launches import triton_alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rotary_dim", "scale"), [(6, 1.0), (64, 1.3465735902799727)])
def test_a_table_has_the_bits_of_the_one_in_main_memory(rotary_dim: int, scale: float, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 4097, 1 << 20])
    frequencies = torch.from_numpy(inverse_frequencies(rotary_dim, 1e6))
    cos, sin = rotary_table(positions, frequencies, scale, dtype)
    with triton_alone(triton_rotary_table) as started:
        found = triton_rotary_table.rotary_table(positions, frequencies, scale, dtype)
    assert len(started) == 1
    for got, want in zip(found, (cos, sin), strict=True):
        assert got.shape == (4, 1, rotary_dim)
        assert got.dtype is dtype
        tolerance = 1e-7 if dtype is torch.float32 else 0.0
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
