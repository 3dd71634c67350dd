"""What one task of a pipeline costs: bytes, operations, and seconds on its lane, by which a simulator's clock runs.

Ops are those that the pipelines yield; a task works on one layer and one micro-batch, transfers of weights on one page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, DISK, PINNED, RAM, Machine
from moeflow.core.plan import Policy
from moeflow.planner.costs.model_costs import ModelCosts, Work, expected_distinct
from moeflow.planner.costs.roofline import work_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskShape:
    """What a decoding step's tasks work on."""

    costs: ModelCosts
    num_sequences: int  # of the micro-batch, one new token each
    context: float  # tokens that each of them sees
    num_pages: int = 1  # that a layer's streamed weights are cut into
    misses: float = 0.0  # share of a layer's chosen experts that come from disk


@dataclass(frozen=True, slots=True)
class TaskCost:
    """What a task moves or reads, computes, and takes."""

    num_bytes: float
    num_flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Setting:
    machine: Machine
    shape: TaskShape
    policy: Policy

    def compute(self, level: str, *works: Work) -> TaskCost:
        at, devices = self.machine.level(level), self.policy.num_devices if level == DEVICE else 1
        return TaskCost(
            sum(work.num_bytes for work in works),
            sum(work.num_flops for work in works),
            sum(work_seconds(at, work, devices) for work in works),
        )

    def move(self, source: str, target: str, num_bytes: float) -> TaskCost:
        """Return a transfer; links that each device has of its own share it."""
        link = self.machine.link(source, target)
        width = 1 if link.is_shared or DEVICE not in (source, target) else self.policy.num_devices
        return TaskCost(num_bytes, 0.0, link.seconds(num_bytes / width))

    def activations(self, num_heads: int) -> float:
        costs = self.shape.costs
        return self.shape.num_sequences * num_heads * costs.shape.head_dim * costs.formats.activation_bytes

    @property
    def feed_forward(self) -> list[Work]:
        """Return router and experts of a layer with experts, or of a dense model's."""
        costs, num = self.shape.costs, self.shape.num_sequences
        return [costs.router(num), costs.experts(num)] if costs.num_moe_layers else [costs.dense(num)]

    @property
    def page_bytes(self) -> float:
        """Return a page of the weights that a layer streams."""
        costs = self.shape.costs
        streamed = costs.layers_bytes * (1 - self.policy.weights_on_device)
        return streamed / costs.shape.num_layers / self.shape.num_pages

    @property
    def kv_bytes(self) -> float:
        """Return what of a micro-batch's keys and values in a layer is not on the device."""
        shape = self.shape
        return shape.num_sequences * shape.context * shape.costs.kv_layer_bytes * (1 - self.policy.kv_on_device)


def _pre_attention(at: _Setting) -> TaskCost:
    return at.compute(DEVICE, at.shape.costs.pre_attention(at.shape.num_sequences))


def _attention(at: _Setting, level: str) -> TaskCost:
    return at.compute(level, at.shape.costs.decode_attention(at.shape.num_sequences, at.shape.context))


def _post_attention(at: _Setting) -> TaskCost:
    projected = at.shape.costs.output_projection(at.shape.num_sequences)
    return at.compute(DEVICE, projected, *at.feed_forward)


def _offload_qkv(at: _Setting) -> TaskCost:
    heads = at.shape.costs.shape
    return at.move(DEVICE, RAM, at.activations(heads.num_heads + 2 * heads.num_kv_heads))


def _weights_to_pinned(at: _Setting) -> TaskCost:
    if not at.machine.has(PINNED):
        return TaskCost(0.0, 0.0, 0.0)
    return at.move(RAM, PINNED, at.page_bytes)


def _weights_to_device(at: _Setting) -> TaskCost:
    return at.move(PINNED if at.machine.has(PINNED) else RAM, DEVICE, at.page_bytes)


def _store_kv(at: _Setting) -> TaskCost:
    shape = at.shape
    new = shape.num_sequences * shape.costs.kv_layer_bytes * (1 - at.policy.kv_on_device)
    return at.move(DEVICE, RAM, new)


def _load_experts(at: _Setting) -> TaskCost:
    shape, model = at.shape, at.shape.costs.shape
    used = expected_distinct(model.num_experts, model.top_k, shape.num_sequences)
    num_bytes = used * shape.misses * shape.costs.expert_bytes
    seconds = at.machine.link(DISK, RAM).seconds(num_bytes, shape.costs.expert_bytes)
    return TaskCost(num_bytes, 0.0, seconds)


_OPS: Final[Mapping[str, Callable[[_Setting], TaskCost]]] = {
    "pre_attention": _pre_attention,
    "offload_qkv": _offload_qkv,
    "cpu_attention": lambda at: _attention(at, RAM),
    "device_attention": lambda at: _attention(at, DEVICE),
    "load_hidden": lambda at: at.move(RAM, DEVICE, at.activations(at.shape.costs.shape.num_heads)),
    "weights_to_pinned": _weights_to_pinned,
    "weights_to_device": _weights_to_device,
    "post_attention": _post_attention,
    "load_kv": lambda at: at.move(RAM, DEVICE, at.kv_bytes),
    "store_kv": _store_kv,
    "load_experts": _load_experts,
}
OPS: Final = tuple(_OPS)


def task_cost(op: str, machine: Machine, shape: TaskShape, policy: Policy) -> TaskCost:
    """Return what a task costs. Raises: ConfigError if the machine lacks a level or link, or the op is unknown."""
    if op not in _OPS:
        raise ConfigError(f"op {op!r} has no cost; known are {', '.join(OPS)}")
    return _OPS[op](_Setting(machine, shape, policy))
