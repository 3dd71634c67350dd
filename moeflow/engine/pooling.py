"""One vector of a prompt's hidden states, gathered pass by pass.

Numbers are summed one position after another, in float64. So a vector has the same bits for any chunks of its prompt
and any other requests.

Source: pooling as in Sentence-BERT (Reimers and Gurevych 2019, section 3); keeping the first numbers of a vector as in
Matryoshka Representation Learning (Kusupati et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.batch import BatchEntry
from moeflow.core.embedding_bytes import encode_embedding
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.request import Request
from moeflow.kernels.arrays import Array, on_host

NOT_FINITE: Final = "the model's hidden states are not finite numbers, so there is no vector of this prompt"


class _RunningSum(msgspec.Struct):
    """Of the hidden states so far."""

    total: NDArray[np.float64]  # [H]
    count: int = 0


class Pooler:
    """The vectors in the making, by request."""

    def __init__(self, classify: Callable[[Sequence[float]], list[float]]) -> None:
        """Take what makes probabilities of classes of a vector, where that is asked for."""
        self._sums: dict[Request, _RunningSum] = {}
        self._classify = classify

    @property
    def requests(self) -> Collection[Request]:
        """Requests with results that have not ended."""
        return self._sums.keys()

    def add(self, entry: BatchEntry, hidden_states: Array) -> None:
        """Take what a pass has computed of `entry.pooled`, [n, H] of any float type, in order of positions."""
        if entry.start == 0 or entry.request not in self._sums:  # also when it starts over after a preemption
            self._sums[entry.request] = _RunningSum(np.zeros(hidden_states.shape[1]))
        so_far = self._sums[entry.request]
        for row in on_host(hidden_states).astype(np.float64):
            so_far.total += row
        so_far.count += hidden_states.shape[0]

    def take(self, request: Request) -> bytes | None:
        """Return a request's vector or probabilities, and forget it; None: these have numbers that are not finite."""
        pooling, so_far = request.pooling, self._sums.pop(request)
        assert pooling is not None
        vector = _vector(so_far, pooling)
        return _encoded(self._classify(vector) if pooling.classifies else vector)

    def forget(self, request: Request) -> None:
        """Let go of a request that has ended, whether or not it has brought anything."""
        self._sums.pop(request, None)


def _vector(so_far: _RunningSum, pooling: PoolingParams) -> list[float]:
    numbers: list[float] = (so_far.total[: pooling.dimensions] / so_far.count).tolist()
    if not pooling.normalize:
        return numbers
    length = math.sqrt(math.fsum(number * number for number in numbers))  # exact, so the same in any order
    return [number / length for number in numbers] if length else numbers


def _encoded(vector: list[float]) -> bytes | None:
    return encode_embedding(vector) if all(map(math.isfinite, vector)) else None
