"""What is kept of a training that is interrupted: its weights, those that did best, and what the optimizer knows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

_KNOWN = ("step", "exp_avg", "exp_avg_sq")  # of a weight, to Adam


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as they are now."""
    return {name: weight.detach().clone() for name, weight in weights.items()}


def kept_tensors(weights: Mapping[str, Tensor], best: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return all that a training's later steps depend on, beside how far it is; none of it is copied."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found |= {f"now.{name}": weight.detach(), f"best.{name}": best[name]}
        found |= {f"{key}.{name}": value for key, value in optimizer.state.get(weight, {}).items()}
    return found


def restore_tensors(
    weights: Mapping[str, Tensor], best: dict[str, Tensor], optimizer: Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `kept_tensors` returned."""
    for name, weight in weights.items():
        with torch.no_grad():
            weight.copy_(tensors[f"now.{name}"])
        best[name] = tensors[f"best.{name}"].clone()
        keys = [key for key in _KNOWN if f"{key}.{name}" in tensors]
        if keys:  # one that no step has reached yet, as an expert without tokens, has no state
            optimizer.state[weight] = {key: tensors[f"{key}.{name}"].clone() for key in keys}
