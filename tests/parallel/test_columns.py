"""Columns that ranks have are put side by side in order, and are those of the whole."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.parallel.blocks import even_blocks
from moeflow.parallel.columns import Columns
from tests.parallel.thread_group import run_ranks


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(0, 4), st.integers(1, 5))
def test_what_ranks_take_of_a_matrix_and_gather_is_the_matrix(count, num_rows, size):
    whole = torch.arange(num_rows * count, dtype=torch.float32).view(num_rows, count)

    def take_and_gather(group):
        columns = Columns(group, "columns", even_blocks(count, size))
        own = columns.of(whole)
        assert own.shape == (num_rows, len(columns.own))
        return columns.gather(own)

    assert all(torch.equal(found, whole) for found in run_ranks(size, take_and_gather))
