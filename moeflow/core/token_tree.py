"""Drafted tokens of a request as a tree: sequences share their common prefix.

Nodes are listed depth first: ancestors precede a node, in order. Any first part of the list is a tree, too. (ExpertFlow
3.4, 4.4; SpecInfer.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

MAX_TREE_TOKENS: Final = 63  # without the token before them, at most the bits of a mask
ROOT: Final = -1  # the parent of nodes that follow the request's last token


class TokenTree(msgspec.Struct, frozen=True):
    """Some tokens, each following its parent."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # the node that each follows, `ROOT` or one before it

    def __post_init__(self) -> None:
        """Hold that nodes are listed depth first, and that no two children of a node are the same token."""
        assert len(self.token_ids) == len(self.parents) <= MAX_TREE_TOKENS
        branch: list[int] = []  # from the root to the node before
        for node, parent in enumerate(self.parents):
            while branch and branch[-1] != parent:
                branch.pop()
            assert parent == (branch[-1] if branch else ROOT), "nodes are listed depth first"
            branch.append(node)
        assert len(set(zip(self.parents, self.token_ids, strict=True))) == len(self.parents), "twins"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """What follows the request's tokens, up to each node and including it; nothing first."""
        found: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(self.token_ids, self.parents, strict=True):
            found.append((*found[parent + 1], token_id))
        return found

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of a node, or of `ROOT`, that is this token; None: there is none."""
        for other in range(node + 1, len(self.token_ids)):
            if self.parents[other] < node:  # past its descendants
                break
            if self.parents[other] == node and self.token_ids[other] == token_id:
                return other
        return None

    def first(self, num_tokens: int) -> TokenTree:
        """Return the tree of so many nodes."""
        return self if num_tokens >= len(self) else TokenTree(self.token_ids[:num_tokens], self.parents[:num_tokens])

    def up_to_depth(self, max_depth: int) -> TokenTree:
        """Return the tree without nodes that are further from the root."""
        found = depths(self.parents)
        if max(found, default=0) <= max_depth:
            return self
        kept = [node for node, depth in enumerate(found) if depth <= max_depth]
        places = {node: place for place, node in enumerate(kept)} | {ROOT: ROOT}
        return TokenTree(
            tuple(self.token_ids[node] for node in kept), tuple(places[self.parents[node]] for node in kept)
        )


NO_TREE: Final = TokenTree()


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many tokens each node of a tree is beyond the request's last one: from 1 on."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def branch_masks(parents: Sequence[int]) -> list[int]:
    """Return for each node of a tree the nodes that it follows, and itself: node i is bit i."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append(1 << node | (0 if parent == ROOT else masks[parent]))
    return masks
