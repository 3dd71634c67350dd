"""What a layer makes of an input of its own, held to float64 and to itself in any company."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.layer_input import PackedLayerInput
from moeflow.kernels.cpu.packed_weight import PackedWeight, matrix_bytes
from moeflow.kernels.norm import NormWeights

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
HIDDEN, SIZE, NUM_LAYERS, EPS = 70, 37, 3, 1e-5


def packed(weight, weight_format="float32"):
    rows, cols = weight.shape
    storage = torch.zeros(matrix_bytes(weight_format, rows, cols), dtype=torch.uint8)
    matrix = PackedWeight(storage, weight_format, rows, cols)
    matrix.split([rows])[0].fill(weight, torch.arange(rows))
    return matrix


@pytest.fixture
def given():
    torch.manual_seed(3)
    sizes = {"gate": (SIZE, HIDDEN), "projection": (HIDDEN, SIZE), "norm": (HIDDEN,), "scale": (1,)}
    made = {name: torch.randn(size) for name, size in sizes.items()}
    return made | {"hidden": torch.randn(9, HIDDEN), "inputs": torch.randn(9, NUM_LAYERS, SIZE)}


def layer_of(given, weight_format="float32", function="gelu_tanh", has_scale=True):
    matrices = (packed(given[name], weight_format) for name in ("gate", "projection"))
    return PackedLayerInput(*matrices, NormWeights(given["norm"], EPS), function, given["scale"] if has_scale else None)


FUNCTIONS = {
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("has_scale", [True, False])
def test_as_in_float64(given, function, has_scale):
    wide = {name: value.double() for name, value in given.items()}
    units = FUNCTIONS[function](wide["hidden"] @ wide["gate"].T) * wide["inputs"][:, 2]
    added = units @ wide["projection"].T
    added *= (added.square().mean(1, keepdim=True) + EPS).rsqrt() * wide["norm"]
    want = (wide["hidden"] + added) * (wide["scale"] if has_scale else 1)
    got = layer_of(given, function=function, has_scale=has_scale)(given["hidden"].clone(), given["inputs"], 2)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8", "int4"])
def test_a_token_has_the_same_bits_alone(given, weight_format):
    layer = layer_of(given, weight_format)
    together = layer(given["hidden"].clone(), given["inputs"], 1)
    for token in range(9):
        rows = slice(token, token + 1)
        alone = layer(given["hidden"][rows].clone(), given["inputs"][rows].contiguous(), 1)
        assert torch.equal(alone, together[rows])


def test_what_does_not_fit_is_refused(given):
    with pytest.raises(ValueError, match="do not match"):
        layer_of(given | {"projection": torch.randn(HIDDEN, SIZE + 1)})
    with pytest.raises(ValueError, match="is needed"):
        layer_of(given)(given["hidden"], given["inputs"][:, :, 1:].contiguous(), 0)
