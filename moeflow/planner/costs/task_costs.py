"""The cost of one task of a pipeline: bytes, operations, and seconds on its lane for a simulator's clock.

Ops are those of the pipelines. A task works on one layer and one micro-batch; transfers of weights move one page.
Activations, keys and values are as wide as a layer's heads. Weights, and the costs of computing, are an average
layer's. A share of the experts has as much of their bytes and operations. `WORKS` defines the work of each op once: the
executor's ops (`engine/offload/offload_ops.py`) report the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, PINNED, RAM, Machine
from moeflow.core.plan import Policy
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts
from moeflow.planner.costs.roofline import work_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskShape:
    """The inputs of one micro-batch's tasks in a layer."""

    costs: ModelCosts
    num_tokens: float
    attention: KernelWork
    num_cached: float = 0.0  # positions with keys and values before the pass
    layer: int | None = None  # None: any that has experts, if the model has some
    num_pages: int = 1  # of a layer's streamed weights
    hosted: float = 0.0  # share of experts that the host computes

    @property
    def has_experts(self) -> bool:
        """Whether the layer has experts, not a plain feed-forward network."""
        return self.costs.num_moe_layers > 0 and self.layer not in self.costs.shape.feed_forward.dense_layers


def decode_shape(
    costs: ModelCosts,
    num_sequences: float,
    context: float,
    *,
    layer: int | None = None,
    num_pages: int = 1,
    hosted: float = 0.0,
) -> TaskShape:
    """Return the shape of a decoding step: one new token of each sequence, which sees `context` tokens."""
    return TaskShape(
        costs=costs,
        num_tokens=num_sequences,
        attention=costs.decode_attention(num_sequences, context),
        num_cached=num_sequences * context,
        layer=layer,
        num_pages=num_pages,
        hosted=hosted,
    )


def _after_attention(at: TaskShape) -> list[KernelWork]:
    costs, num_tokens = at.costs, at.num_tokens
    if not at.has_experts:
        return [costs.output_projection(num_tokens), costs.dense(num_tokens)]
    return [*_until_experts(at), costs.experts(num_tokens)]


def _until_experts(at: TaskShape) -> list[KernelWork]:
    return at.costs.until_experts(at.num_tokens) if at.has_experts else []


def _network(at: TaskShape) -> list[KernelWork]:
    """Return what follows attention's output projection."""
    return _after_attention(at)[1:]


def _device_experts(at: TaskShape) -> list[KernelWork]:
    return [_part_of_experts(at, 1 - at.hosted)] if at.has_experts else _after_attention(at)


def _host_experts(at: TaskShape) -> list[KernelWork]:
    return [_part_of_experts(at, at.hosted)] if at.has_experts else []


def _part_of_experts(at: TaskShape, share: float) -> KernelWork:
    whole = at.costs.experts(at.num_tokens)
    return replace(whole, num_bytes=whole.num_bytes * share, num_flops=whole.num_flops * share)


