"""Estimates the cached part of a prompt in each replica, so that a request goes to the replica with most of it.

Each engine has its own prefix cache. A conversation spread over engines would be computed again in each. A record has
the blocks of tokens sent to each engine, in the probable eviction order of its cache. Errors in it cost time, but never
change a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class PrefixRecord:
    """The blocks of tokens that one engine probably has in its prefix cache."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        """Take the number of tokens of a block, and the engine's number of blocks."""
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()  # of whole prefixes, longest unused first

    def note(self, prefixes: Sequence[int]) -> None:
        """The engine computes tokens with these hashes, or has them."""
        for prefix in reversed(prefixes):  # the end of a prompt is given up first
            self._hashes[prefix] = None
            self._hashes.move_to_end(prefix)
        while len(self._hashes) > self._num_blocks:
            self._hashes.popitem(last=False)

    def share(self, prefixes: Sequence[int], num_tokens: int) -> float:
        """Return the share of a prompt that need not be computed, from 0 to below 1: its last token always is."""
        if not self._hashes:
            return 0.0
        known = takewhile(self._hashes.__contains__, prefixes[: (num_tokens - 1) // self._block_size])
        return sum(self._block_size for _ in known) / max(num_tokens, 1)

    def clear(self) -> None:
        """The engine has ended."""
        self._hashes.clear()


def extend_hashes(hashes: list[int], token_ids: Sequence[int], block_size: int) -> None:
    """Append a number for each further full block of tokens. It stands for all tokens up to the block's end."""
    for stop in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        before = hashes[-1] if hashes else 0
        hashes.append(hash((before, *token_ids[stop - block_size : stop])))
