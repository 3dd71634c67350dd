"""A tree of full KV blocks that share prefixes: every path from the root spells tokens already computed.

A node is one block; the edge to it is the tuple of tokens the block holds, so equal prompts meet in equal
nodes without hashing collisions. Nodes in use are counted, the rest wait in order of last use and are
evicted leaf first. The idea is SGLang's radix attention, at block instead of token granularity so that a
shared block is never half one request's and half another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

TokenBlock = tuple[int, ...]


class Node:
    """One shared block. `num_users` counts the requests whose block tables run through it."""

    __slots__ = ("block_id", "children", "key", "num_users", "parent", "tokens")

    def __init__(self, block_id: int, tokens: TokenBlock, parent: Node | None) -> None:
        self.block_id = block_id
        self.tokens = tokens
        self.parent = parent
        self.children: dict[TokenBlock, Node] = {}
        self.num_users = 0
        self.key = b""  # its key in a store on disk, cached by the caller

    @property
    def is_in_tree(self) -> bool:
        """Whether its block has its contents: it is set apart before the block is given to anyone else."""
        return self.parent is not None

    @property
    def is_evictable(self) -> bool:
        """Whether it is unused and has no children."""
        return self.num_users == 0 and not self.children and self.parent is not None


class PrefixTree:
    """Shared prefixes, and the eviction order of unused ones."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(-1, (), None)
        self.num_nodes = 0
        self.num_unused = 0  # nodes without users: all of them can be evicted, leaves first
        self._evictable: OrderedDict[Node, None] = OrderedDict()  # longest unused first

    def match(self, token_ids: list[int], max_blocks: int) -> list[Node]:
        """Return the longest path of nodes that spells a prefix of `token_ids`, at most `max_blocks` long."""
        path: list[Node] = []
        node = self.root
        for index in range(max_blocks):
            tokens = tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
            child = node.children.get(tokens)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def insert(self, parent: Node, tokens: TokenBlock, block_id: int) -> Node:
        """Hang a block below `parent`; the caller uses it from the start. There must be no such child yet."""
        assert tokens not in parent.children
        assert len(tokens) == self.block_size
        node = Node(block_id, tokens, parent)
        node.num_users = 1
        parent.children[tokens] = node
        self._evictable.pop(parent, None)
        self.num_nodes += 1
        return node

    def lock(self, node: Node) -> None:
        """Count one more user; a locked node is never evicted."""
        if node.num_users == 0:
            self.num_unused -= 1
            self._evictable.pop(node, None)
        node.num_users += 1

    def unlock(self, node: Node) -> None:
        """Count one user less. Unlock a path from its deepest node up, so that leaves age first."""
        assert node.num_users > 0
        node.num_users -= 1
        if node.num_users == 0:
            self.num_unused += 1
            if node.is_evictable:
                self._evictable[node] = None

    def evict(self) -> Node | None:
        """Give up the longest unused leaf and return it, or None if every node is in use."""
        if not self._evictable:
            return None
        node, _ = self._evictable.popitem(last=False)
        self._detach(node)
        return node

    def remove(self, node: Node) -> int:
        """Take out an unused leaf whose block never got valid contents; return the block."""
        assert node.is_evictable
        self._evictable.pop(node, None)
        self._detach(node)
        return node.block_id

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        node.parent = None
        self.num_nodes -= 1
        self.num_unused -= 1
        if parent.is_evictable:  # it was used no later than its child: next in line
            self._evictable[parent] = None
            self._evictable.move_to_end(parent, last=False)
