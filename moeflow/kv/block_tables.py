"""Block tables of the running requests over one pool of KV blocks.

Every block has exactly one of four states: free, private to one request, in the prefix tree, or being filled from
elsewhere for the tree. A request's table starts with tree nodes (shared, full) and ends with
private blocks that are not full yet. Where somebody else put an equal block into the tree first, the request has a copy
until it has computed it. Knows nothing of scheduling, time or tensors.

With recurrent layers a prefix can only be taken up where its state was kept (`state_slots.py`): what of it lies behind
that is computed again.

A block takes memory from when it is first given out. If memory is short, at most `num_kept` unused blocks keep it.
Beyond that, blocks of the tree are taken before fresh ones, and `give_back` names the rest.
"""

from __future__ import annotations

import msgspec

from moeflow.core.batch import NO_SLOT, StateUse
from moeflow.core.request import Request
from moeflow.kv.prefix_tree import Node, PrefixTree, TokenBlock
from moeflow.kv.state_slots import StateCheckpoint, StateSlots


class _Table(msgspec.Struct):
    block_ids: list[int] = []
    nodes: list[Node] = []  # of the first len(nodes) blocks
    copies: list[int] = []  # which of these are own ones, though the tree has them, ascending

    @property
    def private(self) -> list[int]:
        """Blocks of this request alone."""
        return [self.block_ids[index] for index in self.copies] + self.block_ids[len(self.nodes) :]


class Filling(msgspec.Struct, eq=False):
    """Blocks that follow a path of the tree and are filled by others than a pass."""

    nodes: list[Node]  # the path, in use until the end
    tokens: list[TokenBlock]
    block_ids: list[int]
    state_slot: int = NO_SLOT  # that is filled with the state behind them; NO_SLOT: there are no states


