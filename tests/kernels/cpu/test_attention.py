"""Attention by the CPU extension: right to rounding, and the same bits whatever else is in the pass."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.token_tree import branch_masks
from moeflow.kernels.attention.attention import attend, attend_reference, write_kv
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KV_DTYPES
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import attention as cpu_attention
from moeflow.kernels.cpu import extension
from moeflow.scheduler.draft_placement import KV_RANGE_POSITIONS
from tests.kernels.passes import Pass, make_blocks
from tests.marks import thorough_unless
from tests.token_trees import branch_of, token_tree

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.06}
SPANS = [(0, 1), (0, 37), (254, 1), (255, 1), (256, 1), (250, 12), (15, 1), (511, 2), (16, 16)]
HEADS = [(1, 1), (3, 1), (8, 2), (8, 1), (6, 6)]

pytestmark = pytest.mark.usefixtures("isa")


def write(made):
    made.write(lambda k, v, slots: cpu_attention.write_kv(k, v, made.blocks, slots))


def run(made, window=None, **scores):
    q = torch.cat(made.queries)
    assert cpu_attention.fits(q, made.blocks)
    return cpu_attention.attend(q, made.blocks, made.metadata(), Scores(window, **scores))


def alone(made, i, first, count, window=None, **scores):
    """Attend from some tokens of one sequence, as a pass of their own."""
    start = made.spans[i][0] + first
    metadata = AttentionMetadata.build(
        starts=[start],
        num_tokens=[count],
        block_ids=[made.block_ids[i]],
        block_size=made.block_size,
        device="cpu",
    )
    q = made.queries[i][first : first + count]
    return cpu_attention.attend(q, made.blocks, metadata, Scores(window, **scores))


def spoil(blocks):
    """Leave in all slots what another sequence, long gone, may have left."""
    blocks.storage.fill_(255)  # NaN as float32 and as bfloat16, and as scales of int8


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_a_mixed_pass_is_as_the_loop_says(kv_dtype, heads):
    made = Pass(SPANS, heads=heads, head_dim=16, block_size=16, kv_dtype=kv_dtype)
    spoil(made.blocks)
    write(made)
    made.check(run(made), tolerance=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("head_dim", [2, 6, 8, 12, 20, 24, 30, 50, 64, 96, 100, 126, 128, 256])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_head_sizes(head_dim, kv_dtype):
    made = Pass([(70, 1), (0, 9), (260, 3)], heads=(4, 1), head_dim=head_dim, block_size=16, kv_dtype=kv_dtype)
    spoil(made.blocks)
    write(made)
    made.check(run(made), tolerance=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "latent_dim"),
    thorough_unless(
        lambda heads, head_dim, _: heads == (6, 2) or head_dim in (26, 144),
        (
            (heads, head_dim, latent_dim)
            for heads in ((4, 1), (71, 1), (6, 2))
            for head_dim, latent_dim in ((2 + 2, 2), (24, 16), (26, 20), (36, 2), (96, 64), (144, 128))
        ),
    ),
)
def test_values_that_are_the_first_dimensions_of_keys(heads, head_dim, latent_dim, kv_dtype):
    shape = {"heads": heads, "head_dim": head_dim, "latent_dim": latent_dim, "kv_dtype": kv_dtype}
    made = Pass([(70, 1), (0, 9), (260, 3), (1030, 1)], block_size=16, **shape)
    spoil(made.blocks)
    write(made)
    made.check(run(made), tolerance=TOLERANCE[kv_dtype])
    want = attend_reference(torch.cat(made.queries), made.blocks, made.metadata(), Scores())
    torch.testing.assert_close(run(made), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 255, 256, 257, 1000])
def test_windows(window):
    made = Pass(SPANS, heads=(2, 1), block_size=32)
    write(made)
    made.check(run(made, window), window)


SCORES = {
    "scale": {"scale": 0.7},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([-1.0, 0.3, 2.0, 30.0])},
    "all": {"scale": 0.1, "soft_cap": 0.5, "sinks": torch.tensor([0.0, -40.0, 3.0, 1.0])},
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("window", [None, 33])
def test_what_becomes_of_scores_is_as_the_loop_says(kv_dtype, scores, window):
    made = Pass(SPANS, heads=(4, 2), head_dim=16, block_size=16, kv_dtype=kv_dtype)
    spoil(made.blocks)
    write(made)
    made.check(run(made, window, **SCORES[scores]), window, TOLERANCE[kv_dtype], **SCORES[scores])


def test_a_cap_is_exact_near_zero_and_far_beyond_it():
    made = Pass([(40, 1)], heads=(1, 1), head_dim=16, block_size=16)
    write(made)
    for scale in (1e-6, 1e4):
        made.check(run(made, scale=scale, soft_cap=30.0), scale=scale, soft_cap=30.0)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_scores_further_apart_than_floats_have_powers(kv_dtype):
    made = Pass([(600, 1), (0, 40)], heads=(4, 2), head_dim=8, block_size=16, kv_dtype=kv_dtype)
    for rows in (*made.queries, *made.keys):
        rows.copy_(torch.randint(-1, 2, rows.shape))  # scores are multiples of 16: all but the largest vanish
    write(made)
    made.check(run(made, scale=16.0), scale=16.0, tolerance=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_whoever_sees_what_is_no_number_has_none(kv_dtype):
    made = Pass([(0, 300)], heads=(4, 2), head_dim=8, block_size=16, kv_dtype=kv_dtype)
    made.keys[0][140] = float("nan")
    write(made)
    out = run(made)
    assert out[:140].isfinite().all()
    assert out[140:].isnan().all()


@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 512])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_block_sizes(block_size, kv_dtype):
    made = Pass([(600, 1), (0, 40), (250, 30)], heads=(2, 1), block_size=block_size, kv_dtype=kv_dtype)
    spoil(made.blocks)
    write(made)
    made.check(run(made), tolerance=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_contexts(kv_dtype):
    made = Pass([(5000, 1), (3000, 2), (4095, 1)], heads=(3, 1), head_dim=16, block_size=16, kv_dtype=kv_dtype)
    write(made)
    made.check(run(made), tolerance=TOLERANCE[kv_dtype])


def test_more_heads_to_a_kv_head_than_rows_are_taken_together():
    made = Pass([(40, 1), (3, 5)], heads=(71, 1), block_size=16)
    write(made)
    made.check(run(made))


@settings(max_examples=15, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 400)),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 99),
)
def test_any_pass_is_as_the_reference_says(spans, window, heads, seed):
    made = Pass(spans, heads=heads, head_dim=16, block_size=16, seed=seed)
    write(made)
    want = attend_reference(torch.cat(made.queries), made.blocks, made.metadata(), Scores(window))
    torch.testing.assert_close(run(made, window), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "latent_dim", "window"), [(24, 0, None), (24, 0, 33), (12, 0, None), (22, 0, 33), (40, 22, None)]
)
def test_bits_depend_on_neither_mates_nor_chunks_nor_threads(kv_dtype, head_dim, latent_dim, window):
    shape = {"heads": (6, 2), "head_dim": head_dim, "latent_dim": latent_dim, "kv_dtype": kv_dtype}
    made = Pass([(0, 300), (2050, 1), (700, 20)], block_size=16, **shape)
    spoil(made.blocks)
    write(made)
    together = run(made, window).split([count for _, count in made.spans])
    for num_threads in (1, 3, 2):
        extension.set_num_threads(num_threads)
        for i, (_, count) in enumerate(made.spans):
            for chunk in (1, 7, 64, count):
                for first in range(0, count, 5 * chunk if chunk == 1 else chunk):
                    part = alone(made, i, first, min(chunk, count - first), window)
                    assert torch.equal(part, together[i][first : first + len(part)])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(kv_dtype, value):
    """A later token of the pass leaves earlier ones alone, whatever its K and V are."""
    for half, latent_dim in (("keys", 0), ("values", 0), ("keys", 6)):
        made = Pass([(100, 10)], heads=(4, 2), latent_dim=latent_dim, block_size=16, kv_dtype=kv_dtype)
        write(made)
        want = run(made)
        getattr(made, half)[0][108:] = value
        write(made)
        got = run(made)
        assert torch.equal(got[:8], want[:8])
        assert not got[8:].isfinite().any()


def signed(mask):
    return mask - (1 << 64) if mask >> 63 else mask


def random_trees(spans, seed):
    """Make tree masks: each token sees itself and some of the last 64 positions before it."""
    rng = random.Random(seed)
    masks = []
    for _, count in spans:
        own = [max(0, 64 - count) + token for token in range(count)] if count <= 64 else []
        masks.append([signed(rng.getrandbits(64) | 1 << bit) for bit in own] or None)
    return masks


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("window", "latent_dim"), [(None, 0), (1, 0), (20, 0), (70, 0), (290, 0), (None, 4), (20, 4)])
def test_tree_masks(kv_dtype, window, latent_dim):
    spans = [(20, 5), (300, 16), (0, 8), (254, 3), (1000, 1), (193, 64), (70, 90)]
    shape = {"heads": (4, 2), "latent_dim": latent_dim, "kv_dtype": kv_dtype}
    made = Pass(spans, block_size=16, masks=random_trees(spans, 1), **shape)
    spoil(made.blocks)
    write(made)
    made.check(run(made, window), window, tolerance=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("window", [None, 5, 100])
def test_a_mask_of_ones_is_no_mask_to_the_bit(window):
    spans = [(20, 5), (300, 16), (0, 8), (254, 100)]
    made = Pass(spans, heads=(4, 2), block_size=16)
    write(made)
    want = run(made, window)
    made.masks = [None] * len(spans)
    assert made.metadata().tree_masks is not None
    assert torch.equal(run(made, window), want)


def test_bits_of_a_branch_depend_on_neither_mates_nor_threads():
    spans = [(254, 16), (3000, 8), (20, 1)]
    made = Pass(spans, heads=(4, 2), head_dim=16, block_size=16, masks=random_trees(spans, 2))
    write(made)
    want = run(made)
    for num_threads in (1, 3, 2):
        extension.set_num_threads(num_threads)
        assert torch.equal(run(made), want)
    metadata = AttentionMetadata.build(
        starts=[3000],
        num_tokens=[8],
        block_ids=[made.block_ids[1]],
        block_size=16,
        device="cpu",
        tree_masks=torch.tensor(made.masks[1]),
    )
    assert torch.equal(cpu_attention.attend(made.queries[1], made.blocks, metadata), want[16:24])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("block_size", "head_dim", "latent_dim"), [(16, 8, 0), (32, 40, 0), (16, 6, 0), (16, 24, 16), (32, 6, 2)]
)
def test_writing_leaves_the_bits_that_the_reference_leaves(kv_dtype, block_size, head_dim, latent_dim):
    torch.manual_seed(0)
    shape = {
        "dtype": kv_dtype,
        "block_size": block_size,
        "head_dim": head_dim,
        "latent_dim": latent_dim,
        "num_kv_heads": 3,
    }
    mine, reference = make_blocks(5, **shape), make_blocks(5, **shape)
    slots = torch.randperm(5 * block_size)[:50]
    qkv = torch.randn(50, 3 * 3 * head_dim)  # rows further apart than K or V is wide
    _, k, v = qkv.unflatten(1, (3, 3, head_dim)).unbind(1)
    k[0], v[0, 0] = 0, 1e-40
    v = None if latent_dim else v
    cpu_attention.write_kv(k, v, mine, slots)
    reference.write(slots, k, v)
    assert torch.equal(mine.storage, reference.storage)


def test_the_kernels_are_used_for_what_they_take():
    blocks = make_blocks(2, block_size=16, head_dim=16)
    x = torch.zeros(1, 2, 16)
    assert cpu_attention.fits(x, blocks)
    assert not cpu_attention.fits(x.bfloat16(), blocks)
    assert not cpu_attention.fits(torch.zeros(1, 16, 2).transpose(1, 2), blocks)
    assert not cpu_attention.fits(x, make_blocks(2, block_size=8, head_dim=16))
    assert not cpu_attention.fits(torch.zeros(1, 2, 21), make_blocks(2, block_size=16, head_dim=21))


@pytest.mark.parametrize("block_size", [5, 16])
def test_callers_need_not_care_who_computes(block_size):
    made = Pass([(40, 1), (0, 7)], block_size=block_size)
    metadata = made.metadata()
    made.blocks.write(made.slots(0, range(40)), made.keys[0][:40], made.values[0][:40])
    k, v = (torch.cat([halves[0][40:], halves[1]]) for halves in (made.keys, made.values))
    write_kv(k, v, made.blocks, metadata.slots)
    made.check(attend(torch.cat(made.queries), made.blocks, metadata))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_relative_positions_are_as_a_loop_over_keys_says(kv_dtype, heads, is_causal, scale):
    made = Pass([(0, 37), (300, 1), (250, 12), (0, 1), (0, 290)], heads=heads, block_size=16, kv_dtype=kv_dtype)
    reach = 20
    bias = torch.randn(heads[0], 2 * reach + 1)
    write(made)
    metadata = AttentionMetadata.build(
        starts=[start for start, _ in made.spans],
        num_tokens=[count for _, count in made.spans],
        block_ids=made.block_ids,
        block_size=16,
        device="cpu",
        is_causal=is_causal,
    )
    q = torch.cat(made.queries)
    found = cpu_attention.attend(q, made.blocks, metadata, Scores(scale=scale, bias=bias)).view_as(q)
    torch.testing.assert_close(
        attend_reference(q, made.blocks, metadata, Scores(scale=scale, bias=bias)).view_as(q),
        found,
        rtol=1e-4,
        atol=1e-5,
    )
    group, first = heads[0] // heads[1], 0
    for i, (start, count) in enumerate(made.spans):
        for row in sorted({0, 1, count // 2, count - 1} & set(range(count))):
            position, stop = start + row, start + row + 1 if is_causal else start + count
            distances = (torch.arange(stop) - position).clamp(-reach, reach) + reach
            for head in range(heads[0]):
                keys, values = made.keys[i][:stop, head // group], made.values[i][:stop, head // group]
                query = made.queries[i][row, head]
                scores = keys @ query * (query.numel() ** -0.5 if scale is None else scale) + bias[head, distances]
                expected = scores.softmax(0) @ values
                torch.testing.assert_close(found[first + row, head], expected, rtol=0, atol=5 * TOLERANCE[kv_dtype])
        first += count


def test_tokens_see_stored_positions_of_another_sequence():
    made = Pass([(0, 40), (0, 290)], heads=(4, 4), block_size=16)
    write(made)
    q = torch.randn(5, 4, made.queries[0].shape[-1])
    metadata = AttentionMetadata.over(
        lengths=[40, 287], num_tokens=[2, 3], block_ids=made.block_ids, block_size=16, device="cpu"
    )
    found = cpu_attention.attend(q, made.blocks, metadata, Scores(scale=1.0)).view_as(q)
    torch.testing.assert_close(attend_reference(q, made.blocks, metadata, Scores(scale=1.0)).view_as(q), found)
    for row, (i, length) in enumerate([(0, 40), (0, 40), (1, 287), (1, 287), (1, 287)]):
        scores = torch.einsum("phd,hd->hp", made.keys[i][:length], q[row])
        expected = torch.einsum("hp,phd->hd", scores.softmax(1), made.values[i][:length])
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def tree_masks(tree):
    """Make the tree masks of a tree's nodes, whose sequence ends with them."""
    before = (1 << 64 - len(tree)) - 1
    return [signed(before | mask << 64 - len(tree)) for mask in branch_masks(tree.parents)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("window", "latent_dim", "start"),
    thorough_unless(
        lambda *it: it in ((None, 0, 0), (None, 6, 37), (20, 0, 430)),
        ((window, latent, start) for window, latent in ((None, 0), (20, 0), (None, 6)) for start in (0, 37, 430)),
    ),
)
def test_a_branch_has_the_bits_that_it_has_by_itself(kv_dtype, window, latent_dim, start):
    """As a tree's node, and as the last token of a sequence that is nothing but its branch."""
    rng = random.Random(start)
    for _ in range(3):
        tree = token_tree([[rng.randrange(3) for _ in range(rng.randrange(9))] for _ in range(6)], max_tokens=40)
        if not len(tree):
            continue
        shape = {"heads": (4, 2), "latent_dim": latent_dim, "block_size": 16, "kv_dtype": kv_dtype}
        made = Pass([(start, len(tree))], masks=[tree_masks(tree)], **shape)
        write(made)
        together = run(made, window)
        for node in range(len(tree)):
            branch = [start + each for each in branch_of(tree, node)]
            kept = [*range(start), *branch]
            by_itself = Pass([(len(kept) - 1, 1)], **shape)
            by_itself.keys, by_itself.values = [made.keys[0][kept]], [made.values[0][kept]]
            by_itself.queries = [made.queries[0][node : node + 1]]
            write(by_itself)
            assert torch.equal(run(by_itself, window)[0], together[node])


