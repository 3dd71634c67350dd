"""Models whose tensors are loaded in the order that a pass on a GPU reads, against models in the checkpoint's order."""

from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.rearranged import Rearranged, cut
from moeflow.models.loading import load_model
from studies.small_families import write_small
from tests.models.test_planar_models import CPU, logits_of


class RearrangedTensors(TensorAllocator):
    rearranges = True


class RearrangedIntegers(PlanarAllocator):
    rearranges = True


PAIRS = {
    "float32": [kind(torch.float32, CPU) for kind in (TensorAllocator, RearrangedTensors)],
    "int8": [kind(torch.float32, CPU, None, "int8") for kind in (PlanarAllocator, RearrangedIntegers)],
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", PAIRS)
@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoeshared"])
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


def test_rows_are_loaded_in_another_order():
    source, found = torch.arange(12.0).view(6, 2), torch.full((4, 2), torch.nan)
    places = Rearranged([(found[1:], [range(4, 6), range(0, 1)]), (found[:1], [range(3, 4)])])
    places.fill(source)
    assert places.shape == (6, 2)
    assert torch.equal(found, source[[3, 4, 5, 0]])
