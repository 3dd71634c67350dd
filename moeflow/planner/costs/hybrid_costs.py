"""Time and memory where a device holds some experts of each layer, and the host computes all others at the same time.

The device holds all other weights, and keys and values. A layer with experts takes the device's other work, the way to
the host and back, and the longer of both processors' experts. A long pass may instead copy all other
experts to the device, while the layers before them compute.

Main memory may have slots for some experts only. Passes then read as many as miss in one cache of all slots, the
device's and main memory's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final, NamedTuple

from moeflow.core.hardware import DEVICE, DISK, RAM, MemoryLevel
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import (
    BLOCK_TOKENS,
    DEVICE_COMPUTE,
    DISK_OFFLOAD,
    FROM_DEVICE,
    HOST_COMPUTE,
    TO_DEVICE,
    CostModel,
    Prediction,
)
from moeflow.planner.costs.disk_waits import NUM_READERS, ExpertReads
from moeflow.planner.costs.hybrid_sizes import HybridSizes, Passes
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts
from moeflow.planner.costs.roofline import processor_of, work_seconds

CHUNK_TOKENS: Final = 2048  # of a pass over prompts: a long prompt then copies its experts once
CHOICE_BYTES: Final = 8  # of an expert's number and weight, on the way to the host


class Chosen(NamedTuple):
    """Some experts of a layer as a pass uses them."""

    distinct: float
    pairs: float  # of a token and an expert


class HybridPass(NamedTuple):
    """The seconds of a pass, and the busy seconds of each resource."""

    seconds: float
    busy: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class HybridCosts(CostModel):
    """The costs of a device and its host, also for policies that have the host compute experts."""

    host_format: str  # of the experts that the host computes
    num_host_slots: int | None = None  # for experts in main memory; None: it holds all

    def predict(self, policy: Policy) -> Prediction:
        """Return the prediction for a policy."""
        number = policy.num_gpu_experts
        if number is None:
            return super().predict(policy)
        step = self.decode_pass(policy.batch_size, number)
        prefill_s, prefill_busy = self._prefill(policy.batch_size, policy.chunk_tokens, number)
        first_s, _ = self._prefill(1, policy.chunk_tokens, number)
        gen_len = self.workload.gen_len
        return Prediction(
            decode_s=step.seconds,
            prefill_s=prefill_s,
            first_token_s=first_s,
            tokens_per_s=policy.batch_size * gen_len / (prefill_s + (gen_len - 1) * step.seconds),
            busy=step.busy,
            prefill_busy=prefill_busy,
            memory=self.memory_of(policy),
        )

    def memory_of(self, policy: Policy) -> dict[str, float]:
        """Return the bytes that a policy takes of each tier at the peak."""
        number = policy.num_gpu_experts
        if number is None:
            return super().memory_of(policy)
        passes = Passes(policy.chunk_tokens, policy.batch_size)
        device_bytes = self.sizes.device_bytes(number, passes, self.kv_bytes(policy.batch_size))
        host_bytes = self.process_bytes + self.sizes.host_bytes(passes, self.num_host_slots)
        used: dict[str, float] = {RAM: host_bytes, DEVICE: device_bytes}
        if self.num_host_slots is not None:
            used[DISK] = self.on_disk(number) * self.sizes.on_host.experts_bytes
        return used

    def on_disk(self, num_gpu_experts: int) -> float:
        """Return the share of experts that are neither on the device nor in main memory."""
        if self.num_host_slots is None:
            return 0.0
        num_on_device = num_gpu_experts * self.costs.num_moe_layers
        return max(1 - (num_on_device + self.num_host_slots) / self.sizes.num_in_all, 0.0)

    @cached_property
    def sizes(self) -> HybridSizes:
        """The bytes of weights and of passes."""
        return HybridSizes(self.costs, self.host_format)

    def kv_bytes(self, batch_size: int) -> float:
        """Return the keys and values of so many sequences."""
        return batch_size * ceil(self.workload.max_tokens / BLOCK_TOKENS) * BLOCK_TOKENS * self.costs.kv_bytes

    def best_gpu_experts(self, batch_size: int, most: int) -> int:
        """Return how many of the experts that fit on the device are best there: the host must not wait for it."""
        attention = self._decode_attention(batch_size)

        def by_host_s(number: int) -> float:
            return self._by_host(batch_size, attention, batch_size, number, is_decode=True).seconds

        number = most
        while number and by_host_s(number - 1) < by_host_s(number):
            number -= 1
        return min(most, number, key=lambda it: self.decode_pass(batch_size, it).seconds)

    def decode_pass(self, batch_size: int, num_gpu_experts: int) -> HybridPass:
        """Return a pass with a token of each sequence."""
        attention = self._decode_attention(batch_size)
        return self._fastest(batch_size, attention, batch_size, num_gpu_experts, is_decode=True)

    def _decode_attention(self, batch_size: int) -> KernelWork:
        return self.costs.decode_attention(batch_size, self.workload.mean_context)

    def stream_tokens(self, num_gpu_experts: int, max_tokens: int) -> int:
        """Return the tokens of the smallest pass that is faster with copied experts; 0: none up to `max_tokens`."""
        low, high = 1, max_tokens + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._streams(middle, num_gpu_experts) else (middle + 1, high)
        return low if low <= max_tokens else 0

    def _streams(self, num_tokens: int, num_gpu_experts: int) -> bool:
        """Return whether a pass over so many tokens of a prompt is faster with copied experts."""
        attention = self.costs.prefill_attention(1, num_tokens)
        by_host = self._by_host(num_tokens, attention, 1, num_gpu_experts)
        return self._streamed(num_tokens, attention, 1, num_gpu_experts).seconds < by_host.seconds

    def _prefill(self, num_prompts: int, chunk_tokens: int, num_gpu_experts: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of all prompts, and of each resource."""
        length = self.workload.prompt_len
        num_passes = ceil(num_prompts * length / chunk_tokens)
        whole = self.costs.prefill_attention(num_prompts, length, chunk_tokens)
        part = replace(whole, num_bytes=whole.num_bytes / num_passes, num_flops=whole.num_flops / num_passes)
        tokens = num_prompts * length / num_passes
        one = self._fastest(tokens, part, num_prompts / num_passes, num_gpu_experts)
        return one.seconds * num_passes, {name: seconds * num_passes for name, seconds in one.busy.items()}

    def _fastest(
        self, tokens: float, attention: KernelWork, sampled: float, num_gpu_experts: int, *, is_decode: bool = False
    ) -> HybridPass:
        """Return the faster pass: the host computes its experts, or they are copied."""
        by_host = self._by_host(tokens, attention, sampled, num_gpu_experts, is_decode=is_decode)
        streamed = self._streamed(tokens, attention, sampled, num_gpu_experts)
        return by_host if by_host.seconds <= streamed.seconds else streamed

    def _by_host(
        self, tokens: float, attention: KernelWork, sampled: float, num_gpu_experts: int, *, is_decode: bool = False
    ) -> HybridPass:
        """Return a pass whose host computes its experts, and reads absent ones from disk."""
        costs, layers = self.costs, self.costs.num_moe_layers
        on_device, on_host = self._chosen(tokens, num_gpu_experts)
        device_s = layers * _experts_s(self.machine.level(DEVICE), costs, on_device)
        host_s = layers * _experts_s(self.machine.level(RAM), self.sizes.on_host, on_host)
        row_bytes, choice_bytes = self.sizes.row_bytes, CHOICE_BYTES * costs.shape.routing.top_k
        there_s = layers * self.machine.link(DEVICE, RAM).seconds(tokens * (row_bytes + choice_bytes))
        back_s = layers * self.machine.link(RAM, DEVICE).seconds(tokens * row_bytes)
        others_s = self._others_s(tokens, attention, sampled)
        busy = {
            DEVICE_COMPUTE: others_s + device_s,
            HOST_COMPUTE: host_s,
            TO_DEVICE: back_s,
            FROM_DEVICE: there_s,
        }
        reads = self._pass_reads(tokens, is_decode=is_decode)
        num_read = reads.num_read(self.on_disk(num_gpu_experts))
        if num_read:
            busy[DISK_OFFLOAD] = reads.read_s(num_read)
        host_s += reads.wait_s(num_read)
        return HybridPass(others_s + self._seams_s + there_s + back_s + max(device_s, host_s), busy)

    def _streamed(self, tokens: float, attention: KernelWork, sampled: float, num_gpu_experts: int) -> HybridPass:
        """Return a pass that copies all other experts to the device while it computes; the first layer waits."""
        costs, layers = self.costs, self.costs.num_moe_layers
        on_device, others = self._chosen(tokens, num_gpu_experts)
        every = Chosen(on_device.distinct + others.distinct, on_device.pairs + others.pairs)
        device_s = self._others_s(tokens, attention, sampled)
        device_s += layers * _experts_s(self.machine.level(DEVICE), costs, every)
        expert_bytes = self.sizes.on_host.expert_bytes
        copied_bytes = (self.sizes.num_experts - num_gpu_experts) * expert_bytes
        copy_s = self.weight_link.seconds(copied_bytes, expert_bytes)
        busy = {DEVICE_COMPUTE: device_s, HOST_COMPUTE: 0.0, TO_DEVICE: layers * copy_s, FROM_DEVICE: 0.0}
        disk_s = 0.0
        if num_read := self.on_disk(num_gpu_experts) * self.sizes.num_in_all:
            busy[DISK_OFFLOAD] = disk_s = num_read * self._pass_reads(tokens).rates.read_s(NUM_READERS)
        return HybridPass(self._seams_s + copy_s + max(device_s, (layers - 1) * copy_s, disk_s), busy)

    def _pass_reads(self, tokens: float, *, is_decode: bool = False) -> ExpertReads:
        """Return the reads of a pass, by the share of experts on disk."""
        known = self.routing
        if is_decode:
            return self._expert_reads(tokens, known.decode_distinct, known.decode_misses)
        return self._expert_reads(tokens, known.prefill_distinct, known.prefill_misses)

    @property
    def read_expert_bytes(self) -> float:
        """See `CostModel.read_expert_bytes`."""
        return self.sizes.on_host.expert_bytes

    @property
    def _seams_s(self) -> float:
        """The seconds from the device to the host and back, of all layers with experts; bytes come on top."""
        return self.costs.num_moe_layers * processor_of(self.machine.level(DEVICE)).seam_s

    def _chosen(self, tokens: float, num_gpu_experts: int) -> tuple[Chosen, Chosen]:
        """Return a layer's experts that a pass uses on the device, and those on the host.

        The device has the most popular experts. Within either part, routers are taken to choose evenly.
        """
        top_k, num_experts = self.costs.shape.routing.top_k, self.sizes.num_experts
        cold = self.routing.cold_choices.misses(1 - num_gpu_experts / num_experts)
        num_cold = num_experts - num_gpu_experts
        return (
            _reached(num_gpu_experts, top_k * (1 - cold), tokens),
            _reached(num_cold, min(top_k * cold, num_cold), tokens),
        )

    def _others_s(self, tokens: float, attention: KernelWork, sampled: float) -> float:
        """Return the seconds of the device outside of experts, and of the engine outside of kernels."""
        experts, level = self.costs.experts(tokens), self.machine.level(DEVICE)
        works = self.costs.pass_works(tokens, attention, sampled)
        host = processor_of(self.machine.level(RAM))
        device_s = sum(count * work_seconds(level, work) for count, work in works if work != experts)
        return device_s + host.pass_s + sampled * host.token_s


