"""A case: devices, batches of tokens, the experts that routers choose, and how long a device takes.

Times are those of a roofline: reading the weights, or computing. A device sleeps for the time that its work would take.
What it computes meanwhile is small, elementwise arithmetic on a few values of each token. So results are equal bits in
any order and any batch, and are compared with those of one loop over tokens.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.placement import ExpertPlacement
from studies.parallel.skew_router import SkewRouter

Rows = NDArray[np.float32]
Ids = NDArray[np.int64]
VALUES = 8  # of a token that travel and are computed


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """A device and its link. The defaults: a T4 in float32, and PCIe 3.0."""

    flops_per_s: float = 6e12
    bytes_per_s: float = 2.5e11
    link_bytes_per_s: float = 1e10
    link_s: float = 2e-5  # of a message
    launch_s: float = 2e-5  # of a task


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with experts; a dense layer comes before each. The defaults: GPT-MoE's sizes, with fewer layers."""

    num_layers: int = 6
    num_experts: int = 64
    top_k: int = 1
    hidden: int = 1024
    width: int = 4096
    bytes_per_value: int = 4

    @property
    def expert_values(self) -> int:
        """Weights of an expert of two matrices."""
        return 2 * self.hidden * self.width

    @property
    def other_values(self) -> int:
        """Weights of two attentions and a dense network, without experts."""
        return 8 * self.hidden**2 + 2 * self.hidden * self.width


class Case(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What all devices know."""

    shape: Shape = Shape()
    speeds: Speeds = Speeds()
    num_devices: int = 4
    num_batches: int = 4  # of a device
    batch_size: int = 64  # tokens of each
    skew: float = 0.6  # share of tokens for a tenth of the experts
    is_lasting: bool = False  # whether hot experts are on the same device in all layers
    by_load: bool = False  # whether experts are placed by another batch's loads
    scale: float = 20.0  # seconds of the measurement for one of the devices
    seed: int = 0

    def topk_ids(self, layer: int, batch: int) -> Ids:
        """Return the choices for a batch: [T, K]."""
        return self._shifted(layer, self._router(2 + layer * 1000 + batch).route(self.batch_size))

    @cached_property
    def placement(self) -> ExpertPlacement:
        """Homes of experts: blocks by index, or equal loads of other batches."""
        shape = self.shape
        if not self.by_load:
            return ExpertPlacement.by_index(shape.num_layers, shape.num_experts, self.num_devices)
        before = [self._shifted(layer, self._router(1).route(4096)) for layer in range(shape.num_layers)]
        loads = np.array([np.bincount(ids.ravel(), minlength=shape.num_experts) for ids in before], float)
        return place_by_load(loads, self.num_devices, shape.num_experts // self.num_devices, 0)

    @cached_property
    def device_of(self) -> NDArray[np.int64]:
        """The device of each expert, [layers, E]."""
        return np.array([[ranks[0] for ranks in layer] for layer in self.placement.homes])

    def attention_s(self, num_tokens: int) -> float:
        """Return the seconds of all that precedes a layer's experts."""
        return self._task_s(self.shape.other_values, num_tokens)

    def experts_s(self, ids: Ids) -> float:
        """Return the seconds of a device for pairs with these experts."""
        if not len(ids):
            return 0.0
        bytes_s = len(np.unique(ids)) * self.shape.expert_values * self.shape.bytes_per_value / self.speeds.bytes_per_s
        flops_s = 2 * self.shape.expert_values * len(ids) / self.speeds.flops_per_s
        return self.speeds.launch_s + max(bytes_s, flops_s)

    def message_s(self, num_rows: int) -> float:
        """Return the seconds until rows are at another device."""
        num_bytes = num_rows * self.shape.hidden * self.shape.bytes_per_value
        return self.speeds.link_s + num_bytes / self.speeds.link_bytes_per_s

    def input(self, batch: int) -> Rows:
        """Return a batch's tokens, [T, VALUES]."""
        random = np.random.default_rng([self.seed, batch])
        return random.standard_normal((self.batch_size, VALUES), np.float32)

    def attend(self, rows: Rows) -> Rows:
        """Stand for attention."""
        return np.tanh(rows * np.float32(1.25))

    def expert(self, layer: int, ids: Ids, rows: Rows) -> Rows:
        """Return the results of pairs. Shapes: ids [N], rows [N, VALUES]."""
        factor = (1 + (ids * 31 + layer * 17) % 101).astype(np.float32) / np.float32(64)
        return np.tanh(rows * factor[:, None] + np.float32(0.125))

    def add(self, attended: Rows, pairs: Rows) -> Rows:
        """Add a token's pairs in the order of its choices. Shapes: pairs [T, K, VALUES]."""
        for choice in range(pairs.shape[1]):
            attended = attended + pairs[:, choice]
        return attended

    def alone(self, batch: int) -> Rows:
        """Return what one process computes for a batch: an expert for a token after another."""
        hidden = self.input(batch)
        for layer in range(self.shape.num_layers):
            attended, ids = self.attend(hidden), self.topk_ids(layer, batch)
            pairs = [
                [self.expert(layer, ids[token, [choice]], attended[[token]])[0] for choice in range(ids.shape[1])]
                for token in range(len(ids))
            ]
            hidden = self.add(attended, np.array(pairs))
        return hidden

    def least_s(self) -> float:
        """Return the work of the slowest device if each reads a layer's weights once for all batches, without waits."""
        batches = range(self.num_batches * self.num_devices)
        work = np.zeros(self.num_devices)
        for layer in range(self.shape.num_layers):
            ids = np.concatenate([self.topk_ids(layer, batch) for batch in batches]).ravel()
            owners = self.device_of[layer][ids]
            work += [self.experts_s(ids[owners == device]) for device in range(self.num_devices)]
            work += self.attention_s(self.num_batches * self.batch_size)
        return float(work.max())

    def _task_s(self, num_values: int, num_tokens: int) -> float:
        bytes_s = num_values * self.shape.bytes_per_value / self.speeds.bytes_per_s
        return self.speeds.launch_s + max(bytes_s, 2 * num_values * num_tokens / self.speeds.flops_per_s)

    def _router(self, number: int) -> SkewRouter:
        hot = max(self.shape.num_experts // 10, 1)
        router = SkewRouter(
            num_experts=self.shape.num_experts, top_k=self.shape.top_k, router_skew=self.skew, num_experts_skew=hot
        )
        return dataclasses.replace(router, seed=self.seed * 1_000_000 + number)

    def _shifted(self, layer: int, ids: Ids) -> Ids:
        """Move hot experts to another device in each layer, unless skew lasts."""
        per_device = self.shape.num_experts // self.num_devices
        return ids if self.is_lasting else (ids + layer * per_device) % self.shape.num_experts
