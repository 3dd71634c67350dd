"""Keys of token blocks. A key depends on everything that its keys, values and states depend on: the model, its
computation, and every token up to the block's end. Equal names mean equal bytes, wherever and whenever they were
computed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

KEY_BYTES: Final = 32


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the block that has these tokens behind the block `parent`, or behind a model's identity."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=KEY_BYTES).digest()


def state_identity(identity: bytes) -> bytes:
    """Return the identity that separates files of states from files of blocks."""
    return next_key(identity, ())


def state_keys(key: bytes, num_layers: int) -> list[bytes]:
    """Return what the recurrent layers' states behind the block `key` are called: no token is negative."""
    return [next_key(key, (-1 - number,)) for number in range(num_layers)]


def block_keys(identity: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of the whole blocks that tokens fill, in order."""
    keys: list[bytes] = []
    key = identity
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = next_key(key, token_ids[start : start + block_size])
        keys.append(key)
    return keys
