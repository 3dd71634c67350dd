"""Paged attention against a loop over tokens and heads in float64, and against itself in other batches."""

import random
from typing import Any

import msgspec
import pytest
import torch

from moeflow.kernels.attention import attention as paged_attention
from moeflow.kernels.attention.attention import attend_reference
from moeflow.kernels.attention.scores import PLAIN, Scores
from moeflow.kernels.triton import attention, launching
from moeflow.kernels.triton.attention_tiles import AttentionTile
from moeflow.kernels.triton.launching import GPU
from tests.kernels.passes import Pass
from tests.kernels.triton.tolerance import tolerance

MIXED = [(0, 3), (70, 1), (33, 2)]
SINKS = torch.tensor([-1.0, 0.3, 2.0, 30.0])


def filled(spans: list[tuple[int, int]], **shape: Any) -> Pass:
    """Return a pass whose K and V are stored. The rest of their blocks is NaN."""
    made = Pass(spans, **{"block_size": 16, **shape})
    _poison(made)
    made.write(lambda k, v, slots: made.blocks.write(slots, k, v))
    return made


def _poison(made: Pass) -> None:
    blocks = made.blocks
    poisoned = (blocks.key_scales, blocks.value_scales) if blocks.dtype == "int8" else (blocks.keys, blocks.values)
    for stored in poisoned:
        assert stored is not None
        stored.fill_(torch.nan)


def attended(made: Pass, scores: Scores = PLAIN) -> torch.Tensor:
    return attention.attend(torch.cat(made.queries), made.blocks, made.metadata().device_table, scores)


