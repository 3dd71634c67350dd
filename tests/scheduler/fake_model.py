"""A model without weights whose next token depends on every token before it, read through the KV blocks.

It stores (position, token) in the slots that a batch names and reads the whole context back from the block
table, as attention would. A wrong block, a block shared too early, a stale one: the next token changes. If batches name
slots of states, a state holds all tokens so far.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from moeflow.core.batch import NO_SLOT, Batch, BatchEntry, StateUse
from moeflow.core.request import Request
from tests.token_trees import branch_of

VOCAB_SIZE = 50


def next_token(context: list[int]) -> int:
    digest = hashlib.blake2b(repr(context).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def generate_alone(prompt: list[int], max_tokens: int, stop_token_ids: frozenset[int] = frozenset()) -> list[int]:
    """What a request must produce, whatever else is in the batch."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(context))
        if context[-1] in stop_token_ids:
            break
    return context[len(prompt) :]


@dataclass(frozen=True)
class Brought:
    """What a pass brought for a request."""

    tokens: list[int]
    kept: list[int]  # nodes of its tree


class FakeModel:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, int]] = {}
        self.states: dict[int, list[int] | None] = {}  # None: a pass failed that was to write it

    def run(self, batch: Batch) -> dict[Request, Brought]:
        for entry in batch.entries:
            tokens = entry.request.token_ids(entry.start, entry.stop)
            assert len(tokens) == entry.num_tokens > 0
            for position, token in enumerate(tokens, entry.start):
                self.slots[self.slot(entry.block_ids, position)] = (position, token)
            for node, token in enumerate(entry.tree.token_ids):
                position = entry.stop - 1 + len(branch_of(entry.tree, node))
                self.slots[self.slot(entry.block_ids, entry.stop + node)] = (position, token)
            if entry.state is not None:
                self._bring_forward(entry, entry.state)
        return {entry.request: self._sample(entry) for entry in batch.entries if entry.samples}

    def _bring_forward(self, entry: BatchEntry, use: StateUse) -> None:
        request, positions = entry.request, [position for position, _ in use.saves]
        before = [] if use.source == NO_SLOT else self.states[use.source]
        assert before == request.token_ids(0, entry.start), "the state is that of other tokens"
        assert positions == sorted(positions)
        for position, slot in (*use.saves, (entry.stop, use.target)):
            assert entry.start < position <= entry.stop
            self.states[slot] = request.token_ids(0, position)

    def _sample(self, entry: BatchEntry) -> Brought:
        """Go down the tree as far as it is right; leave the kept tokens in a row."""
        tokens, kept = [next_token(self._read(entry, []))], []
        while True:
            last = kept[-1] if kept else -1
            children = [node for node, parent in enumerate(entry.tree.parents) if parent == last]
            found = [node for node in children if entry.tree.token_ids[node] == tokens[-1]]
            if not found:
                break
            kept += found
            tokens.append(next_token(self._read(entry, kept)))
        for place, node in enumerate(kept):
            source = self.slots[self.slot(entry.block_ids, entry.stop + node)]
            self.slots[self.slot(entry.block_ids, entry.stop + place)] = source
        return Brought(tokens, kept)

    def _read(self, entry: BatchEntry, branch: list[int]) -> list[int]:
        places = [*range(entry.stop), *[entry.stop + node for node in branch]]
        context = []
        for position, place in enumerate(places):
            stored_position, token = self.slots[self.slot(entry.block_ids, place)]
            assert stored_position == position
            context.append(token)
        return context

    def slot(self, block_ids: tuple[int, ...], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size
