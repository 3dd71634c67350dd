"""The eviction policies by name. A new one is a class and a row, or an entry point of another package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moeflow.core.extensions import ExtensibleTable
from moeflow.experts.cache.eviction import FIFO, LFRU, LFU, LRU, EvictionPolicy
from moeflow.experts.cache.next_use import NextUse

# Of a model of so many layers with experts, and so many experts in each.
_OWN: Final[dict[str, Callable[[int, int], EvictionPolicy]]] = {
    "next-use": NextUse,
    "lfru": lambda num_layers, num_experts: LFRU(num_layers * num_experts),
    "lfu": lambda num_layers, num_experts: LFU(num_layers * num_experts),
    "lru": lambda num_layers, num_experts: LRU(num_layers * num_experts),
    "fifo": lambda num_layers, num_experts: FIFO(num_layers * num_experts),
}
POLICIES: Final = ExtensibleTable("moeflow.policies", _OWN)
DEFAULT_POLICY: Final = "next-use"
