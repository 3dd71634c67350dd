"""A model without weights whose next token depends on every token before it, read through the KV blocks.

It stores (position, token) in the slots that a batch names and reads the whole context back from the block
table, as attention would. A wrong block, a block shared too early, a stale one: the next token changes.
"""

from __future__ import annotations

import hashlib

from moeflow.core.batch import Batch
from moeflow.core.request import Request

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


class FakeModel:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, int]] = {}

    def run(self, batch: Batch) -> dict[Request, int]:
        for entry in batch.entries:
            tokens = entry.request.token_ids(entry.start, entry.stop)
            assert len(tokens) == entry.num_tokens > 0
            for position, token in enumerate(tokens, entry.start):
                self.slots[self._slot(entry.block_ids, position)] = (position, token)
        return {entry.request: self._read(entry) for entry in batch.entries if entry.samples}

    def _read(self, entry) -> int:
        context = []
        for position in range(entry.stop):
            stored_position, token = self.slots[self._slot(entry.block_ids, position)]
            assert stored_position == position
            context.append(token)
        return next_token(context)

    def _slot(self, block_ids: tuple[int, ...], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size
