"""The network as it is asked while a model serves: by the CPU extension, its matrices packed in bfloat16.

Of a text all steps' products with inputs are computed at once. The rest of the LSTM is one product per layer and step,
of a state with half a megabyte (D = 256). That stays in the second cache and takes a few microseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.lstm import lstm
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.models.expert_predictor.network import LSTM_LAYERS, ExpertPredictor


def for_serving(predictor: ExpertPredictor) -> ExpertPredictor:
    """Return a predictor in its fastest form, which cannot be trained any more."""
    return PackedPredictor(predictor) if extension.is_available() else predictor


class PackedPredictor(ExpertPredictor):
    """A predictor whose matrices are packed. A text's results are the same bits alone and with others."""

    def __init__(self, predictor: ExpertPredictor) -> None:
        with torch.device("meta"):
            super().__init__(predictor.shape)
        self.eval().requires_grad_(False)
        weights = predictor.state_dict()
        self._packed = {
            name: PackedWeight.pack(weight, "bfloat16") for name, weight in weights.items() if weight.dim() == 2
        }
        self._biases = {name: weight.clone() for name, weight in weights.items() if weight.dim() == 1}
        for layer in range(LSTM_LAYERS):  # both are added to the same gates
            self._biases[f"lstm.bias_ih_l{layer}"] += self._biases.pop(f"lstm.bias_hh_l{layer}")

    def _product(self, name: str, inputs: Tensor) -> Tensor:
        return self._multiplied(f"{name}.weight", f"{name}.bias", inputs)

    def _recurrent(self, inputs: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        after = tuple(state.clone() for state in before)
        outputs = inputs.transpose(0, 1).contiguous()  # step by step, as they are computed
        for layer, (hidden, cell) in enumerate(zip(*after, strict=True)):
            gates = self._multiplied(f"lstm.weight_ih_l{layer}", f"lstm.bias_ih_l{layer}", outputs)
            outputs = lstm(gates, self._packed[f"lstm.weight_hh_l{layer}"], hidden, cell)
        return outputs.transpose(0, 1), after

    def _multiplied(self, weight: str, bias: str, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        return extension.linear(rows, self._packed[weight], self._biases.get(bias)).view(*inputs.shape[:-1], -1)
