"""How often each expert is chosen, and which experts should therefore change places."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import ConfigError
from moeflow.workload.routing_trace import read_routing_trace

_HALF_LIFE_TOKENS: Final = 4096  # after which a choice counts half
_FACTOR: Final = 1.25  # that an expert must be chosen more often: moves back and forth cost more than they bring
_DEVIATIONS: Final = 3.0  # the least difference of counts, in standard deviations


class Move(NamedTuple):
    """An expert that gets another one's slot."""

    layer: int
    leaving: int
    coming: int


class Popularity:
    """Decayed counts of choices."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts: NDArray[np.float64] = np.zeros((num_layers, num_experts))

    def read(self, file: Path) -> None:
        """Begin with the choices of a routing trace. Raises: ConfigError if it is of another model."""
        trace = read_routing_trace(file)
        shape = (trace.header.num_layers, trace.header.num_experts)
        if shape != self.counts.shape:
            raise ConfigError(
                f"{file} has routing of {shape[0]} layers with {shape[1]} experts, and the model has "
                f"{self.counts.shape[0]} with {self.counts.shape[1]}: record the routing of this model"
            )
        for routed in trace.passes:
            self.observe(routed.ids)

    def observe(self, ids: NDArray[np.integer]) -> None:
        """Count the choices of a pass. Shapes: ids [layers, T, K]."""
        num_layers, num_experts = self.counts.shape
        places = ids.reshape(num_layers, -1) + np.arange(num_layers)[:, None] * num_experts
        self.counts *= 0.5 ** (ids.shape[1] / _HALF_LIFE_TOKENS)
        self.counts += np.bincount(places.reshape(-1), minlength=self.counts.size).reshape(self.counts.shape)

    def most_chosen(self, layer: int, count: int) -> list[int]:
        """Return experts of a layer, the most popular first; equally popular ones in order."""
        ranked: list[int] = np.argsort(-self.counts[layer], kind="stable")[:count].tolist()
        return ranked

    def moves(self, is_on_gpu: NDArray[np.bool_], at_most: int) -> list[Move]:
        """Return moves that are worth it, at most one a layer. Shapes: is_on_gpu [layers, E]."""
        on_gpu = np.where(is_on_gpu, self.counts, np.inf)
        on_cpu = np.where(is_on_gpu, -np.inf, self.counts)
        leaving, coming = on_gpu.argmin(axis=1), on_cpu.argmax(axis=1)
        least, most = on_gpu.min(axis=1), on_cpu.max(axis=1)
        found = []
        for layer in range(len(self.counts)):
            gain = most[layer] - least[layer]
            if not np.isfinite(gain) or most[layer] <= _FACTOR * least[layer]:
                continue
            if gain > _DEVIATIONS * np.sqrt(most[layer] + least[layer]):
                found.append((gain, Move(layer, int(leaving[layer]), int(coming[layer]))))
        return [move for _, move in sorted(found, key=lambda it: -it[0])[:at_most]]
