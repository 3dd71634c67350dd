import math

import pytest
import torch

from moeflow.kernels.argmax import argmax
from moeflow.kernels.cpu import row_ops


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def _by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "_AVAILABLE", False)


@pytest.mark.parametrize(("num_rows", "size"), [(0, 3), (1, 1), (4, 7), (3, 200)])
def test_the_value_stands_where_it_says(num_rows, size):
    x = torch.randn(num_rows, size)
    values, indices = argmax(x)
    assert values.tolist() == [max(row) for row in x.tolist()]
    assert x.gather(1, indices[:, None])[:, 0].tolist() == values.tolist()


def test_nan_is_not_overlooked():
    x = torch.randn(3, 50)
    x[1, 17] = math.nan
    assert argmax(x)[0].isnan().tolist() == [False, True, False]


def test_other_types_keep_theirs():
    values, indices = argmax(torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16))
    assert values.dtype == torch.bfloat16
    assert indices.tolist() == [1]
