"""Single steps of block tables and prefix tree, worked by hand: the block for each request, and the order of
eviction."""

from __future__ import annotations

import pytest

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.prefix_tree import PrefixTree


def make_request(prompt):
    return Request("r", prompt, SamplingParams(), 4)


def computed(tables, prompt):
    """A request whose prompt was computed in a pass that went well."""
    request = make_request(prompt)
    tables.open(request)
    assert tables.reserve(request, len(prompt))
    tables.share(request, len(prompt))
    tables.confirm_pass()
    request.num_computed_tokens = len(prompt)
    return request


def test_the_longest_unused_leaf_is_given_up_first_and_its_parent_next():
    tree = PrefixTree(1)
    trunk = tree.insert(tree.root, (0,), 10)  # each is used once from the start
    one, other = tree.insert(trunk, (1,), 11), tree.insert(trunk, (2,), 12)
    apart = tree.insert(tree.root, (3,), 13)
    tree.unlock(one)
    tree.lock(one)
    assert (tree.num_unused, tree.evict()) == (0, None)
    for node in (other, one, trunk, apart):
        tree.unlock(node)
    assert (tree.num_unused, tree.num_nodes) == (4, 4)
    assert [node and node.block_id for node in (tree.evict() for _ in range(5))] == [12, 11, 10, 13, None]
    assert (tree.num_unused, tree.num_nodes) == (0, 0)


def test_a_match_is_the_longest_path_that_spells_a_prefix():
    tree = PrefixTree(2)
    first = tree.insert(tree.root, (1, 2), 5)
    second = tree.insert(first, (3, 4), 6)
    assert tree.match([1, 2, 3, 4, 9, 9], 3) == [first, second]
    assert tree.match([1, 2, 3, 4], 1) == [first]
    assert tree.match([1, 2, 3, 9], 2) == [first]
    assert tree.match([3, 4, 1, 2], 2) == []
    assert sorted(node.block_id for node in tree.nodes()) == [5, 6]


def test_low_blocks_come_first_and_the_last_freed_is_the_next_given():
    tables = BlockTables(num_blocks=6, block_size=4, prefix_caching=False)
    first, second = computed(tables, [1] * 8), computed(tables, [1] * 9)
    assert (tables.block_ids(first, 8), tables.block_ids(second, 9)) == ((0, 1), (2, 3, 4))
    assert tables.block_ids(second, 4) == (2,)
    assert tables.block_ids(second, 5) == (2, 3)
    tables.close(first)
    assert tables.block_ids(computed(tables, [2] * 5), 5) == (0, 1)
    assert tables.num_touched == 5


@pytest.mark.parametrize(("num_kept", "given"), [(4, 4), (3, 3), (2, 0), (0, 0)])
def test_where_memory_is_short_cached_blocks_go_before_fresh_ones(num_kept, given):
    """Three blocks are touched, and the tree caches 0 and 1; fresh ones begin at 3."""
    tables = BlockTables(num_blocks=6, block_size=2, num_kept=num_kept)
    tables.close(computed(tables, [1, 1, 1, 1, 1]))
    assert (tables.num_touched, tables.num_cached) == (3, 2)
    first, second = make_request([5, 5]), make_request([6, 6])
    for request in (first, second):
        tables.open(request)
        assert tables.reserve(request, 2)
    assert tables.block_ids(first, 2) == (2,)  # free and touched: better than either
    # Up to `num_kept` blocks keep their memory; beyond that the tree gives up its deepest first.
    assert tables.block_ids(second, 2) == ((3,) if num_kept > 3 else (1,))
    assert tables.num_touched == (4 if num_kept > 3 else 3)
    tables.check_integrity()


def test_without_a_bound_cached_blocks_are_taken_last():
    tables = BlockTables(num_blocks=4, block_size=2)
    tables.close(computed(tables, [1, 1, 1, 1]))
    taken = [computed(tables, [number, number, number]) for number in (5, 6)]
    assert [tables.block_ids(request, 3) for request in taken] == [(2, 3), (1, 0)]
    assert tables.num_cached == 0


@pytest.mark.parametrize(("num_kept", "given"), [(5, []), (4, [4]), (3, [1, 4]), (0, [0, 1, 4])])
def test_what_nobody_uses_is_given_back_down_to_what_may_be_kept(num_kept, given):
    """Two blocks in use, one free, two cached, three never touched: free ones go first, then the tree's leaves."""
    tables = BlockTables(num_blocks=8, block_size=2, num_kept=num_kept)
    cached = computed(tables, [1, 1, 1, 1])
    computed(tables, [2, 2, 2])
    spare = computed(tables, [3])
    tables.close(cached)
    tables.close(spare)
    assert (tables.num_touched, tables.num_cached, tables.num_used) == (5, 2, 2)
    assert sorted(tables.give_back()) == given
    assert tables.num_touched == 5 - len(given)
    tables.check_integrity()
    assert tables.give_back() == []


def test_a_twin_is_taken_over_only_once_this_requests_own_block_is_computed():
    tables = BlockTables(num_blocks=6, block_size=4)
    slow = make_request([1] * 9)
    tables.open(slow)
    assert tables.reserve(slow, 9)
    quick = computed(tables, [1] * 9)
    for num_computed in (1, 2, 3):  # less than a block
        slow.num_computed_tokens = num_computed
        tables.share(slow, 8)
        assert tables.block_ids(slow, 8) == (0, 1)
    slow.num_computed_tokens = 4
    tables.share(slow, 8)
    assert tables.block_ids(slow, 8) == (tables.block_ids(quick, 4)[0], 1)
    slow.num_computed_tokens = 8
    tables.share(slow, 8)
    assert tables.block_ids(slow, 8) == tables.block_ids(quick, 8)
    tables.check_integrity()


def test_what_a_failed_pass_was_to_compute_is_never_found_again():
    tables = BlockTables(num_blocks=6, block_size=2)
    kept = computed(tables, [1, 1, 1])
    failed = make_request([1, 1, 2, 2, 3])
    assert tables.open(failed) == 2
    assert tables.reserve(failed, 5)
    tables.share(failed, 4)
    assert (tables.rests_on_pass(failed), tables.rests_on_pass(kept)) == (True, False)
    tables.close(failed)
    tables.discard_pass()
    tables.check_integrity()
    again = make_request([1, 1, 2, 2, 3])
    assert tables.open(again) == 2  # of the pass before
    assert tables.num_cached == 0
    assert tables.num_available == 4
    tables.close(again)
    tables.close(kept)
    assert tables.num_available == 6
    whole = make_request([7] * 12)
    tables.open(whole)
    assert tables.reserve(whole, 12)  # what the tree holds is given up for it, and nothing twice
    tables.check_integrity()


def test_a_request_that_is_to_compute_all_shares_nothing_and_places_are_counted_within_the_limit():
    tables = BlockTables(num_blocks=6, block_size=2)
    tables.close(computed(tables, [1] * 5))
    again = make_request([1] * 5)
    assert tables.open(again, reuse=False) == 0
    assert tables.lacks(again, 1)
    assert tables.reserve(again, 5, keep_available=3)
    assert (tables.lacks(again, 6), tables.lacks(again, 7)) == (False, True)
    assert (tables.num_used, tables.num_available) == (3, 3)
    tables.limit = 2
    assert tables.num_available == 0
    assert tables.reserve(again, 6, keep_available=99)  # has them already
    assert not tables.reserve(again, 7)
