"""Requests that wait until the beginning of their tokens is read into KV blocks, instead of being computed.

A request that could join the pass, with all its blocks, waits if more of it is found elsewhere than in the prefix tree.
It keeps its place in the queue and holds the blocks that are to be filled; others
overtake it meanwhile. Then these blocks are in the tree, and it begins like any other. Each stay in the queue has one
try: what cannot be read, or is evicted again before there is a place, is computed. While a read hangs no other begins,
so that it keeps its own blocks and no more.
"""

from __future__ import annotations

from collections.abc import Set

from moeflow.core.request import Request
from moeflow.kv.block_tables import BlockTables, Filling
from moeflow.scheduler.prefix_source import PrefixRead, PrefixSource


class PrefixReads:
    """Which requests wait for which blocks; without a source none does."""

    def __init__(self, source: PrefixSource | None, blocks: BlockTables) -> None:
        self._source = source if blocks.prefix_caching else None
        self._blocks = blocks
        self._reads: dict[Filling, PrefixRead] = {}
        self._waiting: dict[Request, Filling] = {}
        self._tried: set[Request] = set()

    def expect(self, request: Request) -> None:
        """A request is queued, anew or again."""
        if self._source is not None and not request.needs_whole_prompt:
            self._tried.discard(request)
            self._source.expect(request)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        if self._source is not None:
            self._waiting.pop(request, None)
            self._tried.discard(request)
            self._source.forget(request)

    def holds(self, request: Request) -> bool:
        """Return whether a request waits."""
        return request in self._waiting

    @property
    def held(self) -> Set[Request]:
        """The requests that wait."""
        return self._waiting.keys()

    def begin(self, request: Request) -> bool:
        """Have a request wait whose table is open, if more of it can be read; its table is then closed again."""
        if self._source is None or request in self._tried or request.needs_whole_prompt or self._is_hanging:
            return False
        num_found = self._source.num_found(request)
        start = self._blocks.num_shared(request)
        if num_found is None:
            self._blocks.close(request)
        elif num_found <= start or self._blocks.builds_on_pass(request) or not self._blocks.can_fill:
            return False
        else:
            self._wait(request, self._source, num_found)
        request.num_computed_tokens = 0
        return True

    def settle(self) -> None:
        """Between passes: pass on prefixes that have been read."""
        for filling, read in [*self._reads.items()]:
            if self._is_hanging:
                read.cancel()
            if read.is_over:
                del self._reads[filling]
                self._blocks.end_filling(filling, read.num_filled, has_state=read.has_state)
            if read.is_over or read.is_late:
                self._waiting = {request: other for request, other in self._waiting.items() if other is not filling}

    def check_integrity(self) -> None:
        """Check that every waiting request waits for a read. AssertionError if not."""
        assert set(self._waiting.values()) <= set(self._reads)

    @property
    def is_reading(self) -> bool:
        """Whether blocks are being filled."""
        return bool(self._reads)

    @property
    def _is_hanging(self) -> bool:
        return any(read.is_late for read in self._reads.values())

    def _wait(self, request: Request, source: PrefixSource, num_found: int) -> None:
        filling = self._blocks.begin_filling(request, num_found)
        if filling not in self._reads:  # else it is for another request that begins likewise: then look again
            self._tried.add(request)
            read = source.read(request, len(filling.nodes), filling.block_ids, filling.state_slot)
            if read is None:
                self._blocks.end_filling(filling, 0)
                return
            self._reads[filling] = read
        self._waiting[request] = filling
