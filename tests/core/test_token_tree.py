"""Token trees against brute force: sets of sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.token_tree import MAX_TREE_TOKENS, ROOT, TokenTree, branch_masks, depths
from tests.token_trees import branch_of, token_tree

sequences = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8)


def texts(tree: TokenTree) -> list[tuple[int, ...]]:
    """What each node stands for: the tokens from the first to it."""
    return [tuple(tree.token_ids[each] for each in branch_of(tree, node)) for node in range(len(tree))]


@given(sequences=sequences)
def test_a_tree_has_each_prefix_once(sequences):
    prefixes = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    found = texts(token_tree(sequences))
    assert len(found) == len(set(found))
    assert set(found) == prefixes


@given(sequences=sequences, max_tokens=st.integers(0, 10))
def test_with_less_room_the_first_sequences_are_whole(sequences, max_tokens):
    tree = token_tree(sequences, max_tokens)
    prefixes: list[tuple[int, ...]] = []
    for sequence in sequences:
        prefixes += [tuple(sequence[: end + 1]) for end in range(len(sequence))]
    assert set(texts(tree)) == set(list(dict.fromkeys(prefixes))[:max_tokens])


@given(sequences=sequences)
def test_nodes_are_listed_depth_first(sequences):
    found = texts(token_tree(sequences))
    for place, text in enumerate(found):
        below = [other[: len(text)] == text for other in found[place + 1 :]]
        assert below == sorted(below, reverse=True), "what follows a node comes right behind it"


@given(sequences=sequences)
def test_depths_masks_and_children(sequences):
    tree = token_tree(sequences)
    found = texts(tree)
    assert depths(tree.parents) == [len(text) for text in found]
    for text, mask in zip(found, branch_masks(tree.parents), strict=True):
        assert [mask >> other & 1 for other in range(64)] == [
            int(other < len(found) and found[other] == text[: len(found[other])]) for other in range(64)
        ]
    for node, text in [(ROOT, ()), *enumerate(found)]:
        for token_id in range(5):
            child = tree.child(node, token_id)
            assert (None if child is None else found[child]) == (
                (*text, token_id) if (*text, token_id) in found else None
            )


@given(sequences=sequences, num_tokens=st.integers(0, 12), max_depth=st.integers(0, 5))
def test_parts_of_a_tree(sequences, num_tokens, max_depth):
    tree = token_tree(sequences)
    assert texts(tree.first(num_tokens)) == texts(tree)[:num_tokens]
    assert texts(tree.up_to_depth(max_depth)) == [text for text in texts(tree) if len(text) <= max_depth]


def test_a_tree_is_as_large_as_a_mask():
    assert len(token_tree([range(100)])) == MAX_TREE_TOKENS
    with pytest.raises(AssertionError):
        TokenTree((1, 2, 3), (-1, -1, 0))  # not depth first
    with pytest.raises(AssertionError):
        TokenTree((1, 1), (-1, -1))
