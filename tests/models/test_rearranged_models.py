"""Models whose tensors are loaded in the order that a pass on a GPU reads, against models in the checkpoint's order."""

from contextlib import closing

import numpy as np
import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.kernels.triton.planar_rows import PlanarRows, empty_planar
from moeflow.kernels.weight_format import LayerFormats
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.rearranged import Rearranged, cut
from moeflow.models.layers.token_mixer import in_order
from moeflow.models.loading import load_model
from studies.small_families import write_small
from tests.kernels.blocks import random_blocks, values_of
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
    places.fill(source, np.arange(len(source)))
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
            else:
                assert isinstance(place, PlanarRows | Rearranged)
                place.fill(source[name], np.arange(len(source[name])))
    x = torch.randn(3, 64)
    assert not ordered.order
    torch.testing.assert_close(ordered(x), in_order(plain(x), plain.order))


def test_rows_are_loaded_in_another_order():
    source, found = torch.arange(12.0).view(6, 2), torch.full((4, 2), torch.nan)
    places = Rearranged([(found[1:], [range(4, 6), range(0, 1)]), (found[:1], [range(3, 4)])])
    places.fill(source, np.arange(len(source)))
    assert places.shape == (6, 2)
    assert torch.equal(found, source[[3, 4, 5, 0]])


@pytest.mark.parametrize(("kind", "weight_format"), [("MXFP4", "mxfp4"), ("Q4_0", "int8")])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_a_file_are_cut_between_blocks(dim, kind, weight_format):
    """The file has rows in another order than the matrix."""
    blocks, places = random_blocks(kind, 6, 96), np.array([4, 5, 0, 1, 2, 3])
    sizes = ([4, 96], [2, 96]) if dim == 0 else ([6, 64], [6, 32])
    parts = [PlanarRows(empty_planar(weight_format, (1, *size), CPU), 0, 0, size[0]) for size in sizes]
    tensor = cut(parts, dim)
    assert (tensor.keeps(kind), tensor.keeps("Q3_K"), tensor.shape) == (True, False, (6, 96))
    tensor.fill(blocks, places, kind)
    found = torch.cat([part.weights[0] for part in parts], dim)
    assert torch.equal(found[places], values_of(kind, blocks))


@pytest.mark.parametrize(
    ("keys", "order", "is_rearranged"),
    [
        ("q4_k", [range(8, 16), range(16, 24), range(8)], True),
        ("q6_k", [range(8, 16), range(8), range(16, 24)], True),
        ("q6_k", [range(8, 16), range(16, 24), range(8)], False),  # keys between queries, in another format
    ],
)
def test_blocks_lie_in_the_order_of_the_reader_where_formats_allow(keys, order, is_rearranged):
    layer = LayerFormats(q_proj="q4_k", k_proj=keys, v_proj=keys, o_proj="q4_k", up="q4_k", down="q4_k")
    formats = WeightFormats("q4_k", "float32", layers=(layer,))
    allocator = RearrangedIntegers(torch.float32, CPU, formats=formats, layer=layer)
    linear = Linear(allocator, 256, {"q_proj": 16, "k_proj": 8}, order=order)
    assert linear.order == (() if is_rearranged else order)
    exact = []
    for name, place in linear.named_weights("p"):
        kind = "Q6_K" if (name, keys) == ("p.k_proj.weight", "q6_k") else "Q4_K"
        blocks = random_blocks(kind, place.shape[0], 256)
        assert isinstance(place, PlanarRows | Rearranged)
        place.fill(blocks, np.arange(len(blocks)), kind)
        exact.append(values_of(kind, blocks))
    x = torch.randn(3, 256)
    torch.testing.assert_close(in_order(linear(x), linear.order), in_order(x @ torch.cat(exact).T, order))
