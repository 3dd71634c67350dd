"""The prefix tree against a brute-force list of stored sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.kv.prefix_tree import PrefixTree

token_lists = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)


def store(tree: PrefixTree, tokens: list[int], next_block: int) -> int:
    """Insert all full blocks of a sequence and give up using them; return the next free block number."""
    num_blocks = len(tokens) // tree.block_size
    path = tree.match(tokens, num_blocks)
    for node in path:
        tree.lock(node)
    while len(path) < num_blocks:
        start = len(path) * tree.block_size
        parent = path[-1] if path else tree.root
        path.append(tree.insert(parent, tuple(tokens[start : start + tree.block_size]), next_block))
        next_block += 1
    for node in reversed(path):
        tree.unlock(node)
    return next_block


@given(stored=token_lists, query=st.lists(st.integers(0, 1), max_size=9))
def test_match_is_the_longest_common_prefix_in_full_blocks(stored, query):
    tree = PrefixTree(2)
    next_block = 0
    for tokens in stored:
        next_block = store(tree, tokens, next_block)
    longest = max(
        (n for tokens in stored for n in range(len(tokens) // 2 + 1) if tokens[: 2 * n] == query[: 2 * n]),
        default=0,
    )
    assert len(tree.match(query, len(query) // 2)) == min(longest, len(query) // 2)


@given(stored=token_lists)
def test_eviction_empties_the_tree_leaves_first(stored):
    tree = PrefixTree(2)
    next_block = 0
    for tokens in stored:
        next_block = store(tree, tokens, next_block)
    assert tree.num_nodes == tree.num_unused == next_block
    evicted = []
    while (node := tree.evict()) is not None:
        evicted.append(node.block_id)
        assert len(list(tree.nodes())) == tree.num_nodes == tree.num_unused
    assert sorted(evicted) == list(range(next_block))


def test_the_longest_unused_leaf_goes_first_and_locked_ones_stay():
    tree = PrefixTree(1)
    store(tree, [1, 2], 0)  # blocks 0, 1
    store(tree, [5], 2)  # block 2
    path = tree.match([1, 2], 2)
    for node in path:
        tree.lock(node)
    assert evict(tree) == [2]
    assert tree.evict() is None
    for node in reversed(path):
        tree.unlock(node)
    assert evict(tree) == [1, 0]


def evict(tree: PrefixTree) -> list[int]:
    """Evict all that can be, and return the blocks in order."""
    return [node.block_id for node in iter(tree.evict, None)]
