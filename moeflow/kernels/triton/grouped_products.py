"""Experts of long passes by torch's grouped products, for bfloat16 on sm_90.

This form gathers the sorted rows and multiplies them in two grouped products. There, torch needs no synchronization.
On other GPUs it may copy the offsets to the host. A result may depend on the size of the pass, by its rounding.

No card has measured this form against the tiles of `tile_kernel`. `scripts/gpu-check` reports the time and error of
both, in its step `experts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeflow.kernels.activation import Activation, activate
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import gpu_of
from moeflow.kernels.triton.matrix_products import Pairs
from moeflow.kernels.triton.planar_weights import PlanarWeights

if TYPE_CHECKING:
    from torch import Tensor

CAPABILITY: Final = 90
_ALIGNMENT: Final = 8  # columns: 16 bytes


def computes(
    x: Tensor, gate_up: Tensor | PlanarWeights, down: Tensor | PlanarWeights, pairs: Pairs, *, has_biases: bool
) -> bool:
    """Return whether this form computes these pairs: all experts, in contiguous matrices, without biases.

    The memory of a pass has room for the results twice if hidden states are at most 3 times as wide as experts.
    """
    if isinstance(gate_up, PlanarWeights) or isinstance(down, PlanarWeights):
        return False
    hidden, width = down.shape[1:]
    return (
        gpu_of(x).capability == CAPABILITY
        and x.dtype == gate_up.dtype == down.dtype == torch.bfloat16
        and not has_biases
        and pairs.slots is None
        and pairs.first_shared is None
        and len(pairs.experts) == pairs.num_experts == len(gate_up)
        and all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in (gate_up, down))
        and hidden % _ALIGNMENT == width % _ALIGNMENT == 0
        and hidden <= 3 * width
    )


def grouped_results(
    x: Tensor,
    gate_up: Tensor | PlanarWeights,
    down: Tensor | PlanarWeights,
    pairs: Pairs,
    order: Tensor,
    spans: Tensor,
    function: Activation,
) -> Tensor:
    """Return the outputs of pairs: [T * K, H]. Rows of pairs with a negative expert are not written.

    `order` and `spans` are from `sort_kernel`, which leaves the first places to pairs with a negative expert and does
    not write them. These places read the last token, and write to a spare row.
    """
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    num_pairs, (num_tokens, top_k) = pairs.num_pairs, pairs.ids.shape
    ends = spans.sum(0, dtype=torch.int32)
    places = torch.arange(num_pairs, dtype=torch.int32, device=order.device)
    order = torch.where(places < spans[0, 0], num_pairs, order).long()
    units = _products(x.index_select(0, (order // top_k).clamp(max=num_tokens - 1)), gate_up, ends)
    units = activate(function, units, is_gated=gate_up.shape[1] != down.shape[2])
    in_order = _products(units, down, ends)
    del units
    results = torch.empty((num_pairs + 1, down.shape[1]), dtype=x.dtype, device=x.device)
    return results.index_copy_(0, order, in_order)[:num_pairs]


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the products of rows with the matrix of their group: [P, K], [E, N, K] -> [P, N]."""
    return torch.nn.functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
