"""Prefixes on disk, in addition to KV blocks: found and read before a request begins, written after passes.

Three threads: one looks up the beginning of a new request, one reads it into KV blocks reserved by the scheduler, one
writes. So no pass waits for a disk, and a request that is new to it hardly.

Blocks to write are neither copied in advance nor kept. The writing thread copies each block out of the KV cache, then
checks whether the block was still the prefix tree's. A block leaves the tree before its reuse, so an invalid copy is
never used. A block evicted too early is not written.

With recurrent layers, a prefix is written up to the last block with a kept state. Kept states are written, too; they
are copied and checked likewise. It is read up to a state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from moeflow.core.batch import Batch
from moeflow.core.errors import CapacityError
from moeflow.core.request import Request
from moeflow.core.units import MIB
from moeflow.engine.prompt_cache.prefix_read import BlocksRead
from moeflow.engine.prompt_cache.state_files import StateFiles
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.disk.block_keys import block_keys, next_key
from moeflow.kv.disk.extent_folder import ExtentFolder
from moeflow.kv.prefix_tree import Node
from moeflow.kv.state_slots import StateCheckpoint
from moeflow.kv.storage import KVStorage
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.planner.choices.prompt_cache_choice import PIECE_BYTES

logger = logging.getLogger(__name__)

EXTENT_BYTES: Final = 16 * MIB  # of a file
EXTENT_BLOCKS: Final = range(4, 65)  # in a file, whatever blocks take
LEAST_BLOCKS: Final = EXTENT_BLOCKS.start  # at the end of a prefix that are worth a file; fewer wait for more
MOST_WAITING: Final = 64  # prefixes to be written
LOOK_S: Final = 1.0  # longest that a request waits until it is known whether it is there
QUICK_LOOK_S: Final = 0.002  # that a pass waits for this: it is known by then, and the request joins the pass
FLUSH_S: Final = 3.0  # at the end, for pending writes


class PromptCache:
    """One engine's prefixes on disk. The methods are for its thread, and wait for no disk."""

    def __init__(
        self,
        folder: ExtentFolder,
        kv: KVStorage,
        identity: bytes,
        make_room: Callable[[Sequence[int]], None],
        clock: Callable[[], float] = time.monotonic,
        states: StateFiles | None = None,
    ) -> None:
        """`make_room` receives the blocks to write, and may raise CapacityError.

        `states` are those of recurrent layers; None: there are none.
        """
        self._folder, self._states, self._kv, self._identity = folder, states, kv, identity
        self._make_room, self._clock = make_room, clock
        self._block_bytes = kv.content_bytes
        self._extent_blocks = min(max(EXTENT_BYTES // self._block_bytes, LEAST_BLOCKS), EXTENT_BLOCKS[-1])
        self._finder, self._reader, self._writer = (Lane(f"prompt cache, {what}") for what in ("look", "read", "write"))
        self._looks: dict[Request, tuple[Future[list[bytes]], float]] = {}  # and until when it is waited for
        self._new_looks: list[Future[list[bytes]]] = []  # since a pass was planned
        self._num_offered: dict[Request, int] = {}  # blocks
        self._to_write: list[Future[None]] = []
        self._bell = threading.Event()  # something has been found or read
        piece_bytes = max(PIECE_BYTES, self._block_bytes, 0 if states is None else states.folder.block_bytes)
        self._read_buffer, self._write_buffer = (memoryview(bytearray(piece_bytes)) for _ in range(2))
        self._is_writing = True  # until the disk refuses
        self._num_bytes = folder.num_bytes  # of all files, when that was last looked at
        self._num_read_blocks = self._read_bytes = self._written_bytes = 0

    def expect(self, request: Request) -> None:
        """See `PrefixSource`."""
        size = self._kv.block_size
        num_blocks = (request.num_tokens - 1) // size
        if num_blocks:
            look = self._finder.submit(self._look, request.token_ids(0, num_blocks * size))
            look.on_done(lambda _: self._bell.set())
            self._looks[request] = look, self._clock() + LOOK_S
            self._new_looks.append(look)

    def num_found(self, request: Request) -> int | None:
        """See `PrefixSource`."""
        look, until_s = self._looks.get(request, (None, 0.0))
        if look is None or (not look.is_done and self._clock() > until_s):
            return 0
        return (0 if look.error else len(look.result())) if look.is_done else None

    def read(self, request: Request, start: int, block_ids: Sequence[int], state_slot: int) -> BlocksRead | None:
        """See `PrefixSource`."""
        try:
            self._make_room(block_ids)
        except CapacityError as error:
            logger.warning("a prompt is computed, not read: %s", error)
            return None
        look, _ = self._looks[request]
        read = BlocksRead(self._clock)
        read.job = self._reader.submit(self._read, read, look.result(), start, block_ids, state_slot)
        read.job.on_done(lambda _: self._bell.set())
        return read

    def forget(self, request: Request) -> None:
        """See `PrefixSource`."""
        self._looks.pop(request, None)
        self._num_offered.pop(request, None)

    def await_looks(self) -> None:
        """Give lookups of new requests a moment, before a pass is planned."""
        new, self._new_looks = self._new_looks, []
        until_s = self._clock() + QUICK_LOOK_S
        while (left_s := until_s - self._clock()) > 0 and not all(look.is_done for look in new):
            self.await_any(left_s)

    def await_any(self, limit_s: float) -> None:
        """Wait until something has been found or read, at most so long."""
        self._bell.wait(limit_s)
        self._bell.clear()

    def note_pass(self, batch: Batch, blocks: BlockTables) -> None:
        """A pass succeeded: write its completed blocks, one file at a time, and the rest of a prompt."""
        for entry in batch.entries:
            request = entry.request
            num_new = blocks.num_shared(request) - self._num_offered.get(request, 0)
            is_prompt_over = entry.start < len(request.prompt_token_ids) <= entry.stop
            if num_new >= (1 if is_prompt_over or self._states is not None else self._extent_blocks):
                self._offer(request, blocks)

    def note_end(self, request: Request, blocks: BlockTables) -> None:
        """A request is about to end, its table still open."""
        if blocks.num_shared(request) > self._num_offered.get(request, 0):
            self._offer(request, blocks)

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that are about it."""
        return {
            "prompt_cache_limit_bytes": self._folder.max_bytes,
            "prompt_cache_bytes": self._num_bytes,
            "is_prompt_cache_writing": self._is_writing,
            "prompt_cache_hit_tokens_total": self._num_read_blocks * self._kv.block_size,
            "prompt_cache_read_bytes_total": self._read_bytes,
            "prompt_cache_written_bytes_total": self._written_bytes,
        }

    def close(self) -> None:
        """End the threads; pending writes complete within a few seconds."""
        with ExitStack() as closing:
            for lane in (self._finder, self._reader, self._writer):
                closing.callback(lane.close)
            self._flush()

    def _flush(self) -> None:
        until_s = self._clock() + FLUSH_S
        for job in self._to_write:
            try:
                job.result(max(until_s - self._clock(), 0.0))
            except TimeoutError:
                break
            except Exception as error:  # a fault of ours
                logger.error("the prompt cache failed", exc_info=error)

    def _offer(self, request: Request, blocks: BlockTables) -> None:
        """Have a request's blocks written, unless too much waits for that: then they are offered again, with more.

        Requests of batch jobs are not: many texts without a continuation would evict conversations.
        """
        self._to_write = [job for job in self._to_write if not job.is_done]
        if self._is_writing and len(self._to_write) < MOST_WAITING and not request.is_batch:
            self._num_offered[request] = blocks.num_shared(request)
            self._to_write.append(self._writer.submit(self._write, *blocks.shared(request)))

    def _look(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the keys of the first blocks that are there, up to a state. In the thread that looks."""
        try:
            self._refresh(may_be_late=True)
        except OSError as error:
            logger.warning("the prompt cache cannot be looked into: %s", error)
        keys = block_keys(self._identity, token_ids, self._kv.block_size)
        keys = keys[: self._folder.count(keys)]
        return keys if self._states is None else keys[: self._states.length(keys)]

    def _refresh(self, *, may_be_late: bool) -> None:
        self._folder.refresh(may_be_late=may_be_late)
        if self._states is not None:
            self._states.folder.refresh(may_be_late=may_be_late)

    def _read(
        self, read: BlocksRead, keys: Sequence[bytes], start: int, block_ids: Sequence[int], state_slot: int
    ) -> int:
        """Fill blocks with those of `keys` from `start` on, in the thread that reads; return how many.

        Before them the state behind the last one: without it they are of no use.
        """

        def take(number: int, content: memoryview) -> None:
            self._kv.copy_in(block_ids[number], content)
            read.copied()

        try:
            if self._states is not None:
                read.has_state = self._states.read(keys[-1], state_slot, self._read_buffer, read.note_progress)
            if self._states is None or read.has_state:
                self._folder.read(keys[start : start + len(block_ids)], take, self._read_buffer)
                self._folder.touch(keys)
        except OSError as error:
            logger.warning("a prompt is computed, as it cannot be read: %s", error)
        self._num_read_blocks += read.num_filled
        self._read_bytes += read.num_filled * self._block_bytes
        if self._states is not None and read.has_state:
            self._read_bytes += self._states.state_bytes
        return read.num_filled

    def _write(self, path: Sequence[Node], checkpoints: Sequence[tuple[int, StateCheckpoint]]) -> None:
        """Write what of a prefix is not on disk yet, in the thread that writes. An error ends all writing."""
        if not self._is_writing:
            return
        try:
            # Blocks just evicted for a state, or by another process, must be written again: states need their blocks.
            self._refresh(may_be_late=False)
            keys = self._keys_of(path)
            for run in self._runs(keys):
                gather = _gather(self._kv, path[run.start : run.stop])
                size = self._folder.write(keys[run.start : run.stop], gather, self._write_buffer, self._names_of(keys))
                self._note_written(self._folder, size)
                if not size:
                    break
            self._folder.touch(keys)
            self._write_states(keys, checkpoints)
        except OSError as error:
            self._is_writing = False
            logger.warning(
                "the prompt cache is read only from now on, because %s cannot be written: %s",
                self._folder.path,
                error.strerror or error,
            )

    def _write_states(self, keys: Sequence[bytes], checkpoints: Sequence[tuple[int, StateCheckpoint]]) -> None:
        """Write the states along a prefix up to which all blocks are there; earlier ones may be deleted for them."""
        num_there = self._folder.count(keys)
        for length, checkpoint in checkpoints:
            if self._states is not None and length <= num_there:
                keep = self._folder.names_of(keys)
                size = self._states.write(keys[length - 1], checkpoint, self._write_buffer, keep)
                self._note_written(self._states.folder, size)

    def _note_written(self, folder: ExtentFolder, num_bytes: int) -> None:
        if num_bytes:
            self._written_bytes += num_bytes
            self._num_bytes = folder.num_bytes

    def _names_of(self, keys: Sequence[bytes]) -> set[str]:
        """Return the files of a prefix."""
        names = {*self._folder.names_of(keys)}
        return names if self._states is None else names | self._states.names_of(keys)

    def _keys_of(self, path: Iterable[Node]) -> list[bytes]:
        """Return the keys of a path of the tree, which its nodes keep."""
        keys: list[bytes] = []
        key = self._identity
        for node in path:
            node.key = key = node.key or next_key(key, node.tokens)
            keys.append(key)
        return keys

    def _runs(self, keys: Sequence[bytes]) -> list[range]:
        """Return which blocks are to be written, each a file. A few at the end wait until there are more."""
        runs = self._folder.missing(keys)
        if self._states is None and runs and runs[-1].stop == len(keys) and len(runs[-1]) < LEAST_BLOCKS:
            runs.pop()
        size = self._extent_blocks
        return [run[first : first + size] for run in runs for first in range(0, len(run), size)]


def _gather(kv: KVStorage, path: Sequence[Node]) -> Callable[[int, memoryview], bool]:
    """Return a function that copies blocks of a path out of the KV cache, and reports whether each was still valid
    afterwards."""

    def gather(number: int, into: memoryview) -> bool:
        node = path[number]
        kv.copy_out(node.block_id, into)
        return node.is_in_tree

    return gather
