"""Paged attention against a loop over tokens and heads in float64, on passes that hypothesis makes up."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.attention import AttentionMetadata, paged_attention


class Pass:
    """Sequences with random K and V, part of them in the cache already, the rest in this pass."""

    def __init__(self, spans, *, heads=(4, 2), head_dim=8, block_size=4, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        self.spans = spans  # (start, num_tokens) of each sequence
        self.block_size = block_size
        num_heads, num_kv_heads = heads
        stops = [start + count for start, count in spans]
        self.keys = [torch.randn(stop, num_kv_heads, head_dim).to(dtype) for stop in stops]
        self.values = [torch.randn(stop, num_kv_heads, head_dim).to(dtype) for stop in stops]
        self.queries = [torch.randn(count, num_heads, head_dim).to(dtype) for _, count in spans]
        needs = [-(-stop // block_size) for stop in stops]
        ids = list(range(sum(needs) + 3))
        random.Random(seed).shuffle(ids)
        self.block_ids = [[ids.pop() for _ in range(need)] for need in needs]
        self.blocks = torch.zeros(sum(needs) + 3, block_size, 2, num_kv_heads, head_dim, dtype=dtype)
        for i, (start, _) in enumerate(spans):
            for position in range(start):
                self.place(i, position)

    def place(self, i, position):
        slot = self.blocks[self.block_ids[i][position // self.block_size], position % self.block_size]
        slot[0], slot[1] = self.keys[i][position], self.values[i][position]

    def run(self, window=None):
        metadata = AttentionMetadata.build(
            starts=[start for start, _ in self.spans],
            num_tokens=[count for _, count in self.spans],
            block_ids=self.block_ids,
            block_size=self.block_size,
            device="cpu",
        )
        new = [slice(start, None) for start, _ in self.spans]
        k = torch.cat([keys[rows] for keys, rows in zip(self.keys, new, strict=True)])
        v = torch.cat([values[rows] for values, rows in zip(self.values, new, strict=True)])
        out = paged_attention(torch.cat(self.queries), k, v, self.blocks, metadata, sliding_window=window)
        return out.split([count for _, count in self.spans])

    def expected(self, i, window=None):
        """Return sequence i's result [n, Q * D], token by token, head by head."""
        start, count = self.spans[i]
        num_heads, head_dim = self.queries[i].shape[1:]
        share = num_heads // self.keys[i].shape[1]
        out = torch.empty(count, num_heads, head_dim, dtype=torch.float64)
        for token in range(count):
            stop = start + token + 1
            first = 0 if window is None else max(0, stop - window)
            for head in range(num_heads):
                seen = self.keys[i][first:stop, head // share].double()
                scores = seen @ self.queries[i][token, head].double() / head_dim**0.5
                out[token, head] = scores.softmax(0) @ self.values[i][first:stop, head // share].double()
        return out.flatten(1)

    def check(self, window=None, tolerance=1e-5):
        for i, got in enumerate(self.run(window)):
            torch.testing.assert_close(got.double(), self.expected(i, window), atol=tolerance, rtol=tolerance)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 12))), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    spans=SPANS,
    window=st.one_of(st.none(), st.integers(1, 50)),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)]),
    block_size=st.sampled_from([1, 4, 5, 16]),
    seed=st.integers(0, 99),
)
def test_any_pass_is_as_the_loop_says(spans, window, heads, block_size, seed):
    Pass(spans, heads=heads, block_size=block_size, seed=seed).check(window)


@pytest.mark.parametrize("window", [1, 4, 5, 6, 7, 11, 12])
def test_windows_around_the_length_of_a_chunk_and_of_a_block(window):
    Pass([(0, 6), (0, 1), (7, 5), (11, 1), (5, 1)]).check(window)


@pytest.mark.parametrize("window", [None, 1, 700])
def test_contexts_longer_than_a_kernel_tile(window):
    """CPU kernels work through keys by 512: whole tiles may be masked at either end."""
    Pass([(1500, 1), (900, 1), (1300, 3)], heads=(2, 1), block_size=16).check(window)


def test_bfloat16():
    spans = [(0, 5), (9, 1), (30, 1), (6, 4)]
    Pass(spans, dtype=torch.bfloat16).check(tolerance=0.05)
    Pass(spans, dtype=torch.bfloat16).check(window=6, tolerance=0.05)


def test_every_token_is_stored_in_its_block():
    made = Pass([(5, 1), (0, 7), (3, 2)])
    made.run()
    for i, (start, count) in enumerate(made.spans):
        for position in range(start + count):
            slot = made.blocks[made.block_ids[i][position // 4], position % 4]
            assert torch.equal(slot[0], made.keys[i][position])
            assert torch.equal(slot[1], made.values[i][position])


def test_a_sequence_may_read_blocks_that_another_writes_in_the_same_pass():
    made = Pass([(0, 8), (8, 2)])
    made.block_ids[1][:2] = made.block_ids[0]  # the second shares the first's prompt
    made.keys[1][:8], made.values[1][:8] = made.keys[0], made.values[0]
    made.check()


def test_layers_with_different_windows_share_one_metadata():
    made = Pass([(20, 1), (11, 3)])
    metadata = AttentionMetadata.build(
        starts=[20, 11], num_tokens=[1, 3], block_ids=made.block_ids, block_size=4, device="cpu"
    )
    k = torch.cat([made.keys[0][20:], made.keys[1][11:]])
    v = torch.cat([made.values[0][20:], made.values[1][11:]])
    for window in (None, 3, None, 5):
        out = paged_attention(torch.cat(made.queries), k, v, made.blocks, metadata, sliding_window=window)
        want = torch.cat([made.expected(0, window), made.expected(1, window)])
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_similar_lengths_share_one_call():
    made = Pass([(3, 1), (40, 1), (9, 1), (44, 1), (60, 1), (0, 1)])
    metadata = AttentionMetadata.build(
        starts=[start for start, _ in made.spans],
        num_tokens=[1] * 6,
        block_ids=made.block_ids,
        block_size=4,
        device="cpu",
    )
    groups = metadata.plan(None, torch.float32).groups
    assert [group.rows.tolist() for group in groups] == [[0, 5], [2], [1, 3, 4]]
    assert all((group.length + 3) // 4 < 2 * min(len(made.block_ids[row]) for row in group.rows) for group in groups)