def hybrid_policy_of(
    costs: ModelCosts, number: int, num_gpu_experts: int, chunk_tokens: int = CHUNK_TOKENS, *, on_disk: float = 0.0
) -> Policy:
    """Return the policy with so many sequences, experts of each layer on the device, and a share on disk."""
    share = num_gpu_experts / costs.shape.routing.num_experts
    return Policy(
        batch_size=number,
        micro_batch=number,
        attention_on_device=True,
        ffn_on_device=True,
        weights_on_device=1 - (1 - share) * costs.experts_bytes / costs.layers_bytes,
        kv_on_device=1.0,
        experts_on_disk=on_disk,
        num_gpu_experts=num_gpu_experts,
        chunk_tokens=max(chunk_tokens, number),
    )


def _reached(num_experts: int, choices: float, tokens: float) -> Chosen:
    """Return how many of some experts are used if each token makes so many choices among them, evenly."""
    if not num_experts or not choices:
        return Chosen(0.0, 0.0)
    missed = max(1 - choices / num_experts, 0.0)
    return Chosen(num_experts * (1 - missed**tokens), tokens * choices)


def _experts_s(level: MemoryLevel, costs: ModelCosts, chosen: Chosen) -> float:
    """Return the seconds of a layer's experts, in one call."""
    if not chosen.pairs:
        return 0.0
    work = KernelWork(
        "experts",
        costs.formats.matrices,
        chosen.distinct * costs.expert_bytes,
        2.0 * chosen.pairs * costs.expert_values,
        chosen.pairs / chosen.distinct,
        costs.expert_values,
    )
    return work_seconds(level, work)
