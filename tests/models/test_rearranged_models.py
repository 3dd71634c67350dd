"""Models whose tensors are loaded in the order that a pass on a GPU reads, against models in the checkpoint's order."""

from contextlib import closing

import numpy as np
import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.rearranged import Rearranged, cut
from moeflow.models.layers.token_mixer import in_order
from moeflow.models.loading import load_model
from studies.small_families import write_small
from tests.models.test_planar_models import CPU, logits_of


class RearrangedTensors(TensorAllocator):
    rearranges = True


class RearrangedIntegers(PlanarAllocator):
    rearranges = True


INT8 = WeightFormats("int8", "float32")
PAIRS = {
    "float32": [kind(torch.float32, CPU) for kind in (TensorAllocator, RearrangedTensors)],
    "int8": [
        kind(torch.float32, CPU, formats=WeightFormats("int8", "float32"))
        for kind in (PlanarAllocator, RearrangedIntegers)
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", PAIRS)
@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoeshared", "gemma4_text"])
def test_shared_experts_lie_behind_the_others(family, weights, tmp_path):
    write_small(family, tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        plain, rearranged = (load_model(checkpoint, it, num_threads=2) for it in PAIRS[weights])
    assert isinstance(plain, CausalLM)
    assert isinstance(rearranged, CausalLM)
    assert [block.shared for _, block in rearranged.moe_blocks()] == [None, None]
    shapes = [{name: tuple(it.shape) for name, it in model.named_weights()} for model in (plain, rearranged)]
    assert shapes[0] == shapes[1]
    torch.testing.assert_close(logits_of(rearranged), logits_of(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_is_cut_into_parts(dim):
    source = torch.arange(24.0).view(4, 6)
    parts = [torch.full_like(it, torch.nan) for it in source.split([1, 3] if dim == 0 else [4, 2], dim)]
    places = cut(parts, dim)
    places.fill(source)
    assert places.shape == source.shape
    assert torch.equal(torch.cat(parts, dim), source)


@pytest.mark.parametrize("weights", PAIRS)
def test_a_projection_has_the_order_that_its_reader_needs(weights):
    order = [range(40, 56), range(10, 40), range(0, 10), range(40, 50)]  # across two parts, and with rows twice
    plain, ordered = (Linear(it, 64, {"q_proj": 32, "k_proj": 24}, bias=True, order=order) for it in PAIRS[weights])
    tensors = {"p.q_proj.weight": (32, 64), "p.k_proj.weight": (24, 64), "p.q_proj.bias": (32,), "p.k_proj.bias": (24,)}
    source = {name: torch.randn(shape) for name, shape in tensors.items()}
    for layer in (plain, ordered):
        found = dict(layer.named_weights("p"))
        assert {name: tuple(it.shape) for name, it in found.items()} == tensors
        for name, place in found.items():
            if isinstance(place, torch.Tensor):
                place.copy_(source[name])
            elif isinstance(place, PlanarRows):
                place.fill(source[name], np.arange(place.num_rows))
            else:
                place.fill(source[name])
    x = torch.randn(3, 64)
    assert not ordered.order
    torch.testing.assert_close(ordered(x), in_order(plain(x), plain.order))


def test_rows_are_loaded_in_another_order():
    source, found = torch.arange(12.0).view(6, 2), torch.full((4, 2), torch.nan)
    places = Rearranged([(found[1:], [range(4, 6), range(0, 1)]), (found[:1], [range(3, 4)])])
    places.fill(source)
    assert places.shape == (6, 2)
    assert torch.equal(found, source[[3, 4, 5, 0]])
