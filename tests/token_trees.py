"""Token trees of given sequences, merged as drafts are, and speculators that always draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeflow.core.token_tree import MAX_TREE_TOKENS, ROOT, TokenTree
from moeflow.speculation.draft_tree import DraftNode, merge, tree_of
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Draft


def token_tree(sequences: Iterable[Sequence[int]], max_tokens: int = MAX_TREE_TOKENS) -> TokenTree:
    """Merge sequences; of those behind, as much is left out as `max_tokens` asks for."""
    drafts = [Draft(tuple(sequence), (0,) * len(sequence)) for sequence in sequences]
    root = merge([("someone", draft) for draft in drafts], MAX_TREE_TOKENS, lambda name, grade: 0.5)
    found: list[DraftNode] = []
    for draft in drafts:
        token = root
        for token_id in draft.token_ids[:MAX_TREE_TOKENS]:
            token = token.children[token_id]
            if token not in found:
                found.append(token)
    return tree_of(found[:max_tokens])[0]


def draft_always(speculation: Speculation) -> None:
    """Let speculators draft from the first pass on, without trials."""
    speculation.usefulness.pays = lambda name: True


def branch_of(tree: TokenTree, node: int) -> list[int]:
    """Return the nodes from the first token to this one; `ROOT`: none."""
    branch: list[int] = []
    while node != ROOT:
        branch.append(node)
        node = tree.parents[node]
    return branch[::-1]
