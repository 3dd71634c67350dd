"""Recurrent states on disk, next to their preceding blocks: each in an extent of its own, one piece per layer.

A state is called by the block behind which it is. Resuming a prefix needs all of its blocks and the state at its end,
so prefixes are found up to the last state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from moeflow.kv.disk.block_keys import state_keys
from moeflow.kv.disk.extent_folder import ExtentFolder
from moeflow.kv.state_slots import StateCheckpoint
from moeflow.kv.state_storage import StateStorage


class StateFiles:
    """One model's states. The methods are for the threads of `PromptCache`; all may raise OSError."""

    def __init__(self, folder: ExtentFolder, states: StateStorage) -> None:
        """Take the folder, whose blocks are the states of one layer."""
        self.folder = folder
        self._states = states

    @property
    def state_bytes(self) -> int:
        """What a state takes, over all layers."""
        return self._states.num_layers * self.folder.block_bytes

    def names_of(self, keys: Sequence[bytes]) -> set[str]:
        """Return the files that have states behind these blocks."""
        return {*self.folder.names_of([piece for key in keys for piece in state_keys(key, 1)])}

    def length(self, keys: Sequence[bytes]) -> int:
        """Return up to how many of these blocks a prefix can be taken up."""
        return next((length for length in range(len(keys), 0, -1) if self._has(keys[length - 1])), 0)

    def read(self, key: bytes, slot: int, buffer: memoryview, on_progress: Callable[[], None]) -> bool:
        """Fill a slot with the state behind a block; return whether all of it could be had."""

        def take(number: int, content: memoryview) -> None:
            self._states.copy_in(number, slot, content)
            on_progress()

        pieces = state_keys(key, self._states.num_layers)
        is_whole = self.folder.read(pieces, take, buffer) == len(pieces)
        self.folder.touch(pieces)
        return is_whole

    def write(self, key: bytes, checkpoint: StateCheckpoint, buffer: memoryview, keep: Collection[str]) -> int:
        """Write the state behind a block, as far as it is still kept; return how many bytes that took.

        The files `keep` are not deleted for it. If the state is there already, it is noted as used.
        """

        def gather(number: int, into: memoryview) -> bool:
            self._states.copy_out(number, checkpoint.slot, into)
            return checkpoint.is_kept

        pieces = state_keys(key, self._states.num_layers)
        if self._has(key):
            self.folder.touch(pieces)
            return 0
        return self.folder.write(pieces, gather, buffer, keep)

    def _has(self, key: bytes) -> bool:
        num_layers = self._states.num_layers
        is_begun = self.folder.count(state_keys(key, 1)) == 1
        return is_begun and self.folder.count(state_keys(key, num_layers)) == num_layers
