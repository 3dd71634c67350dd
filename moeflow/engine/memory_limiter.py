"""Keeps an engine whose experts come from disk within its memory limit, by what each pass is going to touch.

Slots for experts give way to keys, values and a pass's work space, and come back when those need less. What kernels
keep of their work space is measured already, and the next pass works there again: only the rest of it is fresh.
"""

from __future__ import annotations

from collections.abc import Iterable

from moeflow.core.batch import Batch
from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan, SchedulerConfig
from moeflow.core.model_config import ModelConfig
from moeflow.experts.budget import MemoryLimit
from moeflow.experts.elastic_slots import ElasticSlots
from moeflow.experts.slot_arena import arena_bytes
from moeflow.kernels.cpu import extension
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.models.pass_input import PROMPT_CHUNK
from moeflow.planner.costs.process_memory import margin_bytes, own_processes, resident_bytes
from moeflow.planner.costs.work_space import kept_bytes, work_bytes


class MemoryLimiter:
    """Frees memory before passes, returns it after them."""

    def __init__(
        self,
        plan: MemoryPlan,
        shape: ModelConfig,
        scheduler: SchedulerConfig,
        experts: ExpertSlotsConfig,
        slots: ElasticSlots,
        kv: KVStorage,
    ) -> None:
        """Take the plan, and the adjustable parts."""
        processes = own_processes(is_served=plan.is_served)
        self._limit_bytes = plan.limit_bytes - margin_bytes(is_served=plan.is_served)
        self._min_bytes = arena_bytes(experts.min_slots, experts.slab_bytes) + plan.work_bytes
        self._budget = MemoryLimit(
            self._limit_bytes, slots, lambda: resident_bytes(processes), min_slots=experts.min_slots
        )
        self._shape = shape
        self._max_tokens = scheduler.max_num_batched_tokens
        self._kv = kv
        self._block_size = scheduler.block_size
        self._min_blocks = -(-scheduler.max_model_len // scheduler.block_size)

    def make_room(self, batch: Batch) -> None:
        """Reduce the slots so that a pass fits. Raises: CapacityError if that cannot be."""
        size = self._block_size
        written = {block for entry in batch.entries for block in entry.block_ids[entry.start // size :]}
        wants_prompt = any(entry.request.sampling.prompt_logprobs is not None for entry in batch.entries)
        num_sampled = max(sum(entry.num_sampled for entry in batch.entries), PROMPT_CHUNK if wants_prompt else 0)
        work = work_bytes(self._shape, num_tokens=batch.num_tokens, num_sampled=num_sampled)
        fresh = self._kv.untouched(written)
        fresh_bytes = len(fresh) * self._kv.block_bytes
        self._budget.make_room(fresh_bytes + work - self._kept_bytes(batch.num_tokens))
        self._take(fresh, fresh_bytes)

    def make_room_for(self, blocks: Iterable[int]) -> None:
        """Likewise for KV blocks that others write, while passes run. Raises: CapacityError."""
        fresh = self._kv.untouched(blocks)
        fresh_bytes = len(fresh) * self._kv.block_bytes
        self._budget.make_room_between_passes(fresh_bytes)
        self._kv.take_memory(fresh)  # at once: the next pass measures the memory without them
        self._take(fresh, fresh_bytes)

    def _take(self, fresh: Iterable[int], fresh_bytes: int) -> None:
        self._kv.touch(fresh)
        self._budget.other_bytes += fresh_bytes  # as good as held: `settle` must not give them out again

    def settle(self, blocks: BlockTables) -> None:
        """Give back what no request needs, and let requests use as many blocks as there is memory for."""
        given = blocks.give_back()
        self._budget.other_bytes -= len(given) * self._kv.block_bytes
        self._kv.give_back(given)
        left_bytes = self._limit_bytes - self._budget.other_bytes - self._min_bytes
        left_bytes += self._kept_bytes(self._max_tokens)
        block_bytes = self._kv.block_bytes
        most = self._kv.num_touched + left_bytes // block_bytes if block_bytes else blocks.num_blocks
        blocks.limit = min(max(most, self._min_blocks), blocks.num_blocks)

    def _kept_bytes(self, num_tokens: int) -> int:
        """Return how much of such a pass's work space is held already, whether or not a pass runs."""
        return min(extension.kept_bytes(), kept_bytes(self._shape, num_tokens=num_tokens))
