import pytest
import torch

from moeflow.kernels.linear import linear

SHAPES = [(0, 8, 8), (1, 1, 1), (1, 64, 48), (3, 7, 5), (2, 33, 17), (65, 32, 96)]
SHAPES += [(rows, 200, 400) for rows in (0, 1, 3, 40)]  # large enough for the path of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "in_features", "out_features"), SHAPES)
def test_it_is_the_product_with_the_transposed_weight(rows, in_features, out_features, has_bias, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, in_features).to(dtype)
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    want = x.double() @ weight.double().T
    if bias is not None:
        want = want + bias.double()
    got = linear(x, weight, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-5 if dtype == torch.float32 else 0.02
    )


def test_it_takes_rows_of_a_wider_tensor_and_a_slice_of_a_stack():
    x = torch.randn(5, 210)[:, 3:203]
    weights = torch.randn(4, 401, 200)[:, 1:]
    torch.testing.assert_close(linear(x, weights[2]), x @ weights[2].T, atol=1e-4, rtol=1e-5)
