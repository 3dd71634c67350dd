"""Passes cut into micro-batches: every token once, in balance."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.attention_config import RopeConfig
from moeflow.engine.offload.micro_batches import Cut, Side, cut_pass, group, is_decoding
from moeflow.kernels.attention.attention_metadata import AttentionMetadata, SequenceSpan
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.rotary import RotaryEmbeddings

KV = KVStorage(
    layers=range(1), num_blocks=1, block_size=16, num_kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu"
)
SIDE = Side(torch.device("cpu"), RotaryEmbeddings([RopeConfig()], 8, torch.device("cpu")), torch.float32)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_token_is_in_one_micro_batch(sequences, max_tokens, max_prompt_tokens, decodes_on_host):
    starts, counts = zip(*sequences, strict=True)
    sizes = [-(-(start + count) // 16) for start, count in sequences]
    block_ids = [range(100 * number, 100 * number + size) for number, size in enumerate(sizes)]
    attention = AttentionMetadata.build(
        starts=starts, num_tokens=counts, block_ids=block_ids, block_size=16, device="cpu"
    )
    positions = torch.tensor([start + i for start, count in sequences for i in range(count)])
    token_ids = torch.arange(len(positions))
    limits = Cut(max_tokens, max_prompt_tokens, 6, decodes_on_host)
    cut = cut_pass(token_ids, ForwardContext(positions, attention, KV), SIDE, SIDE, limits)
    assert torch.cat([each.rows for each in cut]).sort().values.equal(token_ids)
    assert [each.number for each in cut] == list(range(len(cut)))
    assert all(torch.equal(each.token_ids, each.rows) for each in cut)
    for each in cut:
        (decodes,) = {is_decoding(span) for span in each.on_host.attention.spans}
        most = max_tokens if decodes else max_prompt_tokens
        assert each.num_tokens <= max(most, max(counts)) + max(counts)
    assert sum(each.num_read for each in cut) == sum(start + count for start, count in sequences)
    seen = sum(start + i + 1 for start, count in sequences for i in range(count))
    assert sum(each.num_seen for each in cut) == seen
    for each in cut:
        assert torch.equal(each.on_host.attention.slots // 16 // 100, _sequence_of(each.rows, counts))
        spans = each.on_host.attention.spans
        assert {each.attends_on_device} == {not (decodes_on_host and is_decoding(span)) for span in spans}
        blocks = sum(len(span.block_ids) for span in spans)
        assert len(spans) == 1 or not each.attends_on_device or blocks <= 6


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 40))
def test_long_sequences_make_no_more_micro_batches_for_the_others(counts, max_tokens):
    spans = [SequenceSpan(first_token=0, num_tokens=count, start=0, block_ids=[]) for count in counts]
    parts = group(spans, max_tokens)
    short = [count for count in counts if count < max_tokens]
    assert sorted(span.num_tokens for part in parts for span in part) == sorted(counts)
    assert len(parts) <= len(counts) - len(short) + -(-sum(short) // max_tokens)


def _sequence_of(rows, counts):
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[rows]
