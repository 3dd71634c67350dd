"""The drafts of one request merged, each token with its chance, from which the worthwhile ones are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from moeflow.core.token_tree import ROOT, TokenTree
from moeflow.speculation.speculator import Draft, Experts

Origin = tuple[str, int]  # a speculator's name, and the grade that it gave the token


@dataclass(slots=True, eq=False)
class DraftNode:
    """A token that follows its parent's, according to one speculator or several."""

    token_id: int
    parent: DraftNode | None
    origins: list[Origin] = field(default_factory=list)
    children: dict[int, DraftNode] = field(default_factory=dict)
    chance: float = 0.0  # that it is right, and all before it
    experts: Experts = frozenset()  # that it will need; empty: unknown

    def all(self) -> Iterator[DraftNode]:
        """Yield this token and its descendants."""
        yield self
        for child in self.children.values():
            yield from child.all()


def merge(drafts: Iterable[tuple[str, Draft]], max_depth: int, chance: Callable[[str, int], float]) -> DraftNode:
    """Return a root, the request's last token, whose descendants are the drafted tokens, common beginnings once.

    `chance` is the probability that a speculator's token of a grade is accepted if its ancestors are. If several draft
    the same token, the surest counts.
    """
    root = DraftNode(-1, None, chance=1.0)
    for name, draft in drafts:
        token = root
        known = (*draft.experts, *[frozenset[int]()] * (len(draft.token_ids) + 1 - len(draft.experts)))
        root.experts = root.experts or known[0]
        steps = list(zip(draft.token_ids, draft.grades, known[1:], strict=True))
        for token_id, grade, experts in steps[:max_depth]:
            child = token.children.get(token_id)
            if child is None:
                child = token.children[token_id] = DraftNode(token_id, token)
            if (name, grade) not in child.origins:  # drafts of one speculator begin alike
                child.origins.append((name, grade))
            child.chance = max(child.chance, token.chance * chance(name, grade))
            child.experts = child.experts or experts
            token = child
    return root


def tree_of(chosen: list[DraftNode]) -> tuple[TokenTree, list[DraftNode]]:
    """Return chosen tokens, each after its parent, as a tree, and the token of each of its nodes.

    A parent's children are in the order of choice, so the likeliest path is contiguous.
    """
    below: dict[DraftNode | None, list[DraftNode]] = {}
    for token in chosen:
        assert token.parent is not None
        parent = None if token.parent.parent is None else token.parent
        below.setdefault(parent, []).append(token)
    nodes: list[DraftNode] = []
    parents: list[int] = []
    left = [(token, ROOT) for token in reversed(below.get(None, []))]
    while left:
        token, parent_node = left.pop()
        left += [(child, len(nodes)) for child in reversed(below.get(token, []))]
        nodes.append(token)
        parents.append(parent_node)
    return TokenTree(tuple(node.token_id for node in nodes), tuple(parents)), nodes
