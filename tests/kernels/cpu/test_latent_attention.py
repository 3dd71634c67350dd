"""Latent attention by the CPU extension against the same in torch, and against keys and values of each head."""

import pytest
import torch

from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.latent_attention import attend_to_latents
from moeflow.kernels.attention.latent_heads import LatentHeads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.latent_attention import PackedLatents
from moeflow.kernels.cpu.latent_weights import PackedUpProjection, UpProjectionShape
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.rotary import RotaryTable, inverse_frequencies, rotary_table
from tests.kernels.passes import make_blocks

pytestmark = pytest.mark.usefixtures("isa")
BLOCK_SIZE = 16
SCORES = Scores(scale=0.2)
# heads, not rotated, rotated, latent, value
SHAPES = [(4, 12, 8, 24, 10), (1, 16, 2, 16, 16), (20, 8, 4, 34, 6)]


class Layer:
    """A layer's weights, in torch and packed."""

    def __init__(self, shape, *, q_rank=None, is_interleaved=True, weight_format="float32"):
        torch.manual_seed(0)
        num_heads, nope, rope, latent, value = shape
        norm = None if q_rank is None else NormWeights(1 + 0.3 * torch.randn(q_rank), 1e-6)
        latent_norm = NormWeights(1 + 0.3 * torch.randn(latent), 1e-6)
        self.heads = LatentHeads(num_heads, nope, rope, latent, value, is_interleaved, latent_norm, norm)
        dims = UpProjectionShape(num_heads, nope, value, latent)
        up = PackedUpProjection(dims, weight_format, allocate_lazily, is_wide=False)
        up.fill(torch.randn(up.shape) * 0.3)
        self.up = up.unpack()
        self.q_b = None
        if q_rank is not None:
            self.q_b = PackedWeight.pack(torch.randn(num_heads * (nope + rope), q_rank) * 0.3, weight_format)
        self.packed = PackedLatents(self.heads, self.q_b, up)

    def blocks(self, kv_dtype="float32"):
        heads = self.heads
        return make_blocks(
            30,
            dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            num_kv_heads=1,
            head_dim=heads.key_dim,
            latent_dim=heads.latent_dim,
        )

    def table(self, positions):
        return RotaryTable(
            *rotary_table(positions, inverse_frequencies(self.heads.rope_dim, 100.0), 1.0, torch.float32)
        )

    def queries(self, projected):
        """Return queries [T, H * (N + R)] from the first projection."""
        q = projected[:, : -self.heads.key_dim]
        if self.q_b is None:
            return q
        normed = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.heads.q_norm.weight
        return normed @ self.q_b.unpack().T


def metadata(starts, counts, first_sequence=0):
    return AttentionMetadata.build(
        starts=starts,
        num_tokens=counts,
        block_ids=[[29 - 10 * (first_sequence + i) - j for j in range(10)] for i in range(len(starts))],
        block_size=BLOCK_SIZE,
        device="cpu",
    )


def positions(starts, counts):
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])


def rotated_in_float64(x, position, is_interleaved):
    """Rotate the pairs of x [.., R] by the position, as a complex number each."""
    dim = x.shape[-1]
    angles = position * inverse_frequencies(dim, 100.0).astype("float64")
    pairs = x.double().unflatten(-1, (dim // 2, 2)) if is_interleaved else x.double().unflatten(-1, (2, dim // 2)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(dim // 2).double(), torch.tensor(angles)
    )
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("q_rank", [None, 18])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_it_is_attention_to_each_heads_keys_and_values(shape, q_rank, is_interleaved):
    layer = Layer(shape, q_rank=q_rank, is_interleaved=is_interleaved)
    heads, count = layer.heads, 37
    projected = torch.randn(count, layer.packed.projected_size)
    q = layer.queries(projected).view(count, heads.num_heads, -1).double()
    latents, rope = projected[:, -heads.key_dim :].split([heads.latent_dim, heads.rope_dim], dim=1)
    normed = (latents / (latents.square().mean(-1, keepdim=True) + 1e-6).sqrt() * heads.latent_norm.weight).double()
    keys, values = torch.einsum("tl,hnl->thn", normed, layer.up.double()).split([heads.nope_dim, heads.value_dim], 2)
    want = torch.empty(count, heads.num_heads, heads.value_dim, dtype=torch.float64)
    turned_keys = torch.stack([rotated_in_float64(x, p, is_interleaved) for p, x in enumerate(rope)])
    for t in range(count):
        nope, q_rope = q[t].split([heads.nope_dim, heads.rope_dim], dim=1)
        turned = rotated_in_float64(q_rope, t, is_interleaved)
        scores = torch.einsum("hn,shn->hs", nope, keys[: t + 1]) + turned @ turned_keys[: t + 1].T
        want[t] = torch.einsum("hs,shv->hv", (scores * SCORES.scale).softmax(-1), values[: t + 1])
    for attend in (layer.packed.attend, in_torch(layer)):
        got = attend(projected, layer.table(torch.arange(count)), layer.blocks(), metadata([0], [count]), SCORES)
        torch.testing.assert_close(got.double(), want.flatten(1), atol=2e-5, rtol=1e-4)


def in_torch(layer):
    def attend(projected, table, blocks, meta, scores):
        kept = projected[:, -layer.heads.key_dim :]
        q = layer.queries(projected)
        return attend_to_latents(q, kept, layer.up, layer.heads, table, blocks, meta, scores)

    return attend


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_rank", [None, 18])
def test_bits_depend_on_neither_mates_nor_chunks_nor_threads(some_threads, kv_dtype, weight_format, q_rank):
    layer = Layer(SHAPES[0], q_rank=q_rank, weight_format=weight_format)
    counts = [70, 9]
    projected = torch.randn(79, layer.packed.projected_size)
    blocks = layer.blocks(kv_dtype)
    together = layer.packed.attend(
        projected, layer.table(positions([0, 0], counts)), blocks, metadata([0, 0], counts), SCORES
    )
    stored = blocks.storage.clone()
    for num_threads in (1, 3):
        extension.set_num_threads(num_threads)
        blocks.storage.zero_()
        for i, first in enumerate((0, counts[0])):
            for start in range(0, counts[i], 8):
                stop = min(start + 8, counts[i])
                own = metadata([start], [stop - start], first_sequence=i)
                rows = slice(first + start, first + stop)
                alone = layer.packed.attend(
                    projected[rows], layer.table(torch.arange(start, stop)), blocks, own, SCORES
                )
                assert torch.equal(alone, together[rows])
        assert torch.equal(blocks.storage, stored)


def test_what_does_not_fit_is_refused():
    layer = Layer(SHAPES[0])
    table, meta = layer.table(torch.arange(3)), metadata([0], [3])
    projected = torch.randn(3, layer.packed.projected_size)
    with pytest.raises(ValueError, match="float32"):
        layer.packed.attend(projected[:, 1:].contiguous(), table, layer.blocks(), meta, SCORES)
    with pytest.raises(ValueError, match="do not fit"):
        layer.packed.attend(projected, table, make_blocks(30, num_kv_heads=1, head_dim=32), meta, SCORES)
    with pytest.raises(ValueError, match="do not match"):
        PackedLatents(layer.heads, PackedWeight.pack(torch.randn(80, 18), "float32"), layer.packed.up)