class BlockTables:
    """Gives blocks to requests, shares full ones, takes them back."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        num_kept: int | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """`states` are those of recurrent layers; None: there are none."""
        self.num_blocks = num_blocks
        self.limit = num_blocks  # of blocks in use at once: below num_blocks if memory has become short
        self._num_kept = num_blocks if num_kept is None else num_kept
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.tree = PrefixTree(block_size)
        self.states = states
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first, reused while warm
        self._num_fresh = num_blocks  # at its bottom: blocks that take no memory
        self._tables: dict[Request, _Table] = {}
        self._fresh: list[Node] = []  # put into the tree for the pass under way
        self._fillings: list[Filling] = []

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and unused ones of the tree, within the limit."""
        return max(self.limit - self.num_used, 0)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix tree holds."""
        return self.tree.num_unused

    @property
    def num_used(self) -> int:
        """Blocks that running requests hold."""
        return self.num_blocks - len(self._free) - self.tree.num_unused

    @property
    def num_touched(self) -> int:
        """Blocks that take memory."""
        return self.num_blocks - self._num_fresh

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks that many tokens fill."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of the first `num_tokens` positions."""
        return tuple(self._tables[request].block_ids[: self.blocks_for(num_tokens)])

    def open(self, request: Request, *, reuse: bool = True) -> int:
        """Start a table with the longest shared prefix; return how many tokens it already holds.

        At least one token is always left to compute, because its logits choose the next one.
        """
        assert request not in self._tables
        table = self._tables[request] = _Table()
        if self.prefix_caching and reuse:
            max_blocks = (request.num_tokens - 1) // self.block_size
            path = self.tree.match(request.token_ids(0, max_blocks * self.block_size), max_blocks)
            table.nodes = path if self.states is None else path[: self.states.length(path)]
            for node in table.nodes:
                self.tree.lock(node)
            table.block_ids = [node.block_id for node in table.nodes]
        if self.states is not None:
            self.states.open(request, table.nodes)
        return len(table.nodes) * self.block_size

    def reserve(self, request: Request, num_tokens: int, *, keep_available: int = 0) -> bool:
        """Make the table hold positions [0, num_tokens).

        Returns False, with nothing changed, if that would leave fewer than `keep_available` blocks to others, or no
        slot is left for its state.
        """
        table = self._tables[request]
        num_needed = self.blocks_for(num_tokens) - len(table.block_ids)
        if num_needed > 0 and num_needed + keep_available > self.num_available:
            return False
        if self.states is not None and not self.states.hold(request):
            return False
        if num_needed > 0:
            table.block_ids.extend(self._take() for _ in range(num_needed))
        return True

    def most_tokens(self, request: Request, *, keep_available: int) -> int:
        """Return how many positions a table can be made to hold, at least those of its blocks."""
        num_more = max(self.num_available - keep_available, 0)
        return (len(self._tables[request].block_ids) + num_more) * self.block_size

    def lacks(self, request: Request, num_tokens: int) -> bool:
        """Return whether the table does not hold all of positions [0, num_tokens) yet."""
        return len(self._tables[request].block_ids) < self.blocks_for(num_tokens)

    def share(self, request: Request, stop: int) -> None:
        """Put the blocks that are full once positions [0, stop) are computed into the tree, and have states kept.

        Called when a pass is planned: a later request of the same pass can then use them. A pass writes all keys and
        values before it reads any, and states in the order of its requests. A copy that
        was computed in an earlier pass is given back in favour of the tree's block.
        """
        if not self.prefix_caching:
            return
        table = self._tables[request]
        self._exchange_copies(table, request.num_computed_tokens)
        for index in range(len(table.nodes), stop // self.block_size):
            tokens = tuple(request.token_ids(index * self.block_size, (index + 1) * self.block_size))
            parent = table.nodes[-1] if table.nodes else self.tree.root
            node = parent.children.get(tokens)
            if node is None:
                node = self.tree.insert(parent, tokens, table.block_ids[index])
                self._fresh.append(node)
            else:
                self.tree.lock(node)
                table.copies.append(index)
            table.nodes.append(node)
        self._exchange_copies(table, request.num_computed_tokens)
        if self.states is not None:
            for position in self.states.borders(request.num_computed_tokens, stop):
                self.states.save(request, table.nodes[position // self.block_size - 1], position)

    def state_use(self, request: Request) -> StateUse | None:
        """Return what the pass that is planned does with a request's state; None: it has none."""
        return None if self.states is None else self.states.use(request)

    def close(self, request: Request) -> None:
        """Take back a request's table; shared blocks stay in the tree until their space is needed."""
        table = self._tables.pop(request)
        for node in reversed(table.nodes):
            self.tree.unlock(node)
        self._free.extend(reversed(table.private))
        if self.states is not None:
            self.states.close(request)

    def shared(self, request: Request) -> tuple[list[Node], list[tuple[int, StateCheckpoint]]]:
        """Return the nodes with which a request's table starts and behind which others could go on.

        With recurrent layers also where on this path states are kept: (how many nodes it is long there, checkpoint).
        """
        path = self._tables[request].nodes[: self.num_shared(request)]
        return path, [] if self.states is None else self.states.of_path(path)

    def num_shared(self, request: Request) -> int:
        """Return how many nodes these are."""
        nodes = self._tables[request].nodes
        return len(nodes) if self.states is None else self.states.length(nodes)

    @property
    def can_fill(self) -> bool:
        """Whether one more filling may begin."""
        return self.states is None or self.states.can_fill

    def begin_filling(self, request: Request, num_blocks: int) -> Filling:
        """Close a request's table, but keep blocks of its first `num_blocks` that the tree lacks, to be filled. With
        recurrent layers, also keep a slot for the state after these.

        Returns the filling that is under way already, if there is one of the same tokens behind the same path.
        """
        table = self._tables[request]
        path = self._known_path(request, table, num_blocks)
        start, size = len(path), self.block_size
        assert num_blocks <= len(table.block_ids)
        tokens = [tuple(request.token_ids(i * size, (i + 1) * size)) for i in range(start, num_blocks)]
        for other in self._fillings:
            if other.tokens[:1] == tokens[:1] and other.nodes == path:
                self.close(request)
                return other
        filling = Filling(path, tokens, table.block_ids[start:num_blocks])
        self._fillings.append(filling)
        for node in filling.nodes:
            self.tree.lock(node)
        del table.block_ids[start:num_blocks]
        self.close(request)
        if self.states is not None:
            filling.state_slot = self.states.begin_filling()
            assert filling.state_slot != NO_SLOT, "the request's own was free a moment ago"
        return filling

    def _known_path(self, request: Request, table: _Table, num_blocks: int) -> list[Node]:
        """Return the nodes that have a request's first blocks, be it without a state."""
        if self.states is None:
            return list(table.nodes)
        path = self.tree.match(request.token_ids(0, num_blocks * self.block_size), num_blocks)
        fresh = set(self._fresh)
        return path[: next((length for length, node in enumerate(path) if node in fresh), len(path))]

    def end_filling(self, filling: Filling, num_filled: int, *, has_state: bool = False) -> None:
        """Put the first `num_filled` of its blocks into the tree, unused, and free the others.

        With `has_state` the state behind all of them has been filled, too. Between passes, unless that is none of them.
        """
        assert not (self._fresh and num_filled)
        self._fillings.remove(filling)
        path = list(filling.nodes)
        for tokens, block_id in zip(filling.tokens[:num_filled], filling.block_ids, strict=False):
            parent = path[-1] if path else self.tree.root
            twin = parent.children.get(tokens)
            if twin is None:
                path.append(self.tree.insert(parent, tokens, block_id))
            else:  # computed meanwhile
                self.tree.lock(twin)
                self._free.append(block_id)
                path.append(twin)
        if self.states is not None:
            is_whole = has_state and num_filled == len(filling.tokens)
            self.states.end_filling(filling.state_slot, path[-1] if is_whole else None)
        for node in reversed(path):
            self.tree.unlock(node)
        self._free.extend(reversed(filling.block_ids[num_filled:]))

    def confirm_pass(self) -> None:
        """The pass succeeded: blocks shared for it are valid."""
        self._fresh.clear()
        if self.states is not None:
            self.states.confirm_pass()

    def rests_on_pass(self, request: Request) -> bool:
        """Return whether a table becomes void if the current pass fails: it holds blocks shared for the pass, or a
        state that the pass updates.
        """
        return self.states is not None or self.builds_on_pass(request)

    def builds_on_pass(self, request: Request) -> bool:
        """Return whether a table holds blocks shared for the current pass."""
        nodes = self._tables[request].nodes
        return any(node in nodes for node in self._fresh)

    def discard_pass(self) -> None:
        """The pass failed: blocks shared for it are void. Tables that rest on it must be closed already."""
        if self.states is not None:
            self.states.discard_pass()
        for node in reversed(self._fresh):
            self._free.append(self.tree.remove(node))
        self._fresh.clear()

    def give_back(self) -> list[int]:
        """Return unused blocks beyond `num_kept`: they are fresh again, their contents void.

        Only between passes.
        """
        assert not self._fresh
        given: list[int] = []
        while self.num_touched - len(given) > self._num_kept:
            if len(self._free) > self._num_fresh:
                given.append(self._free.pop())
                continue
            block_id = self._evict()
            if block_id is None:
                break
            given.append(block_id)
        self._free[:0] = given
        self._num_fresh += len(given)
        return given

    def check_integrity(self) -> None:
        """Prove that every block is in exactly one place and every user is counted. AssertionError if not."""
        private = [block_id for table in self._tables.values() for block_id in table.private]
        nodes = list(self.tree.nodes())
        filled = [block_id for filling in self._fillings for block_id in filling.block_ids]
        everywhere = sorted(self._free + private + filled + [node.block_id for node in nodes])
        assert everywhere == list(range(self.num_blocks)), "a block is lost or held twice"
        assert 0 <= self._num_fresh <= len(self._free)
        assert len(nodes) == self.tree.num_nodes
        assert sum(node.num_users == 0 for node in nodes) == self.tree.num_unused
        users = {id(node): 0 for node in nodes}
        for request, table in self._tables.items():
            shared = [node.block_id for node in table.nodes]
            assert table.copies == [i for i, block_id in enumerate(shared) if block_id != table.block_ids[i]]
            assert len(table.block_ids) >= self.blocks_for(request.num_computed_tokens)
            for node in table.nodes:
                users[id(node)] += 1
        for node in (node for filling in self._fillings for node in filling.nodes):
            users[id(node)] += 1
        for node in nodes:
            assert node.num_users == users[id(node)], "a user of a shared block is miscounted"
            assert node.parent is self.tree.root or (node.parent and node.parent.num_users >= node.num_users)
        if self.states is not None:
            self.states.check_integrity()

    def _exchange_copies(self, table: _Table, num_computed: int) -> None:
        """Give back the table's copies that are computed, in favour of the tree's blocks."""
        while table.copies and (table.copies[0] + 1) * self.block_size <= num_computed:
            index = table.copies.pop(0)
            self._free.append(table.block_ids[index])
            table.block_ids[index] = table.nodes[index].block_id

    def _evict(self) -> int | None:
        """Return the block of the longest unused leaf, which leaves the tree; None: every node is in use."""
        node = self.tree.evict()
        if node is None:
            return None
        if self.states is not None:
            self.states.forget(node)
        return node.block_id

    def _take(self) -> int:
        if len(self._free) == self._num_fresh and (not self._free or self.num_touched >= self._num_kept):
            block_id = self._evict()
            if block_id is not None:
                return block_id
        assert self._free, "num_available promised a block"
        self._num_fresh = min(self._num_fresh, len(self._free) - 1)
        return self._free.pop()
