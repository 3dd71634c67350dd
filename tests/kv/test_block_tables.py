"""Block tables: reservation is all or nothing, and the checker detects each kind of damage."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.kv.block_tables import BlockTables


def make_request(prompt: list[int]) -> Request:
    return Request("r", prompt, SamplingParams(), 4)


def test_a_reservation_that_does_not_fit_changes_nothing():
    tables = BlockTables(num_blocks=3, block_size=4)
    request = make_request([1] * 9)
    tables.open(request)
    assert tables.reserve(request, 5)
    assert not tables.reserve(request, 13)
    assert not tables.reserve(request, 12, keep_available=1)
    assert tables.num_available == 1
    assert tables.reserve(request, 12)
    tables.check_integrity()


def test_a_full_match_leaves_one_token_to_compute():
    tables = BlockTables(num_blocks=4, block_size=4)
    first = make_request([1] * 8)
    tables.open(first)
    assert tables.reserve(first, 8)
    tables.share(first, 8)
    tables.confirm_pass()
    tables.close(first)
    assert tables.num_cached == 2
    assert tables.open(make_request([1] * 8)) == 4


def test_twins_are_merged_once_both_are_computed():
    tables = BlockTables(num_blocks=8, block_size=4)
    requests = [make_request([1] * 5) for _ in range(2)]
    for request in requests:
        tables.open(request)  # both before either is shared: two private copies
        assert tables.reserve(request, 5)
    for request in requests:
        tables.share(request, 5)
    assert tables.num_used == 4
    tables.confirm_pass()
    for request in requests:
        request.num_computed_tokens = 5
        tables.share(request, 5)
    assert tables.num_used == 3
    assert tables.block_ids(requests[0], 4) == tables.block_ids(requests[1], 4)
    tables.check_integrity()


@pytest.mark.parametrize("damage", ["lost", "double", "miscounted"])
def test_the_checker_notices_damage(damage):
    tables = BlockTables(num_blocks=4, block_size=2)
    request = make_request([1] * 4)
    tables.open(request)
    assert tables.reserve(request, 4)
    tables.share(request, 2)
    tables.check_integrity()
    if damage == "lost":
        tables._free.pop()
    elif damage == "double":
        tables._free.append(tables.block_ids(request, 4)[1])
    else:
        next(tables.tree.nodes()).num_users += 1
    with pytest.raises(AssertionError):
        tables.check_integrity()


class KeptBlocks(RuleBasedStateMachine):
    """Memory is taken when a block is first given out, and again once it was given back."""

    NUM_BLOCKS = 12

    @initialize(num_kept=st.integers(0, NUM_BLOCKS), prefix_caching=st.booleans())
    def build(self, num_kept, prefix_caching):
        self.num_kept = num_kept
        self.tables = BlockTables(
            num_blocks=self.NUM_BLOCKS, block_size=2, prefix_caching=prefix_caching, num_kept=num_kept
        )
        self.open = []
        self.touched = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), limit=st.integers(0, NUM_BLOCKS))
    def admit(self, tokens, limit):
        request = make_request(tokens)
        self.tables.limit = limit
        request.num_computed_tokens = self.tables.open(request)
        if not self.tables.reserve(request, len(tokens)):
            self.tables.close(request)
            return
        assert self.tables.num_used <= limit
        self.touched.update(self.tables.block_ids(request, len(tokens)))
        self.tables.share(request, len(tokens))
        self.tables.confirm_pass()
        request.num_computed_tokens = len(tokens)
        self.open.append(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data):
        self.tables.close(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @rule()
    def give_back(self):
        given = self.tables.give_back()
        in_use = {b for request in self.open for b in self.tables.block_ids(request, request.num_tokens)}
        assert in_use.isdisjoint(given)
        assert self.touched.issuperset(given)
        self.touched.difference_update(given)
        assert self.tables.num_touched <= max(self.num_kept, self.tables.num_used)

    @invariant()
    def memory_is_counted(self):
        if hasattr(self, "tables"):
            self.tables.check_integrity()
            assert self.tables.num_touched == len(self.touched)


TestKeptBlocks = KeptBlocks.TestCase
TestKeptBlocks.settings = settings(max_examples=30, stateful_step_count=20)
