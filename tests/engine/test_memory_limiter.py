"""Blocks that requests may use, as passes touch memory and requests end: never more than the limit allows."""

from __future__ import annotations

import mmap
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan, SchedulerConfig
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import MIB
from moeflow.engine import memory_limiter
from moeflow.engine.memory_limiter import MemoryLimiter
from moeflow.experts.budget import MemoryLimit
from moeflow.experts.slot_arena import arena_bytes
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.planner.costs.process_memory import margin_bytes
from moeflow.planner.costs.work_space import kept_bytes, work_bytes
from tests.shapes import TINY

BLOCK_SIZE, NUM_BLOCKS, BLOCK_BYTES = 16, 400, MIB
MAX_TOKENS = 64 * BLOCK_SIZE  # of a pass
WORK_BYTES = work_bytes(TINY, num_tokens=MAX_TOKENS, num_sampled=1)
EXPERTS = ExpertSlotsConfig(packed_weights_file="", num_slots=8, slab_bytes=MIB, min_slots=8)
FIXED_BYTES = 300 * MIB
MIN_BLOCKS = 2  # of one request


class FakeKV:
    """Blocks that take their memory as soon as a pass is to write them."""

    block_bytes = BLOCK_BYTES

    def __init__(self):
        self.touched = set()

    @property
    def num_touched(self):
        return len(self.touched)

    def untouched(self, blocks):
        return set(blocks) - self.touched

    def touch(self, blocks):
        self.touched |= set(blocks)

    def take_memory(self, blocks):
        self.touched |= set(blocks)

    def give_back(self, blocks):
        self.touched -= set(blocks)


class NoSlots:
    """As few slots as there may be, none of them filled."""

    num_slots = EXPERTS.min_slots
    taken_bytes = 0

    def within(self, num_bytes):
        return max(num_bytes, 0) // EXPERTS.slab_bytes

    def resize(self, num_slots):
        return EXPERTS.min_slots


def measures(kept, resident):
    """Have the kernels keep so much of their work space, and the processes hold what `resident` returns."""
    stack = ExitStack()
    stack.enter_context(patch.object(memory_limiter.extension, "kept_bytes", lambda: kept))
    stack.enter_context(patch.object(memory_limiter, "resident_bytes", lambda _: resident()))
    return stack


@given(
    room=st.integers(MIN_BLOCKS, NUM_BLOCKS + 50),
    overrides=st.lists(st.integers(-80, 64), min_size=3, max_size=12),
    kept=st.integers(0, WORK_BYTES),
)
def test_requests_are_given_no_more_blocks_than_there_is_room_for(room, overrides, kept):
    """`room` blocks fit beside all else; each pass of `overrides` writes so many more, or a request gives some back.

    The work space that kernels keep is held, and the pass may use it as far as needed.
    """
    reused = min(kept, kept_bytes(TINY, num_tokens=MAX_TOKENS))
    min_bytes = arena_bytes(EXPERTS.min_slots, EXPERTS.slab_bytes) + WORK_BYTES
    limit_bytes = FIXED_BYTES + min_bytes - reused + room * BLOCK_BYTES + margin_bytes(is_served=False)
    plan = MemoryPlan(limit_bytes=limit_bytes, process_bytes=0, weight_bytes=0, work_bytes=WORK_BYTES)
    scheduler = SchedulerConfig(
        num_blocks=NUM_BLOCKS, max_model_len=MIN_BLOCKS * BLOCK_SIZE, max_num_batched_tokens=MAX_TOKENS
    )
    kv = FakeKV()
    keeper = MemoryLimiter(plan, TINY, scheduler, EXPERTS, NoSlots(), kv)
    blocks = BlockTables(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefix_caching=False, num_kept=20)
    requests = []
    with measures(kept, lambda: FIXED_BYTES + kv.num_touched * BLOCK_BYTES):
        for wish in (MIN_BLOCKS, *overrides):  # before the first pass nothing is measured
            num_new = min(wish, blocks.num_available)
            if num_new > 0:
                request = Request(f"{len(requests)}", [1] * num_new * BLOCK_SIZE, SamplingParams(), max_tokens=1)
                requests.append(request)
                blocks.open(request)
                assert blocks.reserve(request, num_new * BLOCK_SIZE)
                ids = blocks.block_ids(request, num_new * BLOCK_SIZE)
                keeper.make_room(Batch((BatchEntry(request, 0, num_new * BLOCK_SIZE, ids, samples=True),)))
            elif requests:
                blocks.close(requests.pop())
            keeper.settle(blocks)
            assert blocks.num_used <= blocks.limit <= room


@given(num_tokens=st.integers(1, MAX_TOKENS), kept=st.integers(0, 2 * WORK_BYTES))
def test_a_pass_announces_what_of_its_work_space_is_not_held_yet(num_tokens, kept):
    plan = MemoryPlan(limit_bytes=2**40, process_bytes=0, weight_bytes=0, work_bytes=WORK_BYTES)
    scheduler = SchedulerConfig(num_blocks=NUM_BLOCKS, max_model_len=MAX_TOKENS)
    kv = FakeKV()
    kv.touch(range(NUM_BLOCKS))
    keeper = MemoryLimiter(plan, TINY, scheduler, EXPERTS, NoSlots(), kv)
    request = Request("", [1] * num_tokens, SamplingParams(), max_tokens=1)
    batch = Batch((BatchEntry(request, 0, num_tokens, list(range(-(-num_tokens // BLOCK_SIZE))), samples=True),))
    with measures(kept, lambda: FIXED_BYTES), patch.object(MemoryLimit, "make_room") as announced:
        keeper.make_room(batch)
    whole = work_bytes(TINY, num_tokens=num_tokens, num_sampled=1)
    (fresh,) = announced.call_args.args
    assert whole - fresh == min(kept, kept_bytes(TINY, num_tokens=num_tokens))


def test_blocks_that_others_fill_while_passes_run_are_held_from_the_beginning():
    """So the slots of experts, for which a pass measures anew, do not take memory still to be filled."""
    plan = MemoryPlan(limit_bytes=2**40, process_bytes=0, weight_bytes=0, work_bytes=WORK_BYTES)
    kv = KVStorage(
        layers=range(2), num_blocks=64, block_size=16, num_kv_heads=4, head_dim=65, dtype="float32", device=None,
        gives_back=True,
    )  # fmt: skip
    keeper = MemoryLimiter(plan, TINY, SchedulerConfig(num_blocks=64, max_model_len=64), EXPERTS, NoSlots(), kv)
    kv.touch([5])
    kv.copy_in(5, memoryview(b"5" * kv.content_bytes))
    before = resident_pages(kv)
    with measures(0, lambda: FIXED_BYTES):
        keeper.make_room_for([3, 4, 5])
    assert resident_pages(kv) - before >= 2 * (kv.content_bytes // mmap.PAGESIZE) - 4
    content = memoryview(bytearray(kv.content_bytes))
    kv.copy_out(5, content)
    assert bytes(content) == b"5" * kv.content_bytes


def resident_pages(kv) -> int:
    """Return how many of a storage's pages are in memory, as the kernel sees it."""
    start = kv._memory.bytes.ctypes.data
    first, last = start // mmap.PAGESIZE, -(-(start + kv.num_bytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((last - first) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())
