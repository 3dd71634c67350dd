"""Models whose matrices are planar integers: the logits of floats rounded to the same values."""

from contextlib import closing

import numpy as np
import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.kernels.triton import planar_rows
from moeflow.kernels.triton.planar_rows import PlanarRows, empty_planar
from moeflow.kernels.triton.planar_weights import pack
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.loading import load_model
from moeflow.models.pass_input import PassInput
from studies.small_families import write_small
from tests.kernels.blocks import random_blocks, values_of

CPU = torch.device("cpu")
PROMPT = [5, 17, 300, 2, 41, 41, 9]


def logits_of(model: CausalLM) -> torch.Tensor:
    attention = model.config.attention
    kv = KVStorage(
        layers=range(model.config.num_layers),
        num_blocks=4,
        block_size=16,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        latent_dim=attention.latent_dim,
        other_heads=attention.other_heads,
        dtype="float32",
        device=CPU,
    )
    given = PassInput(PROMPT, [0], [len(PROMPT)], [(0,)], [list(range(len(PROMPT)))])
    return model.logits(model(*given.tensors(kv, CPU)))


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_logits_are_of_the_rounded_weights(family, weight_format, tmp_path):
    write_small(family, tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        formats = WeightFormats(weight_format, "float32", head="int8")
        planar = load_model(checkpoint, PlanarAllocator(torch.float32, CPU, formats=formats), num_threads=2)
        plain = load_model(checkpoint, TensorAllocator(torch.float32, CPU), num_threads=2)
    assert isinstance(planar, CausalLM)
    assert isinstance(plain, CausalLM)
    pairs = zip(planar.named_weights(), plain.named_weights(), strict=True)
    rounded = [(part, weight) for (_, part), (_, weight) in pairs if isinstance(part, PlanarRows)]
    assert len(rounded) > 10
    for part, weight in rounded:
        weight.copy_(pack(weight[None], part.weights.format)[0])
    torch.testing.assert_close(logits_of(planar), logits_of(plain), rtol=1e-5, atol=1e-5)


def test_matrices_are_rounded_in_small_pieces(monkeypatch):
    sizes = []

    def noted(weights, weight_format):
        sizes.append(weights.numel())
        return pack(weights, weight_format)

    matrix = torch.randn(1030, 4096)
    weights = empty_planar("int8", (2, 1040, 4096), CPU)
    monkeypatch.setattr(planar_rows, "pack", noted)
    PlanarRows(weights, 1, 10, 1030).fill(matrix, np.arange(1030))

    assert max(sizes) * 4 <= 4 << 20  # bytes of a float32 copy: each thread of a loader has some at a time
    assert sum(sizes) == matrix.numel()
    whole = pack(matrix[None], "int8")
    assert torch.equal(weights.values[1, 10:], whole.values[0])
    assert torch.equal(weights.scales[1, 10:], whole.scales[0])


@pytest.mark.parametrize(("kind", "weight_format"), [("Q4_K", "q4_k"), ("Q6_K", "q6_k"), ("Q4_0", "int8")])
def test_rows_of_blocks_come_in_pieces_and_in_the_file_s_order(kind, weight_format):
    blocks = random_blocks(kind, 24, 512)
    weights = empty_planar(weight_format, (2, 40, 512), CPU)
    places = np.random.default_rng(0).permutation(24)  # of the file's rows in the matrix
    rows = PlanarRows(weights, 1, 10, 24)
    assert rows.keeps(kind)
    assert not rows.keeps("Q3_K")
    for piece in (slice(0, 16), slice(16, 24)):
        rows.fill(blocks[piece], places[piece], kind)
    assert torch.equal(weights[1][10:34][places], values_of(kind, blocks))
