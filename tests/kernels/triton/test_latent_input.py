"""Latent attention with its Triton kernel against the torch reference, which another test compares with float64."""

import pytest
import torch

from moeflow.kernels.attention import latent_attention
from moeflow.kernels.attention.attention import attend_reference
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.attention.latent_attention import attend_to_latents
from moeflow.kernels.attention.latent_heads import LatentHeads
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.rotary import RotaryTable, inverse_frequencies, rotary_table
from moeflow.kernels.triton import latent_input
from tests.kernels.cpu.test_latent_attention import metadata
from tests.kernels.passes import make_blocks
from tests.kernels.triton.launches import triton_alone
from tests.kernels.triton.tolerance import tolerance

SIZES = {"num_heads": 5, "nope_dim": 6, "rope_dim": 10, "latent_dim": 20, "value_dim": 8}
COUNT = 3


@pytest.mark.parametrize("most_absorbed", [COUNT, 0])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, "float32"), (torch.float32, "int8"), (torch.bfloat16, "bfloat16"), (torch.float16, "int8")],
)
def test_latent_attention_is_the_reference(
    dtype: torch.dtype, kv_dtype: str, is_interleaved: bool, most_absorbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_input, "_MOST_ABSORBED", most_absorbed)
    torch.manual_seed(0)
    norm = NormWeights(1 + 0.3 * torch.randn(20).to(dtype), 1e-6)
    heads = LatentHeads(**SIZES, is_interleaved=is_interleaved, latent_norm=norm)
    projected = torch.randn(COUNT, 5 * 16 + 30).to(dtype)
    q, kept = projected[:, : 5 * 16], projected[:, 5 * 16 :]
    up = (torch.randn(5, 14, 20) * 0.3).to(dtype)
    frequencies = torch.from_numpy(inverse_frequencies(10, 100.0))
    table = RotaryTable(*rotary_table(torch.arange(COUNT), frequencies, 1.0, dtype))
    want_blocks, blocks = (
        make_blocks(30, dtype=kv_dtype, block_size=16, num_kv_heads=1, head_dim=30, latent_dim=20) for _ in range(2)
    )
    scores, passed = Scores(scale=0.2), metadata([0], [COUNT])
    monkeypatch.setattr(latent_attention, "attend", attend_reference)
    want = attend_to_latents(q, kept, up, heads, table, want_blocks, passed, scores)
    with triton_alone(latent_input) as started:
        found = attend_to_latents(q, kept, up, heads, table, blocks, passed, scores)
    assert len(started) == 1
    allowed = tolerance(dtype)
    torch.testing.assert_close(found, want, rtol=4 * allowed["rtol"], atol=4 * allowed["atol"])
    steps = {"rtol": 0.0, "atol": 1.0} if kv_dtype == "int8" else allowed
    torch.testing.assert_close(blocks.keys.float(), want_blocks.keys.float(), **steps)
    for got, wanted in ((blocks.key_scales, want_blocks.key_scales), (blocks.value_scales, want_blocks.value_scales)):
        if got is not None:
            torch.testing.assert_close(got, wanted, **allowed)


def test_many_tokens_have_the_products_of_few() -> None:
    heads = LatentHeads(**SIZES, is_interleaved=False, latent_norm=NormWeights(torch.ones(20), 1e-6))
    count = 35  # three tiles of tokens
    q, up = torch.randn(count, 3 + 5 * 16)[:, 3:], torch.randn(5, 14, 20)
    table = RotaryTable(torch.ones(count, 1, 10), torch.zeros(count, 1, 10))
    blocks = make_blocks(3, dtype="float32", block_size=16, num_kv_heads=1, head_dim=30, latent_dim=20)
    with triton_alone():
        nowhere = torch.full((count,), -1)
        queries = latent_input.latent_input(q, torch.randn(count, 30), up, heads, table, blocks, nowhere)
    nope = q.unflatten(1, (5, 16))[..., :6].double()
    wanted = torch.einsum("thn,hnl->thl", nope, up[:, :6].double())
    torch.testing.assert_close(queries[..., :20].double(), wanted, **tolerance(torch.float32))


def test_padding_is_not_stored() -> None:
    heads = LatentHeads(**SIZES, is_interleaved=False, latent_norm=NormWeights(torch.ones(20), 1e-6))
    table = RotaryTable(torch.ones(2, 1, 10), torch.zeros(2, 1, 10))
    sizes = {"num_kv_heads": 1, "block_size": 16, "head_dim": 30, "latent_dim": 20}
    num_bytes = kv_block_bytes("float32", **sizes)
    storage = torch.zeros(3 * num_bytes, dtype=torch.uint8)  # the first block stays empty
    blocks = KVBlocks(storage[num_bytes:], "float32", **sizes)
    q, kept = torch.randn(2, 5 * 16), torch.randn(2, 30)
    with triton_alone():
        up = torch.randn(5, 14, 20)
        queries = latent_input.latent_input(q, kept, up, heads, table, blocks, torch.tensor([-1, 17]))
    assert torch.equal(queries[..., 20:], q.view(2, 5, 16)[..., 6:])
    assert torch.equal(blocks.keys[1, 0, 1, 20:], kept[1, 20:])
    assert blocks.keys.count_nonzero() == 30
    assert not storage[:num_bytes].any()
