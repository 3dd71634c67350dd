"""The exchange between a GPU and the CPU within a layer, through pinned memory, without a call that blocks.

    GPU   .. route | ids, weights, hidden states, flag -> host | its experts ..........| sums -> GPU | add ..
    CPU              spins on the flag ................| its experts, sums -> pinned memory |

The flag is copied last on the same stream, so that all else has arrived before it. One set of buffers serves all
layers: the GPU reads the sums of a layer before it writes the flag of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from moeflow.experts.hybrid.hybrid_experts import HostSums
from moeflow.experts.hybrid.lanes import Lanes
from moeflow.kernels.cpu.device_flag import DeviceFlag

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_PATIENCE_S: Final = 1.0  # of one wait, after which the device is checked
_KEPT_ROWS: Final = 64  # of passes whose calls are prepared once
Step = Callable[[], None]
See = Callable[["NDArray[np.int64]"], None]


class Seam:
    """The buffers of the exchange, and the host's part of a layer."""

    def __init__(self, lanes: Lanes, device: torch.device, num_rows: int, hidden_size: int, top_k: int) -> None:
        """Allocate pinned memory for `num_rows` tokens. Raises: RuntimeError from torch if it is not there."""
        self._lanes, self._device = lanes, device
        self._hidden = self._pinned((num_rows, hidden_size), torch.float32)
        self._ids = self._pinned((num_rows, top_k), torch.int64)
        self._ids_on_host = self._ids.numpy()
        self._weights = self._pinned((num_rows, top_k), torch.float32)
        self._sums = self._pinned((num_rows, hidden_size), torch.float32)
        self._flag = DeviceFlag(self._pinned((1,), torch.int64))
        self._raised = torch.ones(1, dtype=torch.int64, device=device)
        self._run_step: Callable[[Step], None] = lambda step: step()
        self._calls: dict[tuple[int, int], Callable[[], None]] = {}  # of the CPU's kernels, by layer and rows
        self.num_tokens = 0  # of the current pass, without padding
        self.waited_s = 0.0  # the CPU waited for the GPU
        self.computed_s = 0.0  # the CPU computed

    @property
    def num_rows(self) -> int:
        """Tokens of a pass at most."""
        return len(self._ids)

    def send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Start the copies to the host. Shapes: hidden [T, H], topk_ids [T, K] int64, topk_weights [T, K] float32."""
        count = len(hidden)
        assert count <= self.num_rows, "the pass is longer than the scheduler's limit"
        for target, source in (
            (self._ids, topk_ids),
            (self._weights, topk_weights),
            (self._hidden, hidden.float()),
        ):
            target[:count].copy_(source, non_blocking=True)
        self._flag.memory.copy_(self._raised, non_blocking=True)

    def compute(self, layer: int, experts: HostSums, num_rows: int, see: See) -> None:
        """Have the host compute the CPU's experts of a layer, once the GPU gets there.

        `see` receives the ids, [T, K], which change with the next layer.
        """
        self._run_step(partial(self._compute, layer, experts, num_rows, see))

    def receive(self, num_rows: int) -> Tensor:
        """Return the CPU's sums on the GPU: [T, H] float32."""
        sums = torch.empty((num_rows, self._sums.shape[1]), device=self._device)
        return sums.copy_(self._sums[:num_rows], non_blocking=True)

    @contextmanager
    def cut_by(self, cut: Callable[[Step], None]) -> Iterator[None]:
        """Give the host's steps to `cut` in the block, in place of running them."""
        before, self._run_step = self._run_step, cut
        try:
            yield
        finally:
            self._run_step = before

    def reset(self) -> None:
        """Forget a pass that failed. Blocks: until the device is idle."""
        self._lanes.synchronize()
        self._flag.lower()

    def _compute(self, layer: int, experts: HostSums, num_rows: int, see: See) -> None:
        num_rows = min(num_rows, self.num_tokens)
        call = self._calls.get((layer, num_rows)) or self._call(layer, experts, num_rows)
        start = perf_counter()
        while not self._flag.wait(_PATIENCE_S):
            self._lanes.check()
        self._flag.lower()
        arrived = perf_counter()
        call()
        self.waited_s += arrived - start
        self.computed_s += perf_counter() - arrived
        see(self._ids_on_host[:num_rows])

    def _call(self, layer: int, experts: HostSums, num_rows: int) -> Callable[[], None]:
        """Return the call of the CPU's kernels; that of a short pass is kept, since its preparation takes time."""
        rows = slice(num_rows)
        call = experts.sums(self._hidden[rows], self._ids[rows], self._weights[rows], self._sums[rows])
        if num_rows <= _KEPT_ROWS:
            self._calls[layer, num_rows] = call
        return call

    def _pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
