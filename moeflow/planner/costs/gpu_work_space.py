"""A GPU's memory for passes beyond weights, keys and values: bounds from shapes alone."""

from __future__ import annotations

from math import ceil
from typing import Final

from moeflow.core.graph_sizes import captured_sizes
from moeflow.core.units import KIB, MIB
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.work_space import sampled_bytes

_SLACK: Final = 1.25  # freed memory that torch cannot reuse
_SEGMENT_BYTES: Final = 20 * MIB  # that torch takes at once for tensors from 1 MiB on
_WORKSPACE_BYTES: Final = 32 * MIB  # of a stream's matrix products, for compute capability 9.0; others take less
_NODE_BYTES: Final = 16 * KIB  # of a kernel in a graph, in the driver's memory
_NODES_OF_LAYER: Final = 25  # at most; tests count launches
_NODES_BESIDE_LAYERS: Final = 14


def pass_bytes(costs: ModelCosts, *, num_tokens: int, num_sampled: int) -> int:
    """Return the most bytes of a pass over so many tokens with so many sampled rows."""
    return ceil(_SLACK * costs.activation_bytes(num_tokens) + num_sampled * sampled_bytes(costs.shape))


def graph_bytes(costs: ModelCosts, max_num_seqs: int) -> int:
    """Return the memory of captured decode passes of up to so many sequences.

    All graphs share the activations of the largest one. Each keeps its kernels and its hidden states.
    """
    sizes, shape = captured_sizes(max_num_seqs), costs.shape
    hidden = sum(sizes) * shape.hidden_size * costs.formats.activation_bytes
    shared = _SLACK * costs.activation_bytes(sizes[-1]) + hidden
    num_nodes = len(sizes) * (shape.num_layers * _NODES_OF_LAYER + _NODES_BESIDE_LAYERS)
    return ceil(shared / _SEGMENT_BYTES) * _SEGMENT_BYTES + _WORKSPACE_BYTES + num_nodes * _NODE_BYTES
