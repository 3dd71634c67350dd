import math

import numpy as np
import pytest
import torch

from moeflow.kernels.scaling import scaled, soft_cap

VALUES = [-1e9, -40.0, -3.0, 0.0, 0.5, 29.0, 1e9]


@pytest.mark.parametrize("make", [lambda it: np.array(it, np.float32), torch.tensor])
def test_values_one_by_one_in_either_kind_of_array(make):
    x = make(VALUES)
    assert scaled(x, 1.0) is x
    tripled, capped = scaled(x, 3.0), soft_cap(x, 30.0)
    assert tripled.dtype == capped.dtype == x.dtype
    assert tripled.tolist() == pytest.approx([3 * it for it in VALUES])
    assert capped.tolist() == pytest.approx([30 * math.tanh(it / 30) for it in VALUES])
