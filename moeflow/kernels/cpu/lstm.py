"""An LSTM layer by the CPU extension: by the calling thread alone, with the weights of its state packed.

torch's own has oneDNN prepare the weights in each call, which takes longer than a text of some tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.cpu.packed_weight import PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


def lstm(inputs: Tensor, weights: PackedWeight, state: Tensor, cell: Tensor) -> Tensor:
    """Return the states after each step; `state` and `cell`, those before the first one, become those after the last.

    Gates are input, forget, cell and output, as torch has them, of all units each.

    Shapes: inputs [T, B, 4D] float32, the gates' inputs with biases and without the state; weights [4D, D]; state and
    cell [B, D] -> [T, B, D].
    """
    num_steps, num_texts, _ = inputs.shape
    size = weights.cols
    if weights.rows != 4 * size:
        raise ValueError(f"{weights} has not four gates")
    out = inputs.new_empty(num_steps, num_texts, size)
    _cpu.lstm(
        weights=weights.handle,
        inputs=floats(inputs, num_steps, num_texts, 4 * size),
        num_steps=num_steps,
        num_texts=num_texts,
        state=floats(state, num_texts, size),
        cell=floats(cell, num_texts, size),
        out=out.data_ptr(),
    )
    return out