@pytest.mark.parametrize("latent_dim", [0, 6])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_moving_keys_and_values_leaves_what_writing_them_there_leaves(kv_dtype, latent_dim):
    made = Pass([(0, 70)], heads=(4, 2), latent_dim=latent_dim, block_size=16, kv_dtype=kv_dtype)
    num_blocks, keys = made.blocks.keys.shape[0], made.keys[0]
    moved, reference, with_torch = (make_blocks(num_blocks, dtype=kv_dtype, latent_dim=latent_dim) for _ in range(3))
    kept = [*range(50), 52, 53, 57, 66]
    for blocks in (moved, reference):
        cpu_attention.write_kv(keys, None if latent_dim else made.values[0], blocks, made.slots(0, range(70)))
    values = None if latent_dim else made.values[0][kept]
    cpu_attention.write_kv(keys[kept], values, reference, made.slots(0, range(54)))
    with_torch.storage.copy_(moved.storage)
    with_torch.handle = None
    for blocks in (moved, with_torch):
        blocks.move(made.slots(0, kept[50:]), made.slots(0, range(50, 54)))
        assert torch.equal(blocks.storage, reference.storage)


def test_trees_end_where_the_kernels_begin_a_new_sum():
    _cpu = pytest.importorskip("moeflow.kernels._cpu")
    assert _cpu.kv_range_positions == KV_RANGE_POSITIONS
