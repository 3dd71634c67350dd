"""The table that kernels on a GPU read, against the sequences that it describes."""

import torch

from tests.kernels.passes import Pass

SPANS = [(20, 3), (0, 5), (90, 1)]


def test_it_holds_each_sequence_and_its_blocks() -> None:
    made = Pass(SPANS, block_size=4)
    table = made.metadata().device_table
    assert (table.num_sequences, table.max_tokens, table.block_size) == (3, 5, 4)
    assert table.sequences.dtype is table.block_ids.dtype is torch.int32
    firsts, starts, counts, begins = table.sequences.tolist()
    assert list(zip(starts, counts, strict=True)) == SPANS
    assert firsts == [0, 3, 8]
    ends = [*begins[1:], len(table.block_ids)]
    assert [table.block_ids[a:b].tolist() for a, b in zip(begins, ends, strict=True)] == made.block_ids


def test_it_carries_tree_masks_and_is_made_once() -> None:
    metadata = Pass([(30, 1), (4, 2)], masks=[[-1 ^ 1 << 40], None]).metadata()
    assert metadata.device_table.tree_masks is metadata.tree_masks
    assert metadata.device_table is metadata.device_table
    assert Pass(SPANS).metadata().device_table.tree_masks is None