@pytest.fixture(params=[1, 3])
def _splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many programs share a sequence, and a tile hold two blocks, so that passes stay small."""
    monkeypatch.setattr(attention, "num_splits_of", lambda gpu, num_programs: request.param)
    monkeypatch.setattr(
        attention, "tile_of", lambda *_, **__: AttentionTile(rows=16, tokens=32, num_warps=4, num_stages=1)
    )


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 16), ((4, 2), 8), ((5, 1), 80), ((2, 2), 192), ((24, 1), 16)])
def test_prompts_and_decodes_share_a_pass(heads: tuple[int, int], head_dim: int) -> None:
    made = filled(MIXED, heads=heads, head_dim=head_dim)
    made.check(attended(made), tolerance=2e-5)


@pytest.mark.parametrize(("dtype", "window", "tolerance"), [(torch.float16, None, 5e-3), (torch.bfloat16, 7, 4e-2)])
def test_narrow_numbers(dtype: torch.dtype, window: int | None, tolerance: float) -> None:
    made = filled(MIXED, dtype=dtype, kv_dtype=torch.float32 if dtype is torch.float16 else None)
    made.check(attended(made, Scores(window)), window, tolerance)


@pytest.mark.parametrize("latent_dim", [0, 48])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2), ("int8", 5e-2)])
def test_keys_and_values_may_be_stored_in_less(kv_dtype: str, tolerance: float, latent_dim: int) -> None:
    made = filled(MIXED, heads=(4, 1), head_dim=56, latent_dim=latent_dim, kv_dtype=getattr(torch, kv_dtype))
    made.check(attended(made), tolerance=tolerance)


@pytest.mark.parametrize("latent_dim", [0, 4])
def test_int8_is_the_reference_up_to_rounding(latent_dim: int) -> None:
    made = filled(MIXED, heads=(4, 1), latent_dim=latent_dim, kv_dtype=torch.int8)
    out = attended(made)
    for scales in (made.blocks.key_scales, made.blocks.value_scales):
        assert scales is not None
        scales.nan_to_num_(0.0)  # the reference multiplies by them
    expected = attend_reference(torch.cat(made.queries), made.blocks, made.metadata())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("scores", [{"scale": 0.7}, {"soft_cap": 1.5}])
def test_what_becomes_of_scores(scores: dict[str, Any], window: int | None) -> None:
    made = filled(MIXED)
    made.check(attended(made, Scores(window, **scores)), window, 2e-5, **scores)


@pytest.mark.usefixtures("_splits")
def test_a_sink_counts_once() -> None:
    made = filled(MIXED)
    made.check(attended(made, Scores(sinks=SINKS)), tolerance=2e-5, sinks=SINKS)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_gated(dtype: torch.dtype) -> None:
    made = filled(MIXED, dtype=dtype)
    plain = attended(made)
    gates = torch.randn(len(plain), 3 + plain.shape[1]).to(dtype)[:, 3:]
    table = made.metadata().device_table
    found = attention.attend(torch.cat(made.queries), made.blocks, table, PLAIN, gates)
    wanted = plain.double() * gates.double().sigmoid()
    torch.testing.assert_close(found.double(), wanted, **tolerance(dtype))


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("window", [1, 16, 34, 70])
def test_windows(window: int) -> None:
    made = filled([(70, 1), (33, 20)], heads=(1, 1))
    made.check(attended(made, Scores(window)), window, 2e-5)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("window", [None, 1, 9, 40])
def test_trees(window: int | None) -> None:
    random_bits = random.Random(3)
    spans = [(90, 3), (0, 3), (20, 1), (5, 2)]
    masks = [[_mask(count, token, random_bits) for token in range(count)] for _, count in spans[:3]]
    made = filled(spans, heads=(2, 1), masks=[*masks, None])
    made.check(attended(made, Scores(window)), window, 2e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_before_the_last_64_see_all_before_them(window: int | None) -> None:
    made = filled([(2, 70)], heads=(1, 1), masks=[[-1] * 66 + [-1 ^ 1 << 59] * 4])
    made.check(attended(made, Scores(window)), window, 2e-5)


def _mask(count: int, token: int, random_bits: random.Random) -> int:
    """Return a mask of random bits: the token sees itself. Bits beyond it and of negative positions may be set."""
    mask = random_bits.getrandbits(64) | 1 << (64 - count + token)
    return mask - (1 << 64) if mask >> 63 else mask


@pytest.mark.usefixtures("_splits")
def test_padding_is_zero_and_changes_nothing() -> None:
    made = filled([(40, 1), (3, 4)])
    table = made.metadata().device_table
    empty = torch.tensor([[0], [0], [0], [0]], dtype=torch.int32)
    padded = msgspec.structs.replace(table, sequences=torch.cat([empty, table.sequences, empty], dim=1))
    q = torch.cat(made.queries)
    more = torch.cat([q, torch.full_like(q[:2], torch.nan)])
    out = attention.attend(more, made.blocks, padded, PLAIN)
    assert torch.equal(out[:5], attended(made))
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("window", [None, 20])
def test_a_row_does_not_depend_on_others(window: int | None) -> None:
    made = filled([(70, 3), (33, 6)], heads=(2, 1))
    together = attended(made, Scores(window))
    made.spans, made.queries, made.block_ids = made.spans[:1], made.queries[:1], made.block_ids[:1]
    assert torch.equal(attended(made, Scores(window)), together[:3])


def test_nothing_is_read_behind_the_blocks_of_a_sequence() -> None:
    made = filled([(40, 1)], heads=(1, 1), dtype=torch.bfloat16)
    table = made.metadata().device_table
    far = torch.full((8,), 2**31 - 1, dtype=torch.int32)  # a block there crashes the interpreter
    followed = msgspec.structs.replace(table, block_ids=torch.cat([table.block_ids, far]))
    made.check(attention.attend(made.queries[0], made.blocks, followed, PLAIN), tolerance=4e-2)


def test_queries_may_lie_among_other_numbers() -> None:
    made = filled(MIXED)
    q, table = torch.cat(made.queries), made.metadata().device_table
    among = torch.cat([q, torch.full_like(q, torch.nan)], dim=1)[:, : q.shape[1]]
    assert torch.equal(attention.attend(among, made.blocks, table, PLAIN), attended(made))
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attention.attend(swapped, made.blocks, table, PLAIN), attended(made))


def started(made: Pass, monkeypatch: pytest.MonkeyPatch, scores: Scores = PLAIN) -> int:
    """Attend as on a GPU, and return how many kernels started; the reference makes a plan or reads by sequence."""
    monkeypatch.setattr(launching, "accepts", lambda x: True)
    grids: list[Any] = []
    monkeypatch.setattr(attention, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    made.blocks.handle = None
    metadata = made.metadata()
    out = paged_attention.attend(torch.cat(made.queries), made.blocks, metadata, scores)
    assert out.shape == (len(metadata.slots), made.queries[0].shape[1] * made.blocks.value_dim)
    assert not (grids and metadata._plans)
    return len(grids)


def test_a_gpu_runs_the_kernels_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(filled(MIXED), monkeypatch) == 1
    monkeypatch.setattr(attention, "gpu_of", lambda x: GPU(75, 40))
    assert started(filled(MIXED), monkeypatch) == 2


def test_the_reference_computes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(filled(MIXED), monkeypatch, Scores(bias=torch.zeros(4, 3))) == 0
    latents = filled(MIXED, heads=(4, 1), head_dim=576, latent_dim=512)
    assert started(latents, monkeypatch) == 1
    monkeypatch.setattr(attention, "gpu_of", lambda x: GPU(75, 40))
    assert started(latents, monkeypatch) == 0