WORKS: Final[Mapping[str, tuple[str, Callable[[TaskShape], list[KernelWork]]]]] = {  # op -> (level that computes, work)
    "pre_attention": (DEVICE, lambda at: [at.costs.pre_attention(at.num_tokens)]),
    "cpu_attention": (RAM, lambda at: [at.attention]),
    "device_attention": (DEVICE, lambda at: [at.attention]),
    "post_attention": (DEVICE, _after_attention),
    "project_part": (DEVICE, lambda at: [at.costs.output_projection(at.num_tokens)]),
    "network_part": (DEVICE, _network),
    "add_network": (DEVICE, lambda _: []),  # little next to the network
    "route": (DEVICE, _until_experts),
    "experts": (DEVICE, _device_experts),
    "host_experts": (RAM, _host_experts),
}


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The bytes, operations and seconds of a task."""

    num_bytes: float
    num_flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Setting:
    machine: Machine
    shape: TaskShape
    policy: Policy

    def move(self, source: str, target: str, num_bytes: float) -> TaskCost:
        """Return a transfer; links that each device has of its own share it."""
        link = self.machine.link(source, target)
        width = 1 if link.is_shared or DEVICE not in (source, target) else self.policy.num_devices
        return TaskCost(num_bytes, 0.0, link.seconds(num_bytes / width))

    def activations(self, size: float) -> float:
        """Return the bytes of so many numbers for each token."""
        return self.shape.num_tokens * size * self.shape.costs.formats.activation_bytes

    def summed(self) -> TaskCost:
        """Return an all-reduce of hidden states: each device sends, and gets, all of it but its own part."""
        size = self.shape.costs.shape.hidden_size * (1 - 1 / self.policy.num_devices)
        sent, got = (self.move(*ends, self.activations(size)) for ends in ((DEVICE, RAM), (RAM, DEVICE)))
        return sent if sent.seconds > got.seconds else got

    @property
    def page_bytes(self) -> float:
        """Return a page of the weights that a layer streams."""
        costs = self.shape.costs
        streamed = costs.layers_bytes * (1 - self.policy.weights_on_device) - costs.experts_bytes * self.shape.hosted
        return streamed / costs.shape.num_layers / self.shape.num_pages

    def of_experts(self, bytes_per_token: float) -> float:
        """Return the bytes of a transfer that only layers with experts have."""
        return self.shape.num_tokens * bytes_per_token if self.shape.has_experts else 0.0

    def kv_bytes(self, num_positions: float) -> float:
        """Return the bytes of keys and values in a layer that are not on the device."""
        return num_positions * self.shape.costs.kv_bytes_of(self.shape.layer) * (1 - self.policy.kv_on_device)


def _to_pinned(at: _Setting, num_bytes: float) -> TaskCost:
    if not at.machine.has(PINNED):
        return TaskCost(0.0, 0.0, 0.0)
    return at.move(RAM, PINNED, num_bytes)


def _weights_to_device(at: _Setting) -> TaskCost:
    return at.move(PINNED if at.machine.has(PINNED) else RAM, DEVICE, at.page_bytes)


_TRANSFERS: Final[Mapping[str, Callable[[_Setting], TaskCost]]] = {
    "offload_qkv": lambda at: at.move(DEVICE, RAM, at.activations(at.shape.costs.projected_size_of(at.shape.layer))),
    "load_hidden": lambda at: at.move(RAM, DEVICE, at.activations(at.shape.costs.attended_size_of(at.shape.layer))),
    "offload_routed": lambda at: at.move(DEVICE, RAM, at.of_experts(at.shape.costs.routed_bytes)),
    "load_sums": lambda at: at.move(RAM, DEVICE, at.of_experts(at.shape.costs.summed_bytes)),
    "sum_attention": lambda at: at.summed(),
    "sum_network": lambda at: at.summed(),
    "weights_to_pinned": lambda at: _to_pinned(at, at.page_bytes),
    "weights_to_device": _weights_to_device,
    "kv_to_pinned": lambda at: _to_pinned(at, at.kv_bytes(at.shape.num_cached)),
    "load_kv": lambda at: at.move(RAM, DEVICE, at.kv_bytes(at.shape.num_cached)),
    "store_kv": lambda at: at.move(DEVICE, RAM, at.kv_bytes(at.shape.num_tokens)),
    "save_kv": lambda _: TaskCost(0.0, 0.0, 0.0),  # little beside the transfer, and nothing waits for it
}
OPS: Final = (*WORKS, *_TRANSFERS)


def task_cost(op: str, machine: Machine, shape: TaskShape, policy: Policy) -> TaskCost:
    """Return the cost of a task. Raises: ConfigError if the machine lacks a level or link, or the op is unknown."""
    if op in WORKS:
        level, works = WORKS[op]
        return compute_cost(machine, level, works(shape), policy)
    if op not in _TRANSFERS:
        raise ConfigError(f"op {op!r} has no cost; known are {', '.join(OPS)}")
    return _TRANSFERS[op](_Setting(machine, shape, policy))


def compute_cost(machine: Machine, level: str, works: Sequence[KernelWork], policy: Policy) -> TaskCost:
    """Return the cost of works at a level, one after another. Raises: ConfigError if the machine lacks the level."""
    at, num_devices = machine.level(level), policy.num_devices if level == DEVICE else 1
    return TaskCost(
        sum(work.num_bytes for work in works),
        sum(work.num_flops for work in works),
        sum(work_seconds(at, work, num_devices) for work in works),
    )
