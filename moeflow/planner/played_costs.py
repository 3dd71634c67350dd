"""What the tasks of a pipeline take of a processor that plays the device, too.

A task lasts as long as on the machine that is played, or as long as the processor really needs: for Python and copies
on one core, and for kernels on all. Constants were fitted to `moeflow bench engine` on two Zen 5 vCPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Final

from moeflow.core.hardware import DEVICE, RAM, Machine, MemoryLevel
from moeflow.core.plan import Policy
from moeflow.planner.cost_model import BLOCK_TOKENS, ROW_SHARE
from moeflow.planner.model_costs import ModelCosts, Work, expected_distinct
from moeflow.planner.roofline import work_seconds
from moeflow.planner.task_costs import TaskCost

TASK_S: Final = 6e-5  # of a core, for a task beside copies and kernels
SEQUENCE_S: Final = 1e-6  # of attention, for each sequence
# Of what operations on rows take of a layer: rotation and storing K and V, which come with attention; norms, residuals.
ATTENTION_ROWS: Final = 0.75
LINEAR_ROWS: Final = 0.4
ROUTED_BYTES: Final = 12  # of an expert's number and weight
SUM_BYTES: Final = 4
KV_COPIES: Final = {"load_kv": 2, "store_kv": 3}  # of what these tasks move: gathered, moved, laid out


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCost(TaskCost):
    """A task's cost; `seconds` are those that it lasts at least."""

    core_s: float  # of one core
    kernel_s: float = 0.0  # of all cores, afterwards


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch of a pass."""

    num_sequences: float
    num_tokens: float
    num_seen: float  # positions that queries look at, over all of them
    num_read: float  # positions whose keys and values attention reads
    num_copied: float  # positions in blocks that were there before the pass

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, int]]) -> Part:
        """Return that of some sequences: (tokens in the pass, tokens before it)."""
        return cls(
            len(sequences),
            sum(count for count, _ in sequences),
            sum(count * (2 * start + count + 1) // 2 for count, start in sequences),
            sum(count + start for count, start in sequences),
            sum(ceil(start / BLOCK_TOKENS) * BLOCK_TOKENS for _, start in sequences),
        )


@dataclass(frozen=True)
class PlayedCosts:
    """The costs of one model on `machine`, as it is played by a processor that really is `real`."""

    costs: ModelCosts
    machine: Machine
    real: MemoryLevel
    copy_bytes_per_s: float  # of one core
    policy: Policy
    num_pages: int
    num_hosted: float = 0.0  # experts of a layer that the host computes

    def of(self, op: str, part: Part) -> PlayedCost:
        """Return what a task takes. Raises: KeyError for an op of no pipeline that streams weights."""
        return self._ops[op](part)

    @cached_property
    def _ops(self) -> Mapping[str, Callable[[Part], PlayedCost]]:
        q, kv = self._head_bytes(self.costs.shape.num_heads), self._head_bytes(2 * self.costs.shape.num_kv_heads)
        on_host = 1 - self.policy.kv_on_device
        return {
            "pre_attention": self._pre_attention,
            "post_attention": self._post_attention,
            "cpu_attention": lambda part: self._attention(RAM, part),
            "device_attention": lambda part: self._attention(DEVICE, part),
            "offload_qkv": lambda part: self._move(DEVICE, RAM, part.num_tokens * (q + kv)),
            "load_hidden": lambda part: self._move(RAM, DEVICE, part.num_tokens * q),
            "weights_to_pinned": lambda _: self._copy(self._page_bytes),
            "weights_to_device": lambda _: self._move(RAM, DEVICE, self._page_bytes),
            "load_kv": lambda part: self._move(
                RAM, DEVICE, part.num_copied * self.costs.kv_layer_bytes * on_host, KV_COPIES["load_kv"]
            ),
            "store_kv": lambda part: self._store_kv(part, part.num_tokens * kv * on_host),
            "route": self._route,
            "offload_routed": self._offload_routed,
            "host_experts": lambda part: self._share_of_experts(RAM, self._hosted_share, part),
            "load_sums": self._load_sums,
            "experts": lambda part: self._share_of_experts(DEVICE, 1 - self._hosted_share, part),
        }

    def _pre_attention(self, part: Part) -> PlayedCost:
        return self._compute(
            DEVICE, LINEAR_ROWS * self._rows_s(part), [(1.0, self.costs.pre_attention(part.num_tokens))]
        )

    def _post_attention(self, part: Part) -> PlayedCost:
        costs, num_layers = self.costs, self.costs.shape.num_layers
        works = [(1.0, costs.output_projection(part.num_tokens))]
        works += [(count / num_layers, work) for count, work in costs.feed_forward(part.num_tokens)]
        return self._compute(DEVICE, LINEAR_ROWS * self._rows_s(part), works)

    def _attention(self, level: str, part: Part) -> PlayedCost:
        work = self.costs.attention(part.num_tokens, part.num_seen, part.num_read)
        return self._compute(level, self._attention_rows_s(part), [(1.0, work)])

    def _store_kv(self, part: Part, num_bytes: float) -> PlayedCost:
        moved = self._move(DEVICE, RAM, num_bytes, KV_COPIES["store_kv"])
        return PlayedCost(
            num_bytes=num_bytes,
            num_flops=0.0,
            seconds=moved.seconds,
            core_s=moved.core_s + TASK_S,
            kernel_s=self._attention_rows_s(part) if num_bytes else 0.0,
        )

    def _route(self, part: Part) -> PlayedCost:
        works = [self.costs.output_projection(part.num_tokens), self.costs.router(part.num_tokens)]
        return self._compute(DEVICE, LINEAR_ROWS * self._rows_s(part), [(1.0, work) for work in works])

    def _offload_routed(self, part: Part) -> PlayedCost:
        shape = self.costs.shape
        chosen = shape.top_k * ROUTED_BYTES
        num_bytes = part.num_tokens * (shape.hidden_size * self.costs.formats.activation_bytes + chosen)
        return self._move(DEVICE, RAM, num_bytes)

    def _share_of_experts(self, level: str, share: float, part: Part) -> PlayedCost:
        shape = self.costs.shape
        used = expected_distinct(shape.num_experts, shape.top_k, part.num_tokens)
        return self._compute(level, 0.0, [(1.0, self.costs.experts(part.num_tokens * share, used * share))])

    def _load_sums(self, part: Part) -> PlayedCost:
        shape = self.costs.shape
        with_sums = part.num_tokens * (1 - (1 - self._hosted_share) ** shape.top_k)
        return self._move(RAM, DEVICE, with_sums * SUM_BYTES * shape.hidden_size)

    def _compute(self, level: str, rows_s: float, works: Sequence[tuple[float, Work]]) -> PlayedCost:
        played = self.machine.level(level)
        return PlayedCost(
            num_bytes=sum(share * work.num_bytes for share, work in works),
            num_flops=sum(share * work.num_flops for share, work in works),
            seconds=sum(share * work_seconds(played, work) for share, work in works),
            core_s=TASK_S,
            kernel_s=rows_s + sum(share * work_seconds(self.real, work) for share, work in works),
        )

    def _move(self, source: str, target: str, num_bytes: float, num_copies: int = 1) -> PlayedCost:
        """Return a transfer over the link."""
        seconds = self.machine.link(source, target).seconds(num_bytes)
        core_s = self._copy(num_bytes * num_copies).core_s
        return PlayedCost(num_bytes=num_bytes, num_flops=0.0, seconds=seconds, core_s=core_s)

    def _copy(self, num_bytes: float) -> PlayedCost:
        """Return a copy within main memory."""
        core_s = TASK_S + num_bytes / self.copy_bytes_per_s
        return PlayedCost(num_bytes=num_bytes, num_flops=0.0, seconds=0.0, core_s=core_s)

    def _rows_s(self, part: Part) -> float:
        return self.costs.row_bytes(part.num_tokens) / (self.real.read_bytes_per_s * ROW_SHARE)

    def _attention_rows_s(self, part: Part) -> float:
        return ATTENTION_ROWS * self._rows_s(part) + SEQUENCE_S * part.num_sequences

    @property
    def _page_bytes(self) -> float:
        costs = self.costs
        streamed = costs.layers_bytes * (1 - self.policy.weights_on_device) - self._hosted_share * costs.experts_bytes
        return max(streamed, 0.0) / costs.shape.num_layers / self.num_pages

    @property
    def _hosted_share(self) -> float:
        return self.num_hosted / max(self.costs.shape.num_experts, 1)

    def _head_bytes(self, num_heads: int) -> float:
        return num_heads * self.costs.shape.head_dim * self.costs.formats.activation_bytes
