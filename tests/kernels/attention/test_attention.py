"""Paged attention against a loop over tokens and heads in float64, on passes that hypothesis makes up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.attention.attention import attend_reference
from moeflow.kernels.attention.scores import Scores
from tests.kernels.passes import Pass


def run(made, window=None):
    """Put K and V into the cache and attend, in plain torch."""
    made.write(lambda k, v, slots: made.blocks.write(slots, k, v))
    return attend_reference(torch.cat(made.queries), made.blocks, made.metadata(), Scores(window))


def check(spans, window=None, tolerance=1e-5, **shape):
    made = Pass(spans, **shape)
    made.check(run(made, window), window, tolerance)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 12))), min_size=1, max_size=6)


@settings(max_examples=12, derandomize=True)
@given(
    spans=SPANS,
    window=st.one_of(st.none(), st.integers(1, 50)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)]),
    block_size=st.sampled_from([1, 4, 5, 16]),
    seed=st.integers(0, 99),
)
def test_any_pass_is_as_the_loop_says(spans, window, heads, block_size, seed):
    check(spans, window, heads=heads, block_size=block_size, seed=seed)


@pytest.mark.parametrize("window", [1, 4, 5, 6, 7, 11, 12])
def test_windows_around_the_length_of_a_chunk_and_of_a_block(window):
    check([(0, 6), (0, 1), (7, 5), (11, 1), (5, 1)], window)


@pytest.mark.parametrize("window", [None, 1, 700])
def test_contexts_longer_than_a_kernel_tile(window):
    """CPU kernels work through keys by 512: whole tiles may be masked at either end."""
    check([(1500, 1), (900, 1), (1300, 3)], window, heads=(2, 1), block_size=16)


@pytest.mark.parametrize("window", [None, 6])
def test_bfloat16(window):
    check([(0, 5), (9, 1), (30, 1), (6, 4)], window, tolerance=0.05, dtype=torch.bfloat16)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.int8, 0.05)])
def test_keys_and_values_may_be_stored_in_less(kv_dtype, tolerance):
    check([(0, 5), (9, 1), (30, 1), (6, 4)], tolerance=tolerance, kv_dtype=kv_dtype)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.int8, 0.05)])
def test_values_may_be_the_first_dimensions_of_keys(window, kv_dtype, tolerance):
    shape = {"heads": (4, 1), "head_dim": 24, "latent_dim": 16, "kv_dtype": kv_dtype}
    check([(0, 5), (9, 1), (30, 1), (6, 4)], window, tolerance=tolerance, **shape)
    check([(9, 1), (30, 1)], window, tolerance=tolerance, **shape)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
def test_tree_masks(window):
    # Three tokens at bits 61, 62 and 63: the last two are alternatives to each other.
    tree = [(1 << 62) - 1, ((1 << 61) - 1) | 1 << 61 | 1 << 62, ((1 << 62) - 1) | 1 << 63]
    check([(20, 3), (0, 5), (90, 3)], window, masks=[_signed(tree), None, _signed(tree)])


def test_a_token_that_is_alone_may_have_a_tree_mask():
    check([(30, 1), (4, 1)], masks=[[-1 ^ 1 << 40], None])


def _signed(masks):
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def test_a_sequence_may_read_blocks_that_another_writes_in_the_same_pass():
    made = Pass([(0, 8), (8, 2)])
    made.block_ids[1][:2] = made.block_ids[0]  # the second shares the first's prompt
    made.keys[1][:8], made.values[1][:8] = made.keys[0], made.values[0]
    made.check(run(made))


def test_layers_with_different_windows_share_one_metadata():
    made = Pass([(20, 1), (11, 3)])
    run(made)
    metadata = made.metadata()
    for window in (None, 3, None, 5):
        made.check(attend_reference(torch.cat(made.queries), made.blocks, metadata, Scores(window)), window)


def test_similar_lengths_share_one_call():
    made = Pass([(3, 1), (40, 1), (9, 1), (44, 1), (60, 1), (0, 1)])
    groups = made.metadata().plan(None, torch.float32).groups
    assert [group.rows.tolist() for group in groups] == [[0, 5], [2], [1, 3, 4]]
    assert all((group.length + 3) // 4 < 2 * min(len(made.block_ids[row]) for row in group.rows) for group in groups)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scores", [{"scale": 0.7}, {"soft_cap": 1.5}, {"sinks": torch.tensor([-1.0, 0.3, 2.0, 30.0])}])
def test_what_becomes_of_scores(window, scores):
    made = Pass([(0, 9), (12, 1), (5, 4), (30, 1)])
    made.write(lambda k, v, slots: made.blocks.write(slots, k, v))
    out = attend_reference(torch.cat(made.queries), made.blocks, made.metadata(), Scores(window, **scores))
    made.check(out, window, **scores)
